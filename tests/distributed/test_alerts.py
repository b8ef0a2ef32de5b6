"""The hook of alerts: each is a line on the terminal and an event; memory of ranks as events."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mtrain.errors import TrainingError
from mtrain.events import log, read
from tests.support.forked import import_engine, run_alone
from tests.support.runs import tiny_run


def test_alerts_are_a_line_and_an_event_once(tmp_path: Path) -> None:
    def job() -> str:
        import_engine()
        from contextlib import redirect_stderr
        from io import StringIO

        from mtrain.train.hooks.alerts import Alerts
        from mtrain.train.hooks.metrics import Metrics

        metrics = Metrics(tmp_path)
        metrics.writer = log.Writer([log.Journal(log.next_attempt(tmp_path), lambda event: event)])
        hook = Alerts(tiny_run(), tmp_path, metrics)
        world = SimpleNamespace(is_rank0=True)
        context: Any = SimpleNamespace(world=world, state=SimpleNamespace(step=7))
        hook.start(context)
        fault = TrainingError("step 60: the loss is nan")
        fault.alert = "non_finite"
        with redirect_stderr(StringIO()) as told:
            for step in range(1, 60):
                hook.log(context, step, {"loss": 9.0 if step > 50 else 3.0, "lr": 1.0})
            hook.on_error(context, fault, saveable=False)
            hook.on_error(context, KeyboardInterrupt(), saveable=False)
        hook.close()
        metrics.writer.close()
        return told.getvalue()

    told = run_alone(job).splitlines()
    events = [event for event in read.events(tmp_path) if event["kind"] == log.ALERT]
    assert [(event["name"], event["step"]) for event in events] == [
        ("loss_spike", 51),
        ("loss_rising", 56),
        ("non_finite", 7),
    ]
    assert told[0] == "alert[loss_spike]: step 51: the loss is 9, and was 3 in the median before"
    assert len(told) == 2
