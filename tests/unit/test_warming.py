"""Kernels compiled while ranks start: which processes are started, and that a step then compiles
nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mtrain_kernels.compilations import Launch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.launching import warming
from mtrain.train import warm_cache
from tests.support.configs import tiny

ROOT = Path(__file__).resolve().parents[2]
CARDS = Machine(cpu_cores=8, memory_bytes=64 << 30, gpus=8, triton=True)
LAUNCHES = [Launch("mtrain_kernels.a.triton.a_kernel", "{}", "ABC")]


class Started:
    """Children that would have been started."""

    def __init__(self, name: str, run: RunConfig, *, executed: bool, **arguments: Any) -> None:
        self.arguments = arguments
        started.append(self)

    def abandon(self) -> None:
        """Do nothing: there is no process."""


started: list[Started] = []


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started.clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(warm_cache.VARIABLE, raising=False)
    monkeypatch.setattr(warming, "ChildProcess", Started)


def on_cards(**changes: Any) -> RunConfig:
    keys = {"cluster__device": "cuda", "cluster__sm": 90, "parallel__ranks": 2, **changes}
    return resolve(tiny(**keys), CARDS)


def test_warming_cpu_run_starts_nothing() -> None:
    for run in (resolve(tiny(), CARDS), on_cards(cluster__sm=None)):
        warming.Warming(run).begin(prepared=True)
    assert not started


def test_warming_without_a_record_lists_each_stage_once() -> None:
    run = on_cards(parallel__pp=2, parallel__ranks=4)
    one = warming.Warming(run, count=4)
    one.begin(prepared=True)
    one.begin(prepared=True)
    assert [child.arguments["stages"] for child in started] == [{"1": 2, "0": 0}]
    assert os.environ[warm_cache.VARIABLE] == started[0].arguments["report"]
    assert warm_cache.told(os.environ) == {"ended": False}
    one.close()
    assert warm_cache.told(os.environ) is None


def test_warming_waits_for_data_that_is_not_mock() -> None:
    run = on_cards(data__kind="text", data__path="corpus.txt")
    one = warming.Warming(run)
    one.begin(prepared=False)
    assert not started
    one.begin(prepared=True)
    assert len(started) == 1


def test_warming_complete_cache_starts_nothing(tmp_path: Path) -> None:
    run = on_cards()
    warm_cache.write(warm_cache.record_file(run, 0, os.environ), LAUNCHES)
    warming.Warming(run, count=2).begin(prepared=False)
    assert len(started) == 1  # the binary is missing
    binary = tmp_path / "triton" / "ABC" / "__grp__a_kernel.json"
    binary.parent.mkdir(parents=True)
    binary.write_text("{}")
    one = warming.Warming(run, count=2)
    one.begin(prepared=False)
    assert len(started) == 1
    told = warm_cache.told(os.environ)
    assert told is not None
    assert (told["list"], told["cached"], told["compiled"]) == ("record", 1, 0)
    one.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[1, 2]",
        lambda text: text.replace('"ABC"', "7"),
        lambda text: text.replace("kernel", "colonel", 1),
        lambda text: '{"launches": []}',
    ],
)
def test_warming_damaged_record_is_no_record(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "record.json"
    warm_cache.write(path, LAUNCHES)
    assert warm_cache.read(path) == LAUNCHES
    path.write_text(damage(path.read_text()))
    assert warm_cache.read(path) is None


def test_warming_record_belongs_to_what_decides_kernels() -> None:
    files = {
        warm_cache.record_file(run, stage, os.environ)
        for run, stage in (
            (on_cards(), 0),
            (on_cards(), 1),
            (on_cards(cluster__sm=100), 0),
            (on_cards(model__hidden_size=512), 0),
            (on_cards(optim__lr=0.5, trainer__train_iters=7), 0),  # as the first
        )
    }
    assert len(files) == 4


STEP = """
import json, sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
import host_cost

host_cost.prepare()
import torch
import triton
from host_cost_models import FORMATS
from mtrain.api import load
from mtrain.mcore.adapter.op_overrides import override_operations
from mtrain.train import warm_cache
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.loop import prefetch
from mtrain.train.loop.step import train_step
from mtrain.world.init import joined

words = [
    "model=llama_tiny", "model.num_layers=2", "parallel=single", "data=mock", "data.seq_length=128",
    "trainer.micro_batch_size=1", "trainer.global_batch_size=2", "trainer.eval_iters=0",
    "cluster=cpu", "kernels=triton", "kernels.gradient_accumulation_fusion=true",
    *(["kernels.linear=torch"] if sys.argv[1] == "bf16" else []), *FORMATS[sys.argv[1]],
]
run = load(words).run
run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"sm": 90})})
Path(sys.argv[2]).write_text(run.model_dump_json())
# A device has copies of what the host read, at aligned addresses.
copied = prefetch._copied
def as_copies(*given):
    batch = copied(*given)
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
prefetch._copied = as_copies
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
with joined(run) as world:
    parts = assemble(run, world, splits_of(run))
    override_operations(run.kernels, None)
    train_step(parts, stop_requested=False)
warm_cache.keep(run, 0)
print(json.dumps([hits.count(False), hits.count(True)]))
"""
WARM = """
import sys
from pathlib import Path
import torch
torch.version.cuda = "12.9"  # of a build for GPUs, by which FP8 is multiplied by cuBLAS
from mtrain.config.schema.run import RunConfig
from mtrain.launching import kernels

run = RunConfig.model_validate_json(Path(sys.argv[2]).read_text())
kernels.compile_kernels(run, {"0": 0}, 1, sys.argv[3])
"""


@pytest.mark.full
@pytest.mark.parametrize("form", ["bf16", "fp8 blockwise"])
def test_warming_a_step_then_compiles_nothing(tmp_path: Path, form: str) -> None:
    run = tmp_path / "run.json"
    report = tmp_path / "report.json"

    def runs(script: str, cache: str) -> str:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, form, str(run), str(report)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    missed, _ = json.loads(runs(STEP, "cold").splitlines()[-1])
    assert missed > 10
    # Without a record, the list comes from shapes.
    runs(WARM, "shapes")
    told = json.loads(report.read_text())
    assert told["list"] == "shapes"
    assert (told["failed"], told.get("incomplete")) == (0, None)
    assert json.loads(runs(STEP, "shapes").splitlines()[-1]) == [0, missed]
    # With one, and without the binaries, it comes from the record.
    record = next((tmp_path / "cold" / warm_cache.FOLDER).iterdir())
    (tmp_path / "again" / warm_cache.FOLDER).mkdir(parents=True)
    (tmp_path / "again" / warm_cache.FOLDER / record.name).write_text(record.read_text())
    runs(WARM, "again")
    told = json.loads(report.read_text())
    assert (told["list"], told["compiled"]) == ("record", missed)
    assert json.loads(runs(STEP, "again").splitlines()[-1]) == [0, missed]
