"""Weights in and out by the places of tensors in a checkpoint; those places from the parts of a
tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mtrain.ckpt.new_file import Writer
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.convert.boxes import Box, box_of
from mtrain.convert.checkpoint_reader import CheckpointReader
from mtrain.convert.exporter import Weights, export_weights
from mtrain.convert.huggingface.folder import WEIGHTS, open_folder
from mtrain.convert.huggingface.reader import Reader
from mtrain.convert.importer import import_weights
from mtrain.errors import CorruptData
from mtrain.models.table import GATE_UP, QKV, Entry, Table
from tests.support.configs import LAPTOP

FC1 = "decoder.layers.{i}.mlp.linear_fc1.weight"
FC2 = "decoder.layers.{i}.mlp.linear_fc2.weight"
TABLE = Table((), (Entry(FC1, ("{i}.gate", "{i}.up"), GATE_UP), Entry(FC2, ("{i}.down",))))
OTHER = Table((), (Entry(FC1, ("{i}.up", "{i}.gate"), GATE_UP), Entry("{i}.other", ("{i}.down",))))
RUN = resolve(compose(["model=llama_tiny", "model.num_layers=2", "data=mock"]).run, LAPTOP)


class Spec(NamedTuple):
    """A `ShardSpec`, without megatron-core."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    lead: int
    first: int

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape))


def specs(name: str, shape: tuple[int, int], halves: int) -> tuple[Any, ...]:
    """Return a tensor of layer 0 or 1 as megatron-core describes it: in so many parts."""
    key = name.replace(".0.", ".").replace(".1.", ".")
    layer = int(".1." in name)
    rows = shape[0] // halves
    return tuple(
        Spec(key, (2, *shape), (layer, n * rows, 0), (1, rows, shape[1]), 1, n * rows * shape[1])
        for n in range(halves)
    )


def ours() -> dict[str, Box]:
    given = [(FC1.replace("{i}", i), (6, 4), 2) for i in "01"] + [
        (FC2.replace("{i}", i), (4, 3), 1) for i in "01"
    ]
    return {name: box_of(name, shape, specs(name, shape, parts)) for name, shape, parts in given}


def source(folder: Path, **shapes: tuple[int, int]) -> Path:
    """Write a folder with the weights of two layers."""
    folder.mkdir()
    shapes = {"gate": (3, 4), "up": (3, 4), "down": (4, 3), **shapes}
    names = [f"{i}.{name}" for i in range(2) for name in shapes]
    with Writer(folder / WEIGHTS, names) as writer:
        for number, name in enumerate(names):
            words = np.arange(12, dtype=np.int16) + 100 * number
            writer.write(name, "BF16", shapes[name[2:]], memoryview(words.tobytes()))
        writer.close({})
    return folder


def taken(tmp_path: Path, *tables: Table, **shapes: Any) -> Path:
    """Return the checkpoint of an import."""
    reader = Reader(open_folder(source(tmp_path / "theirs", **shapes)))
    return import_weights(reader, tables, RUN, tmp_path / "checkpoints", ours())[0]


def bytes_of(folder: Path) -> dict[str, bytes]:
    reader = Reader(open_folder(folder))
    return {name: reader.tensor(name).tobytes() for name in reader.names}


def test_boxes_round_trip(tmp_path: Path) -> None:
    checkpoint = CheckpointReader.open(taken(tmp_path, TABLE))
    boxes = ours()
    expected = bytes_of(tmp_path / "theirs")
    moved = dict(boxes)
    first, second = (FC1.replace("{i}", i) for i in "01")
    moved[first], moved[second] = moved[second], moved[first]
    for number, own in enumerate((boxes, moved)):
        out = tmp_path / str(number)
        out.mkdir()
        record = export_weights(Weights(checkpoint, RUN, TABLE, own), out)
        found = bytes_of(out)
        assert (found == expected) == (own is boxes), "boxes say what lies where"
        assert set(record.target) == set(expected)
    assert found["0.gate"] == expected["1.gate"]


def test_boxes_table_is_chosen_by_names(tmp_path: Path) -> None:
    first = taken(tmp_path, TABLE)
    (tmp_path / "again").mkdir()
    second = taken(tmp_path / "again", OTHER, TABLE)
    for path in ("manifest.json", "rank_00000.safetensors"):
        assert (first / path).read_bytes() == (second / path).read_bytes()


def test_boxes_wrong_shapes_are_refused_without_output(tmp_path: Path) -> None:
    table = Table(
        (), (Entry(FC1, ("{i}.gate", "{i}.up", "{i}.more"), QKV), Entry(FC2, ("{i}.down",)))
    )
    with pytest.raises(
        CorruptData,
        match=r"0\.gate \[3, 4\], 0\.up \[3, 4\], 0\.more \[4, 3\] do not make our decoder",
    ):
        taken(tmp_path, table, more=(4, 3))
    with pytest.raises(
        CorruptData, match=r"0\.down make a tensor of shape \[3, 4\], and our .* \[4, 3\]"
    ):
        taken(tmp_path / "theirs", TABLE, down=(3, 4))
    for root in (tmp_path, tmp_path / "theirs"):
        assert list((root / "checkpoints").iterdir()) == []


def test_boxes_non_boxes_are_refused() -> None:
    a, b = specs(FC1.replace("{i}", "0"), (6, 4), 2)
    assert box_of("fc1", (6, 4), (a, b)) == Box(a.key, (2, 6, 4), (0, 0, 0), 1, (6, 4))
    for wrong in ((b, a), (a,), (a, b._replace(key="other")), (a, b._replace(offset=(0, 4, 0)))):
        with pytest.raises(ValueError, match="fc1"):
            box_of("fc1", (6, 4), wrong)
