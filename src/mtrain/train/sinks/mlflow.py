"""A run of MLflow: in files, in a database, or on a server, as `MLFLOW_TRACKING_URI` says."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtrain.events.read import Event
from mtrain.events.sink import Sink, seconds_of, usual

EXPERIMENT = "mtrain"
TAG = "mtrain.run.id"
"""The tag by which a resumed run finds its MLflow run."""
BATCH = 1000
"""The most metrics that a request may hold, by MLflow's limits; and a tenth of it parameters."""
LONGEST = 500
"""Characters of a parameter."""


class Mlflow(Sink):
    """Metrics of all events that have numbers, and the configuration as parameters."""

    def open(self) -> None:
        """Find the run, or create it."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        # Every new database would be announced table by table.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.metric = Metric
        self.client = MlflowClient()
        self.known: dict[str, int] = {}
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self.client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self.client.create_experiment(name)
        query = f"tags.`{TAG}` = '{self.session.id}'"
        found = self.client.search_runs([place], query)
        if found:
            self.run_id = found[0].info.run_id
            self.client.set_terminated(self.run_id, "RUNNING")
            self.known = {name: self._last(name) for name in found[0].data.metrics}
            return
        tags = {TAG: self.session.id}
        run = self.client.create_run(place, tags=tags, run_name=self.session.name)
        self.run_id = run.info.run_id
        flat = flattened(self.session.run.model_dump(mode="json"))
        params = [Param(key, value[:LONGEST]) for key, value in flat]
        for first in range(0, len(params), BATCH // 10):
            self.client.log_batch(self.run_id, params=params[first : first + BATCH // 10])

    def send(self, events: Sequence[Event]) -> None:
        """Log metrics, apart from those that the run has already."""
        metrics = []
        for event in events:
            at = round(1000 * seconds_of(event))
            for name, value in usual(event).items():
                # Other characters than these are refused.
                key = re.sub(r"[^\w. /-]", "_", name)
                if event["step"] > self.known.get(key, -1):
                    metrics.append(self.metric(key, value, at, event["step"]))
        for first in range(0, len(metrics), BATCH):
            part = metrics[first : first + BATCH]
            self.client.log_batch(self.run_id, metrics=part)
            # If the next part fails, this one is not sent again.
            self.known |= {metric.key: metric.step for metric in part}

    def close(self) -> None:
        """End the run; a resumed one sets it running again."""
        self.client.set_terminated(self.run_id)

    def _last(self, name: str) -> int:
        """Return the last step that the run has of a metric."""
        history = self.client.get_metric_history(self.run_id, name)
        return max((metric.step for metric in history), default=0)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration with dots, and their values as text."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


SINK = Mlflow
