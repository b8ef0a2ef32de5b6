"""Images with texts: what a record says, what is read of an image, and what is refused by name."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mtrain.config.disk.files import records_of
from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.image_text import (
    IMAGE,
    MEAN,
    NOTHING,
    STD,
    ImageTextSamples,
    encode_record,
    inside,
    load,
    parse_record,
)
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, CorruptData, MtrainError
from mtrain.models.llava.config import LlavaConfig
from mtrain.models.llava.data import _batch, _of_records, spread
from tests.support.shapes import folder_of_shapes
from tests.support.tables import tables

TABLES = tables("image_text")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    return folder_of_shapes(folder / "shapes", 20, conversations=True).parent


def data_of(home: Path, **more: Any) -> DataConfig:
    given: dict[str, Any] = {
        "path": str(home / "shapes"),
        "cache_dir": str(home / "cache"),
        "split": (0.5, 0.3, 0.2),
    }
    return DataConfig(kind="image_text", seq_length=48, tokenizer_vocab_size=300, **(given | more))


def samples(home: Path, seed: int = 1, **more: Any) -> ImageTextSamples:
    data = data_of(home, **more)
    train = open_splits(data, 512, seed, prepare(data, lambda note: None)).train
    assert isinstance(train, ImageTextSamples)
    return train


def tokenizer_of(home: Path) -> Tokenizer:
    found = prepare(data_of(home), lambda note: None).tokenizer
    assert found is not None
    return Tokenizer(found)


def test_image_text_learns_answer_and_its_end(home: Path) -> None:
    tokenizer = tokenizer_of(home)
    turns = [
        ("human", "What? <image>\nSay."),
        ("gpt", "A red bar."),
        ("human", "Sure?"),
        ("gpt", "Yes."),
    ]
    line = {
        "image": "a.png",
        "conversations": [{"from": who, "value": said} for who, said in turns],
    }
    ids, learned = encode_record(parse_record(json.dumps(line).encode()), tokenizer)
    assert ids.count(IMAGE) == 1
    answers = [i for i, known in zip(ids, learned, strict=True) if known]
    assert tokenizer.decode(answers) == " A red bar. Yes."
    assert answers.count(tokenizer.eod or 0) == 2
    words = tokenizer.decode([i for i in ids if i >= 0])
    assert words == "USER: What? \nSay. ASSISTANT: A red bar.USER: Sure? ASSISTANT: Yes."


@pytest.mark.parametrize(
    ("line", "images", "places"),
    [
        ({"image": "a.png", "text": "red"}, 1, [0]),
        ({"image": ["a.png", "b.png"], "text": "one <image> two <image>"}, 2, None),
        ({"text": "no image"}, 0, []),
        ({"image": ["a.png", "b.png"], "text": "both"}, 2, [0, 1]),
    ],
)
def test_image_text_images_stand_in_text_or_first(
    line: dict[str, Any], images: int, places: list[int] | None, home: Path
) -> None:
    record = parse_record(json.dumps(line).encode())
    ids, learned = encode_record(record, tokenizer_of(home))
    found = [i for i, number in enumerate(ids) if number == IMAGE]
    assert len(record.images) == len(found) == images
    assert places is None or found == places
    assert not any(learned[i] for i in found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "object"),
        ("{", "JSON"),
        ('{"image": "a.png"}', "either text or conversations"),
        ('{"image": 3, "text": "a"}', "neither a path"),
        ('{"image": "a.png", "text": "<image> and <image>"}', "2 times <image> for 1 images"),
        ('{"text": "<image>"}', "1 times <image> for 0 images"),
        ('{"text": "  "}', "text is empty, or not a string"),
        ('{"image": "a.png", "text": "half \\ud83d"}', r"\\ud83d is half of a surrogate pair"),
        (
            '{"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]}',
            "turn 1",
        ),
        ('{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]}', "turn 2"),
    ],
)
def test_image_text_non_record_states_reason(line: str, said: str) -> None:
    with pytest.raises(CorruptData, match=said):
        parse_record(line.encode())


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../shapes.jsonl", "images/../../x.png", "", "link/x.png"]
)
def test_image_text_outside_path_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link").symlink_to(tmp_path)
    with pytest.raises(CorruptData, match="folder"):
        inside(tmp_path / "folder", name)


def _bomb(path: Path) -> None:
    """Write a PNG of a few bytes whose header claims 30,000 by 30,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def _long(path: Path) -> None:
    Image.new("RGB", (1_000_000, 1)).save(path)


def _cut(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:300])


BAD = {
    "a bomb": _bomb,
    "long and narrow": _long,
    "cut": _cut,
    "text": lambda path: path.write_text("no image"),
    "empty": lambda path: path.write_bytes(b""),
    "a program for another program": lambda path: path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_image_text_unreadable_image_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.png"
    BAD[name](path)
    with pytest.raises(CorruptData, match=r"/bad\.png: "):
        load(path, 336)


def test_image_text_bad_image_has_line_and_name(tmp_path: Path) -> None:
    folder_of_shapes(tmp_path / "shapes", 6)
    for file in (tmp_path / "shapes/images").iterdir():
        file.write_bytes(b"no image")
    train = samples(tmp_path)
    with pytest.raises(CorruptData, match=r"shapes\.jsonl:\d: .*images/000\d\.png"):
        train.images([0], 32)


@pytest.mark.parametrize(
    ("line", "said"),
    TABLES["records"],
)
def test_image_text_records_are_verified_before_training(
    line: str, said: str, tmp_path: Path
) -> None:
    folder = folder_of_shapes(tmp_path / "shapes", 20)
    (folder / "round.png").symlink_to("round.png")
    with (folder / "shapes.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CorruptData, match=said):
        prepare(data_of(tmp_path), lambda note: None)
    assert not list((tmp_path / "cache").glob("images-*/meta.json"))


def test_image_text_emptied_text_is_padding(tmp_path: Path) -> None:
    folder = folder_of_shapes(tmp_path / "shapes", 4)
    (folder / "shapes.jsonl").write_text('{"text": "aa"}\n' * 4)
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    model = {"type": "BPE", "vocab": {"b": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "normalizer": step, "model": model})
    )
    train = samples(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    assert (train.batch([0]) == NOTHING).all()


@pytest.mark.parametrize("names", [(), ("a.jsonl", "b.jsonl")])
def test_image_text_folder_has_one_record_file(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(ConfigError, match="one must tell which text"):
        prepare(data_of(tmp_path, path=str(tmp_path)), lambda note: None)


def test_image_text_folder_named_as_records_is_none(tmp_path: Path) -> None:
    folder_of_shapes(tmp_path / "shapes", 4)
    (tmp_path / "shapes/old.jsonl").mkdir()
    assert records_of(tmp_path / "shapes", "which") == (tmp_path / "shapes/shapes.jsonl", "")


def test_image_text_unreadable_records_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_shapes(tmp_path / "shapes", 4)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "jsonl" not in str(path) and access(path, mode)
    )
    found, rule = records_of(tmp_path / "shapes", "which")
    assert (found, rule) == (None, "shapes.jsonl cannot be read: permission denied")


def test_image_text_image_is_resized_cropped_normalised(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = (255, 128, 0)  # only the middle is kept
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    found = load(tmp_path / "wide.png", 20)
    expected = (np.array([1.0, 128 / 255, 0.0]) - MEAN) / STD
    assert found.shape == (3, 20, 20)
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found, np.broadcast_to(expected[:, None, None], found.shape), atol=1e-5
    )


def test_image_text_epoch_has_each_record_once_by_seed(
    home: Path,
) -> None:
    first = samples(home)
    again = samples(home)
    other = samples(home, seed=2)
    count = len(first)
    epochs = [
        [s.record_of(n + e * count) for n in range(count)] for s in (first, other) for e in range(2)
    ]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    numbers = np.array([7, 3, 2 * count + 7])
    assert (first.batch(numbers) == again.batch(numbers)).all()
    assert (first.images(numbers, 24) == again.images(numbers, 24)).all()


def test_image_text_wanted_split_has_a_record(tmp_path: Path) -> None:
    for count, sizes in ((20, [18, 1, 1]), (3, [1, 1, 1]), (2, [1, 1, None])):
        folder_of_shapes(tmp_path / str(count) / "shapes", count)
        data = data_of(tmp_path / str(count), split=(0.98, 0.01, 0.01))
        splits = open_splits(data, 512, 1, prepare(data, lambda note: None))
        assert [
            part and len(part) for part in (splits.train, splits.validation, splits.test)
        ] == sizes


def test_image_text_folder_change_is_detected(home: Path, tmp_path: Path) -> None:
    folder_of_shapes(tmp_path / "shapes", 20, seed=5)
    seen = []
    for place in (home, tmp_path):
        data = data_of(place)
        seen.append(open_splits(data, 512, 1, prepare(data, lambda note: None)).describe())
    same_data(seen[0], seen[0])
    with pytest.raises(ConfigError, match="fingerprint"):
        same_data(seen[0], seen[1])


def test_image_text_short_text_padding_is_not_learned() -> None:
    own = LlavaConfig(image_size=4, patch_size=2, image_token_id=9)
    window = torch.tensor([5, IMAGE, 6, 7, NOTHING, NOTHING, NOTHING, NOTHING])
    learned = torch.tensor([True, False, True, True, False, False, False, False])
    tokens, known = spread(own, window, learned)
    assert tokens.tolist() == [5, IMAGE, IMAGE, IMAGE, IMAGE, 6, 7, NOTHING]
    batch = _batch(own, tokens[None], known[None], torch.zeros(1, 3, 4, 4))
    assert batch["tokens"].tolist() == [[5, 9, 9, 9, 9, 6, 7]]
    assert batch["labels"].tolist() == [[9, 9, 9, 9, 6, 7, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0]]


def test_image_text_image_token_zero_is_not_padding() -> None:
    own = LlavaConfig(image_size=4, patch_size=2, image_token_id=0)
    window = torch.tensor([5, IMAGE, 6, *[NOTHING] * 7])
    tokens, known = spread(own, window, window >= 0)
    batch = _batch(own, tokens[None], known[None], torch.zeros(1, 3, 4, 4))
    assert int((batch["tokens"] == own.image_token_id).sum()) == own.image_tokens


@pytest.mark.parametrize(
    ("image_size", "letter", "said"),
    [
        (28, None, "its images take 49 tokens, .* do not fit data.seq_length 48"),
        (4, "USER", "which stands for images"),
    ],
)
def test_image_text_unsuitable_record_has_its_line(
    image_size: int, letter: str | None, said: str, home: Path
) -> None:
    train = samples(home)
    image = 500 if letter is None else tokenizer_of(home).encode(letter)[0]
    own = LlavaConfig(image_size=image_size, patch_size=4, image_token_id=image)
    with pytest.raises(MtrainError, match=rf"shapes\.jsonl:\d+: .*{said}"):
        _of_records(own, train, torch.from_numpy(train.batch(np.array([0]))), np.array([0]))


def test_image_text_image_beyond_sample_has_its_line(tmp_path: Path) -> None:
    """Refuse an image whose patches would take the places of the next sample's image."""
    folder = folder_of_shapes(tmp_path / "shapes", 4)
    line = {"image": "images/0000.png", "text": "a red bar " * 60 + "<image>"}
    (folder / "shapes.jsonl").write_text((json.dumps(line) + "\n") * 4)
    train = samples(tmp_path)
    own = LlavaConfig(image_size=8, patch_size=4, image_token_id=500)
    with pytest.raises(
        CorruptData, match=r"shapes\.jsonl:\d: its images take 4 tokens, .* data.seq_length 48"
    ):
        _of_records(own, train, torch.from_numpy(train.batch(np.array([0]))), np.array([0]))
