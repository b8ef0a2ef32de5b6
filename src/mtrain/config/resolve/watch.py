"""A recorder of the keys that a function reads from a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from mtrain.config.schema.base import Section
from mtrain.config.schema.run import UnresolvedRun

Run = TypeVar("Run", bound=UnresolvedRun)


def watched(run: Run, reads: set[str]) -> Run:
    """Return `run` for a function that only reads keys; each key that it reads is added to `reads`.

    Keys are dotted; a section that is read itself, as in `model.moe is None`, ends in a dot.
    """
    return cast("Run", _Watched(run, "", reads))


class _Watched:
    """A proxy of a section, or of another proxy."""

    def __init__(self, section: Section | _Watched, path: str, reads: set[str]) -> None:
        self._section = section
        self._path = path
        self._reads = reads
        self._kind: type[Section] = (
            section._kind if isinstance(section, _Watched) else type(section)
        )

    def __getattr__(self, name: str) -> Any:
        kind = self._kind
        if name not in kind.model_fields:
            made = getattr(kind, name, None)
            if isinstance(made, property) and made.fget is not None:
                # A property runs on the proxy, so that the keys it reads are recorded, too.
                return made.fget(self)
            return getattr(self._section, name)
        value = getattr(self._section, name)
        path = f"{self._path}{name}"
        if isinstance(value, Section | _Watched):
            self._reads.add(f"{path}.")
            return _Watched(value, f"{path}.", self._reads)
        self._reads.add(path)
        return value

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self._kind.model_fields)


def read_from(reads: Iterable[str], made_from: Mapping[str, frozenset[str]]) -> set[str]:
    """Return `reads` and every key that they were derived from, transitively."""
    out: set[str] = set()
    waiting = list(reads)
    while waiting:
        key = waiting.pop()
        if key not in out:
            out.add(key)
            waiting += made_from.get(key, ())
    return out


def touches(reads: Iterable[str], keys: Iterable[str]) -> bool:
    """Return whether any of `reads` is one of `keys`, a part of one, or contains one."""
    wanted = tuple(keys)
    return any(
        read == key or read.startswith(f"{key}.") or key.startswith(f"{read}.")
        for read in reads
        for key in wanted
    )
