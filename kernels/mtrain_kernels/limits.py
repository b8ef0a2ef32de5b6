"""The bytes and FLOPs that each op needs at least, and its least time on an H200; `python -m
mtrain_kernels.limits`.
"""

from __future__ import annotations

from collections.abc import Callable

from mtrain_kernels.registry import MODELS, Case, Cost, Model, ops

COPY = 4.3e12  # bytes/s of a copy on an H200, counting what is read and what is written
GEMM = 790e12  # FLOP/s of a large BF16 matrix product there
SHOWN = ("llama3_8b", "llama3_70b", "qwen3_30b_a3b", "deepseek_v3")


def table() -> str:
    """Return the limits of every case in BF16 as Markdown: MB and GFLOP at the first model that has
    the op, then us.
    """
    head = ["op", "case", "moved, MB", "GFLOP", *SHOWN]
    rows = [
        [
            op.name,
            case.name,
            *_amounts(case),
            *(_both(case, MODELS[name], _microseconds) for name in SHOWN),
        ]
        for op in ops().values()
        for case in op.cases
    ]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _amounts(case: Case) -> list[str]:
    model = next(MODELS[name] for name in SHOWN if case.applies(MODELS[name]))
    return [
        _both(case, model, lambda cost: f"{cost.bytes / 1e6:,.0f}"),
        _both(case, model, lambda cost: f"{cost.flops / 1e9:,.0f}" if cost.flops else ""),
    ]


def _both(case: Case, model: Model, show: Callable[[Cost], str]) -> str:
    """Return the costs of forward and backward, if the model has such an op and the op has
    gradients.
    """
    if not case.applies(model):
        return ""
    costs = [case.forward(model), *([case.backward(model)] if case.backward is not None else [])]
    return " / ".join(shown for shown in map(show, costs) if shown)


def _microseconds(cost: Cost) -> str:
    least = 1e6 * cost.seconds(COPY, GEMM)
    return f"{least:,.0f}" if least >= 100 else f"{least:.3g}"


if __name__ == "__main__":
    print(table())
