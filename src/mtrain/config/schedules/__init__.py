"""The learning-rate curves: every module of this package is one, found by iterating it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from mtrain.config.schema.schedule import Schedule

# By name, which is that of the module, in alphabetical order.
SCHEDULES: dict[str, Schedule] = {
    found.name: import_module(f"{__name__}.{found.name}").SCHEDULE
    for found in iter_modules(__path__)
}
