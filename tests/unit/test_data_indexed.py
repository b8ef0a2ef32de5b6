"""Reading and writing `.bin/.idx`: byte-identical to megatron-core, and nothing damaged gets in."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.store import indexed
from mtrain.data.store.indexed import (
    HEADER,
    IndexedDataset,
    IndexedWriter,
    token_dtype,
    write_index,
)
from mtrain.errors import CorruptData
from tests.support.patience import patient

LENGTHS = (5, 1, 9, 4, 7, 30)
AT_LENGTHS = HEADER.size
AT_POINTERS = AT_LENGTHS + 4 * len(LENGTHS)
AT_DOCUMENTS = AT_POINTERS + 8 * len(LENGTHS)

MEGATRON = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
for prefix, name in ((sys.argv[1], "uint16"), (sys.argv[2], "int32")):
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, name))
    start = 0
    for length in map(int, sys.argv[3:]):
        builder.add_document(torch.arange(start, start + length), [length])
        start += length
    builder.finalize(prefix + ".idx")
"""


def write(prefix: Path, dtype: str = "<i4", lengths: tuple[int, ...] = LENGTHS) -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        writer.add(np.arange(sum(lengths)), np.array(lengths))
    return prefix


def poke(path: Path, offset: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


def resize(path: Path, size: int) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:size] if size >= 0 else raw + b"\0" * -size)


@pytest.mark.full
def test_indexed_files_equal_megatron_core(tmp_path: Path) -> None:
    theirs, ours = [[tmp_path / f"{who}{i}" for i in range(2)] for who in ("theirs", "ours")]
    arguments = [*map(str, theirs), *map(str, LENGTHS)]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON, *arguments],
        check=True,
        timeout=patient(120),
    )
    for prefix, reference, dtype in zip(ours, theirs, ("<u2", "<i4"), strict=True):
        write(prefix, dtype)
        for suffix in (".bin", ".idx"):
            assert (
                Path(f"{prefix}{suffix}").read_bytes() == Path(f"{reference}{suffix}").read_bytes()
            )


def test_indexed_index_follows_format(tmp_path: Path) -> None:
    write(tmp_path / "a", "<u2", (2, 3))
    assert (tmp_path / "a.idx").read_bytes() == b"MMIDIDX\0\0" + struct.pack(
        "<QBQQ", 1, 8, 2, 3
    ) + struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 1, 2)


def test_indexed_long_index_spans_chunks(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 9, 300_000)
    write_index(tmp_path / "a.idx", lengths, np.dtype("<u2"))
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum()))
    dataset = IndexedDataset(tmp_path / "a")
    assert (dataset.lengths == lengths).all()
    assert (dataset.pointers == 2 * (np.cumsum(lengths) - lengths)).all()
    assert (dataset.document_indices == np.arange(300_001)).all()


@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<i2", "<u2", "<i4", "<i8"])
def test_indexed_round_trip(tmp_path: Path, dtype: str) -> None:
    dataset = IndexedDataset(write(tmp_path / "a", dtype))
    assert (dataset.num_documents, dataset.num_tokens, dataset.dtype) == (6, 56, np.dtype(dtype))
    assert dataset[2].tolist() == list(range(6, 15))
    assert [dataset.document_start(d) for d in range(7)] == [0, 5, 6, 15, 19, 26, 56]
    assert [dataset.document_at(p) for p in (0, 4, 5, 6, 14, 15, 55)] == [0, 0, 1, 2, 2, 3, 5]


def test_indexed_empty_corpus_and_documents_are_legal(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "none", np.dtype("<u2")):
        pass
    assert IndexedDataset(tmp_path / "none").num_documents == 0
    dataset = IndexedDataset(write(tmp_path / "some", "<u2", (0, 3, 0)))
    assert [dataset.document_at(p) for p in (0, 2)] == [1, 1]


def test_indexed_large_id_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(CorruptData, match="65536 do not fit uint16"),
        IndexedWriter(tmp_path / "a", token_dtype(4096)) as w,
    ):
        w.add(np.array([1, 65536]))
    assert not (tmp_path / "a.idx").exists()


def test_indexed_sequence_beyond_int32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match="0 to 2\\^31 - 1"):
        write_index(tmp_path / "a.idx", np.array([1, 2**31]), np.dtype("<u2"))


def test_indexed_dtype_equals_megatron() -> None:
    assert [token_dtype(v).name for v in (300, 65499, 65500, 128256)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


I8 = struct.Struct("<q").pack
I4 = struct.Struct("<i").pack
CASES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "empty index": (lambda i, b: resize(i, 0), "0 bytes, and a header has 34"),
    "index cut in the magic": (lambda i, b: resize(i, 5), "5 bytes, and a header"),
    "index cut in the header": (lambda i, b: resize(i, 33), "33 bytes, and a header"),
    "index cut after the header": (lambda i, b: resize(i, 34), "offset 18: 6 sequences"),
    "index cut by one byte": (lambda i, b: resize(i, 161), "need 162 bytes, the file has 161"),
    "index one byte longer": (lambda i, b: resize(i, -1), "the file has 163"),
    "index zeroed": (lambda i, b: i.write_bytes(bytes(162)), "offset 0"),
    "index and bin exchanged": (lambda i, b: i.write_bytes(b.read_bytes()), "offset 0"),
    "magic": (lambda i, b: poke(i, 0, b"X"), "offset 0: starts with"),
    "version": (lambda i, b: poke(i, 9, b"\2"), "offset 9: version 2"),
    "unknown dtype code": (lambda i, b: poke(i, 17, b"\x63"), "offset 17: dtype code 99"),
    "float dtype code": (lambda i, b: poke(i, 17, b"\7"), "offset 17: dtype code 7"),
    "narrower dtype code": (lambda i, b: poke(i, 17, b"\x08"), "wrong dtype code"),
    "wider dtype code": (lambda i, b: poke(i, 17, b"\x05"), "wrong dtype code"),
    "sequence count": (lambda i, b: poke(i, 18, b"\7"), "offset 18: 7 sequences"),
    "sequence count huge": (lambda i, b: poke(i, 25, b"\x7f"), "offset 18"),
    "document count": (lambda i, b: poke(i, 26, b"\6"), "6 document indices"),
    "multimodal": (lambda i, b: resize(i, -6), "multimodal"),
    "negative length": (
        lambda i, b: poke(i, AT_LENGTHS + 8, I4(-9)),
        "offset 42: sequence 2 has length -9",
    ),
    "other length": (lambda i, b: poke(i, AT_LENGTHS + 8, I4(8)), "pointer of sequence 3"),
    "last length": (lambda i, b: poke(i, AT_LENGTHS + 20, I4(31)), "a.bin: 224 bytes, but"),
    "first pointer": (
        lambda i, b: poke(i, AT_POINTERS, I8(4)),
        f"offset {AT_POINTERS}: pointer of sequence 0",
    ),
    "pointer": (
        lambda i, b: poke(i, AT_POINTERS + 16, I8(25)),
        f"offset {AT_POINTERS + 16}: pointer of sequence 2 is 25",
    ),
    "negative pointer": (
        lambda i, b: poke(i, AT_POINTERS + 40, I8(-4)),
        "pointer of sequence 5 is -4",
    ),
    "first document": (lambda i, b: poke(i, AT_DOCUMENTS, I8(1)), "from 1 to 6"),
    "last document": (
        lambda i, b: poke(i, AT_DOCUMENTS + 48, I8(5)),
        "from 0 to 5, must be 0 to 6",
    ),
    "documents fall": (
        lambda i, b: poke(i, AT_DOCUMENTS + 16, I8(5)),
        "document index 3 is 3, less than 5",
    ),
    "bin cut by one byte": (
        lambda i, b: resize(b, 223),
        "a.bin: 223 bytes, but a.idx describes 224",
    ),
    "bin cut by a token": (lambda i, b: resize(b, 220), "a.bin: 220 bytes"),
    "bin empty": (lambda i, b: resize(b, 0), "a.bin: 0 bytes"),
    "bin longer": (lambda i, b: resize(b, -4), "a.bin: 228 bytes"),
    "bin missing": (lambda i, b: b.unlink(), "a.bin: cannot be read: No such file"),
    "index missing": (lambda i, b: i.unlink(), "a.idx: cannot be read: No such file"),
}


@pytest.mark.parametrize("case", CASES)
def test_indexed_damaged_file_is_refused_with_offset(tmp_path: Path, case: str) -> None:
    prefix = write(tmp_path / "a")
    damage, message = CASES[case]
    damage(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(CorruptData) as caught:
        IndexedDataset(prefix)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("code", [3, 8])
def test_indexed_same_size_dtype_code_keeps_ids(tmp_path: Path, code: int) -> None:
    prefix = write(tmp_path / "a", "<u2")
    poke(tmp_path / "a.idx", 17, bytes([code]))
    assert IndexedDataset(prefix).tokens.tolist() == list(range(56))


def test_indexed_1500_mutations_are_refused_or_harmless(tmp_path: Path) -> None:
    rng = np.random.default_rng(20240)
    prefix = write(tmp_path / "a", "<u2")
    whole = (tmp_path / "a.idx").read_bytes()
    good = IndexedDataset(prefix)
    expected = [good[i].tolist() for i in range(len(good))]
    harmless = 0
    for trial in range(1500):
        raw = bytearray(whole)
        end = HEADER.size if trial < 500 else len(raw)
        for _ in range(1 if trial % 2 else int(rng.integers(1, 5))):
            raw[int(rng.integers(end))] ^= 1 << int(rng.integers(8))
        if trial % 10 == 9:
            raw = raw[: int(rng.integers(len(raw)))]
        (tmp_path / "a.idx").write_bytes(raw)
        try:
            dataset = IndexedDataset(prefix)
        except CorruptData:
            continue
        # What passes holds the same sequences; only where one document ends and the next starts may
        # have moved.
        assert [dataset[i].tolist() for i in range(len(dataset))] == expected
        assert (np.diff(dataset.document_indices) >= 0).all()
        harmless += 1
    assert harmless < 60


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits so that an index of a few hundred sequences is read in parts."""
    for name, value in (("LARGE", 100), ("PARTS", 3), ("PART", 8), ("STEP", 64)):
        monkeypatch.setattr(indexed, name, value)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("what", ["length", "pointer", "document"])
def test_indexed_large_index_is_verified_while_running(tmp_path: Path, what: str) -> None:
    many = 700
    prefix = tmp_path / "a"
    write_index(tmp_path / "a.idx", np.full(many, 3), np.dtype("<u2"))
    (tmp_path / "a.bin").write_bytes(bytes(2 * 3 * many))
    whole = (tmp_path / "a.idx").read_bytes()
    places = {
        "length": HEADER.size,
        "pointer": HEADER.size + 4 * many,
        "document": HEADER.size + 12 * many,
    }
    wide = 4 if what == "length" else 8

    def damaged(number: int, value: int) -> IndexedDataset:
        (tmp_path / "a.idx").write_bytes(whole)
        poke(
            tmp_path / "a.idx",
            places[what] + wide * number,
            value.to_bytes(wide, "little", signed=True),
        )
        return IndexedDataset(prefix, whole=False)

    for number in (0, 3, many // 2, many - 1):
        with pytest.raises(CorruptData, match=str(tmp_path)):
            damaged(number, -5)
    held = damaged(200, 5)  # of no part that is read at open
    with pytest.raises(CorruptData, match="offset"):
        [held.check_next() for _ in range(many // 64 + 1)]
    with pytest.raises(CorruptData):
        IndexedDataset(prefix)
    held = damaged(200, 1 << 30)
    with pytest.raises(CorruptData, match="offset"):
        [held.document_start(i) for i in (199, 200, 201)]
    (tmp_path / "a.idx").write_bytes(whole)
    held = IndexedDataset(prefix, whole=False)
    for _ in range(many // 64 + 3):
        held.check_next()
    assert [held.document_start(i) for i in (0, 200, many)] == [0, 600, 3 * many]
