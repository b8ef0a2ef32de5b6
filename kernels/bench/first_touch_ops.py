"""Stages of `first_touch.py` about single operations: parity, tiles that are tuned, and
the bench.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from first_touch_device import Skipped, device_here, needs_device
from first_touch_results import Walk

Units = dict[str, Callable[[], Any]]
SAMPLE = ("norm", "activation")
"""Ops of a dry run, unless others are named."""


def _ops(walk: Walk) -> list[str]:
    from mtrain_kernels.registry import ops

    some = walk.ops or (SAMPLE if walk.dry and not walk.whole else ())
    return [name for name in ops() if not some or name in some]


def parity(walk: Walk, folder: Path) -> Units:
    """Return every case of every op with its definition in fp64, at odd sizes and a model's, and
    `first_touch_edges`.
    """
    from mtrain_kernels.registry import MODELS, Model, ops

    odd = Model("odd", 104, 136, 5, 5, 40, 331, 40, experts=6, top_k=3, expert_ffn=72, tokens=37)
    production = Model("llama3_8b", 4096, 14336, 32, 8, 128, 128256, 128, tokens=1000)
    # what training needs comes first
    models = [MODELS["tiny"]] if walk.dry else [production, odd, MODELS["tiny"]]
    cases = {
        f"{case.name} {model.name}": functools.partial(_compare, walk, name, case, model)
        for model in models
        for name in _ops(walk)
        for case in ops()[name].cases
        if case.applies(model)
    }
    edges = ("functions", "operands") if "quantize" in _ops(walk) else ()
    return cases | {f"edges of {name}": functools.partial(_edges, walk, name) for name in edges}


def _edges(walk: Walk, name: str) -> dict[str, Any]:
    needs_device(walk)
    if importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    import first_touch_edges

    wrong = getattr(first_touch_edges, name)(device_here())
    return {"op": "edges", **({"wrong": wrong} if wrong else {"edges": "as defined"})}


def _compare(walk: Walk, name: str, case: Any, model: Any) -> dict[str, Any]:
    import torch
    from mtrain_kernels import parity
    from mtrain_kernels.registry import Unavailable, choose, ops
    from mtrain_kernels.runtime import capability

    needs_device(walk)
    device = device_here()
    torch.manual_seed(0)
    inputs = case.make(model, device, torch.bfloat16)
    impls = ["auto"]
    if "triton" in ops()[name].implementations:
        impls = ["triton"] if walk.dry else ["auto", "triton"]
    compared = {}
    call = case.checked or case.call
    for impl in impls:
        given = functools.partial(lambda impl, **i: call(i, impl), impl)
        wanted = functools.partial(lambda **i: call(i, "reference"))
        tolerance = case.tolerance or (parity.TOLERANCE[torch.bfloat16] if case.checked else None)
        try:
            compared[impl] = _agreement(parity, given, wanted, inputs, tolerance)
        except Unavailable as error:
            compared[impl] = f"cannot run: {error}"
    signs = ["differs"] + ["cannot run"] * (
        capability(device) >= ops()[name].oldest and not walk.dry
    )
    wrong = [impl for impl, said in compared.items() if said.startswith(tuple(signs))]
    said = {"op": name, "auto is": choose(ops()[name], "auto", device)[0], **compared}
    return said | ({"wrong": wrong} if wrong else {})


def _agreement(
    parity: Any, given: Any, wanted: Any, inputs: dict[str, Any], tolerance: float | None
) -> str:
    floats = [
        value
        for value in inputs.values()
        if hasattr(value, "is_floating_point") and value.is_floating_point()
    ]
    for upcast, words in ((True, "fp64"), (False, "the definition in its own format")):
        if upcast and not floats:  # nothing that fp64 is put in for
            continue
        try:
            parity.check(given, wanted, inputs, upcast=upcast, tolerance=tolerance)
            return f"as {words}"
        except AssertionError as error:
            return f"differs from {words}: {error}"
        except (ValueError, TypeError, RuntimeError) as error:
            if not upcast or "float64" not in f"{error}":  # a definition of formats takes no fp64
                raise
    raise AssertionError("either way ends before")


def autotune(walk: Walk, folder: Path) -> Units:
    """Return the tiles of products of experts, attention and logits, measured for models; later
    stages and runs take it.
    """
    some = {
        "grouped_gemm": ("qwen3_30b_a3b", "deepseek_v3"),
        "attention": ("llama3_8b", "deepseek_v3"),
    }
    some["linear_cross_entropy"] = ("llama3_8b", "deepseek_v3")
    if walk.dry:
        return {"tiles": functools.partial(_tune, walk, "", "")}
    return {
        f"{op} {model}": functools.partial(_tune, walk, op, model)
        for op, models in some.items()
        if op in _ops(walk)
        for model in models
    }


def _tune(walk: Walk, op: str, name: str) -> dict[str, str]:
    if walk.dry:
        raise Skipped("the interpreter says nothing about speed")
    needs_device(walk)
    import torch
    from mtrain_kernels import tune, tuning
    from mtrain_kernels.registry import MODELS
    from triton.testing import do_bench

    m = MODELS[name]
    device = device_here()
    if op == "linear_cross_entropy":
        given = tuning.file_of(device), device, m.tokens, m.hidden, m.vocab, torch.bfloat16
        return tune.measure_loss(*given, seconds=lambda call: do_bench(call) / 1e3)
    if op == "attention":
        heads = (m.heads, m.kv_heads)
        widths = (m.head_dim, 128 if m.head_dim == 192 else m.head_dim)
        return tune.measure_attention(
            *(tuning.file_of(device), device, *heads, widths, m.tokens, torch.bfloat16),
            seconds=lambda call: do_bench(call) / 1e3,
        )
    sizes = (m.tokens * m.top_k, m.experts, m.hidden, m.expert_ffn)
    return tune.measure(
        tuning.file_of(device),
        device,
        *sizes,
        torch.bfloat16,
        seconds=lambda call: do_bench(call) / 1e3,
    )


def measured(walk: Walk, folder: Path) -> Units:
    """Return the bench of every case: each contender a row, with its share of what the device can
    do at that size.
    """
    from mtrain_kernels.registry import MODELS, ops

    models = ["tiny"] if walk.dry else ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3"]
    names = [
        (name, case) for name in _ops(walk) for case in ops()[name].cases[: 1 if walk.dry else None]
    ]
    return {
        f"{case.name} {model}": functools.partial(_measure, walk, name, case, MODELS[model])
        for name, case in names
        for model in models
        if case.applies(MODELS[model])
    }


@functools.cache
def _setting(dry: bool) -> Any:
    import torch
    from run import Clock, Setting, ceilings, use_measured

    use_measured(device_here())
    clock = Clock(device_here(), 1 if dry else 20, dry)
    some = ["eager", "auto"] if dry else []  # the interpreter says nothing about speed
    return Setting(clock, torch.bfloat16, ceilings(clock, torch.bfloat16, dry), some)


def _measure(walk: Walk, name: str, case: Any, model: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from run import measure

    needs_device(walk)
    setting = _setting(walk.dry)
    rows = [asdict(row) for row in measure(name, case, model, setting)]
    short = [{key: value for key, value in row.items() if value not in (None, "")} for row in rows]
    wrong = [row["contender"] for row in rows if row["agrees"] is False]
    return {"rows": short, "ceilings": setting.rates, **({"wrong": wrong} if wrong else {})}
