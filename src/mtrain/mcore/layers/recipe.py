"""The FP8 recipe of our linear layers, from the keys of a run."""

from __future__ import annotations

from mtrain_kernels.fp8_linear.op import Recipe

from mtrain.config.schema.run import RunConfig


def recipe(run: RunConfig) -> Recipe | None:
    """Return the FP8 recipe of our linear layers, or None without FP8."""
    p = run.precision
    if p.fp8 is None or run.kernels.linear == "te":
        return None
    return Recipe(p.fp8_recipe or "tensorwise", backward="e5m2" if p.fp8 == "hybrid" else "e4m3")
