"""A thousand seeded mutations of checkpoints: none is loaded without a word, and each error names
the file.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from mtrain.ckpt.remote import transfer
from mtrain.ckpt.remote.place import Place
from mtrain.errors import CorruptData
from tests.faults.promises import Record, measured
from tests.support import grouping_writer
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

MUTATIONS = 1000
REMOTE = 300
"""Mutations of objects in a store."""
KINDS = ("xxh3", "sha256", "groups")
MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Return, by kind, the checkpoint to damage, another step of its run and one of another run."""
    found = {}
    for kind in KINDS:
        paths = []
        ranks = 4 if kind == "groups" else 2
        for seed in (1, 2):
            root = tmp_path_factory.mktemp(kind)
            run = tiny_run(ranks=ranks, distributed_optimizer=True, trainer={"seed": seed})
            hashed = {"hash": "sha256" if kind == "sha256" else "xxh3"}
            section = run.checkpoint.model_copy(update=hashed)
            run = run.model_copy(update={"checkpoint": section})

            def save(run: object = run, root: Path = root, grouped: bool = ranks == 4) -> None:
                if grouped:
                    grouping_writer.use()
                train_steps(run, 2, save_to=root, save_after=1)  # type: ignore[arg-type]

            run_ranks(ranks, save)
            paths += [root / "step_00000002", root / "step_00000001"]
        found[kind] = paths[:3]
    assert len(list(found["groups"][0].glob("index_*"))) == 2
    return found


def flip(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def lengthened(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    return data + dice.randbytes(dice.randrange(1, 64))


def zeroed(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    end = min(len(data), at + 512)
    return data[:at] + bytes(end - at) + data[end:]


def another_step(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    return others[0]


def another_run(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    return others[1]


def another_file(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    return dice.choice(others[2:])


MAKE: dict[str, Callable[[bytes, list[bytes], random.Random], bytes]] = {
    "flipped bit": flip,
    "cut": cut,
    "lengthened": lengthened,
    "zeroed": zeroed,
    "of another step": another_step,
    "of another run": another_run,
    "another file of it": another_file,
}
MISSING = "missing"


@dataclass(frozen=True)
class Mutation:
    """A change of a file of a checkpoint."""

    kind: str
    file: Path
    how: str
    changed: bytes | None
    """The new content; None: the file is removed."""
    expected: list[str]
    """Names of files, of which an error has to name one."""

    def __str__(self) -> str:
        return f"{self.file.name.partition('_')[0].removesuffix('.json')}: {self.how}"


def drawn(runs: dict[str, list[Path]], dice: random.Random) -> Mutation | None:
    """Return a mutation; None if the drawn one changes nothing."""
    kind = dice.choice(KINDS)
    path, step, other_run = runs[kind]
    names = sorted(os.listdir(path))
    # Shards are most of the files, and the manifest is the marker.
    file = path / dice.choice([*names, MANIFEST])
    how = dice.choice([*MAKE, MISSING])
    original = file.read_bytes()
    others = [(folder / file.name).read_bytes() for folder in (step, other_run)]
    others += [(path / name).read_bytes() for name in names if name != file.name]
    changed = None if how == MISSING else MAKE[how](original, others, dice)
    if changed == original:  # run.yaml is the same at every step
        return None
    # The manifest of another step does not fit the files, and one of these is named.
    whole_manifest = file.name == MANIFEST and how in ("of another step", "of another run")
    return Mutation(kind, file, how, changed, names if whole_manifest else [file.name])


def at_once(path: Path) -> None:
    """Compare every byte when the checkpoint is opened."""
    from mtrain.ckpt.store import Checkpoint

    Checkpoint.open(path)


def as_read(path: Path) -> None:
    """Compare bytes as all ranks read them."""
    from mtrain.ckpt.store import Checkpoint

    opened = Checkpoint.open(path, verify=False)
    for key in opened.manifest["tensors"]:
        opened.whole(key)
    for rank in range(opened.manifest["ranks"]):
        opened.rank_tensors(rank)


def words_of(load: Callable[[Path], None], path: Path) -> str:
    """Return the words of the refusal; empty: it was loaded."""
    from mtrain.ckpt import hashes

    # A rewritten file may have the size and the time of the one before.
    hashes._sound.clear()
    try:
        load(path)
    except CorruptData as error:
        return str(error)
    return ""


@pytest.mark.full
def test_checkpoint_thousand_mutations_are_found_and_named(
    runs: dict[str, list[Path]], capsys: pytest.CaptureFixture[str], record_property: Record
) -> None:
    dice = random.Random(20)
    counts: Counter[str] = Counter()
    silent: list[str] = []
    for path in (paths[0] for paths in runs.values()):
        assert not words_of(at_once, path)
        assert not words_of(as_read, path)
    while counts.total() < MUTATIONS:
        one = drawn(runs, dice)
        if one is None:
            continue
        original = one.file.read_bytes()
        if one.changed is None:
            one.file.unlink()
        else:
            one.file.write_bytes(one.changed)
        for load in (at_once, as_read):
            words = words_of(load, one.file.parent)
            if not words:
                silent.append(f"{one.kind}: {one.file.name} {one.how} loaded ({load.__name__})")
            else:
                assert any(name in words for name in one.expected), (one, words)
        one.file.write_bytes(original)
        counts[str(one)] += 1
    for path in (paths[0] for paths in runs.values()):
        assert not words_of(as_read, path), "every file is as it was"
    measured(record_property, mutations=counts.total(), silent=len(silent))
    assert not silent
    with capsys.disabled():
        print(f"\n{counts.total()} mutations, each found twice and named:")
        for name, count in sorted(counts.items()):
            print(f"  {count:4} {name}")


@pytest.mark.full
def test_checkpoint_mutations_of_objects_are_found_and_named(
    runs: dict[str, list[Path]], tmp_path: Path, record_property: Record
) -> None:
    files = fsspec.filesystem("memory")
    places = {kind: Place(f"memory://mutated/{kind}/step_00000002") for kind in KINDS}
    for kind, place in places.items():
        transfer.upload(runs[kind][0], place)
    dice = random.Random(21)
    counts: Counter[str] = Counter()
    silent: list[str] = []

    def download(place: Place) -> str:
        try:
            transfer.download(place, tmp_path / "out")
        except CorruptData as error:
            assert list(tmp_path.iterdir()) == []
            return str(error)
        shutil.rmtree(tmp_path / "out")
        return ""

    assert not any(map(download, places.values()))
    while counts.total() < REMOTE:
        one = drawn(runs, dice)
        if one is None:
            continue
        place = places[one.kind]
        address = f"{place.url}/{one.file.name}"
        if one.changed is None:
            files.rm_file(address)
        else:
            files.pipe_file(address, one.changed)
        words = download(place)
        if not words:
            silent.append(f"{one.kind}: {one}")
        else:
            assert any(name in words for name in one.expected), (one, words)
        files.pipe_file(address, one.file.read_bytes())
        counts[str(one)] += 1
    assert not any(map(download, places.values())), "every object is as it was"
    files.rm("/mutated", recursive=True)
    measured(record_property, mutations=counts.total(), silent=len(silent))
    assert not silent
