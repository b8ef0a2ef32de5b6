"""Alerts: rank 0 reads the numbers of the run, and reports those that a user should look at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Preempted, TrainingError, say
from mtrain.events import log
from mtrain.train.alerts import losses, machines
from mtrain.train.alerts.detector import Alert, Detector, Detectors, Line
from mtrain.train.alerts.webhook import VARIABLE, Webhook
from mtrain.train.hooks.base import Hook, reason
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.loop.context import TrainContext
from mtrain.units import GIB

SLOWDOWN = 1.5
"""`log.alert_slowdown` where the run leaves it open."""


class Alerts(Hook):
    """The detectors that `log.alerts` turns on.

    Each alert is a line on the terminal, an event of the stream, and a message to the webhook that
    the environment names. It changes nothing of the run, and runs no command.
    """

    def __init__(self, run: RunConfig, folder: Path, metrics: Metrics) -> None:
        self.run = run
        self.name_of_run = folder.name
        self.metrics = metrics
        self.detectors = Detectors(detectors(run))
        self.webhook: Webhook | None = None
        self.is_rank0 = False

    def start(self, context: TrainContext) -> None:
        """Start the thread of the webhook."""
        self.is_rank0 = context.world.is_rank0
        url = os.environ.get(VARIABLE)
        if self.is_rank0 and url:
            self.webhook = Webhook(url)

    def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Read the numbers of a step or an evaluation."""
        self.see(step, metrics)

    def see(self, step: int, line: Line) -> None:
        """Raise the alerts of a line, on rank 0."""
        if self.is_rank0:
            for alert in self.detectors.see(step, line):
                self._raise(alert)

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Raise an alert of the error that ends the run, which the launcher prints."""
        if self.is_rank0 and not isinstance(error, Preempted | KeyboardInterrupt):
            name = error.alert if isinstance(error, TrainingError) else TrainingError.alert
            self._send(Alert(name, context.state.step, reason(error)))

    def close(self) -> None:
        """End the thread of the webhook."""
        if self.webhook is not None:
            self.webhook.close()
            self.webhook = None

    def state_dict(self) -> dict[str, Any]:
        """Return the windows and the hysteresis of all detectors."""
        return self.detectors.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them; those of a version with other detectors begin afresh."""
        try:
            self.detectors.load(state)
        except (KeyError, TypeError, ValueError):
            self.detectors = Detectors(detectors(self.run))

    def _raise(self, alert: Alert) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more
            say(f"alert[{alert.name}]: step {alert.step}: {alert.text}", error=True)
        self._send(alert)

    def _send(self, alert: Alert) -> None:
        self.metrics.note(log.ALERT, alert.step, name=alert.name, text=alert.text)
        # Last, so that the stream has what a failing webhook loses.
        if self.webhook is not None:
            text = f"{self.name_of_run}: step {alert.step}: {alert.text}"
            facts = {"alert": alert.name, "step": alert.step, "run": self.name_of_run}
            self.webhook.send({"text": text, **facts, "time": log.now()})


def detectors(run: RunConfig) -> list[Detector]:
    """Return the detectors of a run."""
    keys = run.log
    on_host = facts_of(run.cluster.device).on_host
    holds = run.cluster.device_memory_gib
    found: list[Detector] = [
        losses.NonFinite(),
        losses.loss_spike(),
        losses.norm_spike(),
        losses.LossRising(),
        losses.LossFlat(keys.alert_window, losses.untrained(run.model.vocab_size)),
        losses.WorseEvaluation(),
        machines.DataWait(),
        machines.FullMemory(keys.alert_memory, None if on_host or not holds else holds * GIB),
        machines.DeadExpert(),
        machines.OverloadedRank(),
    ]
    factor = keys.alert_slowdown or (None if on_host else SLOWDOWN)
    if factor is not None:
        found += [machines.Slow(factor), machines.BelowPlan(factor)]
    p = run.precision
    if p.format == "fp16" and p.initial_loss_scale > p.min_loss_scale:
        found.append(losses.LossScale(p.min_loss_scale))
    return found
