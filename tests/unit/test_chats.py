"""Chats of a file: what is read, what is refused with its line, and which chats make a sample."""

from __future__ import annotations

import json
import random
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.rules import apply
from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.batch import MicroBatch, averaged, chat_collator
from mtrain.data.chats import prepare as workers
from mtrain.data.chats.messages import NotJson, parse_chat, parse_line, parse_pair
from mtrain.data.chats.samples import NOTHING, ChatSamples, PairSamples
from mtrain.data.samples.packing import first_fit
from mtrain.errors import ConfigError, CorruptData, MtrainError
from tests.support.chats import chats_file, folder_of, turns
from tests.support.configs import errors, tiny
from tests.support.covering import some
from tests.support.forked import run_alone
from tests.support.tables import tables

TABLES = tables("chats")

VOCAB = 400
LENGTH = 96


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chats")
    dice = random.Random(0)
    folder_of(home, "chatml", marked=True)
    said = [
        [str(dice.randrange(10)) * dice.randrange(1, 12) for _ in range(dice.choice((2, 4)))]
        for _ in range(60)
    ]
    chats_file(home / "chats.jsonl", [turns(*one) for one in said])
    return home


def data_of(home: Path, **more: Any) -> DataConfig:
    given: dict[str, Any] = {
        "kind": "sft",
        "path": str(home / "chats.jsonl"),
        "cache_dir": str(home / "cache"),
    }
    given |= {
        "tokenizer": str(home / "tokenizer.json"),
        "seq_length": LENGTH,
        "split": (0.8, 0.1, 0.1),
    }
    return DataConfig(**(given | more))


def opened(home: Path, seed: int = 1, notes: list[str] | None = None, **more: Any) -> Any:
    data = data_of(home, **more)
    kept: list[str] = [] if notes is None else notes
    return open_splits(data, VOCAB, seed, prepare(data, kept.append), ("train",))


def said(line: Any) -> Any:
    return parse_chat(parse_line(json.dumps(line).encode()))


REFUSED = TABLES["refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_chats_non_chat_states_reason(name: str) -> None:
    line, why = REFUSED[name]
    with pytest.raises(CorruptData, match=why):
        said(line)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"\xff",
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_chats_bad_json_differs_from_non_chat(line: bytes) -> None:
    with pytest.raises(NotJson):
        parse_line(line)


def test_chats_shared_prefix_of_pair_is_not_learned(home: Path, tmp_path: Path) -> None:
    forms = [
        {
            "prompt": turns("What is it?"),
            "chosen": turns("a", "It is")[1:],
            "rejected": turns("a", "no")[1:],
        },
        {"chosen": turns("What is it?", "It is"), "rejected": turns("What is it?", "no")},
        {"prompt": "What is it?", "chosen": "It is", "rejected": "no"},
        {
            "conversations": [{"from": "human", "value": "What is it?"}],
            "chosen": {"from": "gpt", "value": "It is"},
            "rejected": {"from": "gpt", "value": "no"},
        },
    ]
    assert len({repr(parse_pair(form)) for form in forms}) == 1
    several = turns("a", "b", "What is it?", "It is")
    forms.append({"prompt": several[:3], "chosen": several[3:], "rejected": turns("a", "no")[1:]})
    path = chats_file(tmp_path / "pairs.jsonl", forms)
    samples = opened(home, kind="preference", path=str(path), split=(1.0, 0.0, 0.0)).train
    assert isinstance(samples, PairSamples)
    from mtrain.data.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(home / "tokenizer.json")
    found = set()
    for number in range(len(samples) // 2):
        both = [tokenizer.decode(s.tokens[s.learned].tolist()) for s in samples.pair(number)]
        found.add(tuple(both))
    assert found == {("It is", "no")}
    assert samples.batch([0, 1]).shape == (2, LENGTH + 1)
    assert (samples.batch([2, 3]) == [one.tokens for one in samples.pair(1)]).all()
    empty = {"prompt": "q", "chosen": "a", "rejected": " "}
    for wrong in ({"chosen": "a"}, {"prompt": "q", "chosen": "a", "rejected": "a"}, empty):
        with pytest.raises(CorruptData, match="rejected"):
            parse_pair(wrong)


def test_chats_system_field_precedes_messages_and_pairs() -> None:
    whole = turns("a", "b", system="be kind")
    assert said({"messages": whole[1:], "system": "be kind"}).messages == whole
    assert said({"messages": whole, "system": "be kind"}).messages == whole
    assert said({"messages": whole, "system": ""}).messages == whole
    for form in ({"prompt": "a", "chosen": "b"}, {"chosen": whole[1:]}):
        both = parse_pair(
            {
                "rejected": "no" if "prompt" in form else turns("a", "no"),
                "system": "be kind",
                **form,
            }
        )
        assert both[0].messages == whole
        assert [one.begin for one in both] == [2, 2]
        assert both[1].messages[0] == whole[0]


def test_chats_middle_is_not_moved() -> None:
    fim = {"data.fim.rate": 0.5, "data.fim.ids": [1, 2, 3]}
    found = errors(apply(tiny(), {"data.kind": "sft", **fim}))
    assert ("MT344", "data.fim.rate") in {(p.code, p.path) for p in found}


def test_chats_bad_json_lines_are_skipped_up_to_a_limit(home: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"messages": turns("a", "b")}).encode() for _ in range(6)]
    lines[2:2] = [b"{bad", b"", b'{"a": \xff}']
    (tmp_path / "chats.jsonl").write_bytes(b"\n".join(lines))
    splits = opened(home, path=str(tmp_path / "chats.jsonl"))
    assert splits.corpus.meta["documents"] == 6
    assert "2 lines of chats.jsonl are not JSON" in splits.remarks()[-1]
    rows = [
        json.loads(line)
        for line in (splits.corpus.prefix.parent / "rejects.jsonl").read_text().splitlines()
    ]
    assert [row["line"] for row in rows] == [3, 5]
    with pytest.raises(CorruptData, match=r"chats\.jsonl:5: not JSON.*data.bad_lines is 1"):
        opened(home, path=str(tmp_path / "chats.jsonl"), bad_lines=1)


@pytest.mark.parametrize("line", [{"messages": turns("a")}, {"text": "a"}])
def test_chats_unlearnable_is_refused_with_its_line(line: Any, home: Path, tmp_path: Path) -> None:
    path = chats_file(
        tmp_path / "chats.jsonl", [turns("a", "b"), turns("a", "b"), line, turns("a", "b")]
    )
    with pytest.raises(CorruptData, match=r"chats\.jsonl:3: "):
        opened(home, path=str(path))
    assert not list((home / "cache").glob(".building-*"))


def test_chats_cut_and_empty_ones_are_counted(home: Path, tmp_path: Path) -> None:
    given = [turns("a", "b"), turns("x" * 200, "b"), turns("a", "y" * 200), turns("a", "b")]
    path = chats_file(tmp_path / "chats.jsonl", given)
    splits = opened(home, path=str(path), split=(1.0, 0.0, 0.0))
    assert splits.train.describe() == {
        "documents": 3,
        "tokens": 23 + 96 + 23,
        "cut": 2,
        "left_out": 1,
        "samples": 3,
    }
    assert "2 chats of train are cut at data.seq_length 96; 1 of them" in splits.remarks()[1]
    with pytest.raises(
        ConfigError, match=r"=20: .*none of the 4 .* has anything to learn in its first 20"
    ):
        opened(home, path=str(path), split=(1.0, 0.0, 0.0), seq_length=20)
    with pytest.raises(ConfigError, match=r"split=.*the train split has none of the 4 chats"):
        opened(home, path=str(path), split=(0.0, 1.0, 0.0))


@pytest.mark.parametrize("packed", [False, True])
def test_chats_epoch_has_each_once_by_seed(packed: bool, home: Path) -> None:
    first, again, other = (opened(home, seed, packed=packed).train for seed in (1, 1, 2))
    count = len(first)
    assert (count < 48) == packed
    epochs = [
        [s.sample(n + e * count).documents for n in range(count)]
        for s in (first, other)
        for e in (0, 1)
    ]
    assert all(
        sorted(d for documents in epoch for d in documents) == list(range(48)) for epoch in epochs
    )
    assert len({tuple(epoch) for epoch in epochs}) == 4
    numbers = [7, 3, 2 * count + 7]
    assert (first.batch(numbers) == again.batch(numbers)).all()


def test_chats_packed_equal_separate(home: Path) -> None:
    alone, packed = (
        opened(home, packed=p, packed_multiple=4 if p else None).train for p in (False, True)
    )
    assert isinstance(packed, ChatSamples)
    whole = {}
    for n in range(len(alone)):
        sample = alone.sample(n)
        whole[sample.documents[0]] = [
            sample.tokens[sample.tokens != NOTHING],
            np.flatnonzero(sample.learned),
        ]
    collator = chat_collator(packed)
    for n in range(len(packed)):
        sample = packed.sample(n)
        batch = collator(torch.from_numpy(packed.batch([n])), np.array([n]))
        bounds = batch["cu_seqlens"].tolist()
        assert bounds[-1] == LENGTH
        assert all(start % 4 == 0 for start in bounds)
        for document, start, stop in zip(sample.documents, bounds, bounds[1:], strict=False):
            tokens, learned = whole[document]
            assert batch["tokens"][0, start : start + len(tokens)].tolist() == tokens.tolist()
            assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
            found = batch["loss_mask"][0, start:stop].nonzero().flatten()
            assert (found + 1).tolist() == learned.tolist()
            assert batch["labels"][0, start:stop][found].tolist() == tokens[learned].tolist()


def test_chats_first_fit_is_first_fit() -> None:
    dice = np.random.default_rng(0)
    for count in (0, 1, 2, 7, 300):
        sizes = dice.integers(1, 101, count)
        rooms: list[int] = []
        windows: list[list[int]] = []
        for item, size in enumerate(sizes.tolist()):
            at = next((i for i, room in enumerate(rooms) if room >= size), len(rooms))
            if at == len(rooms):
                rooms.append(100)
                windows.append([])
            rooms[at] -= size
            windows[at].append(item)
        order, starts = first_fit(sizes, 100)
        assert [order[a:b].tolist() for a, b in pairwise(starts)] == windows
    with pytest.raises(ValueError, match="does not fit"):
        first_fit(np.array([101]), 100)


def test_chats_prepared_file_is_written_once(home: Path, tmp_path: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", [turns("a", "b")] * 9)
    notes = list[str]()
    first = opened(home, notes=notes, path=str(path)).describe()
    again = opened(home, notes=notes, path=str(path)).describe()
    assert (len(notes), first) == (1, again)
    same_data(first, again)
    chats_file(path, [turns("a", "c")] * 9)
    changed = opened(home, notes=notes, path=str(path)).describe()
    learned = opened(home, notes=notes, path=str(path), loss_on="all").describe()
    assert len(notes) == 3
    for other in (changed, learned):
        with pytest.raises(ConfigError, match="fingerprint"):
            same_data(again, other)


def test_chats_altered_prepared_file_is_remade_or_refused(home: Path, tmp_path: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", [turns("a", "b")] * 9)
    corpus = opened(home, path=str(path)).corpus
    folder = corpus.prefix.parent
    for name in ("tokens.bin", "learned.bin", "chats.bin", "tokens.idx"):
        with open(folder / name, "ab") as file:
            file.write(b"\0\0")
        assert opened(home, path=str(path)).train.batch([0]).shape == (1, LENGTH + 1)
    (folder / "tokens.bin").write_bytes(b"\xff" * (folder / "tokens.bin").stat().st_size)
    with pytest.raises(CorruptData, match=r"chats\.jsonl:\d: token ids from 65535"):
        opened(home, path=str(path)).train.batch([0])


@pytest.mark.parametrize("average", ["token", "sample", "sequence"])
@pytest.mark.parametrize("packed", [False, True])
def test_chats_loss_average_follows_key(average: str, packed: bool) -> None:
    """Follow the definition: the mean over units of the mean over their predictions that count."""
    dice = np.random.default_rng(3)
    losses = dice.random((4, 12))
    mask = dice.random((4, 12)) < 0.5
    mask[2] = False
    bounds = [0, 5, 12, 24, 30, 36, 40, 48]
    units = {
        "token": [[i] for i in range(48)],
        "sequence": [list(range(12 * row, 12 * row + 12)) for row in range(4)],
        "sample": [list(range(a, b)) for a, b in pairwise(bounds)],
    }
    chosen = units["sequence" if average == "sample" and not packed else average]
    flat = losses.ravel()
    known = mask.ravel()
    means = [flat[unit][known[unit]].mean() for unit in chosen if known[unit].any()]
    shape = (1, 48) if packed else (4, 12)
    nothing = torch.zeros(shape, dtype=torch.int64)
    batch = MicroBatch(
        tokens=nothing,
        labels=nothing,
        loss_mask=torch.from_numpy(mask).float().view(shape),
        position_ids=nothing,
    )
    if packed:
        batch["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    made = averaged(batch, average, 4)
    total = float((torch.from_numpy(losses).view(shape) * made["loss_mask"].double()).sum())
    count = float(made.get("loss_counts", made["loss_mask"]).sum())
    assert count == len(means)
    assert total / count == pytest.approx(np.mean(means), rel=1e-6)


FOREVER = {
    "a loop": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a text of gigabytes": "{{ ('x' * 10 ** 11) | length }}",
    "texts without end": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "padding": "{{ 'x'.ljust(10 ** 11) }}",
}


@pytest.mark.full
@pytest.mark.parametrize("name", some(FOREVER, [name for name in FOREVER if name != "a power"]))
def test_chats_endless_template_is_stopped_and_named(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SECONDS", 1)
    (tmp_path / "t.jinja").write_text(FOREVER[name])
    with pytest.raises(
        CorruptData, match=r"chats\.jsonl:1: "
    ):  # it would take longer than a test may
        opened(home, chat_template=str(tmp_path / "t.jinja"), loss_on="all")


def test_chats_processor_time_is_limited(home: Path, tmp_path: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", [turns("a", "b")])

    def job() -> int:
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))  # less than a chat may take
        return len(opened(home, path=str(path), split=(1.0, 0.0, 0.0)).train)

    assert run_alone(job) == 1


GOOD = json.dumps(
    {"messages": turns("What is it?", "It is a cat ☃", "and?", "12", system="S")},
    ensure_ascii=False,
)
PIECES = [
    "{{ ''.__class__ }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.clear() }}",
    "{{ self.__init__ }}",
    "{{ 1/0 }}",
    "{% import 'os' as o %}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception(messages) }}",
    "{% if",
    "{{",
    "{{ lipsum() }}",
    "{{ messages[99].content }}",
    "{{ namespace(_x=1) }}",
    "{% generation %}",
    "{% break %}",
    "\0",
    "{{ ('%s' * 9) % (1,) }}",
    "{{ strftime_now(3) }}",
    "{{ messages | tojson(indent='x') }}",
    "{{ nothing.x }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% extends 'x' %}",
    "{{ '{}'.format(m.__class__) }}",
]


@pytest.mark.parametrize("rounds", [24, pytest.param(500, marks=pytest.mark.full)])
def test_chats_hostile_lines_name_the_file(rounds: int, home: Path, tmp_path: Path) -> None:
    from tests.support.chats import template_of

    (tmp_path / "secret").write_text("of somebody else")
    before = sorted(path.name for path in tmp_path.iterdir())
    outcomes = set()
    for seed in range(rounds):
        dice = random.Random(seed)
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        line = bytearray(GOOD.encode())
        template = template_of("chatml", marked=bool(seed % 3))
        if seed % 2:
            for _ in range(dice.randrange(1, 6)):
                at = dice.randrange(len(line))
                line[at : at + dice.randrange(3)] = bytes(
                    dice.choices(b'{}[]",:\\u0\xff\x00ax1', k=dice.randrange(3))
                )
        else:
            at = dice.randrange(len(template))
            template = template[:at] + dice.choice(PIECES) + template[at + dice.randrange(9) :]
        (folder / "chats.jsonl").write_bytes(b"\n".join([line, GOOD.encode(), line]))
        (folder / "t.jinja").write_text(template)
        given = {
            "path": str(folder / "chats.jsonl"),
            "chat_template": str(folder / "t.jinja"),
            "bad_lines": seed % 4,
        }
        told = _told(home, cache_dir=f"{folder}/cache", split=(1.0, 0.0, 0.0), **given)
        assert "Traceback" not in told
        assert not told or str(folder) in told or "data.split" in told
        outcomes.add(bool(told))
    assert outcomes == {True, False}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "in") == before


def _told(home: Path, **given: Any) -> str:
    """Return the error for chats that are refused; empty if their first sample can be read."""
    try:
        opened(home, **given).train.batch([0])
    except MtrainError as error:
        return str(error)
    return ""
