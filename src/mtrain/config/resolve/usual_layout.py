"""The default layout of a CPU: sharded, so that a laptop runs the code paths of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrain.config.compose.origins import DEFAULT
from mtrain.config.resolve.resolution import Machine, resolve, smallest_world
from mtrain.config.rules import findings
from mtrain.config.schema.run import UnresolvedRun

AUTO_LAYOUT = "parallel.auto"


def cpu_layout(
    raw: UnresolvedRun, origins: Mapping[str, str], machine: Machine, world_size: int | None
) -> tuple[UnresolvedRun, dict[str, str]]:
    """Return `raw` with the default layout of a CPU, tensor parallelism 2, and the reason.

    The layout is one process if the number of processes or the model does not permit 2. Keys that
    are set stay.
    """
    named = [axis for axis in ("tp", "fsdp") if origins.get(f"parallel.{axis}", DEFAULT) != DEFAULT]
    plain = _changed(raw, auto=False)
    device = f"cluster.device {resolve(plain, machine, world_size).cluster.device}"
    why = {AUTO_LAYOUT: f"answered for {device}"}
    ranks = raw.parallel.ranks or world_size
    sharded = _changed(plain, tp=2)
    if named or (ranks is not None and ranks % smallest_world(sharded.parallel)):
        return plain, why

    def broken(run: UnresolvedRun) -> set[tuple[str, str]]:
        found = findings(resolve(run, machine, world_size))
        return {(finding.code, finding.path) for finding in found if finding.severity == "error"}

    # A default must not break a rule that the configuration keeps without it.
    wrong = broken(sharded)
    if wrong and (new := sorted(wrong - broken(plain))):
        return plain, {**why, "parallel.tp": f"resolved from {device}: 2 is refused ({new[0][0]})"}
    return sharded, {**why, "parallel.tp": f"resolved from {device}: two processes"}


def _changed(run: UnresolvedRun, **keys: Any) -> UnresolvedRun:
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=keys)})
