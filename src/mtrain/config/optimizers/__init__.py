"""The optimizers: every module of this package is one."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from mtrain.config.schema.optimizer import NO_MATRICES, Optimizer, ParamGroup, Run

# Optimizers by name, which is that of the module, in alphabetical order.
OPTIMIZERS: dict[str, Optimizer] = {
    found.name: import_module(f"{__name__}.{found.name}").OPTIMIZER
    for found in iter_modules(__path__)
}


def mup_groups(run: Run) -> tuple[ParamGroup, ...]:
    """Return the parameters whose rate follows the width of the model (`model.mup`)."""
    o = run.optim
    m = run.model.width_mult
    if m == 1:
        return ()

    def hidden(param: Any, name: str) -> bool:
        return param.ndim > 1 and not any(word in name for word in NO_MATRICES)

    # The update of SGD grows with the gradient, whose size falls with width; Adam's does not, so
    # the rate of its matrices falls instead (arXiv 2203.03466).
    if o.name == "sgd":
        rates = {"max_lr": o.rate * m, "min_lr": o.min_lr * m}
        return (ParamGroup("mup, as wide as one", lambda p, name: not hidden(p, name), rates),)
    rates = {"max_lr": o.rate / m, "min_lr": o.min_lr / m}
    # Gradients of wide matrices are smaller by the same factor: eps must stay below them.
    rates |= {"eps": o.eps / m} if "eps" in OPTIMIZERS[o.name].keys else {}
    return (ParamGroup("mup, wide on both sides", hidden, rates),)


def read_by(key: str) -> str:
    """Return the condition of a key of `optim` that only some optimizers read."""
    return f"optim.name={'|'.join(readers(key))}"


def readers(key: str) -> tuple[str, ...]:
    """Return the optimizers that read a key of `optim`, if not all do."""
    return tuple(name for name, spec in OPTIMIZERS.items() if key in spec.keys)
