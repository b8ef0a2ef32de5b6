"""One harness that holds an op against its definition: values, every gradient, strides, poisoned
memory, mutants.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Largest error allowed, relative to the element and to the root mean square of the tensor, against
# the definition evaluated in fp64 on the same inputs.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Limits = Callable[[Mapping[str, Any], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function of inputs and of gradients of outputs that gives the largest error of each element of
each result.

All three are by name; results are named as `check` names them in messages.
"""


def check(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],
    *,
    exact: bool = False,
    upcast: bool = True,
    tolerance: float | Limits | None = None,
    seed: int = 0,
) -> None:
    """Assert that `op(**inputs)` and the gradient of each input with requires_grad equal those of
    `reference`.

    Memory that `op` allocates is poisoned. `upcast` evaluates the reference in fp64 (turn it off
    where the rounding is part of the definition); `exact` wants every bit. Errors are measured
    against `TOLERANCE` of the coarsest dtype among inputs and results, or `tolerance`, relative to
    the element and to the tensor's root mean square; or they are held to the `Limits` of each
    element, which know names as they stand in messages. Not-a-number and infinity must stand at the
    same places. Raises `AssertionError` naming the tensor.
    """
    with poisoned():
        found = _values_and_gradients(op, inputs, seed, None)
    wanted = _values_and_gradients(reference, inputs, seed, torch.float64 if upcast else None)
    assert found.keys() == wanted.keys(), f"results {list(found)} instead of {list(wanted)}"
    dtypes = [t.dtype for t in (*inputs.values(), *found.values()) if isinstance(t, Tensor)]
    coarsest = max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=0.0)
    limits = tolerance(inputs, _directions(found, seed)) if callable(tolerance) else {}
    for name, value in found.items():
        if exact:
            torch.testing.assert_close(
                value, wanted[name].to(value.dtype), rtol=0, atol=0, equal_nan=True, msg=name
            )
        elif callable(tolerance):
            assert_within(name, value, wanted[name], limits[name])
        else:
            assert_near(name, value, wanted[name], coarsest if tolerance is None else tolerance)


def check_format(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],
    *,
    roundings: int = 1,
    seed: int = 1,
) -> None:
    """Assert that values and gradients in half precision are exact ones that were rounded
    `roundings` times.

    `check` forgives an error of some roundings wherever it comes from, and its inputs have few
    rows: it does not see what is added up or widened too late in half precision. Here an element
    may be off by `roundings` times half a unit in its last place. Besides, one rounding leaves
    the noise of fp32 of the tensor's root mean square; several are roundings inside of a sum, and
    leave as many of it. `reference` is evaluated in fp64 on the same inputs. Raises
    `AssertionError` naming the tensor.
    """
    found = _values_and_gradients(op, inputs, seed, None)
    wanted = _values_and_gradients(reference, inputs, seed, torch.float64)
    halves = [
        t.dtype
        for t in inputs.values()
        if isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16)
    ]
    assert halves, "no input is in half precision"
    assert found.keys() == wanted.keys(), f"results {list(found)} instead of {list(wanted)}"
    for name, value in found.items():
        assert value.shape == wanted[name].shape, (
            f"{name}: {tuple(value.shape)} for {tuple(wanted[name].shape)}"
        )
        half = torch.finfo(
            value.dtype if value.dtype in (torch.float16, torch.bfloat16) else halves[0]
        )
        a = value.double()
        b = wanted[name].double()
        near = TOLERANCE[torch.float32] if roundings == 1 else roundings * half.eps / 2
        limit = roundings * half.eps / 2 * (b.abs() + half.tiny) + near * b.square().mean().sqrt()
        excess = ((a - b).abs() / limit).nan_to_num(nan=torch.inf, posinf=torch.inf)
        assert bool((excess <= 1).all()), (
            f"{name}: {a.flatten()[excess.argmax()]:.7g} instead of"
            f" {b.flatten()[excess.argmax()]:.7g}: {excess.max():.3g} times what {roundings}"
            f" rounding(s) to {value.dtype} leave"
        )


def assert_near(name: str, found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Assert shape and values of one tensor, to the tolerance of `found`'s dtype unless one is
    given.
    """
    assert found.shape == wanted.shape, (
        f"{name}: shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    )
    if not found.dtype.is_floating_point:
        assert torch.equal(found, wanted.to(found.dtype)), f"{name}: integers differ"
        return
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    a = found.double()
    b = wanted.to(found.dtype).double()
    finite = b.isfinite()
    same = torch.where(
        finite, torch.ones_like(b, dtype=torch.bool), (a == b) | (a.isnan() & b.isnan())
    )
    assert bool(same.all()), (
        f"{name}: {int((~same).sum())} places should be infinite or not a number and are not"
    )
    if not finite.any():
        return
    a = a[finite]
    b = b[finite]
    # fp64 has noise where the truth is zero
    limit = tolerance * (b.abs() + b.square().mean().sqrt()) + 1e-12
    excess = ((a - b).abs() / limit).nan_to_num(nan=torch.inf)
    worst = int(excess.argmax())
    assert excess[worst] <= 1, (
        f"{name}: {a[worst]:.7g} instead of {b[worst]:.7g}, {excess[worst]:.3g} times the tolerance"
        f" {tolerance:g}; {int((excess > 1).sum())} of {excess.numel()} elements are off"
    )


def assert_within(name: str, found: Tensor, wanted: Tensor, limit: Tensor) -> None:
    """Assert shape and values of one tensor, each to its own `limit`; what is no number is within
    none.
    """
    assert found.shape == wanted.shape, (
        f"{name}: shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    )
    a = found.double().flatten()
    b = wanted.double().flatten()
    excess = ((a - b).abs() / (limit.to(b.device).flatten() + 1e-12)).nan_to_num(nan=torch.inf)
    worst = int(excess.argmax()) if excess.numel() else 0
    assert not excess.numel() or excess[worst] <= 1, (
        f"{name}: {a[worst]:.7g} instead of {b[worst]:.7g}, {excess[worst]:.3g} times its limit; "
        f"{int((excess > 1).sum())} of {excess.numel()} elements are off"
    )


def _directions(values: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return gradients of outputs: the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for name in values if name.startswith("output ")]
    return {name: torch.randn(values[name].shape, generator=generator).bfloat16() for name in names}


def _values_and_gradients(
    function: Callable[..., Any], inputs: dict[str, Any], seed: int, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    arguments = {name: _leaf(value, dtype) for name, value in inputs.items()}
    leaves = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.requires_grad}
    outputs = function(**arguments)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    values = {f"output {i}": out for i, out in enumerate(outputs) if isinstance(out, Tensor)}
    differentiable = [out for out in values.values() if out.requires_grad]
    given = _directions(values, seed)
    directions = [
        given[name].to(out.device, out.dtype) for name, out in values.items() if out.requires_grad
    ]
    if differentiable and leaves:
        gradients = torch.autograd.grad(
            differentiable, list(leaves.values()), directions, allow_unused=True
        )
        for name, gradient in zip(leaves, gradients, strict=True):
            # Outputs that do not depend on an input give it no gradient, which counts as zeros.
            values[f"gradient of {name}"] = (
                torch.zeros_like(leaves[name]) if gradient is None else gradient
            )
    return {name: value.detach() for name, value in values.items()}


def _leaf(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if dtype is not None and value.is_floating_point():
        cast = value.detach().to(dtype)
    else:
        cast = value.detach()
    return cast.requires_grad_(value.requires_grad)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory from `torch.empty` and its relatives with NaN (integers: the largest): what
    nobody wrote shows.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # torch fills empty memory only in deterministic mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of `x` in other strides: padded rows, every second element, and the axes
    stored in reverse order.
    """
    grad = x.requires_grad
    x = x.detach()
    padded = torch.full(
        (*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device
    )
    padded[..., : x.shape[-1]] = x
    yield "padded rows", padded[..., : x.shape[-1]].requires_grad_(grad)
    spread = torch.full(
        (*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device
    )
    spread[..., ::2] = x
    yield "every second element", spread[..., ::2].requires_grad_(grad)
    reverse = tuple(reversed(range(x.ndim)))
    yield "reversed axes", x.permute(reverse).contiguous().permute(reverse).requires_grad_(grad)


@contextmanager
def mutated(module: str, old: str, new: str) -> Iterator[None]:
    """Run with a variant of `module` in which the text `old`, which must occur, reads `new`: a
    seeded bug.

    The variant stands in for the module for whoever imports it inside the `with`, as ops do when
    they are called.
    """
    original = importlib.import_module(module)
    source = Path(original.__file__ or "").read_text()
    assert old in source, f"{module} does not contain {old!r}: the mutant would be no mutant"
    package, _, name = module.rpartition(".")
    parent = importlib.import_module(package)
    with tempfile.TemporaryDirectory() as folder:
        # A file, since Triton reads the source text of its kernels.
        path = Path(folder) / f"{name}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        variant = importlib.util.module_from_spec(spec)
        sys.modules[module] = variant
        setattr(parent, name, variant)
        try:
            spec.loader.exec_module(variant)
            yield
        finally:
            sys.modules[module] = original
            setattr(parent, name, original)


@contextmanager
def caught(module: str, old: str, new: str) -> Iterator[None]:
    """Fail unless the body raises `AssertionError` while `module` is `mutated`: parity must see a
    seeded bug.
    """
    seen = False
    with mutated(module, old, new):
        try:
            yield
        except AssertionError:
            seen = True
    assert seen, f"nobody noticed that {module} said {new!r} instead of {old!r}"
