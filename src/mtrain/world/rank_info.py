"""Ranks' descriptions, and the check that they form one world, complete and alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

from mtrain.errors import BadEnvironment, show, visible

MAX_LINES = 20
CONFIGURATION = "configuration"


class Refused(BadEnvironment):
    """The ranks form no world; every rank that came raises the same error.

    `speaks`: this rank prints it.
    """

    def __init__(self, text: str, *, speaks: bool) -> None:
        super().__init__(*text.split("\n"))
        self.speaks = speaks


@dataclass(frozen=True)
class RankInfo:
    """The description that a rank gives of itself when it joins."""

    rank: int
    size: int
    """Its WORLD_SIZE."""
    host: str
    pid: int
    digest: str = ""
    """Digest of its configuration; empty where it has no valid one."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts besides the configuration that must be equal everywhere: versions, grid."""
    gpu: str = ""
    """UUID of its GPU, where a scheduler shows it only one; no other rank may have that GPU."""

    def text(self) -> str:
        """Return the info as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> RankInfo:
        """Return the info that `text` describes; another version of mtrain may have written it."""
        values = json.loads(text)
        return cls(
            **{field.name: values[field.name] for field in fields(cls) if field.name in values}
        )

    @property
    def who(self) -> str:
        """Return the rank with its host and process."""
        return f"rank {self.rank} ({self.process})"

    @property
    def process(self) -> str:
        """Return its host and process."""
        return f"{self.host}, process {self.pid}"

    @property
    def signature(self) -> tuple[str, ...]:
        """Return everything that must be equal on every rank."""
        return (self.digest, *(f"{k} {v}" for k, v in sorted(self.facts.items())))


@dataclass
class RendezvousState:
    """The ranks that have joined so far, in order of arrival."""

    infos: list[RankInfo] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    """Positions in `infos` of the ranks that have finished their imports."""
    failed: dict[int, str] = field(default_factory=dict)
    """Positions of the ranks that will not take part, with the reason."""

    def absent(self, size: int) -> list[int]:
        """Return the ranks of a world of `size` that have not arrived."""
        return sorted(set(range(size)) - {info.rank for info in self.infos})

    def unready(self) -> list[RankInfo]:
        """Return the ranks that have arrived and still import."""
        return [c for i, c in enumerate(self.infos) if i not in self.ready and i not in self.failed]

    def able(self) -> list[RankInfo]:
        """Return the ranks that did not fail and have a configuration."""
        return [info for i, info in enumerate(self.infos) if i not in self.failed and info.digest]

    def shared_gpus(self) -> dict[str, list[RankInfo]]:
        """Return the GPUs that several ranks were given, by UUID, with those ranks."""
        by_gpu: dict[str, list[RankInfo]] = {}
        for info in self.infos:
            if info.gpu:
                by_gpu.setdefault(info.gpu, []).append(info)
        return {
            gpu: infos for gpu, infos in by_gpu.items() if len({info.rank for info in infos}) > 1
        }

    def is_wrong(self) -> bool:
        """Return whether no further rank can make this a world."""
        return (
            bool(self.failed)
            or len({info.rank for info in self.infos}) < len(self.infos)
            or len({info.size for info in self.infos}) > 1
            or len({info.signature for info in self.able()}) > 1
            or bool(self.shared_gpus())
        )

    def is_world(self, size: int) -> bool:
        """Return whether all of `size` ranks are here and ready."""
        return not self.is_wrong() and len(self.ready) == size


def faults(state: RendezvousState, config_of: Callable[[str], dict[str, Any] | None]) -> list[str]:
    """Return the faults of the ranks that arrived.

    `config_of` returns the flat configuration of a digest, where it is known.
    """
    problems = [
        f"{state.infos[i].who} ended before it was ready: {text}"
        for i, text in sorted(state.failed.items())
    ]
    for rank, infos in _by_rank(state.infos):
        if len(infos) > 1:
            problems.append(
                f"RANK {rank} came {_times(len(infos))}: {' and '.join(c.process for c in infos)}"
            )
    for gpu, infos in state.shared_gpus().items():
        ranks = _numbers(info.rank for info in infos)
        problems.append(
            f"ranks {ranks} were given the same GPU, {gpu} of {infos[0].host}\n"
            "  fix: a GPU for each task (srun --gpus-per-task=1), or fewer tasks on a machine"
        )
    # Ranks of different launches differ in their configurations, too; this is the cause to fix.
    sizes = Counter(info.size for info in state.infos)
    if len(sizes) > 1:
        each = [
            f"{size} on {_named(c for c in state.infos if c.size == size)}"
            for size, _ in sizes.most_common()
        ]
        problems.append(
            f"WORLD_SIZE differs: {', '.join(each)}\n  fix: start every rank with the same"
            " WORLD_SIZE"
        )
    else:
        problems += _differences(state.able(), config_of)
    return problems


def absence(state: RendezvousState, size: int, waited_s: float) -> str:
    """Return a message that lists the ranks that did not arrive, and those that did."""
    absent = state.absent(size)
    hosts = [
        f"{_numbers(c.rank for c in infos)} on {host}"
        for host, infos in groupby(
            sorted(state.infos, key=lambda c: (c.host, c.rank)), lambda c: c.host
        )
    ]
    more = f" and {len(hosts) - 8} more machines" if len(hosts) > 8 else ""
    plural = "s" if len(absent) > 1 else ""
    return (
        f"rank{plural} {_listed(absent)} of {size} did not arrive within {waited_s:g} s; arrived:"
        f" {', '.join(hosts[:8])}{more}\n  fix: see why {'they do' if plural else 'it does'} not"
        f" start, or, where machines start further apart, trainer.join_timeout_s={waited_s * 10:g}"
    )


def unreadiness(state: RendezvousState, waited_s: float) -> str:
    """Return a message that lists the ranks that arrived and are still not ready."""
    late = sorted(state.unready(), key=lambda info: info.rank)
    names = ", ".join(info.who for info in late[:8]) + (
        f" and {len(late) - 8} more" if len(late) > 8 else ""
    )
    return (
        f"{names} arrived, but {'were' if len(late) > 1 else 'was'} not ready within {waited_s:g}"
        " s: still importing, stopped or dead\n  fix: see what holds it; where imports take long,"
        " a larger trainer.join_timeout_s (twelve of it are waited)"
    )


def _differences(
    infos: list[RankInfo], config_of: Callable[[str], dict[str, Any] | None]
) -> list[str]:
    """Return a text for each kind of rank that differs from the majority."""
    kinds: dict[tuple[str, ...], list[RankInfo]] = {}
    for info in sorted(infos, key=lambda c: c.rank):
        kinds.setdefault(info.signature, []).append(info)
    if len(kinds) < 2:
        return []
    # The majority counts as right; of equal parts, the one with the lowest rank.
    usual, *odd = sorted(kinds.values(), key=lambda kind: (-len(kind), kind[0].rank))
    differences = []
    for kind in odd[:3]:
        lines = _lines(kind[0], usual[0], config_of)
        hidden = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        head = (
            f"ranks [{_numbers(c.rank for c in kind)}] differ from rank {usual[0].rank} in version"
            " or configuration:"
        )
        differences.append("\n  ".join([head, *lines[:MAX_LINES], *hidden]))
    return differences


def _lines(
    odd: RankInfo, usual: RankInfo, config_of: Callable[[str], dict[str, Any] | None]
) -> list[str]:
    """Return a line for each fact and key in which two ranks differ."""
    values: list[tuple[str, object, object]] = [
        (name, odd.facts.get(name), usual.facts.get(name)) for name in {**usual.facts, **odd.facts}
    ]
    if odd.digest != usual.digest:
        one = config_of(odd.digest)
        other = config_of(usual.digest)
        if one is None or other is None:
            values.append(
                (CONFIGURATION, f"digest {odd.digest[:12]}", f"digest {usual.digest[:12]}")
            )
        else:
            values += [(key, one.get(key), other.get(key)) for key in {**other, **one}]
    return [
        visible(f"{k}: {show(a)} on {odd.who}, {show(b)} on {usual.who}")
        for k, a, b in values
        if a != b
    ]


def _by_rank(infos: Iterable[RankInfo]) -> list[tuple[int, list[RankInfo]]]:
    return [
        (rank, list(group))
        for rank, group in groupby(sorted(infos, key=lambda c: c.rank), lambda c: c.rank)
    ]


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _named(infos: Iterable[RankInfo]) -> str:
    some = sorted(infos, key=lambda info: info.rank)
    return some[0].who if len(some) == 1 else f"ranks {_numbers(info.rank for info in some)}"


def _listed(numbers: list[int]) -> str:
    text = _numbers(numbers).split(", ")
    return text[0] if len(text) == 1 else f"{', '.join(text[:-1])} and {text[-1]}"


def _numbers(numbers: Iterable[int]) -> str:
    """Return numbers with runs of three or more written short: `0-2, 5, 6`."""
    runs: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(_run(first, last) for first, last in runs)


def _run(first: int, last: int) -> str:
    if last > first + 1:
        return f"{first}-{last}"
    if last > first:
        return f"{first}, {last}"
    return str(first)
