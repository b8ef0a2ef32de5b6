"""Finished corpora: changes are detected, derived corpora are right, and runs read the manifest."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.cli.main import main
from mtrain.config.disk.token_files import dump, read_manifest
from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare
from mtrain.data.store.indexed import IndexedDataset, IndexedWriter, write_index
from mtrain.errors import ConfigError, CorruptData
from tests.support.token_corpora import bpe, documents, jsonl, sentencepiece

NOT_OURS = re.compile(r"unexpected [A-Z]\w+:")
ENDS = (".bin", ".idx", ".manifest.json")


def data(*words: object) -> int:
    return main(["data", *map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `tokenizer.json`, `docs.jsonl` and the corpus `c`."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = documents(200, 11)
    jsonl(folder / "docs.jsonl", [*texts, *texts[:20], texts[30] + " and more"])
    words = (f"tokenizer={bpe(folder)}", "workers=1")
    assert data("tokenize", folder / "docs.jsonl", f"out={folder / 'c'}", *words) == 0
    return folder


def mutations(rng: np.random.Generator) -> list[tuple[str, Callable[[bytes], bytes]]]:
    """Return named functions that each change the bytes of a file."""

    def flip(raw: bytes) -> bytes:
        at = int(rng.integers(len(raw)))
        bit = 1 << int(rng.integers(8))
        return raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]

    def cut(raw: bytes) -> bytes:
        return raw[: int(rng.integers(len(raw)))]

    def more(raw: bytes) -> bytes:
        return raw + rng.bytes(int(rng.integers(1, 9)))

    def zeros(raw: bytes) -> bytes:
        at = int(rng.integers(len(raw)))
        return raw[:at] + bytes(min(8, len(raw) - at)) + raw[at + 8 :]

    def swap(raw: bytes) -> bytes:
        a, b = sorted(int(i) for i in rng.integers(0, len(raw) - 8, 2))
        if b >= a + 4:
            return raw[:a] + raw[b : b + 4] + raw[a + 4 : b] + raw[a : a + 4] + raw[b + 4 :]
        return flip(raw)

    def twice(raw: bytes) -> bytes:
        at = int(rng.integers(len(raw)))
        many = int(rng.integers(1, 9))
        return raw[:at] + raw[at : at + many] + raw[at:]

    return [
        ("flip", flip),
        ("cut", cut),
        ("more", more),
        ("zeros", zeros),
        ("swap", swap),
        ("twice", twice),
    ]


@pytest.mark.parametrize("many", [60, pytest.param(2000, marks=pytest.mark.full)])
def test_corpora_file_change_is_reported(
    made: Path, tmp_path: Path, many: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(many)
    kept = {end: (made / f"c{end}").read_bytes() for end in ENDS}
    ways = mutations(rng)
    for end, raw in kept.items():
        (tmp_path / f"c{end}").write_bytes(raw)
    assert data("verify", tmp_path / "c") == 0
    done = 0
    while done < many:
        end = ENDS[int(rng.integers(3))]
        name, change = ways[int(rng.integers(len(ways)))]
        changed = change(kept[end])
        if changed == kept[end]:
            continue
        (tmp_path / f"c{end}").write_bytes(changed)
        capsys.readouterr()
        assert data("verify", tmp_path / "c") == 4, (end, name)
        err = capsys.readouterr().err
        assert f"c{end}" in err or "c.bin" in err or "c.idx" in err
        assert "Traceback" not in err
        assert not NOT_OURS.search(err), err
        (tmp_path / f"c{end}").write_bytes(kept[end])
        done += 1


def test_corpora_missing_or_swapped_file_is_reported(made: Path, tmp_path: Path) -> None:
    words = ("sample", made / "c", f"out={tmp_path / 's'}", "documents=100")
    assert data(*words) == 0
    for end in ENDS:
        for name in ENDS:
            shutil.copy(made / f"c{name}", tmp_path / f"c{name}")
        (tmp_path / f"c{end}").unlink()
        assert data("verify", tmp_path / "c") == 2
        shutil.copy(tmp_path / f"s{end}", tmp_path / f"c{end}")
        assert data("verify", tmp_path / "c") == 4
    shutil.copy(made / "c.bin", tmp_path / "c.bin")
    shutil.copy(made / "c.idx", tmp_path / "c.idx")
    (tmp_path / "c.manifest.json").unlink()
    assert data("verify", tmp_path / "c", "manifest=false") == 0
    assert data("verify", tmp_path / "c", "manifest=false", "vocab_size=300") == 4


def test_corpora_negative_id_is_named_with_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.zeros(64, np.int64)
    tokens[30] = -1
    with IndexedWriter(tmp_path / "c", np.dtype("<i4")) as writer:
        writer.add(tokens, np.array([20, 20, 24]))
    assert data("verify", tmp_path / "c", "manifest=false", "vocab_size=300") == 4
    said = capsys.readouterr().err
    assert "token id -1" in said
    assert "document 1" in said


def test_corpora_rewritten_manifest_must_be_true(made: Path, tmp_path: Path) -> None:
    for end in ENDS:
        shutil.copy(made / f"c{end}", tmp_path / f"c{end}")
    held = read_manifest(made / "c")
    assert held is not None
    for name, value in (
        ("documents", 1),
        ("largest_id", 10),
        ("dtype", "int32"),
        ("tokens", 5),
        ("vocab_size", 20),
    ):
        (tmp_path / "c.manifest.json").write_bytes(dump(held.body | {name: value}))
        assert data("verify", tmp_path / "c") == 4, name


HOSTILE: list[dict[str, Any]] = [
    {"inputs": None},
    {"inputs": [1]},
    {"inputs": [{}]},
    {"inputs": [{"file": "a", "tokens": "many"}]},
    {"eod": "x"},
    {"eod": -5},
    {"tokenizer": {"sha256": "x", "files": [1]}},
    {"tokenizer": {"sha256": "x", "files": 3}},
    {"vocab_size": -1},
    {"tokens": 10**400},
]


@pytest.mark.parametrize(
    "wrong", [HOSTILE[0], *(pytest.param(one, marks=pytest.mark.full) for one in HOSTILE[1:])]
)
def test_corpora_ill_typed_manifest_is_refused_in_words(
    made: Path, tmp_path: Path, wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for end in ENDS:
        shutil.copy(made / f"c{end}", tmp_path / f"c{end}")
    held = read_manifest(made / "c")
    assert held is not None
    (tmp_path / "c.manifest.json").write_bytes(dump(held.body | wrong))
    codes = [data(word, tmp_path / "c") for word in ("stats", "inspect", "verify")]
    codes.append(data("inspect", tmp_path / "c", "doc=1", f"tokenizer={made / 'tokenizer.json'}"))
    assert set(codes) <= ({0, 2, 4} if "tokenizer" in wrong else {4})
    assert not NOT_OURS.search(capsys.readouterr().err)


def test_corpora_unknown_ids_are_reported_in_words(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for end in ENDS[:2]:
        shutil.copy(made / f"c{end}", tmp_path / f"c{end}")
    assert data("inspect", tmp_path / "c", "doc=30", f"tokenizer={sentencepiece(tmp_path)}") == 4
    assert "ids cannot be decoded" in capsys.readouterr().err


def test_corpora_replacement_removes_all_of_the_old(made: Path, tmp_path: Path) -> None:
    words = ("merge", made / "c", f"out={tmp_path / 'm'}")
    for end in (".rejects.jsonl", ".removed.jsonl"):
        (tmp_path / f"m{end}").write_text("{}\n")
        assert data(*words) == 2
    assert data(*words, "overwrite=true") == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"m{end}" for end in ENDS}


def test_corpora_foreign_corpus_gets_a_manifest(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "c"
    words = ["data=indexed", f"data.path={tmp_path / 'c'}", "data.seq_length=16"]
    for end in ENDS[:2]:
        shutil.copy(made / f"c{end}", tmp_path / f"c{end}")
    assert main(["check", *words]) == 0
    assert f"data verify {prefix} write=true" in capsys.readouterr().out
    assert data("verify", prefix) == 2
    assert data("verify", prefix, "write=true", "vocab_size=20") == 4
    assert not prefix.with_name("c.manifest.json").exists()
    assert data("verify", prefix, "write=true", f"tokenizer={made / 'tokenizer.json'}") == 0
    held = read_manifest(prefix)
    theirs = read_manifest(made / "c")
    assert held is not None
    assert theirs is not None
    for name in ("documents", "sequences", "tokens", "largest_id", "vocab_size", "dtype", "files"):
        assert held.body[name] == theirs.body[name]
    assert held.tokenizer_sha256 == theirs.tokenizer_sha256
    capsys.readouterr()
    assert main(["check", *words]) == 0
    assert "write=true" not in capsys.readouterr().out
    raw = bytearray((tmp_path / "c.bin").read_bytes())
    raw[100] ^= 1
    (tmp_path / "c.bin").write_bytes(raw)
    assert data("verify", prefix) == 4
    assert data("verify", prefix, "write=true") == 4, "an existing manifest is not written again"


def tokens(prefix: Path) -> list[list[int]]:
    held = IndexedDataset(prefix)
    ends = [held.document_start(i) for i in range(held.num_documents + 1)]
    return [held.tokens[a:b].tolist() for a, b in pairwise(ends)]


def test_corpora_split_and_merge_round_trip(made: Path, tmp_path: Path) -> None:
    assert data("split", made / "c", f"out={tmp_path / 's'}", "shares=0.5,0.3,0.2") == 0
    parts = [tmp_path / f"s-{name}" for name in ("train", "validation", "test")]
    assert data("merge", *parts, f"out={tmp_path / 'm'}") == 0
    for end in ENDS[:2]:
        assert (tmp_path / f"m{end}").read_bytes() == (made / f"c{end}").read_bytes()
    assert data("verify", *parts, tmp_path / "m") == 0
    assert data("merge", *parts, f"out={tmp_path / 'm'}") == 2
    assert data("split", made / "c", f"out={tmp_path / 'd'}", "shares=1,1", "seed=3") == 0
    drawn = [tokens(tmp_path / f"d-{name}") for name in ("train", "validation")]
    assert sorted(map(tuple, drawn[0] + drawn[1])) == sorted(map(tuple, tokens(made / "c")))
    assert drawn[0] + drawn[1] != tokens(made / "c")


def test_corpora_sample_has_unique_documents_within_tokens(made: Path, tmp_path: Path) -> None:
    whole = tokens(made / "c")
    assert data("sample", made / "c", f"out={tmp_path / 'a'}", "tokens=1000") == 0
    found = tokens(tmp_path / "a")
    assert sum(map(len, found)) <= 1000
    places = iter(whole)
    assert all(any(one == other for other in places) for one in found), "in their order"
    assert data("sample", made / "c", f"out={tmp_path / 'b'}", "documents=7", "tokens=9") == 2


def test_corpora_duplicate_documents_are_removed(made: Path, tmp_path: Path) -> None:
    assert data("dedup", made / "c", f"out={tmp_path / 'a'}") == 0
    found = list(map(tuple, tokens(tmp_path / "a")))
    assert len(found) == len(set(found))
    assert set(found) == set(map(tuple, tokens(made / "c")))
    rows = [json.loads(line) for line in (tmp_path / "a.removed.jsonl").read_text().splitlines()]
    whole = tokens(made / "c")
    assert all(whole[row["document"]] == whole[row["repeats"]] for row in rows)
    assert len(rows) + len(found) == len(whole)
    assert (
        data("dedup", made / "c", f"out={tmp_path / 'b'}", "method=minhash", "threshold=0.7") == 0
    )
    near = [json.loads(line) for line in (tmp_path / "b.removed.jsonl").read_text().splitlines()]
    assert {"document": 220, "repeats": 30} in near
    assert len(rows) < len(near) < len(rows) + 40


def test_corpora_two_tokenizers_are_not_joined(made: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    words = (f"tokenizer={bpe(other, 300)}", "workers=1")
    assert data("tokenize", made / "docs.jsonl", f"out={tmp_path / 'o'}", *words) == 0
    assert data("merge", made / "c", tmp_path / "o", f"out={tmp_path / 'm'}") == 2
    assert not (tmp_path / "m.bin").exists()
    assert data("inspect", made / "c", "doc=0", f"tokenizer={other / 'tokenizer.json'}") == 2


def test_corpora_inspect_shows_boundaries_and_counts(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data("inspect", made / "c", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 221 == sum(row["documents"] for row in found["lengths"])
    assert data("inspect", made / "c", "--doc", "220", "--tokenizer", made / "tokenizer.json") == 0
    out = capsys.readouterr().out
    assert "|<|endoftext|>" in out
    assert " and more" in out.replace("|", "")
    assert data("inspect", made / "c", "doc=221") == 2
    assert data("--json", "stats", made / "c") == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    texts = [json.loads(line)["text"] for line in (made / "docs.jsonl").read_text().splitlines()]
    assert row["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert row["fertility"] == pytest.approx(
        row["tokens"] / sum(len(text.split()) for text in texts)
    )


def test_corpora_trained_tokenizer_works(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    words = (made / "docs.jsonl", f"out={out}")
    assert data("train-tokenizer", *words, "vocab_size=350", "special=<eos>", "special=<x>") == 0
    assert data("train-tokenizer", *words) == 2, "it is there"
    held = json.loads(out.read_text())
    assert [token["content"] for token in held["added_tokens"]] == ["<eos>", "<x>"]
    assert (
        data(
            "tokenize",
            made / "docs.jsonl",
            f"out={tmp_path / 'c'}",
            f"tokenizer={out}",
            "eod_token=<x>",
        )
        == 0
    )
    assert tokens(tmp_path / "c")[0][-1] == 1


def indexed(**more: Any) -> DataConfig:
    return DataConfig(kind="indexed", seq_length=16, **more)


def test_corpora_run_reads_the_manifest(made: Path, tmp_path: Path) -> None:
    corpus = prepare(indexed(path=str(made / "c")))
    assert (corpus.meta["eod"], corpus.meta["largest_id"]) == (0, 399)
    assert open_splits(indexed(path=str(made / "c"), packed=True), 400, 0, corpus).eod == 0
    with pytest.raises(ConfigError, match="MT612"):
        open_splits(indexed(path=str(made / "c")), 399, 0, corpus)
    with pytest.raises(ConfigError, match=r"MT355.*id 0 ends documents"):
        open_splits(
            indexed(path=str(made / "c"), fim={"rate": 0.5, "ids": (0, 1, 2)}), 400, 0, corpus
        )
    (other := tmp_path / "other").mkdir()
    wrong = bpe(other, 300)
    with pytest.raises(ConfigError, match="MT620"):
        prepare(indexed(path=str(made / "c"), tokenizer=str(wrong)))
    for end in ENDS:
        shutil.copy(made / f"c{end}", tmp_path / f"c{end}")
    shutil.copy(made / "docs.jsonl", tmp_path / "c.bin")
    write_index(
        tmp_path / "c.idx", np.array([(tmp_path / "c.bin").stat().st_size // 2]), np.dtype("uint16")
    )
    (tmp_path / "c.bin").write_bytes(
        (tmp_path / "c.bin").read_bytes()[: (tmp_path / "c.bin").stat().st_size // 2 * 2]
    )
    with pytest.raises(CorruptData, match=r"manifest\.json records"):
        prepare(indexed(path=str(tmp_path / "c")))


def test_corpora_check_reads_the_manifest(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "check",
        "data=indexed",
        f"data.path={made / 'c'}",
        "data.seq_length=16",
        "trainer.sample_tokens=0",
    ]
    assert main([*words, "data.packed=true", "data.eod_mask_loss=true"]) == 0, capsys.readouterr()
    with IndexedWriter(tmp_path / "bare", np.dtype(np.uint16)) as writer:  # without a manifest
        writer.add(np.ones(200, np.uint16))
    own = f"data.validation_blend=[{tmp_path / 'bare'}]"
    assert main([*words, "data.packed=true", own]) == 2
    assert "[MT608]" in capsys.readouterr().err
    assert main([*words, "model.vocab_size=384"]) == 4
    assert "[MT612]" in capsys.readouterr().err
    (other := tmp_path / "other").mkdir()
    assert main([*words, f"data.tokenizer={bpe(other, 300)}"]) == 2
    assert "[MT620]" in capsys.readouterr().err
    for end in ENDS:
        shutil.copy(made / f"c{end}", tmp_path / f"c{end}")
    (tmp_path / "c.manifest.json").write_bytes(
        (made / "c.manifest.json").read_bytes().replace(b'"eod": 0', b'"eod": 1')
    )
    assert main([*words[:2], f"data.path={tmp_path / 'c'}", *words[3:]]) == 4
    assert "[MT611]" in capsys.readouterr().err


def with_lengths(prefix: Path, lengths: list[int]) -> Path:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.zeros(sum(lengths), np.int64), np.array(lengths))
    return prefix


@pytest.mark.parametrize("seed", range(4))
def test_corpora_sample_lacks_less_than_a_document(tmp_path: Path, seed: int) -> None:
    lengths = [12_000, 40_000, 3_000, 20_100, 39_900, 9_000, 700, 55_000]
    source = with_lengths(tmp_path / "c", lengths)
    for asked in (10_000, 60_000, 3_000):
        out = tmp_path / f"s{asked}"
        assert data("sample", source, f"out={out}", f"tokens={asked}", f"seed={seed}") == 0
        taken = [
            int(IndexedDataset(out).document_start(i + 1) - IndexedDataset(out).document_start(i))
            for i in range(IndexedDataset(out).num_documents)
        ]
        left_out = sorted(lengths)
        for length in taken:
            left_out.remove(length)
        missing = asked - sum(taken)
        assert 0 <= missing < min(left_out), "another document fits"


def test_corpora_short_sample_states_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_lengths(tmp_path / "c", [12_000, 40_000, 9_000])
    assert data("sample", source, f"out={tmp_path / 'a'}", "tokens=8999") == 2
    assert (
        "there are 3 documents with 61000 tokens, and the shortest has 9000"
        in capsys.readouterr().err
    )
    assert data("sample", source, f"out={tmp_path / 'b'}", "tokens=10000") == 0
    assert (
        "1000 tokens fewer than the 10000 that were asked for: the shortest document left out has"
        " 12000" in capsys.readouterr().out
    )
    assert data("sample", source, f"out={tmp_path / 'd'}", "documents=9") == 0
    assert "9 documents were asked for, and these are all" in capsys.readouterr().out
    assert data("sample", source, f"out={tmp_path / 'e'}", "tokens=61000") == 0
    assert "fewer" not in capsys.readouterr().out
