"""Hooks and objectives: every name stands for something that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from mtrain.config.machine import installed
from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.config.schema.trainer import TrainerConfig

DEFAULT = TrainerConfig.model_fields["objective"].default
"""The objective that ships and needs no look at installed packages."""


@rule(Code("MT126", example="log.hooks=[garbag]"), reads="log.hooks", disk=True)
def known_hooks(run: RunConfig) -> Iterator[Finding]:
    """Each hook ships with mtrain or comes with an installed package, and is named once."""
    if not run.log.hooks:
        return  # a scan of installed packages takes longer than all other rules
    names = installed.names(installed.SHIPPED_HOOKS, installed.HOOKS)
    unknown = [name for name in run.log.hooks if name not in names]
    if not unknown and len(set(run.log.hooks)) == len(run.log.hooks):
        return
    known = tuple(dict.fromkeys(name for name in run.log.hooks if name in names))
    problem = "a hook is named twice"
    if unknown:
        problem = f"no hook is called {unknown[0]}"
    near = get_close_matches(unknown[0], names, n=1) if unknown else []
    fixes = [known] if not near else [tuple(dict.fromkeys((*known, *near))), known]
    text = f"{problem}; hooks here: {', '.join(names)} (a package adds one as {installed.HOOKS})"
    yield Finding("MT126", "log.hooks", text, tuple({"log.hooks": list(fix)} for fix in fixes))


@rule(Code("MT127", example="trainer.objective=nxt_token"), reads="trainer.objective", disk=True)
def known_objective(run: RunConfig) -> Iterator[Finding]:
    """The objective ships with mtrain or comes with an installed package."""
    name = run.trainer.objective
    if name == DEFAULT:
        return
    names = installed.names(installed.SHIPPED_OBJECTIVES, installed.OBJECTIVES)
    if name in names:
        return
    near = [*get_close_matches(name, names, n=1), "next_token"]
    text = (
        f"there is no such objective; objectives here: {', '.join(names)} (a package adds one as"
        f" {installed.OBJECTIVES})"
    )
    fixes = tuple({"trainer.objective": other} for other in dict.fromkeys(near))
    yield Finding("MT127", "trainer.objective", text, fixes)


RULES = (known_hooks, known_objective)
