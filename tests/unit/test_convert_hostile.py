"""Files of weights that somebody else made: whatever is in them, an error that names the file, and
nothing else.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtrain.ckpt.new_file import Writer
from mtrain.cli.main import main
from mtrain.convert.huggingface.folder import INDEX, WEIGHTS, open_folder
from mtrain.convert.inspect import held, totals
from mtrain.convert.safetensors_file import read_header
from mtrain.errors import CorruptData
from tests.support.tables import tables

TABLES = tables("convert_hostile")

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(32)


def _file(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _with(entry: Any, name: str = "b") -> bytes:
    return _file(json.dumps({**GOOD, name: entry}).encode())


def _entry(**changes: Any) -> bytes:
    return _with({**GOOD["b"], **changes})


def _headers() -> Iterator[tuple[str, bytes]]:
    good = json.dumps(GOOD).encode()
    yield "empty", b""
    yield "cut length", b"\x01\x00"
    yield "no header", struct.pack("<Q", 0)
    for length in (1 << 63, (1 << 64) - 1, 10**9, len(good) + 1000):
        yield f"length {length}", _file(good, length=length)
    for text in (
        b"[]",
        b"null",
        b"1",
        b"{",
        b'{"a": ',
        b"\xff\xfe",
        b"{" * 5000,
        b"[" * 100_000,
        b'"' * 99,
    ):
        yield f"text {text[:9]!r}", _file(text)
    yield "a name twice", _file(b'{"a": {}, "a": {}}')
    yield (
        "a number of many digits",
        _file(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 9000 + b'], "data_offsets": [0, 24]}}'),
    )
    for wrong in (None, 1, "x", [], {}, {"dtype": "F32"}, {"dtype": "F32", "shape": [1]}):
        yield f"entry {wrong}", _with(wrong)
    for dtype in ("F33", "", None, 3, ["F32"], "f32", "OBJECT", "F32 " * 99):
        yield f"dtype {str(dtype)[:9]}", _entry(dtype=dtype)
    for shape in (
        None,
        "4",
        [-4],
        [4.0],
        [True],
        ["4"],
        [1 << 62],
        [1 << 62, 1 << 62],
        [5],
        [],
        [4, 1, 2],
        [[4]],
        [1] * 40,
    ):
        yield f"shape {str(shape)[:20]}", _entry(shape=shape)
    for offsets in (
        None,
        [],
        [24],
        [24, 32, 40],
        [32, 24],
        [-8, 0],
        [24, 1 << 60],
        ["24", "32"],
        [24.0, 32.0],
        [0, 8],
        [16, 24],
        [25, 33],
    ):
        yield f"offsets {offsets}", _entry(data_offsets=offsets)
    yield "a hole", _with({"dtype": "F32", "shape": [1], "data_offsets": [40, 44]}, "c")
    yield "bytes behind", _file(good, DATA + b"x")
    yield "bytes missing", _file(good, DATA[:-1])
    rng = random.Random(1)
    for number in range(60):
        mutated = bytearray(_file(good))
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(8 + len(good))] = rng.randrange(256)
        yield f"mutation {number}", bytes(mutated)


HEADERS = dict(_headers())


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", HEADERS)
def test_convert_hostile_header_is_refused_by_file_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(HEADERS[name])
    tracemalloc.start()
    if name.startswith("mutation"):  # of a name, of a space or of the metadata is no fault
        with suppress(CorruptData):
            assert totals(held(tmp_path))["bytes"] == len(DATA)
    else:
        with pytest.raises(CorruptData, match=re.escape(str(path))) as caught:
            held(tmp_path)
        assert len(str(caught.value)) < 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20, "a header decides how much memory is taken"


INDEXES: dict[str, Any] = {
    "no object": [],
    "no map": {"metadata": {}},
    "an empty map": {"weight_map": {}},
    "a list": {"weight_map": ["a"]},
    "a path outside": {"weight_map": {"a": "../model.safetensors"}},
    "a path from the root": {"weight_map": {"a": "/etc/passwd"}},
    "a path below": {"weight_map": {"a": "x/model.safetensors"}},
    "a pickle": {"weight_map": {"a": "pytorch_model.bin"}},
    "a number": {"weight_map": {"a": 3}},
    "a file that is not there": {"weight_map": {"a": "other.safetensors"}},
    "a name that is not there": {"weight_map": {"a": WEIGHTS, "b": WEIGHTS, "c": WEIGHTS}},
    "a name too few": {"weight_map": {"a": WEIGHTS}},
    "a zero byte": {"weight_map": {"a": "model\0.safetensors"}},
    "a line": {"weight_map": {"a": "model.safetensors\n"}},
}


@pytest.mark.full
@pytest.mark.parametrize("name", INDEXES)
def test_convert_hostile_index_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(_file(json.dumps(GOOD).encode()))
    (tmp_path / INDEX).write_text(json.dumps(INDEXES[name]))
    with pytest.raises(CorruptData, match=str(tmp_path)):
        open_folder(tmp_path)


@pytest.mark.full
def test_convert_hostile_pipe_is_not_awaited(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WEIGHTS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS}}))
    with pytest.raises(CorruptData, match="is no plain file"):
        open_folder(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"weight_map": {"a": "x", "a": "y"}}', "\ud800"], ids=range(5)
)
def test_convert_hostile_non_json_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text, errors="surrogatepass")
    with pytest.raises(CorruptData, match="no index of weights"):
        open_folder(tmp_path)


def test_convert_hostile_pickle_is_never_read(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CorruptData, match="is a pickle"):
        open_folder(tmp_path)
    assert not mark.exists()


CONFIGS: dict[str, Any] = TABLES["configs"]


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_convert_hostile_config_is_refused_without_output(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    out = tmp_path / "out"
    source.mkdir()
    (source / WEIGHTS).write_bytes(_file(json.dumps(GOOD).encode()))
    (source / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert main(["convert", "import", str(source), str(out)]) in (2, 4)
    assert str(source) in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.full
def test_convert_hostile_file_is_written_in_order_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    with Writer(path, ["x", "y"]) as writer:
        with pytest.raises(ValueError, match="not what follows"):
            writer.write("y", "U8", (3,), memoryview(b"abc"))
        with pytest.raises(ValueError, match="not what follows"):
            writer.write("x", "F32", (2,), memoryview(b"abc"))
        writer.write("x", "F32", (2,), memoryview(bytes(8)))
        with pytest.raises(ValueError, match="was not written"):
            writer.close({})
    os.unlink(path)
    with Writer(path, ["x"]) as writer:
        writer.write("x", "U8", (1,), memoryview(b"a"))
        with pytest.raises(ValueError, match="and room for"):
            writer.close({"format": "x" * 1000})
    os.unlink(path)
    with Writer(path, ["x", "y"]) as writer:
        writer.write("x", "F32", (2,), memoryview(bytes(range(8))))
        writer.write("y", "U8", (3,), memoryview(b"abc"))
        writer.close({"format": "pt"})
    tensors = read_header(path)
    buffer = bytearray(3)
    tensors["y"].read_into(memoryview(buffer))
    assert bytes(buffer) == b"abc"
    assert tensors["x"].shape == (2,)
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["x", "y"]


@pytest.mark.full
def test_convert_hostile_low_rank_mxfp4_is_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from mtrain.convert.huggingface.reader import Reader

    parts = {
        "w_blocks": torch.zeros(3, 16, dtype=torch.uint8),
        "w_scales": torch.zeros(3, dtype=torch.uint8),
    }
    save_file(parts, tmp_path / WEIGHTS)
    with pytest.raises(CorruptData, match="do not fit together"):
        Reader(open_folder(tmp_path)).tensor("w")
