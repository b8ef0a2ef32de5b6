"""Each kind of addition takes as many files as CONTRIBUTING says, and nothing else changes.

A copy of the project gets one addition of every kind, and a run uses them all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment, latest

pytestmark = pytest.mark.full

HOOK = '''"""Steps, one line each, as a user's own file."""

from mtrain.train.hooks.base import Hook


class Diary(Hook):
    def __init__(self, folder):
        self.file = folder / "diary.txt"

    @classmethod
    def of(cls, run, folder):
        return cls(folder)

    def after_step(self, context, result):
        config = context.state.chunks[0].config
        with self.file.open("a") as file:
            value = config.clone_scatter_output_in_embedding
            file.write(f"{context.world.rank} {result.step} {value}\\n")


HOOK = Diary
'''
LOGGER = '''"""Metrics as a table of comma-separated values."""

from mtrain.train.hooks.base import Hook


class Table(Hook):
    def __init__(self, folder):
        self.file = folder / "table.csv"

    @classmethod
    def of(cls, run, folder):
        return cls(folder)

    def log(self, context, step, metrics):
        if context.world.is_rank0:
            with self.file.open("a") as file:
                file.write(f"{step},{metrics['loss']},{metrics['squares']}\\n")


HOOK = Table
'''
CURVE = '''"""Half of the rate on odd steps."""

from mtrain.config.schema.schedule import Schedule


def factor(step, run):
    return 0.5 if step % 2 else 1.0


SCHEDULE = Schedule(factor=factor)
'''
LOSS = '''"""Twice the cross entropy of the next token."""

from mtrain.train.objectives import Metric
from mtrain.train.objectives.next_token import NextToken

SQUARES = Metric("squares", reduce="count")


class Twice(NextToken):
    def metrics(self):
        return *super().metrics(), SQUARES

    def loss(self, output, batch):
        total, count, metrics = super().loss(output, batch)
        return 2 * total, count, (*metrics, SQUARES.of(total.detach() ** 2))


OBJECTIVE = Twice
'''
MODEL = """name: minute
hidden_size: 32
ffn_hidden_size: 64
num_layers: 2
num_attention_heads: 2
vocab_size: 128
max_position_embeddings: 64
"""
FAMILY_CONFIG = '''"""`model.echo`: the keys of a decoder with a scaled embedding."""

from typing import Annotated, ClassVar

from mtrain.config.families import FamilyConfig, FamilySection
from mtrain.config.schema.base import Effect, Key


class EchoConfig(FamilySection):
    """`model.echo`: a scale of the embedding."""

    FAMILY: ClassVar[str] = "echo"

    scale: Annotated[float, Key(effect=Effect.NUMERICS)] = 1.0
    """Factor of the embedded tokens."""


CONFIG = FamilyConfig(section=EchoConfig, about="The family echo; null: another family.")
'''
FAMILY = '''"""A decoder with a scaled embedding."""

from dataclasses import replace

from mtrain.models.gpt.family import FAMILY as GPT

FAMILY = replace(GPT, name="echo", builder="mtrain.models.echo.build:chunk")
'''
FAMILY_BUILD = '''"""Chunks of the family echo."""

from mtrain.models.gpt import build


def chunk(run, config, stage):
    model = build.chunk(run, config, stage)
    scale = run.model.echo.scale
    model.embedding.register_forward_hook(lambda module, args, output: output * scale)
    return model
'''
KEY = '''    clone_embedding_output: Annotated[
        bool, Key(feeds="clone_scatter_output_in_embedding", effect=Effect.RUNTIME)
    ] = True
    """Copy the scattered output of the embedding, so that the whole of it can be freed."""
'''
LAUNCHER = """    Variables(
        "carrier pigeon",
        rank=("PIGEON",),
        size=("PIGEONS",),
        local_rank=("PIGEON_HERE",),
        local_size=("PIGEONS_HERE",),
    ),
"""
OP_REFERENCE = '''"""The definition: every element twice."""

from torch import Tensor


def forward(x: Tensor) -> Tensor:
    """Return 2 x."""
    return x + x
'''
OP_TRITON = '''"""The kernel of `double`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def forward(x: Tensor) -> Tensor:
    """Return 2 x."""
    x = x.contiguous()
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y
'''
OP = '''"""Twice a tensor: contract, gradient, registration."""

import torch
from torch import Tensor

from mtrain_kernels.double import reference
from mtrain_kernels.operators import differentiable, operator
from mtrain_kernels.registry import Op, pick


@operator("double", shapes=lambda x, impl: torch.empty_like(x))
def _double(x: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        from mtrain_kernels.double import triton

        return triton.forward(x)
    return reference.forward(x)


def _save(ctx, inputs, output) -> None:
    ctx.impl = inputs[1]


def _gradients(ctx, dy: Tensor) -> dict[str, Tensor]:
    return {"x": _double(dy, ctx.impl)}


differentiable(_double, save=_save, gradients=_gradients)


def double(x: Tensor, *, impl: str = "auto") -> Tensor:
    """Return 2 x, of any shape."""
    return _double(x, pick("double", impl, x.device))


OPS = (Op("double", (), lambda model: None),)
'''
OP_TEST = """import pytest
import torch
from mtrain_kernels.double.op import double
from mtrain_kernels.registry import ops


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_double(impl):
    assert "double" in ops()
    x = torch.randn(300, requires_grad=True)
    y = double(x, impl=impl)
    torch.testing.assert_close(y, 2 * x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))
"""
NEW = {
    "a hook": {"src/mtrain/train/hooks/optional/diary.py": HOOK},
    "a logger": {"src/mtrain/train/hooks/optional/table.py": LOGGER},
    "a learning-rate curve": {"src/mtrain/config/schedules/odd.py": CURVE},
    "a loss": {"src/mtrain/train/objectives/twice.py": LOSS},
    "a family of known parts": {"conf/model/minute.yaml": MODEL},
    "a family with new parts": {
        "src/mtrain/models/echo/__init__.py": "",
        "src/mtrain/models/echo/config.py": FAMILY_CONFIG,
        "src/mtrain/models/echo/family.py": FAMILY,
        "src/mtrain/models/echo/build.py": FAMILY_BUILD,
    },
    "a kernel": {
        "kernels/mtrain_kernels/double/reference.py": OP_REFERENCE,
        "kernels/mtrain_kernels/double/triton.py": OP_TRITON,
        "kernels/mtrain_kernels/double/op.py": OP,
        "kernels/tests/test_double.py": OP_TEST,
    },
}
"""Files that an addition creates."""
CHANGED = {
    "a key": (
        "src/mtrain/config/schema/trainer.py",
        "    train_iters: Annotated[",
        KEY + "    train_iters: Annotated[",
    ),
    "a launcher": (
        "src/mtrain/world/launchers.py",
        "    _torchrun,\n",
        LAUNCHER + "    _torchrun,\n",
    ),
}
"""The one file that an addition changes, the text at the place, and the new text."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with one addition of every kind."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src", "kernels", "conf", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "launch.py", folder)
    for files in NEW.values():
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
    for path, old, new in CHANGED.values():
        text = (folder / path).read_text()
        assert text.count(old) == 1, path
        (folder / path).write_text(text.replace(old, new))
    return folder


def run(tree: Path, *argv: str, **variables: str) -> str:
    """Run Python with the modules of a tree in a folder next to it; return what it prints."""
    paths = f"{tree / 'src'}{os.pathsep}{tree / 'kernels'}"
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=tree,
        env=environment() | {"PYTHONPATH": paths} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tree: Path) -> Path:
    """Return the folder of a run that uses all additions."""
    words = (
        "model=minute",
        "model.family=echo",
        "model.echo={scale: 0.0}",
        "parallel=tp2",
        "data=mock",
        "data.seq_length=16",
        "optim.schedule=odd",
        "optim.lr=1e-2",
        "optim.min_lr=0",
        "objective.name=twice",
        "trainer.train_iters=2",
        "trainer.clone_embedding_output=false",
        "trainer.eval_iters=0",
        "log.hooks=[diary,table]",
        "log.name=run",
        "log.interval=1",
    )
    run(tree, "launch.py", *latest(*words))
    return tree / "runs/run"


def test_additions_curve_sets_the_rate(trained: Path) -> None:
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert rates == [5e-3, 1e-2]


def test_additions_hook_sees_the_key_in_the_engine(trained: Path) -> None:
    lines = (trained / "diary.txt").read_text().splitlines()
    assert sorted(lines) == ["0 1 False", "0 2 False", "1 1 False", "1 2 False"]


def test_additions_logger_writes_metric_of_loss(trained: Path) -> None:
    rows = (trained / "table.csv").read_text().splitlines()
    steps, losses, squares = zip(*(row.split(",") for row in rows), strict=True)
    assert steps == ("1", "2")
    assert all(float(loss) < float(square) for loss, square in zip(losses, squares, strict=True))
    # model.echo.scale=0: every token is as likely as any other.
    assert float(losses[0]) == pytest.approx(math.log(128))


def test_additions_key_is_explained(tree: Path) -> None:
    page = run(tree, "launch.py", "explain", "trainer.clone_embedding_output")
    assert "Copy the scattered output of the embedding" in page
    assert "TransformerConfig.clone_scatter_output_in_embedding" in page


def test_additions_launcher_numbers_processes(tree: Path) -> None:
    code = (
        "from mtrain.world.launchers import launched; import os;"
        "print(launched(os.environ).variables()['RANK'])"
    )
    variables = {"PIGEON": "3", "PIGEONS": "4", "PIGEON_HERE": "3", "PIGEONS_HERE": "4"}
    assert run(tree, "-c", code, **variables).strip() == "3"


def test_additions_kernel_passes_its_test(tree: Path) -> None:
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "kernels/tests/test_double.py")
