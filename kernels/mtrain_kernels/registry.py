"""The table of operations: who implements each, what it costs, at which shapes it is measured and
compiled.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mtrain_kernels.parity import Limits
from mtrain_kernels.runtime import triton_obstacle

log = logging.getLogger(__name__)


class Unavailable(RuntimeError):
    """A named implementation cannot run; the message says which and why."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op; `obstacle(device)` says why it cannot run on tensors of a device,
    or None.
    """

    name: str
    obstacle: Callable[[torch.device], str | None]

    def available(self, device: torch.device) -> str | None:
        """Return None if usable on `device`, else the reason why it is not."""
        return self.obstacle(device)


def _cpu_obstacle(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"it is for a CPU, the tensors are on {device.type}"


REFERENCE = Implementation("reference", lambda device: None)
CPU = Implementation("cpu", _cpu_obstacle)
TRITON = Implementation("triton", triton_obstacle)
# in the order in which `auto` tries them
STANDARD = {i.name: i for i in (TRITON, REFERENCE)}
WITH_CPU = {i.name: i for i in (TRITON, CPU, REFERENCE)}


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer layer that ops are measured at; `tokens` is the micro-batch in
    tokens.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_dim: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    tokens: int = 8192


MODELS = {
    model.name: model
    for model in (
        Model("llama3_8b", 4096, 14336, 32, 8, 128, 128256, 128),
        Model("llama3_70b", 8192, 28672, 64, 8, 128, 128256, 128),
        Model("llama3_405b", 16384, 53248, 128, 8, 128, 128256, 128),
        Model(
            "qwen3_30b_a3b",
            2048,
            6144,
            32,
            4,
            128,
            151936,
            128,
            experts=128,
            top_k=8,
            expert_ffn=768,
        ),
        Model(
            "deepseek_v3",
            7168,
            18432,
            128,
            128,
            192,
            129280,
            64,
            experts=256,
            top_k=8,
            expert_ffn=2048,
        ),
        Model("tiny", 64, 160, 4, 2, 16, 384, 16, experts=8, top_k=2, expert_ffn=48, tokens=32),
    )
}


@dataclass(frozen=True)
class Cost:
    """The least work of a call: `bytes` read and written in device memory, `flops` in matrix
    products.
    """

    bytes: int
    flops: int = 0

    def seconds(self, copy: float, gemm: float) -> float:
        """Return the time limit on a device that copies `copy` bytes/s, both ways counted, and
        multiplies `gemm` FLOP/s.
        """
        return max(self.bytes / copy, self.flops / gemm)


@dataclass(frozen=True)
class Case:
    """One call of an op that is measured and stands in the table.

    `make(model, device, dtype)` returns the keyword arguments, tensors to differentiate with
    requires_grad set; `call(inputs, impl)` runs the op. `forward` and `backward` give its cost at a
    model in BF16; `backward` is None for an op without gradients. `applies` is False for a model
    that has no such layer. `rivals` maps a library's name to a function that takes the inputs and
    returns a call of that library without arguments, or raises ImportError. Where `call` changes
    its inputs in place, `checked(inputs, impl)` does so on copies of them with numbers worth
    comparing, and returns what is to be compared, to the tolerance of bf16. `tolerance` is that of
    its results in bf16 where kernels round more than once on the way, or their `parity.Limits`.
    """

    name: str
    make: Callable[[Model, torch.device, torch.dtype], dict[str, Any]]
    call: Callable[[dict[str, Any], str], Any]
    forward: Callable[[Model], Cost]
    backward: Callable[[Model], Cost] | None = None
    applies: Callable[[Model], bool] = lambda model: True
    rivals: Mapping[str, Callable[[dict[str, Any]], Callable[[], Any]]] = field(
        default_factory=dict
    )
    checked: Callable[[dict[str, Any], str], Any] | None = None
    tolerance: float | Limits | None = None


@dataclass(frozen=True)
class Op:
    """An operation: its name, who implements it, the cases that are measured, and how its kernels
    are launched.

    `launch(model)` launches every Triton kernel of the op on meta tensors of a model's shape, as
    training would; `aot` records and compiles what is launched. `aot_models` are the shapes that CI
    compiles.
    """

    name: str
    cases: tuple[Case, ...]
    launch: Callable[[Model], None]
    aot_models: tuple[str, ...] = ("llama3_405b",)
    implementations: Mapping[str, Implementation] = field(default_factory=lambda: STANDARD)
    oldest: int = 80
    """The first compute capability that its kernels are for."""


@functools.cache
def ops() -> dict[str, Op]:
    """Return every op by name: the `OPS` of each folder's `op.py`."""
    found: dict[str, Op] = {}
    # Folders of ops have no `__init__.py`, so `pkgutil` does not list them.
    for file in sorted(Path(__file__).parent.glob("*/op.py")):
        for op in importlib.import_module(f"mtrain_kernels.{file.parent.name}.op").OPS:
            found[op.name] = op
    return found


# A constant to the compiler: the choice depends on dtypes, shapes and devices, not on values.
@torch.compiler.assume_constant_result
def pick(
    name: str,
    impl: str,
    device: torch.device,
    obstacle: str | None = None,
    cpu_obstacle: str | None = None,
) -> str:
    """Return the name that `choose` returns; for use inside ops, also under torch.compile."""
    op = ops()[name]
    against = {"reference": None, "cpu": cpu_obstacle}
    # Each call of an op comes by here, so the usual answer builds no reasons.
    for candidate in op.implementations if impl == "auto" else (impl,):
        known = op.implementations.get(candidate)
        if known is None or against.get(candidate, obstacle) is not None:
            continue
        if known.obstacle(device) is None:
            # The first choice of `auto` is logged with its reasons.
            if impl != "auto" or (name, device.type, candidate) in _chosen:
                return candidate
            _chosen.add((name, device.type, candidate))
            break
    return choose(op, impl, device, obstacle, cpu_obstacle)[0]


_chosen: set[tuple[str, str, str]] = set()
"""Choices of `auto` for ops on devices."""


def choose(
    op: Op,
    impl: str,
    device: torch.device,
    obstacle: str | None = None,
    cpu_obstacle: str | None = None,
) -> tuple[str, str]:
    """Return the implementation that `impl` names and the reason, which `auto` logs once.

    `impl` is `auto` or the name of an implementation. `obstacle` is why the kernels and libraries
    do not take this input (its dtype, its width), `cpu_obstacle` why `cpu` does not; the reference
    takes every input. Raises `Unavailable` where the named one cannot run, and `ValueError` for an
    unknown name.
    """
    beyond = {"reference": None, "cpu": cpu_obstacle}
    reasons = {
        name: implementation.available(device) or beyond.get(name, obstacle)
        for name, implementation in op.implementations.items()
    }
    if impl == "auto":
        # The reference refuses nothing, so there always is one.
        chosen = next(name for name, reason in reasons.items() if reason is None)
        refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
        reason = "; ".join(refused) or "the first that can run"
        _say_once(f"{op.name} on {device.type}: {chosen} ({reason})")
        return chosen, reason
    if impl not in reasons:
        raise ValueError(
            f"{op.name} has no implementation {impl!r}; choose one of auto, {', '.join(reasons)}"
        )
    if reasons[impl] is not None:
        raise Unavailable(f"{op.name}: {impl} cannot run: {reasons[impl]}")
    return impl, "named"


@functools.cache
def _say_once(line: str) -> None:
    log.info(line)
