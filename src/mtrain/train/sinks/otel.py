"""Metrics and spans by OTLP over HTTP, under the names of Megatron-LM's own metrics.

The endpoint and its headers are in the variables `OTEL_EXPORTER_OTLP_*` of OpenTelemetry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mtrain.events.log import CHECKPOINT, EVALUATION, RESTART, STEP
from mtrain.events.read import Event
from mtrain.events.sink import OTEL_GAUGES, Sink, alert_of, memory_of, numbers, seconds_of

METER = "megatron.training"
PHASES = ("data", "forward_backward", "optimizer")
"""Phases of a step in their order; the keys of a step have their seconds."""
SPANS = {EVALUATION: "mtrain.evaluation", CHECKPOINT: "mtrain.save"}
S = 1_000_000_000
"""Nanoseconds of a second."""


class NotTaken(Exception):
    """An endpoint that refused data."""


class Otel(Sink):
    """A histogram, gauges and a counter, exported after each step, and a span for each step with
    its phases, each evaluation, save and restart.
    """

    # What was exported cannot be taken back.
    batch = 1
    exporters: tuple[Any, ...] = ()

    def open(self) -> None:
        """Make the instruments; exporters connect with the first export."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self.connect(OTLPMetricExporter(), OTLPSpanExporter())

    def connect(self, metrics: Any, spans: Any) -> None:
        """Make the instruments of a pair of exporters."""
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        # The library would log each failure; the run warns once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        session = self.session
        resource = Resource.create(
            {"service.name": "mtrain", "mtrain.run.id": session.id, "mtrain.run.name": session.name}
        )
        self.exporters = (metrics, spans)
        # The SDK's own readers and processors drop what an endpoint refuses.
        self.reader = InMemoryMetricReader()
        self.finished = InMemorySpanExporter()
        self.good = (MetricExportResult.SUCCESS, SpanExportResult.SUCCESS)
        meter = MeterProvider([self.reader], resource).get_meter(METER)
        self.meter = meter
        self.memory: dict[str, Any] = {}
        traces = TracerProvider(resource=resource)
        traces.add_span_processor(SimpleSpanProcessor(self.finished))
        self.tracer = traces.get_tracer("mtrain")
        self.gauges = {
            name: (meter.create_gauge(f"{METER}.{ours}"), factor)
            for name, (ours, factor) in OTEL_GAUGES.items()
        }
        self.duration = meter.create_histogram(f"{METER}.step_duration_ms", unit="ms")
        self.skipped = meter.create_counter(f"{METER}.skipped_iters")

    def send(self, events: Sequence[Event]) -> None:
        """Export the spans of all events, and the metrics after each step.

        Raises:
            NotTaken: the endpoint refused them.
        """
        for event in events:
            self._trace(event)
            found = numbers(event)
            memory = memory_of(event)
            for key, size in memory.items():
                self._memory(key).set(size)
            for name in found.keys() & self.gauges.keys():
                gauge, factor = self.gauges[name]
                gauge.set(found[name] * factor)
            if event["kind"] == STEP:
                self.duration.record(1000 * found["step_s"])
                self.skipped.add(int(found.get("skipped", 0)))
            if found or memory:
                data = self.reader.get_metrics_data()
                self._export("metrics", partial(self.exporters[0].export, data))
        spans = self.finished.get_finished_spans()
        if spans:
            self._export("spans", lambda: self.exporters[1].export(spans))
        self.finished.clear()

    def _memory(self, key: str) -> Any:
        """Return the gauge of a kind of memory."""
        if key not in self.memory:
            name = f"{METER}.memory.{key}"
            self.memory[key] = self.meter.create_gauge(name)
        return self.memory[key]

    def close(self) -> None:
        """Close the connections."""
        for exporter in self.exporters:
            exporter.shutdown()

    def _export(self, what: str, export: Callable[[], Any]) -> None:
        if export() not in self.good:
            raise NotTaken(f"the OTLP endpoint does not take {what}")

    def _trace(self, event: Event) -> None:
        """Make the spans of an event, which end when it was written."""
        end = seconds_of(event)
        step = {"mtrain.step": event["step"]}
        kind = event["kind"]
        if kind == STEP:
            seconds = numbers(event)
            begun = end - seconds["step_s"]
            whole = self._span("mtrain.step", begun, end, step)
            for phase in PHASES:
                spent = seconds.get(f"{phase}_s", 0.0)
                self._span(f"mtrain.{phase}", begun, begun + spent, step, whole)
                begun += spent
        elif kind in SPANS:
            self._span(SPANS[kind], end - event["seconds"], end, step)
        elif kind == RESTART:
            facts = event["facts"]
            named = {f"mtrain.{key}": facts.get(key) for key in ("rank", "error", "steps_lost")}
            self._span("mtrain.restart", end, end, step | named)
        alert = alert_of(event)
        if alert is not None:
            words = {"mtrain.alert": alert[0], "mtrain.text": alert[1]}
            self._span("mtrain.alert", end, end, step | words)

    def _span(
        self, name: str, begun: float, end: float, facts: dict[str, Any], parent: Any = None
    ) -> Any:
        from opentelemetry.trace import set_span_in_context

        known = {key: value for key, value in facts.items() if value is not None}
        context = None if parent is None else set_span_in_context(parent)
        span = self.tracer.start_span(
            name, context=context, start_time=round(begun * S), attributes=known
        )
        span.end(round(end * S))
        return span


SINK = Otel
