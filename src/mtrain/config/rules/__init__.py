"""Rules between keys: all are evaluated, and every fix is tried before it is shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from mtrain.config.compose.dump import override
from mtrain.config.compose.origins import discards, forgets, lost
from mtrain.config.messages.problem import plain, problem_of, value_at
from mtrain.config.messages.suggestions import NOTHING, with_choices
from mtrain.config.resolve.watch import Run, watched
from mtrain.config.rules import (
    attention,
    batch,
    chats,
    corpus,
    data,
    experts,
    graphs,
    launch,
    layout,
    model,
    objectives,
    optim,
    peft,
    pipeline,
    plug_ins,
    precision,
    resilience,
    rollouts,
    sharding,
    storage,
    unused,
)
from mtrain.config.rules.families import rules_of_families
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.related import related
from mtrain.config.rules.rule import Rule, rules_in
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import Problem

# Problems are reported in this order: first the keys that decide the shape of a run.
_MODULES = (
    layout,
    pipeline,
    sharding,
    experts,
    batch,
    model,
    attention,
    data,
    corpus,
    chats,
    objectives,
    rollouts,
    precision,
    optim,
    peft,
    storage,
    resilience,
    launch,
    graphs,
    unused,
    plug_ins,
)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule: those of this package, then those of the families of models."""
    return (*(rule for module in _MODULES for rule in rules_in(module)), *rules_of_families())


MAX_TRIES = 400
DISK_SECONDS = 0.4
"""The seconds that rules on files may take to try the fixes of one configuration."""
Read = tuple[Finding, frozenset[str]]
"""A finding, and the keys that its rule had read by then."""


class Answers:
    """Cached findings of rules that read files: a trial evaluates such a rule again only if a key
    that it reads changed.

    After `DISK_SECONDS` none is evaluated again, and new values get no findings.
    """

    def __init__(self) -> None:
        self._known: dict[Rule, dict[tuple[Any, ...], list[Read]]] = {}
        self._left = DISK_SECONDS

    def of(self, rule: Rule, run: RunConfig) -> list[Read]:
        """Return the findings of a rule, each with the keys that the rule had read by then."""
        known = self._known.setdefault(rule, {})
        values = tuple(value_at(run, key) for key in rule.reads)
        if values not in known:
            if known and self._left <= 0:
                return []
            begun = time.monotonic()
            known[values] = list(_watched(rule, run))
            self._left -= time.monotonic() - begun
        return known[values]


def check(
    run: RunConfig,
    origins: Mapping[str, str] | None = None,
    *,
    raw: UnresolvedRun | None = None,
    resolve: Callable[[UnresolvedRun], RunConfig] | None = None,
    hidden: Callable[[AbstractSet[str]], bool] = lambda reads: False,
    to_run: bool = True,
) -> list[Problem]:
    """Return every broken rule of a resolved run, errors before warnings.

    A shown fix was tried: applied to `raw` (the run before it was resolved, which a user edits) and
    resolved again, it removes its problem and causes no new one. Findings that `hidden` accepts, by
    the keys that the rule read, are left out. If the configuration is not `to_run` on this machine,
    inputs that it lacks are warnings.
    """
    answers = Answers()
    found = list(findings_and_reads(run, answers))
    broken = [finding for finding, _ in found]
    if raw is None or resolve is None:
        raw = run
        trial = _Trial(run, lambda changed: changed, broken, answers)
    else:
        trial = _Trial(raw, resolve, broken, answers)
    problems = [
        _problem(_softened(finding, raw, to_run=to_run), run, origins or {}, trial, reads)
        for finding, reads in found
        if not hidden(reads)
    ]
    return sorted(problems, key=lambda p: p.severity)


def _softened(finding: Finding, raw: UnresolvedRun, *, to_run: bool) -> Finding:
    """Return a warning in place of an error, for inputs that a run elsewhere may have."""
    on_a_device = finding.lacks == "device"
    if to_run or not finding.lacks or (on_a_device and raw.cluster.device != "auto"):
        return finding
    parts = [finding.detail, "a run here is refused"]
    if on_a_device:
        parts.append("name the machines it is meant for, as in cluster=h100x8")
    return replace(finding, severity="warning", detail="; ".join(filter(None, parts)))


def findings(run: RunConfig, answers: Answers | None = None) -> Iterator[Finding]:
    """Return the findings of every rule on a resolved run; `answers` are those of a run that
    differs in a few keys.
    """
    answers = answers or Answers()
    for rule in all_rules():
        # Watching which keys are read costs time, and trials do not need it.
        yield from (found for found, _ in answers.of(rule, run)) if rule.disk else rule(run)


def findings_and_reads(run: RunConfig, answers: Answers) -> Iterator[Read]:
    """Yield the same, each with the keys that its rule had read until then."""
    for rule in all_rules():
        yield from answers.of(rule, run) if rule.disk else _watched(rule, run)


def _watched(rule: Rule, run: RunConfig) -> Iterator[Read]:
    reads = set[str]()
    for found in rule(watched(run, reads)):
        yield found, frozenset(reads)


def apply(run: Run, change: Change) -> Run:
    """Return `run` with new values for dotted keys.

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
    return type(run).model_validate(values)


class _Trial:
    """A bounded trial of fixes against the rules."""

    def __init__(
        self,
        raw: UnresolvedRun,
        resolve: Callable[[Any], RunConfig],
        found: Iterable[Finding],
        answers: Answers,
    ) -> None:
        self.raw = raw
        self.resolve = resolve
        self.answers = answers
        self.before = {(f.code, f.path) for f in found if f.severity == "error"}
        self.left = MAX_TRIES

    def outcome(self, change: Change) -> list[Finding] | None:
        """Return the findings after `change`; None if it cannot be applied."""
        self.left -= 1
        try:
            return list(findings(self.resolve(apply(self.raw, change)), self.answers))
        except (ValidationError, KeyError, TypeError):
            return None

    def repair(self, change: Change, finding: Finding, depth: int) -> Change | None:
        """Return `change` with at most `depth` more for rules that it breaks; None: no success."""
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

    def choose(self, finding: Finding, fixes: Sequence[Change]) -> list[Change]:
        """Return two of `fixes` that remove `finding` and cause nothing new, in their order.

        If no fix does so by itself, return the first that does with one or two more changes.
        """
        good: list[Change] = []
        for change in fixes:
            if len(good) < 2 and not any(known.items() <= change.items() for known in good):
                done = self.repair(change, finding, 0)
                good += [done] if done is not None else []
        for change in () if good else fixes:
            done = self.repair(change, finding, 2)
            if done is not None:
                return [done]
        return good


def _problem(
    finding: Finding,
    run: RunConfig,
    origins: Mapping[str, str],
    trial: _Trial,
    reads: AbstractSet[str],
) -> Problem:
    held = trial.raw.flat()
    undone = [lost(change, held, origins) for change in finding.fixes] if finding.unset else []
    kept = [
        change
        for change in finding.fixes
        if not discards(change, held, origins)
        and not (finding.unset and lost(change, held, origins))
    ]
    chosen = [c for c in trial.choose(finding, kept) if not discards(c, held, origins)]
    # Prefer fixes that leave every value that the user provided.
    keeping = [change for change in chosen if not forgets(change, held, origins)]
    fixes = []
    for change in keeping or chosen:
        new = {k: value for k, value in change.items() if k not in held or plain(value) != held[k]}
        settings = new or change
        each = (override(*one) for one in settings.items())
        fixes.append(with_choices(settings) if finding.unset else " ".join(each))
    if finding.hint:
        fixes.append(finding.hint)
    return problem_of(
        run,
        origins,
        finding.code,
        finding.path,
        finding.detail,
        " or ".join(dict.fromkeys(fixes or _left_out(undone, finding.path))),
        severity=finding.severity,
        related=related(finding, run, reads, origins),
    )


def _left_out(keys: Iterable[list[str]], path: str) -> list[str]:
    """Return advice about which provided keys to leave out, as few as possible, for a finding at
    `path`.
    """
    sets = [one for one in keys if one]
    least = [one for one in sets if not any(set(other) < set(one) for other in sets)]
    return [NOTHING] if least == [[path]] else [f"leave out {' and '.join(one)}" for one in least]
