"""Rules about installed software: hooks, sinks, objectives, and the release of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from mtrain.config.engine import release as engine
from mtrain.config.engine.capabilities import CAPABILITIES, is_here, keys
from mtrain.config.machine import installed
from mtrain.config.messages.problem import value_at
from mtrain.config.resolve.conditional import condition
from mtrain.config.rules.finding import Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.run import RunConfig

OBJECTIVE = "objective.name"


@rule(Code("MT126", example="log.hooks=[garbag]"), reads="log.hooks", disk=True)
def known_hooks(run: RunConfig) -> Iterator[Finding]:
    """Cannot enable these hooks because each must be installed and named once."""
    # A scan of installed packages takes longer than all other rules.
    if run.log.hooks:
        names = installed.names(installed.SHIPPED_HOOKS, installed.HOOKS)
        yield from _named("MT126", "log.hooks", "hook", run.log.hooks, names, installed.HOOKS)


@rule(Code("MT520", example="log.sinks=[wandbb]"), reads="log.sinks", disk=True)
def known_sinks(run: RunConfig) -> Iterator[Finding]:
    """Cannot send to these sinks because each must be known and named once."""
    if run.log.sinks:
        names = installed.names(installed.SHIPPED_SINKS, installed.SINKS)
        yield from _named("MT520", "log.sinks", "sink", run.log.sinks, names, installed.SINKS)


@rule(
    Code(
        "MT522",
        help="Install the extra that the message names, or remove the sink.",
        says="wandb, mlflow",
    ),
    reads="log.sinks",
    disk=True,
)
def installed_sinks(run: RunConfig) -> Iterator[Finding]:
    """Cannot send to a sink because its library is not installed."""
    missing = [name for name in dict.fromkeys(run.log.sinks) if not installed.has_sink(name)]
    if missing:
        hint = f"pip install 'mtrain[{','.join(missing)}]'"
        others = [[name for name in run.log.sinks if name not in missing]]
        fixes = each("log.sinks", others)
        detail = ", ".join(missing)
        yield Finding("MT522", "log.sinks", detail, fixes, hint=hint, lacks="device")


def _named(
    code: str, key: str, kind: str, given: Sequence[str], names: Sequence[str], group: str
) -> Iterator[Finding]:
    """Yield a finding unless each of `given` is one of `names`, and there once."""
    unknown = [name for name in given if name not in names]
    if not unknown and len(set(given)) == len(given):
        return
    known = tuple(dict.fromkeys(name for name in given if name in names))
    near = get_close_matches(unknown[0], names, n=1) if unknown else []
    # The corrected name comes first, then the list without the unknown one.
    fixes = [[*known]] if not near else [[*dict.fromkeys((*known, *near))], [*known]]
    problem = f"no {kind} is called {unknown[0]}" if unknown else "one is named twice"
    detail = f"{problem}; {kind}s here: {', '.join(names)}; a package adds one as {group}"
    yield Finding(code, key, detail, each(key, fixes))


@rule("MT127", reads=OBJECTIVE, disk=True)
def known_objective(run: RunConfig) -> Iterator[Finding]:
    """Require an objective that mtrain or an installed package has."""
    name = run.objective.name
    # The default ships, and needs no look at installed packages.
    if name == ObjectiveConfig.model_fields["name"].default:
        return
    names = installed.names(installed.SHIPPED_OBJECTIVES, installed.OBJECTIVES)
    if name not in names:
        near = dict.fromkeys([*get_close_matches(name, names, n=1), "next_token"])
        detail = (
            "neither mtrain nor an installed package has it (objectives here:"
            f" {', '.join(names)}; a package adds one as {installed.OBJECTIVES})"
        )
        yield Finding("MT127", OBJECTIVE, detail, each(OBJECTIVE, near))


@rule(
    Code(
        "MT045",
        help="Install a release that can (`engines` lists what each can do), or remove the key.",
        says="0.16.1 is installed, >=0.19.0: an update is skipped where the gradient norm is large",
    ),
    reads=" ".join(keys()),
)
def release_capability(run: RunConfig) -> Iterator[Finding]:
    """Cannot do this because it needs another release of megatron-core."""
    # Without megatron-core there is no release to compare.
    found = engine.release()
    if found is None:
        return
    for row in CAPABILITIES:
        if not is_here(row, found) and condition(row.when).holds(lambda key: value_at(run, key)):
            detail = f"{engine.words(found)} is installed, {row.versions}: {row.about}"
            yield Finding("MT045", row.keys[0], detail, [dict(row.without)], also=row.keys[1:])
