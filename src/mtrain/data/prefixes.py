"""The corpora that a configuration names by the prefix of their two files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mtrain import units
from mtrain.config.schema.data import DataConfig
from mtrain.data.corpus import near_paths
from mtrain.data.indexed import with_suffix
from mtrain.data.remote import is_remote, mirrored


def prefixes_of(
    data: DataConfig, key: str, problem: Callable[[str, str, str, str], None]
) -> tuple[Path, ...]:
    """Return the corpora that a key names; `problem` is told of those whose files are not there."""
    named = getattr(data, key) or ()
    named = (named,) if isinstance(named, str) else named
    cache = Path(os.path.expanduser(data.cache_dir))
    limit = int(data.remote_cache_gib * units.GIB)
    prefixes = tuple(
        mirrored(name, key, cache, limit) if is_remote(name) else Path(os.path.expanduser(name))
        for name in named
    )
    for name, prefix in zip(named, prefixes, strict=True):
        if is_remote(name):
            continue
        if prefix.suffix in (".bin", ".idx"):
            rule = f"is a file; the prefix of both is meant, without {prefix.suffix}"
            problem(key, name, rule, f"data.{key}={prefix.with_suffix('')}")
            continue
        missing = [s for s in (".bin", ".idx") if not os.path.isfile(with_suffix(prefix, s))]
        if missing:
            if os.path.isdir(prefix.parent):
                there = sorted(p.stem for p in prefix.parent.glob("*.idx"))
            else:
                there = []
            missing_files = " and ".join(with_suffix(prefix, s).name for s in missing)
            problem(
                key,
                name,
                f"no file {missing_files} in {prefix.parent}",
                near_paths(prefix, there or None),
            )
    return prefixes
