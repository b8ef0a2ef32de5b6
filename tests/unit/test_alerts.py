"""Alerts: faults of invented runs are found, healthy runs raise none, and nobody is flooded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.compose.composer import Rejected, compose
from mtrain.train.alerts import losses, machines, webhook
from mtrain.train.alerts.detector import Alert, Detectors
from tests.support import training_curves as curves

WITHIN = 20
"""Steps after which a fault must be found."""


def detectors_of_curves() -> Detectors:
    """Return every detector, as a run in fp16 on GPUs has them."""
    return Detectors(
        [
            losses.NonFinite(),
            losses.loss_spike(),
            losses.norm_spike(),
            losses.LossRising(),
            losses.LossFlat(curves.WINDOW, curves.UNTRAINED),
            losses.WorseEvaluation(),
            losses.LossScale(1.0),
            machines.Slow(1.5),
            machines.BelowPlan(1.5),
            machines.DataWait(),
            machines.FullMemory(0.95, curves.DEVICE_BYTES),
            machines.DeadExpert(),
            machines.OverloadedRank(),
        ]
    )


def alerts_of(curve: curves.Curve, until: int | None = None) -> list[Alert]:
    """Return the alerts of a run, up to a step."""
    detectors = detectors_of_curves()
    found: list[Alert] = []
    for step, line in curve.lines():
        if until is not None and step > until:
            break
        found += detectors.see(step, line)
    return found


def finds(fault: curves.Fault, seed: int) -> bool:
    """Return whether a run's fault is found in time, and by the right detector."""
    last = fault.mark + fault.after + WITHIN
    found = alerts_of(curves.faulty(fault, seed), last)
    return any(fault.mark <= one.step and one.name in fault.alerts for one in found)


def test_alerts_find_38_of_40_faults_within_20_steps() -> None:
    assert len(curves.FAULTS) == 40
    missed = [fault for seed, fault in enumerate(curves.FAULTS) if not finds(fault, seed)]
    assert len(missed) <= 2, missed


def test_alerts_none_on_20_healthy_runs() -> None:
    runs = [curves.healthy(seed) for seed in range(20)]
    assert min(run.steps for run in runs) >= 1000
    assert [alerts_of(run) for run in runs] == [[]] * 20


@pytest.mark.full
def test_alerts_rates_over_more_seeds() -> None:
    seeds = range(10_000, 10_400, 40)
    found = [finds(f, s + n) for s in seeds for n, f in enumerate(curves.FAULTS)]
    assert sum(found) >= 0.95 * len(found)
    false = [bool(alerts_of(curves.healthy(seed))) for seed in range(10_000, 10_100)]
    assert sum(false) <= 1


def test_alerts_hysteresis_does_not_flood() -> None:
    detectors = Detectors([losses.loss_spike(), machines.DataWait()])
    found = []
    for step in range(1, 10_001):
        loss = 6.0 if step % 120 == 0 else 3.0 + 0.01 * (step % 7)
        wait = 0.5 if step % 400 < 50 else 0.0
        found += detectors.see(step, {"loss": loss, "data_wait_share": wait})
    # 83 spikes and 25 waits
    by_name = [sum(one.name == name for one in found) for name in ("loss_spike", "data_wait")]
    assert all(2 <= number <= 12 for number in by_name), by_name


def test_alerts_full_memory_of_one_rank_lasts_between_samples() -> None:
    detectors = Detectors([machines.FullMemory(0.95, 100.0)])
    found = []
    for step in range(1, 1000):
        found += detectors.see(step, {"peak_bytes": 50.0})
        if step % 200 == 0:
            found += detectors.see(step, {"ranks": [{"peak_bytes": 50.0}, {"peak_bytes": 96.0}]})
    (alert,) = found
    assert (alert.step, "rank 1" in alert.text) == (200, True)
    host = {"peak_bytes": 9e9, "host_bytes": 100.0, "host_free_bytes": 4.0}
    (alert,) = Detectors([machines.FullMemory(0.95, None)]).see(1, {"ranks": [host]})
    assert "machine of rank 0" in alert.text


@pytest.mark.parametrize("name", ["loss_flat", "loss_rising", "grad_norm_spike"])
def test_alerts_resumed_are_those_of_one_run(name: str) -> None:
    fault = next(f for f in curves.FAULTS if f.alerts[0] == name and f.mark > 300)
    whole = detectors_of_curves()
    parts = detectors_of_curves()
    found: list[Alert] = []
    # Times are no part of the state, which is the same for equal runs.
    kept = {"loss", "lr", "grad_norm", "valid_loss"}
    for step, line in curves.faulty(fault, 3).lines():
        if step % 50 == 0:
            state = json.loads(json.dumps(parts.state()))
            parts = detectors_of_curves()
            parts.load(state)
        line = {key: value for key, value in line.items() if key in kept}
        alerts = whole.see(step, line)
        assert parts.see(step, line) == alerts
        found += alerts
    assert name in {alert.name for alert in found}


class Server:
    """A server on this machine that keeps what is posted to it."""

    def __init__(self, wait_s: float = 0.0, status: int = 200) -> None:
        server = self
        self.bodies: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                time.sleep(wait_s)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.bodies.append({"path": self.path, **json.loads(body)})
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/hook/SECRET?key=SECRET"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """End the server."""
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_alerts_webhook_gets_json(server: Server) -> None:
    hook = webhook.Webhook(server.url)
    hook.send({"text": "run: step 5: the loss is nan", "step": 5})
    hook.close()
    path = "/hook/SECRET?key=SECRET"
    assert server.bodies == [{"path": path, "text": "run: step 5: the loss is nan", "step": 5}]


def test_alerts_webhook_is_secret_and_never_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webhook, "CLOSE_S", 0.1)
    slow = Server(wait_s=0.3)
    refusing = Server(status=302)
    no_port = "http://SECRET.invalid:notaport/SECRET"
    for url in (slow.url, refusing.url, "http://127.0.0.1:1/SECRET", "file:///SECRET", no_port):
        hook = webhook.Webhook(url)
        begun = time.monotonic()
        for step in range(300 if url == slow.url else 2):
            hook.send({"step": step})
        assert time.monotonic() - begun < 0.2
        hook.close()
    told = capsys.readouterr().err
    assert "the server is too slow" in told
    assert "the server answers 302" in told
    assert "ConnectionRefusedError" in told
    assert told.count("because of ValueError") == 2
    assert "SECRET" not in told
    refusing.close()
    slow.close()
    # Tests that fork come later: no thread may be left.
    for thread in threading.enumerate():
        if thread.name == "webhook":
            thread.join(5)
            assert not thread.is_alive()


def test_alerts_webhook_in_a_configuration_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("log:\n  webhook: https://example.com/SECRET\n")
    for words in (["log.webhook=https://example.com/SECRET"], [f"recipe={recipe}"]):
        with pytest.raises(Rejected) as caught:
            compose(words)
        (problem,) = caught.value.problems
        assert problem.code == "MT375"
        assert "SECRET" not in problem.render()
        assert "MTRAIN_WEBHOOK" in problem.render()
