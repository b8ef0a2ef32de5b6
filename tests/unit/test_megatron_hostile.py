"""Checkpoints of megatron-core that somebody else made: an error in one line, and nothing else
happens.
"""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mtrain.cli.main import main
from tests.support import hostile_torch_dist as hostile

NOWHERE = Path("canary")
MOST_BYTES = 50 << 20
"""Limit on Python's memory, for files of at most 4 MiB."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid checkpoint in a folder of its own."""
    return hostile.write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """Return a copy of it that a test may change."""
    shutil.copytree(good.parent, tmp_path / "theirs")
    return tmp_path / "theirs" / good.name


@pytest.fixture
def measured() -> Iterator[None]:
    """Assert that no fault takes much memory."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"a file decides how much memory is taken: {peak}"


def refused(path: Path, capsys: pytest.CaptureFixture[str], *verb: str) -> str:
    """Return the one line that a conversion ends with."""
    around = path.parent if path.name == "theirs" else path.parent.parent
    before = {p: p.lstat().st_size for p in around.rglob("*")}
    assert main(["convert", *(verb or ("inspect",)), str(path)]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert 0 < len(said) < 1000
    assert "Traceback" not in said
    assert {p: p.lstat().st_size for p in around.rglob("*")} == before, "something was written"
    return said


def test_megatron_hostile_sound_checkpoint_is_read(good: Path) -> None:
    import torch

    from mtrain.convert.megatron.checkpoint import open_weights
    from mtrain.convert.megatron.reader import TorchDistReader
    from mtrain.convert.raw_arrays import as_tensor

    for path in (good, good.parent):
        reader = TorchDistReader(open_weights(path))
        assert torch.equal(as_tensor(reader.tensor(hostile.NAME), "F32"), torch.arange(8.0))
        assert torch.equal(
            as_tensor(reader.tensor(hostile.OTHER), "BF16"), torch.ones(4, 8, dtype=torch.bfloat16)
        )
        assert reader.names == {hostile.NAME, hostile.OTHER}


@pytest.mark.sampled(30)
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", hostile.pickles(NOWHERE))
def test_megatron_hostile_pickle_is_refused_without_effect(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = copy.parent.parent / "ran"
    (copy / ".metadata").write_bytes(hostile.pickles(canary)[name])
    said = refused(copy, capsys)
    assert str(copy / ".metadata") in said
    if name.startswith("calls "):
        assert f"it names {name.removeprefix('calls ')}, which is no part of a checkpoint" in said
    assert not canary.exists()


@pytest.mark.full
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", hostile.METADATA)
def test_megatron_hostile_lying_metadata_is_refused(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.change_metadata(copy, hostile.METADATA[name])
    assert str(copy) in refused(copy, capsys)


@pytest.mark.sampled(25)
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", hostile.FOLDERS)
def test_megatron_hostile_outside_folder_is_refused(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.FOLDERS[name](copy)
    assert str(copy.parent) in refused(copy.parent, capsys)


@pytest.mark.full
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", hostile.items(NOWHERE))
def test_megatron_hostile_non_tensor_bytes_are_refused(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain.convert.megatron.checkpoint import open_weights
    from mtrain.convert.megatron.reader import TorchDistReader
    from mtrain.errors import CorruptData

    canary = copy.parent.parent / "ran"
    hostile.put_item(copy, hostile.items(canary)[name])
    with pytest.raises(CorruptData) as caught:
        TorchDistReader(open_weights(copy)).tensor(hostile.OTHER)
    assert hostile.OTHER in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not canary.exists()


@pytest.mark.full
@pytest.mark.usefixtures("measured")
def test_megatron_hostile_gigabyte_directory_is_not_read(copy: Path) -> None:
    from mtrain.convert.megatron.checkpoint import open_weights
    from mtrain.convert.megatron.reader import TorchDistReader
    from mtrain.errors import CorruptData

    size = 1 << 30
    end = hostile.item(hostile.tensor_pickle())[-22:]
    end = end[:12] + struct.pack("<II", size - 22, 0) + end[20:]
    hostile.put_item(copy, end)
    with (copy / "__1_0.distcp").open("rb+") as file:
        file.truncate(size)  # of which the disk holds nothing
        file.seek(size - 22)
        file.write(end)
    hostile.change_metadata(copy, hostile.stored(length=size))
    with pytest.raises(CorruptData, match="its directory has"):
        TorchDistReader(open_weights(copy)).tensor(hostile.OTHER)


@pytest.mark.full
def test_megatron_hostile_import_writes_nothing(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = copy.parent.parent / "ran"
    (copy / ".metadata").write_bytes(hostile.calls("os", "system", hostile.text(f"touch {canary}")))
    out = copy.parent.parent / "run"
    assert main(["convert", "import", "--megatron", str(copy), str(out), "model=llama_tiny"]) == 4
    assert "it names os.system" in capsys.readouterr().err
    assert sorted(p.name for p in copy.parent.parent.iterdir()) == [copy.parent.name]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["calls os.system", "code as a state", "a text of exabytes", "nothing"]
)
def test_megatron_hostile_arguments_are_only_a_hint(name: str, good: Path, tmp_path: Path) -> None:
    import zipfile

    from mtrain.convert.megatron.arguments import read_arguments
    from mtrain.convert.megatron.torch_dist import Chunk

    canary = tmp_path / "ran"
    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", hostile.pickles(canary)[name])
    assert read_arguments(tmp_path) == {}
    assert not canary.exists()
    (tmp_path / "common.pt").write_bytes(hostile.pickles(canary)[name])
    assert read_arguments(tmp_path) == {}
    inside = Chunk((), (), tmp_path / "__0_0.distcp", 3, (tmp_path / "common.pt").stat().st_size)
    (tmp_path / "common.pt").rename(tmp_path / "whole")
    inside.path.write_bytes(b"abc" + (tmp_path / "whole").read_bytes() + b"rest")
    assert read_arguments(tmp_path, inside) == {}
    assert read_arguments(tmp_path, replace(inside, length=1 << 40)) == {}
    assert read_arguments(good) == {}
    assert not canary.exists()
