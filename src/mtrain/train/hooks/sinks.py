"""The threads of the sinks that `log.sinks` names, on rank 0."""

from __future__ import annotations

from pathlib import Path

from mtrain.config.schema.run import RunConfig
from mtrain.events.feed import Feed, close
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.sinks import sink_class


class Sinks(Hook):
    """Feeds that send the event stream while the run trains."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        self.kinds = {name: sink_class(name) for name in run.log.sinks}
        self.folder = folder
        self.feeds: list[Feed] = []

    def start(self, context: TrainContext) -> None:
        """Start the threads."""
        if context.world.is_rank0:
            step = context.state.step
            run = context.run
            self.feeds = [
                Feed(name, kind, run, self.folder, step) for name, kind in self.kinds.items()
            ]

    def close(self) -> None:
        """Wait for a while until everything is sent."""
        feeds = self.feeds
        self.feeds = []
        close(feeds)
