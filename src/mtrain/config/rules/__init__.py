"""Rules between keys: pure functions, all asked, every fix tried before it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from mtrain.config.dump import override
from mtrain.config.rules import (
    batch,
    data,
    experts,
    inert,
    layout,
    model,
    optim,
    pipeline,
    precision,
    quantized,
    sharding,
    storage,
)
from mtrain.config.rules.finding import Change, Finding, Rule
from mtrain.config.run import RunConfig
from mtrain.errors import Problem

RULES: tuple[Rule, ...] = tuple(
    rule
    for room in (
        layout,
        pipeline,
        sharding,
        experts,
        batch,
        model,
        data,
        precision,
        quantized,
        optim,
        storage,
        inert,
    )
    for rule in room.RULES
)

MAX_TRIES = 400


def check(
    run: RunConfig,
    origins: Mapping[str, str] | None = None,
    *,
    raw: RunConfig | None = None,
    resolve: Callable[[RunConfig], RunConfig] = lambda run: run,
) -> list[Problem]:
    """Every broken rule of a resolved run, errors before warnings.

    A fix is shown only after it was tried: applied to `raw` (the run before it was resolved, what a user edits)
    and resolved again, it removes its problem and brings no new one.
    """
    raw = raw if raw is not None else run
    found = list(findings(run))
    trial = _Trial(raw, resolve, found)
    problems = [_problem(finding, run, origins or {}, trial) for finding in found]
    return sorted(problems, key=lambda p: p.severity)


def findings(run: RunConfig) -> Iterator[Finding]:
    """What every rule has to say about a resolved run."""
    for rule in RULES:
        yield from rule(run)


def apply(run: RunConfig, change: Change) -> RunConfig:
    """`run` with dotted keys set to new values.

    Raises:
        ValidationError: the schema refuses a value.
        KeyError: a part of a path is no section.
    """
    values = run.to_dict()
    for path, value in change.items():
        *parents, last = path.split(".")
        node: dict[str, Any] = values
        for name in parents:
            node = node[name]
        node[last] = value
    return RunConfig.model_validate(values)


class _Trial:
    """Tries fixes against the rules, a bounded number of them."""

    def __init__(self, raw: RunConfig, resolve: Callable[[RunConfig], RunConfig], found: Iterable[Finding]) -> None:
        self.raw, self.resolve = raw, resolve
        self.before = {(f.code, f.path) for f in found if f.severity == "error"}
        self.left = MAX_TRIES

    def outcome(self, change: Change) -> list[Finding] | None:
        """What the rules say under `change`; None where it cannot be applied."""
        self.left -= 1
        try:
            return list(findings(self.resolve(apply(self.raw, change))))
        except (ValidationError, KeyError, TypeError):
            return None

    def repair(self, change: Change, finding: Finding, depth: int) -> Change | None:
        """`change`, with at most `depth` more changes for what it breaks; None where `finding` stays."""
        after = self.outcome(change) if self.left > 0 else None
        if after is None or (finding.code, finding.path) in {(f.code, f.path) for f in after}:
            return None
        new = [f for f in after if f.severity == "error" and (f.code, f.path) not in self.before]
        if not new:
            return change
        for more in new[0].fixes[:6] if depth else ():
            if all(change.get(key, value) == value for key, value in more.items()):
                done = self.repair({**change, **more}, finding, depth - 1)
                if done is not None:
                    return done
        return None

    def choose(self, finding: Finding, limit: int = 2) -> list[Change]:
        """The fixes that remove `finding` and bring nothing new, in the order of the rule.

        Where none of them does so alone, the first that does so with one or two changes more.
        """
        good: list[Change] = []
        for change in finding.fixes:
            if len(good) < limit and not any(known.items() <= change.items() for known in good):
                done = self.repair(change, finding, 0)
                good += [done] if done is not None else []
        for change in () if good else finding.fixes:
            done = self.repair(change, finding, 2)
            if done is not None:
                return [done]
        return good


def _problem(finding: Finding, run: RunConfig, origins: Mapping[str, str], trial: _Trial) -> Problem:
    held = trial.raw.flat()
    fixes = []
    for change in trial.choose(finding):
        new = {key: value for key, value in change.items() if key not in held or _plain(value) != held[key]}
        fixes.append(" ".join(override(key, value) for key, value in (new or change).items()))
    if finding.hint:
        fixes.append(finding.hint)
    value: Any = run
    for name in finding.path.split("."):
        value = getattr(value, name)
    if isinstance(value, tuple):
        value = list(value)
    source = origins.get(finding.path, "")
    fix = " or ".join(dict.fromkeys(fixes))
    return Problem(finding.code, finding.path, value, finding.rule, fix, source, finding.severity)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
