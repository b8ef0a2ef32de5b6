"""The shipped sinks with their libraries, over a run that is killed and resumed twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import free_port

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".sinks"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="libraries of sinks: make .sinks"),
]
ATTEMPTS = (("0", "5", "kill"), ("3", "8", "kill_at_once"), ("6", "10"))
STEPS = range(1, 11)
LOSSES = {step: step / 8 for step in STEPS}
EVALUATIONS = {step: float(step) for step in STEPS if step % 2 == 0}
THIRDS = [step for step in STEPS if step % 3 == 0]
MEMORY = [(step, float(step)) for step in THIRDS]
ALERTS = [(step, 1.0) for step in THIRDS]


def python(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the libraries behind the installed packages, in `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_", "OTEL_"))}
    path = os.pathsep.join([*(path for path in sys.path if path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        env=kept | {"PYTHONPATH": path, "LIBRARIES": str(PACKAGES), "HOME": str(home)} | variables,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=280,
    )


def run_through(home: Path, sink: str, **variables: str) -> str:
    """Run all attempts; return what they printed."""
    (home / "run").mkdir()
    said = ""
    for begun, last, *kill in ATTEMPTS:
        words = ("-m", "tests.support.sink_driver", str(home / "run"), sink, begun, last, *kill)
        done = python(home, *words, **variables)
        expected = -signal.SIGKILL if kill else 0
        assert done.returncode == expected, done.stderr
        assert "warning" not in done.stderr
        said += done.stdout
    return said


def read_back(home: Path, code: str) -> Any:
    """Return what a program of Python prints last, as a literal."""
    import ast

    preamble = "import os, sys; sys.path.append(os.environ['LIBRARIES'])\n"
    done = python(home, "-c", preamble + code)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_sink_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    run_through(tmp_path, "tensorboard")
    found = read_back(
        tmp_path,
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator('run/tensorboard').Reload()\n"
        "names = ['lm loss', 'lm loss validation', 'learning-rate', 'memory/allocated_bytes',"
        " 'alert/loss']\n"
        "texts = [e.tensor_proto.string_val[0].decode()"
        " for e in found.Tensors('alerts/loss/text_summary')]\n"
        "print([*[[(e.step, e.value) for e in found.Scalars(name)] for name in names], texts])",
    )
    assert found[0] == list(LOSSES.items())
    assert found[1] == list(EVALUATIONS.items())
    assert found[2] == [(step, 0.5) for step in STEPS]
    assert found[3:] == [MEMORY, ALERTS, [f"high at {step}" for step in THIRDS]]


def test_sink_wandb_offline_has_each_step_once(tmp_path: Path) -> None:
    run_through(tmp_path, "wandb", WANDB_MODE="offline")
    # The library has no reader: blocks of 32 KiB hold parts of records (1: whole, 4: the last).
    found = read_back(
        tmp_path,
        "import glob, json\n"
        "from wandb.proto.wandb_internal_pb2 import Record\n"
        "rows, ids = [], set()\n"
        "for file in sorted(glob.glob('run/wandb/offline*/*.wandb')):\n"
        "    data, at, parts = open(file, 'rb').read(), 7, b''\n"
        "    while at + 7 <= len(data):\n"
        "        if 32768 - at % 32768 < 7:\n"
        "            at += 32768 - at % 32768\n"
        "            continue\n"
        "        size = int.from_bytes(data[at + 4 : at + 6], 'little')\n"
        "        kind, part = data[at + 6], data[at + 7 : at + 7 + size]\n"
        "        parts, at = parts + part, at + 7 + size\n"
        "        if len(part) < size or kind not in (1, 4):\n"
        "            continue\n"
        "        record, parts = Record.FromString(parts), b''\n"
        "        if record.run.run_id:\n"
        "            ids.add(record.run.run_id)\n"
        "        items = record.history.item\n"
        "        row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}\n"
        "        rows += [row] if row else []\n"
        "keys = ('iteration', 'lm loss', 'lm loss validation', 'memory/allocated_bytes',"
        " 'alerts/loss')\n"
        "print((len(ids), [tuple(row.get(key) for key in keys) for row in rows]))",
    )
    assert found[0] == 1
    assert [row[:2] for row in found[1] if row[1] is not None] == list(LOSSES.items())
    assert [row[:3:2] for row in found[1] if row[2] is not None] == list(EVALUATIONS.items())
    assert [(row[0], row[3]) for row in found[1] if row[3] is not None] == MEMORY
    assert [row[4] for row in found[1] if row[4] is not None] == [f"high at {n}" for n in THIRDS]


def test_sink_swanlab_offline_has_each_step_once(tmp_path: Path) -> None:
    run_through(tmp_path, "swanlab", SWANLAB_MODE="offline")
    found = read_back(
        tmp_path,
        "import glob\n"
        "from swanlab.proto.swanlab.record.v1.record_pb2 import Record\n"
        "from swanlab.sdk.internal.core_python.store import DataStoreReader\n"
        "found = []\n"
        "for file in sorted(glob.glob('run/swanlog/*/*.swanlab')):\n"
        "    if not os.path.getsize(file):\n"
        "        continue  # of a killed process\n"
        "    reader = DataStoreReader()\n"
        "    reader.open(file)\n"
        "    found += [Record.FromString(data).scalar for data in reader]\n"
        "print([[(s.step, s.value.number) for s in found if s.key == key]"
        " for key in ('lm loss', 'lm loss validation', 'memory/allocated_bytes', 'alert/loss')])",
    )
    assert found == [list(LOSSES.items()), list(EVALUATIONS.items()), MEMORY, ALERTS]


def test_sink_trackio_has_each_step_once(tmp_path: Path) -> None:
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    run_through(tmp_path, "trackio", **place)
    found = read_back(
        tmp_path,
        f"os.environ |= {place!r}\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "(name,) = SQLiteStorage.get_runs('mtrain')\n"
        "logs = SQLiteStorage.get_logs('mtrain', name)\n"
        "print([[(log['step'], log[key]) for log in logs if key in log]"
        " for key in ('lm loss', 'lm loss validation', 'memory/allocated_bytes', 'alert/loss')])",
    )
    assert found == [list(LOSSES.items()), list(EVALUATIONS.items()), MEMORY, ALERTS]


@pytest.mark.parametrize("place", ["sqlite:///mlflow.db", "./files"])
def test_sink_mlflow_has_each_step_once(place: str, tmp_path: Path) -> None:
    allowed = {"MLFLOW_TRACKING_URI": place, "MLFLOW_ALLOW_FILE_STORE": "true"}
    run_through(tmp_path, "mlflow", **allowed)
    found = read_back(
        tmp_path,
        f"os.environ |= {allowed!r}\n"
        "from mlflow import MlflowClient\n"
        "client = MlflowClient()\n"
        "place = client.get_experiment_by_name('mtrain').experiment_id\n"
        "(run,) = client.search_runs([place])\n"
        "def metric(name):\n"
        "    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]\n"
        "print((metric('lm loss'), metric('lm loss validation'), run.info.status,"
        " run.data.params['model.num_layers']))",
    )
    assert found == (list(LOSSES.items()), list(EVALUATIONS.items()), "FINISHED", "4")


def test_sink_prometheus_answers_with_the_last_step(tmp_path: Path) -> None:
    said = run_through(tmp_path, "prometheus", PORT=str(free_port()))
    lines = [line for line in said.splitlines() if line.startswith("mtrain_")]
    assert 'mtrain_step{run="run"} 5.0' in lines
    assert 'mtrain_loss{run="run"} 1.25' in lines
    assert 'mtrain_valid_loss{run="run"} 10.0' in lines
    assert 'mtrain_memory_allocated_bytes{run="run"} 9.0' in lines
    assert 'mtrain_alert_loss{run="run"} 9.0' in lines


class Collector(BaseHTTPRequestHandler):
    """An endpoint that keeps what it gets, and refuses the third request."""

    got: list[tuple[str, bytes]]
    count = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Collector.count += 1
        refused = Collector.count == 3
        if not refused:
            self.got.append((self.path, body))
        self.send_response(400 if refused else 200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector() -> Iterator[str]:
    """Return the address of an endpoint."""
    Collector.got = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_sink_otel_exports_each_step_and_its_phases(tmp_path: Path, collector: str) -> None:
    (tmp_path / "run").mkdir()
    words = ("-m", "tests.support.sink_driver", str(tmp_path / "run"), "otel", "0", "6")
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    done = python(tmp_path, *words, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: log.sinks=[otel]") == 1, done.stderr
    for number, (path, body) in enumerate(Collector.got):
        (tmp_path / f"{number:03d}{path.replace('/', '_')}").write_bytes(body)
    losses, skipped, spans, ids, sizes = read_back(
        tmp_path,
        "import glob\n"
        "from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics\n"
        "from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces\n"
        "losses, skipped, spans, ids, sizes = [], [], [], set(), []\n"
        "for file in sorted(glob.glob('*_v1_metrics')):\n"
        "    found = metrics.ExportMetricsServiceRequest.FromString(open(file, 'rb').read())\n"
        "    for one in found.resource_metrics:\n"
        "        facts = {a.key: a.value.string_value for a in one.resource.attributes}\n"
        "        ids.add(facts['mtrain.run.id'])\n"
        "        for metric in one.scope_metrics[0].metrics:\n"
        "            name = metric.name.removeprefix('megatron.training.')\n"
        "            if name == 'memory.allocated_bytes':\n"
        "                sizes.append(metric.gauge.data_points[0].as_double)\n"
        "            if name == 'loss':\n"
        "                losses.append(metric.gauge.data_points[0].as_double)\n"
        "            if name == 'skipped_iters':\n"
        "                skipped.append(metric.sum.data_points[0].as_int)\n"
        "for file in sorted(glob.glob('*_v1_traces')):\n"
        "    found = traces.ExportTraceServiceRequest.FromString(open(file, 'rb').read())\n"
        "    for span in found.resource_spans[0].scope_spans[0].spans:\n"
        "        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9\n"
        "        spans.append((span.attributes[0].value.int_value, span.name, round(seconds, 3),"
        " bool(span.parent_span_id)))\n"
        "print((losses, skipped[-1], spans, len(ids), sorted(set(sizes))))",
    )
    # after an evaluation the last loss is exported again
    assert list(dict.fromkeys(losses)) == [step / 8 for step in range(1, 7)]
    assert (skipped, ids) == (1, 1)
    assert [s for s in spans if s[1] == "mtrain.step"] == [
        (step, "mtrain.step", 0.5, False) for step in range(1, 7)
    ]
    second = {name: (seconds, child) for step, name, seconds, child in spans if step == 2}
    assert second == {
        "mtrain.step": (0.5, False),
        "mtrain.data": (0.1, True),
        "mtrain.forward_backward": (0.3, True),
        "mtrain.optimizer": (0.1, True),
        "mtrain.evaluation": (0.25, False),
        "mtrain.save": (0.125, False),
    }
    assert [span[:2] for span in spans if span[1] == "mtrain.alert"] == [
        (3, "mtrain.alert"),
        (6, "mtrain.alert"),
    ]
    assert sizes == [3.0, 6.0]
