"""The optimizers: every module of this package is one, found by being here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from mtrain.config.optimizer import Optimizer

OPTIMIZERS: dict[str, Optimizer] = {
    found.name: import_module(f"{__name__}.{found.name}").OPTIMIZER for found in iter_modules(__path__)
}
"""By name, which is that of the module, in the order of the alphabet."""


def read_by(key: str) -> str:
    """The condition of a key of `optim` that not all optimizers read."""
    return f"optim.name={'|'.join(readers(key))}"


def readers(key: str) -> tuple[str, ...]:
    """The optimizers that read a key of `optim` which not all of them do."""
    return tuple(name for name, spec in OPTIMIZERS.items() if key in spec.keys)
