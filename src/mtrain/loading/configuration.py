"""The way from a command line to a validated configuration, shared by every verb."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from mtrain.config.compose.composer import Composed, Rejected
from mtrain.config.compose.origins import DEFAULT
from mtrain.config.engine import kernels
from mtrain.config.machine.devices import AUTO, facts_of
from mtrain.config.messages.fixes import with_fixes
from mtrain.config.resolve.defaults import synthetic_tokens
from mtrain.config.resolve.resolution import Machine, machine_problems, resolve, world_size_of
from mtrain.config.resolve.usual_layout import cpu_layout
from mtrain.config.resolve.watch import read_from, touches, watched
from mtrain.config.rules import check
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import BadEnvironment, BadPlace, ConfigError, CorruptInput, Problem, say_page
from mtrain.loading import checkpoints, exports, reward_models, teachers

# Codes of damaged files.
DAMAGE = {"MT611", "MT612", "MT613"}
# Codes of folders that cannot be written.
PLACES = {"MT431", "MT432"}
# The code of values of a recipe that a choice on the command line replaces.
REPLACED = "MT020"
# Code of the error that no layout keeps all rules.
NO_LAYOUT = "MT258"
# Codes of errors that may mean no more than too few devices here, where their number is that of
# this machine.
COUNTED_HERE = frozenset({"MT113", "MT114"})


@dataclass(frozen=True)
class Loaded(Composed):
    """A configuration that is resolved and passed every rule."""

    run: RunConfig
    """The resolved configuration: no derived value is null."""
    raw: UnresolvedRun = field(kw_only=True)
    """The configuration before it was resolved, in which null stands for a derived value."""
    argv: tuple[str, ...] = ()
    """The command line that describes it."""


class TooFewDevices(BadEnvironment):
    """The only errors of a configuration are that this machine has fewer devices than ranks."""

    def __init__(self, lines: Sequence[str], problems: Sequence[Problem]) -> None:
        super().__init__(*lines)
        self.problems = tuple(problems)


def load(
    argv: Sequence[str] = (),
    machine: Machine | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    to_run: bool = True,
    machines: int | None = None,
    but: AbstractSet[str] = frozenset(),
) -> Loaded:
    """Compose, resolve and validate a configuration.

    Args:
        argv: the words of a command line: `model=llama_tiny`, `optim.lr=3e-4`, `recipe=NAME`.
        machine: the machine to resolve for; by default this one.
        environment: variables in which a launcher sets the number of ranks.
        to_run: the configuration must run on this machine. Otherwise it may be meant for another
            one: a missing device or input is then a warning, unless the configuration names this
            machine.
        machines: the number of machines on which a launcher started processes; by default that of
            the cluster.
        but: codes of problems to ignore.

    Returns:
        The resolved configuration, with the origin of every key and the warnings.

    Raises:
        ConfigError: with every problem of the schema or, where the schema is satisfied, of the
            rules.
        BadPlace: the configuration is `to_run`, and every problem is a folder that cannot be
            written.
        BadEnvironment: the configuration is `to_run`, and a mistake in a variable hides the GPUs of
            this machine, or the only problem is that it has too few.
    """
    machine = machine or Machine.here()
    world_size = world_size_of(environment)
    try:
        composed = checkpoints.composed(argv)
    except Rejected as error:
        found = list(error.problems)
        if error.partial is not None:
            # A fix is offered only where the rest of the configuration, without the refused keys,
            # still passes with it.
            partial = _with_cpu_layout(error.partial, machine, world_size)[0]
            found = with_fixes(found, partial.run, lambda r: resolve(r, machine, world_size))
        raise ConfigError(
            [*found, *also_wrong(error, machine, world_size), *error.warnings]
        ) from None
    composed, why = settled(composed, machine, world_size)
    raw = composed.run
    run = resolve(raw, machine, world_size, why=why)
    if to_run:
        _refuse_hidden_gpus(raw, run, machine)
    origins = resolved_origins(composed, run, why)
    problems = [
        *composed.warnings,
        *validate(composed, run, origins, machine, world_size, to_run=to_run),
    ]
    problems += _of_model(run, machine, origins)
    problems = [problem for problem in problems if problem.code not in but]
    errors = {problem.code for problem in problems if problem.severity == "error"}
    if errors:
        problems.sort(key=lambda p: p.severity)
        # Exit 3 instead of 2: the configuration is fine, and another machine would run it.
        if to_run and errors <= _of_devices(raw, world_size):
            _refuse_too_few_devices(run, machine, machines or run.cluster.nodes, problems)
        raise _kind(errors, to_run)(problems)
    return Loaded(
        run,
        origins,
        composed.choices,
        tuple(problems),
        composed.history,
        composed.files,
        raw=raw,
        argv=tuple(argv),
    )


def _of_model(run: RunConfig, machine: Machine, origins: Mapping[str, str]) -> list[Problem]:
    """Return why a model has no family, or the problems of its memory and of names of weights."""
    from mtrain.models import registry as families
    from mtrain.models import selection
    from mtrain.plan.memory import memory_problems

    # The memory of a model without a family cannot be planned, and its weights have no names.
    return families.problems(run.model, origins) or [
        *memory_problems(run, machine, origins),
        *selection.problems(run, origins),
    ]


def say_replaced(composed: Composed) -> None:
    """Print on standard error which values the choices on the command line replaced."""
    for problem in composed.warnings:
        if problem.code == REPLACED:
            say_page(problem.render(), error=True)


def _kind(errors: AbstractSet[str], to_run: bool) -> type[ConfigError]:
    """Return the error for problems with these codes: damage and places have exit codes."""
    if errors <= DAMAGE:
        return CorruptInput
    if to_run and errors <= PLACES:
        return BadPlace
    return ConfigError


def _refuse_hidden_gpus(raw: UnresolvedRun, run: RunConfig, machine: Machine) -> None:
    """Refuse to train on the CPU where a mistake in CUDA_VISIBLE_DEVICES hides the GPUs that `auto`
    would take.

    Raises:
        BadEnvironment: with the mistake.
    """
    seen = machine.nvidia
    if (
        raw.cluster.device != AUTO
        or not facts_of(run.cluster.device).on_host
        or seen.on_purpose
        or not seen.fault
    ):
        return
    raise BadEnvironment(
        f"[MT052] {seen.fault}; this run would take the CPU",
        f"  fix: {seen.fix}; or cluster=cpu where that is meant",
    )


def _of_devices(raw: UnresolvedRun, world_size: int | None) -> AbstractSet[str]:
    """Return the codes of errors that may be due to the number of devices of this machine."""
    if raw.cluster.devices_per_node is not None:
        return frozenset()
    if raw.parallel.ranks is None and world_size is None:  # as many ranks as devices
        return COUNTED_HERE | {"MT112"}
    return COUNTED_HERE


def _refuse_too_few_devices(
    run: RunConfig, machine: Machine, machines: int, problems: Sequence[Problem]
) -> None:
    """Refuse a machine with fewer devices than its share of the ranks.

    Raises:
        TooFewDevices: with everything that the GPUs of the machine lack.
    """
    from mtrain.launching import preflight

    lines = preflight.too_few_devices(run, machine, machines)
    if lines:
        raise TooFewDevices(lines, problems)


def settled(
    composed: Composed, machine: Machine, world_size: int | None
) -> tuple[Composed, dict[str, str]]:
    """Choose the layout if the user set none, as `tune` does on GPUs and tensor parallel 2 on a
    CPU, and the keys that make a step fit the device; return the run with the reasons.

    Raises:
        ConfigError: there is no such layout.
    """
    from mtrain.plan.fits import fitted

    composed, why = _with_layout(composed, machine, world_size)
    raw, more = fitted(composed.run, machine, world_size)
    return replace(composed, run=raw), why | more


def _with_layout(
    composed: Composed, machine: Machine, world_size: int | None
) -> tuple[Composed, dict[str, str]]:
    composed, why = _with_cpu_layout(composed, machine, world_size)
    if composed.run.parallel.auto is False:
        return composed, why
    from mtrain.plan.tune.choose import chosen, cleared, said_of

    try:
        raw, why = chosen(composed.run, composed.origins, machine, world_size)
    except ConfigError as error:
        if composed.run.parallel.auto or {problem.code for problem in error.problems} != {
            NO_LAYOUT
        }:
            raise
        # The user did not ask for a choice: the broken rule reports its own problem instead.
        raw = cleared(composed.run, said_of(composed.run, composed.origins, command_line=False))
        why = {}
    return replace(composed, run=raw), why


def _with_cpu_layout(
    composed: Composed, machine: Machine, world_size: int | None
) -> tuple[Composed, dict[str, str]]:
    """Return the same with the default layout of a CPU, if it runs there and the user set none."""
    raw = composed.run
    if (
        raw.parallel.auto is not None
        or not facts_of(resolve(raw, machine, world_size).cluster.device).on_host
    ):
        return composed, {}
    raw, why = cpu_layout(raw, composed.origins, machine, world_size)
    return replace(composed, run=raw), why


def validate(
    composed: Composed,
    run: RunConfig,
    origins: Mapping[str, str],
    machine: Machine,
    world_size: int | None,
    *,
    to_run: bool = True,
) -> list[Problem]:
    """Return the problems of a resolved configuration by the rules and by this machine."""
    raw = composed.run
    problems = check(
        run, origins, raw=raw, resolve=lambda r: resolve(r, machine, world_size), to_run=to_run
    )
    # A plan for another machine must not fail because this one lacks Triton.
    elsewhere = not to_run and raw.cluster.device == "auto"
    problems += (
        replace(p, severity="warning") if elsewhere else p
        for p in kernels.problems(run, machine, origins)
    )
    problems += synthetic_tokens(raw, run, origins["data.kind"])
    problems += checkpoints.problems(run, origins)
    problems += exports.problems(run, origins)
    problems += teachers.problems(run, origins, to_run=to_run)
    problems += reward_models.problems(run, origins, to_run=to_run)
    return problems + list(machine_problems(composed.run, run, machine, world_size, origins))


def also_wrong(error: Rejected, machine: Machine, world_size: int | None) -> list[Problem]:
    """Return the rules that a refused configuration breaks between keys that the schema accepted.

    A refused key has its default meanwhile, so findings that depend on it, or on a key that was
    derived from it, are left out.
    """
    if error.partial is None:
        return []
    made_from: dict[str, frozenset[str]] = {}
    partial, why = _with_cpu_layout(error.partial, machine, world_size)
    raw = partial.run
    run = resolve(raw, machine, world_size, made_from, why)
    origins = resolved_origins(partial, run, why)
    refused = [p.path for p in error.problems if p.path]

    def hidden(reads: AbstractSet[str]) -> bool:
        return touches(read_from(reads, made_from), refused)

    found = check(
        run, origins, raw=raw, resolve=lambda r: resolve(r, machine, world_size), hidden=hidden
    )
    for key in kernels.KEYS:
        reads: set[str] = set()
        found += [
            p
            for p in kernels.problems(watched(run, reads), machine, origins, [key])
            if not hidden(reads)
        ]
    reads = set()
    seen = watched(raw, reads), watched(run, reads)
    found += [p for p in machine_problems(*seen, machine, world_size, origins) if not hidden(reads)]
    return [p for p in found if p.severity == "error"]


def resolved_origins(composed: Composed, run: RunConfig, why: Mapping[str, str]) -> dict[str, str]:
    """Return the origin of each key; the origin of a derived key or mapping is the reason."""
    return {key: _reason(key, why) or composed.origins.get(key, DEFAULT) for key in run.flat()}


def _reason(key: str, why: Mapping[str, str]) -> str | None:
    """Return why a key, or the mapping that holds it, was derived; None if it was not."""
    return why.get(key) or why.get(key.rpartition(".")[0])
