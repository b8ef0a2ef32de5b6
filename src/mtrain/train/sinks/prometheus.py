"""The newest numbers of a run for Prometheus: at a port of this machine, or sent to a gateway.

Each number of a step is a gauge `mtrain_NAME` with the label `run`, `mtrain_step` is the step,
`mtrain_memory_NAME` the most of a rank, and `mtrain_alert_NAME` the step of the last such alert.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from mtrain.events.read import Event
from mtrain.events.sink import Sink, alert_of, memory_of, numbers

ADDRESS = "127.0.0.1"
GATEWAY = "MTRAIN_PUSHGATEWAY"
"""The variable of a push gateway's address; without it, a port answers."""
TIMEOUT_S = 10.0


class Prometheus(Sink):
    """Gauges of the newest numbers."""

    server: Any = None

    def open(self) -> None:
        """Listen, unless there is a gateway.

        Raises:
            OSError: the port is taken.
        """
        import prometheus_client as client

        self.client = client
        self.registry = client.CollectorRegistry()
        self.gauges: dict[str, Any] = {}
        self.gateway = os.environ.get(GATEWAY, "")
        if not self.gateway:
            port = self.session.run.log.prometheus_port
            self.server, _ = client.start_http_server(port, ADDRESS, self.registry)

    def send(self, events: Sequence[Event]) -> None:
        """Set the gauges."""
        for event in events:
            step = float(event["step"])
            found = numbers(event)
            found |= {"step": step} if found else {}
            found |= {f"memory_{key}": size for key, size in memory_of(event).items()}
            alert = alert_of(event)
            found |= {} if alert is None else {f"alert_{alert[0]}": step}
            for name, value in found.items():
                self._gauge(name).labels(self.session.name).set(value)
        if self.gateway:
            key = {"run": self.session.name}
            send = self.client.pushadd_to_gateway
            send(self.gateway, "mtrain", self.registry, key, timeout=TIMEOUT_S)

    def close(self) -> None:
        """Close the port."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _gauge(self, name: str) -> Any:
        known = re.sub(r"[^a-zA-Z0-9_]", "_", f"mtrain_{name}")
        if known not in self.gauges:
            text = f"{name}, the newest one"
            self.gauges[known] = self.client.Gauge(known, text, ["run"], registry=self.registry)
        return self.gauges[known]


SINK = Prometheus
