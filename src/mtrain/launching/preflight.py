"""Checks of this machine against a configuration, before any process is started."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mtrain import units
from mtrain.config import rules
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import program, user_path
from mtrain.config.engine import release as engine
from mtrain.config.engine.formats import bytes_of
from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.hardware import cpu_cores
from mtrain.config.resolve.resolution import MAX_CPU_RANKS, Machine, resolve, smallest_world
from mtrain.config.resolve.usual_layout import cpu_layout
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, say, warn
from mtrain.launching import gpus, limits
from mtrain.launching.environment import Place, conflicts, environment
from mtrain.launching.gpus import Shortage
from mtrain.layout.grid import RankGrid
from mtrain.plan.count import parameters
from mtrain.plan.memory import activation_bytes, bytes_here
from mtrain.plan.shrink import shrink
from mtrain.plan.storage import Storage, at_once, copies, storage

# The most ranks that `rehearse` starts
MOST_REHEARSED = 16


def check(
    run: RunConfig,
    argv: Sequence[str],
    machine: Machine | None = None,
    *,
    ranks_here: int | None = None,
) -> None:
    """Compare the needs of a run with this machine; `argv` are the user's words, for the suggested
    commands.

    Where the run can start, warnings and the kind of GPU that `cluster=local` found are printed on
    stderr. `ranks_here` is how many ranks another launcher started on this machine; None: this
    command starts them all.

    Raises:
        BadEnvironment: lists every shortage, and the commands that work here.
    """
    machine = machine or Machine.here()
    lacking = shortages(run, machine, ranks_here)
    if any(not shortage.warning for shortage in lacking):
        works = (f"  {' '.join(words)}   ({why})" for words, why in _working(run, machine, argv))
        raise BadEnvironment(*_refusal(run, machine, lacking), "what works here:", *works)
    for shortage in lacking:
        code = f"[{shortage.code}] " if shortage.code else ""
        warn(f"{code}{shortage.text}; fix: {shortage.fix}")
    if run.log.progress != "none" and (line := gpus.described(run, machine)):
        with suppress(OSError):
            say(line, error=True)


def shortages(run: RunConfig, machine: Machine, ranks_here: int | None = None) -> list[Shortage]:
    """Return the resources that a run needs and this machine lacks, and warnings; see `check`."""
    grid = RankGrid.of(run)
    lacking: list[Shortage] = []
    here = min(grid.world, run.cluster.devices_per_node or 0) if ranks_here is None else ranks_here
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        lacking.append(
            Shortage("needs torch and megatron-core, which are not installed: pip install mtrain")
        )
    elif not engine.is_supported(engine.release() or (0, 0, 0)):
        present = engine.folder()
        if present:
            reason = f"not what is in {present}"
        else:
            reason = "and there is no module megatron.core: pip install mtrain"
        lacking.append(Shortage(f"needs megatron-core {engine.supported_words()}, {reason}"))
    if run.cluster.nodes > 1 and ranks_here is None:
        lacking.append(
            Shortage(
                f"needs {run.cluster.nodes} machines ({run.cluster.name}); this command starts"
                " ranks on one: start it on each machine with torchrun"
            )
        )
    lacking += gpus.shortages(run, machine, here, siblings=ranks_here is not None)
    if facts_of(run.cluster.device).on_host:
        lacking += map(Shortage, _cpu_shortages(run, grid, machine, ranks_here))
    lacking += map(Shortage, _copy_shortages(run, machine, here or grid.world))
    lacking += _disk_shortages(run)
    return [*lacking, *map(Shortage, _faults(run, here or grid.world, grid.world))]


def _cpu_shortages(
    run: RunConfig, grid: RankGrid, machine: Machine, ranks_here: int | None
) -> list[str]:
    ranks = grid.world if ranks_here is None else ranks_here
    # a lower bound: a run that is refused here could not start, and others may still run out
    needed = bytes_here(run) * ranks // grid.world + ranks * activation_bytes(run)
    out = []
    if needed > machine.memory_bytes:
        size = units.count(parameters(run.model))
        processes = units.number_of(ranks, "rank")
        out.append(
            f"needs at least {units.bytes_(needed)} of memory for weights, gradients, optimizer"
            f" state and activations of {size} parameters on {processes}; here:"
            f" {units.bytes_(machine.memory_bytes)}"
        )
    if ranks_here is None and grid.world > MAX_CPU_RANKS:
        out.append(f"needs {grid.world} processes; on a CPU at most {MAX_CPU_RANKS} are started")
    return out


def _copy_shortages(run: RunConfig, machine: Machine, here: int) -> list[str]:
    """Return the shortage of host memory for the copies that `checkpoint.staging_mib` asks for;
    without that key a save takes no more than is free.
    """
    mib = run.checkpoint.staging_mib
    if mib is None or not run.checkpoint.async_save or not run.checkpoint.saves:
        return []
    own = None
    with suppress(ValueError):  # without a plan, at most what the key allows
        own = copies(run)
    needed = here * (mib * units.MIB if own is None else own)
    if facts_of(run.cluster.device).on_host:
        needed += bytes_here(run) * here // RankGrid.of(run).world
    if needed <= machine.memory_bytes:
        return []
    fits = max(16, machine.memory_bytes // (4 * max(1, here) * units.MIB))
    return [
        f"checkpoint.staging_mib={mib}: needs {units.bytes_(needed)} of host memory for the copies"
        f" of {units.number_of(here, 'rank')}; here: {units.bytes_(machine.memory_bytes)}. Use"
        f" checkpoint.staging_mib={fits}, or checkpoint.async_save=false"
    ]


def too_few_devices(run: RunConfig, machine: Machine, machines: int) -> list[str]:
    """Return, as lines, the shortage of GPUs on this machine; empty: it has enough.

    `run` may break the rules that count devices; its ranks, or the fewest that its layout needs,
    are to start on this number of `machines`.
    """
    ranks = max(run.parallel.ranks, smallest_world(run.parallel))
    here = -(-ranks // machines)
    if not facts_of(run.cluster.device).counted or machine.gpus >= here:
        return []
    whole = run.model_copy(update={"parallel": run.parallel.model_copy(update={"ranks": ranks})})
    return _refusal(whole, machine, list(gpus.shortages(whole, machine, here, siblings=False)))


def _faults(run: RunConfig, ranks: int, world: int) -> list[str]:
    """Return the problems of the variables and limits of `ranks` ranks on this machine."""
    on_host = facts_of(run.cluster.device).on_host
    problems = limits.faults(os.environ, limits.Limits.here(), ranks, world=world, on_host=on_host)
    return problems + conflicts(environment(run, Place(ranks), os.environ))


def _disk_shortages(run: RunConfig) -> Iterator[Shortage]:
    """Yield the shortage of a disk for one checkpoint, or a warning if it has no room for all."""
    if not run.checkpoint.saves:
        return
    folder = user_path(run.log.runs_dir).absolute()
    try:
        place = next(p for p in (folder, *folder.parents) if p.is_dir())
        disk = shutil.disk_usage(place)
    except (OSError, StopIteration):
        return  # the error of making the folder has more details
    if not disk.total:  # some file systems in user space do not report their size
        return
    free = f"free at {place}: {units.bytes_(disk.free)}"
    found = _storage(run)
    # without a plan, a lower bound: the weights
    first = (
        found.first if found is not None else parameters(run.model) * bytes_of(run.precision.format)
    )
    if first > disk.free:
        more = "" if found is not None else "more than "
        yield Shortage(f"needs {more}{units.bytes_(first)} of disk for a checkpoint; {free}")
    elif found is not None and found.total > disk.free and run.checkpoint.resume is None:
        # A run that continues has some of them already.
        exported = " with exports" if found.exports else ""
        yield Shortage(
            f"log.runs_dir={run.log.runs_dir}: cannot hold all checkpoints of this run because up"
            f" to {found.at_once} exist at once ({units.bytes_(found.total)}{exported}; {free})",
            _fewer(run, found, disk.free),
            warning=True,
        )


def _storage(run: RunConfig) -> Storage | None:
    """Return the disk of a run's checkpoints; None: unknown."""
    try:
        return storage(run)
    except ValueError:
        return None


def _fewer(run: RunConfig, found: Storage, free: int) -> str:
    """Return a lower `checkpoint.keep` with which all checkpoints fit, or another disk."""
    elsewhere = "log.runs_dir=FOLDER on a larger disk"
    one = run.checkpoint.model_copy(update={"keep": 1})
    # besides the newest: the present save, permanent ones and the best
    others = at_once(run.model_copy(update={"checkpoint": one})) - 1
    keep = (free - found.exports - found.first) // found.further + 1 - others
    return f"checkpoint.keep={keep}, or {elsewhere}" if keep > 0 else elsewhere


def _refusal(run: RunConfig, machine: Machine, lacking: Sequence[Shortage]) -> list[str]:
    seen = (
        f"{machine.cpu_cores} cores, {units.bytes_(machine.memory_bytes)}, {gpus.number(machine)}"
        " GPUs"
    )
    return [
        f"{run.model.name} with {RankGrid.of(run)} cannot run here:",
        *(line for shortage in lacking for line in shortage.lines()),
        f"this machine: {seen}",
    ]


def _working(
    run: RunConfig, machine: Machine, argv: Sequence[str]
) -> Iterator[tuple[list[str], str]]:
    """Yield the commands that this machine can run, as words, each with its purpose."""
    words = [shlex.join(argv)] if argv else []
    yield [program(), "check", *words], "validate this configuration without running it"
    yield [program(), "show", *words], "see every value and who set it"
    # only commands that pass the same checks are suggested
    if _runs(lambda: _rehearsed(run, machine), machine):
        yield [program(), "rehearse", *words], "run this layout here, shrunk"
    if _runs(lambda: _default(machine), machine):
        yield [program()], "train a small model on this machine"


def _runs(made: Callable[[], RunConfig], machine: Machine) -> bool:
    """Return whether a run can be made, and preflight finds no shortage for it."""
    try:
        run = made()
        return not any(not shortage.warning for shortage in shortages(run, machine))
    except MtrainError:
        return False


def _rehearsed(run: RunConfig, machine: Machine) -> RunConfig:
    """Return the run that `rehearse` would make of a configuration.

    Raises:
        ConfigError: no shrunk configuration keeps the rules.
    """
    dtype = "bf16" if run.precision.dtype == "bf16" else "fp32"
    small = shrink(
        run, steps=1, dtype=dtype, max_ranks=MOST_REHEARSED, interpreted=machine.triton_interpreted
    )
    _refuse(small)
    if RankGrid.of(small).world > MOST_REHEARSED:
        raise ConfigError("more ranks than are rehearsed")
    return small


def _default(machine: Machine) -> RunConfig:
    """Return the run of a command without overrides.

    Raises:
        ConfigError: it breaks a rule on this machine.
    """
    composed = compose([])
    raw = cpu_layout(composed.run, composed.origins, machine, None)[0]
    run = resolve(raw, machine)
    _refuse(run, raw, lambda r: resolve(r, machine))
    return run


def _refuse(
    run: RunConfig,
    raw: UnresolvedRun | None = None,
    again: Callable[[UnresolvedRun], RunConfig] | None = None,
) -> None:
    problems = [
        problem
        for problem in rules.check(run, raw=raw, resolve=again)
        if problem.severity == "error"
    ]
    if problems:
        raise ConfigError(problems)


def threads_per_rank(ranks: int) -> int:
    """Return the number of cores for each of `ranks` processes on this machine, at least one."""
    return max(1, cpu_cores() // ranks)
