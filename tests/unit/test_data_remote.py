"""Corpora in an object store, fsspec's `memory://`: the samples of the same files on a disk, within
a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from mtrain.cli.main import main
from mtrain.config.disk.token_files import dump, read_manifest
from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.store import remote
from mtrain.data.store.indexed import IndexedWriter
from mtrain.errors import BadEnvironment, ConfigError, CorruptData
from tests.support.forked import run_alone

VOCAB = 60_000
SEQ = 64
KIB = 1024


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide a store with the corpora a and b, which are in `tmp_path` too; blocks are of 4
    KiB.
    """
    monkeypatch.setattr(remote, "BLOCK_BYTES", 4 * KIB)
    store = fsspec.filesystem("memory")
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add(random.integers(0, VOCAB, 50_000), np.full(1000, 50))
        for suffix in (".bin", ".idx"):
            store.pipe_file(f"/bucket/{name}{suffix}", (tmp_path / f"{name}{suffix}").read_bytes())
    yield store
    store.rm("/bucket", recursive=True)


def config(folder: Path, path: str, **more: Any) -> DataConfig:
    words = {
        "kind": "indexed",
        "path": path,
        "seq_length": SEQ,
        "cache_dir": str(folder / "cache"),
        **more,
    }
    return DataConfig.model_validate(words)


def opened(data: DataConfig) -> Any:
    splits = open_splits(data, VOCAB, 1, prepare(data), requested=(500, 20, 5))
    splits.check_ids()
    return splits


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_remote_samples_equal_local_files(files: Any, tmp_path: Path, order: str) -> None:
    local = opened(config(tmp_path, str(tmp_path / "a"), order=order))
    far = opened(config(tmp_path, "memory://bucket/a", order=order))
    numbers = np.random.default_rng(1).integers(0, 3000, 200)
    for part in ("train", "validation"):
        assert (getattr(far, part).batch(numbers) == getattr(local, part).batch(numbers)).all()
    assert far.unigram_entropy_nats == local.unigram_entropy_nats
    same_data(local.describe(), far.describe())
    again = opened(config(tmp_path, "memory://bucket/a", order=order)).train
    assert run_alone(lambda: (again.batch(numbers) == local.train.batch(numbers)).all()), (
        "in a forked process too"
    )


def test_remote_blends_and_splits_may_mix_kinds(files: Any, tmp_path: Path) -> None:
    names = {
        "blend": [str(tmp_path / "a"), "memory://bucket/b"],
        "validation_blend": ["memory://bucket/a"],
    }
    same = {
        "blend": [str(tmp_path / "a"), str(tmp_path / "b")],
        "validation_blend": [str(tmp_path / "a")],
    }
    far, local = (opened(config(tmp_path, None, **words)) for words in (names, same))  # type: ignore[arg-type]
    for part in ("train", "validation"):
        assert (
            getattr(far, part).batch(range(300)) == getattr(local, part).batch(range(300))
        ).all()


def test_remote_cached_blocks_stay_within_bound(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HELD_BLOCKS", 2)
    data = config(tmp_path, "memory://bucket/a", remote_cache_gib=64 * KIB / 2**30)
    splits = opened(data)
    expected = opened(config(tmp_path, str(tmp_path / "a"))).train
    for first in range(0, 700, 50):
        numbers = range(first, first + 50)
        assert (splits.train.batch(numbers) == expected.batch(numbers)).all()
        held = sum(p.stat().st_size for p in (tmp_path / "cache/remote").glob("*/blocks/*"))
        assert 0 < held <= 64 * KIB
    assert not list((tmp_path / "cache/remote").glob("*/blocks/.*")), "no draft is left"


def test_remote_fetched_blocks_are_reused(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(config(tmp_path, "memory://bucket/a")).train.batch(range(700))
    asked: list[int] = []
    real = remote.Store.pieces
    monkeypatch.setattr(remote.Store, "pieces", lambda *args: asked.append(1) or real(*args))
    again = opened(config(tmp_path, "memory://bucket/a"))
    asked.clear()
    again.train.batch(range(700))
    assert not asked


def test_remote_replaced_file_is_another_corpus(files: Any, tmp_path: Path) -> None:
    data = config(tmp_path, "memory://bucket/a")
    saved = opened(data).describe()
    files.pipe_file("/bucket/a.bin", files.cat_file("/bucket/b.bin"))
    with pytest.raises(ConfigError, match="not the one that the checkpoint was trained on"):
        same_data(saved, opened(data).describe())


def test_remote_manifest_is_read_as_local(files: Any, tmp_path: Path) -> None:
    assert main(["data", "merge", str(tmp_path / "a"), f"out={tmp_path / 'm'}"]) == 0
    held = read_manifest(tmp_path / "m")
    assert held is not None
    for suffix in (".bin", ".idx"):
        files.pipe_file(f"/bucket/m{suffix}", (tmp_path / f"m{suffix}").read_bytes())
    assert prepare(config(tmp_path, "memory://bucket/m")).meta.get("eod") is None
    files.pipe_file("/bucket/m.manifest.json", dump(held.body | {"eod": 3}))
    assert prepare(config(tmp_path, "memory://bucket/m")).meta["eod"] == 3
    for wrong in (
        {"largest_id": VOCAB},
        {"files": held.body["files"] | {".idx": {"bytes": 1, "sha256": ""}}},
    ):
        files.pipe_file("/bucket/m.manifest.json", dump(held.body | wrong))
        with pytest.raises((ConfigError, CorruptData), match=r"manifest"):
            opened(config(tmp_path, "memory://bucket/m"))


def test_remote_errors_hold_no_secret(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[Exception], path: str) -> str:
        with pytest.raises(kind) as caught:
            opened(config(tmp_path, path)).train.batch(range(100))
        assert "SECRET" not in str(caught.value)
        return str(caught.value)

    assert "no file c.idx" in refused(ConfigError, "memory://bucket/c")
    assert "credentials" in refused(ConfigError, "memory://KEY:SECRET@bucket/a")
    assert "credentials" in refused(ConfigError, "memory://bucket/a?sig=SECRET")
    assert "nosuch://" in refused(BadEnvironment, "nosuch://bucket/a")
    files.pipe_file("/bucket/c.bin", b"1234")
    for head, said in (
        (b"", "and a header has"),
        (b"X" * 40, "offset 0"),
        (b"MMIDIDX\0\0" + bytes(100), "version 0"),
    ):
        files.pipe_file("/bucket/c.idx", head)
        assert said in refused(CorruptData, "memory://bucket/c")
        assert "memory://bucket/c.idx" in refused(CorruptData, "memory://bucket/c")
    files.pipe_file("/bucket/c.idx", files.cat_file("/bucket/a.idx"))
    assert "memory://bucket/c.bin: 4 bytes, but" in refused(CorruptData, "memory://bucket/c")

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("https://bucket/a?X-Amz-Signature=SECRET")

    monkeypatch.setattr(type(files), "cat_ranges", fails)
    assert "memory://bucket/a.bin cannot be read: OSError" in refused(
        BadEnvironment, "memory://bucket/a"
    )


def test_remote_missing_store_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(BadEnvironment, match=r"(?s)s3://.*pip install 'mtrain\[fsspec\]'"):
        prepare(config(tmp_path, "s3://bucket/a"))
