"""`doctor`: the examination of a machine before a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from mtrain.cli.output import say_json
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.doctor.diagnosis import examined, exit_code
from mtrain.doctor.gathering import gather
from mtrain.doctor.rows import Row
from mtrain.errors import say_page
from mtrain.processes import without_collecting
from mtrain.units import number_of
from mtrain.world.launchers import launched

Found = Sequence[tuple[str, Row]]


@without_collecting()
def run(words: Sequence[str], *, as_json: bool) -> int:
    """Examine this machine for the run that words describe; return 3 if it would fail here.

    Raises:
        ConfigError: the words describe no configuration.
    """
    begun = time.monotonic()
    # Of several tasks on a machine one measures: together they would slow each other.
    task = launched(os.environ)
    if task is not None and task.local_rank > 0:
        return 0
    machine = Machine.here()
    # The rules of a run are judged by `check`; a machine may be examined for any cluster.
    wanted = resolve(compose(words).run, machine, world_size_of(os.environ))
    found = list(examined(gather(wanted, os.environ, machine)))
    seconds = time.monotonic() - begun
    code = exit_code([row for _, row in found])
    if as_json:
        rows = [{"area": area, **asdict(row)} for area, row in found]
        node = os.uname().nodename
        say_json({"ok": code == 0, "machine": node, "seconds": round(seconds, 2), "rows": rows})
    else:
        say_page("\n".join(_lines(found, seconds)))
    return code


def _lines(found: Found, seconds: float) -> Iterator[str]:
    width = max(len(row.name) for _, row in found)
    areas = []
    for area, row in found:
        if area not in areas:
            areas.append(area)
            yield area
        yield f"  {row.verdict:<5}  {row.name:<{width}}  {row.measured}"
        if row.fix:
            yield f"         {'':<{width}}  fix: {row.fix}"
    verdicts = [row.verdict for _, row in found]
    wrong = verdicts.count("wrong")
    slow = verdicts.count("slow")
    end = f"{number_of(len(found), 'check')} of {os.uname().nodename} in {seconds:.1f} s"
    if wrong:
        yield f"{end}: {wrong} wrong, {slow} slow: a run would fail here"
    else:
        yield f"{end}: ok" + (f", {slow} slow" if slow else "")
