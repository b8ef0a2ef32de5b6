"""Faults in a run's files: `check` refuses them before any rank starts."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.api import load
from mtrain.cli import check
from mtrain.cli.checkpoint.verdict import answered
from mtrain.config.compose.dump import run_yaml
from mtrain.config.disk.token_files import HEADER, TokenFiles, split_documents, tokenizer_facts
from mtrain.data import open_splits, prepare
from mtrain.data.store.indexed import IndexedDataset, IndexedWriter
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, CorruptData, MtrainError, Problem
from tests.support.configs import LAPTOP
from tests.support.forked import run_without_privileges
from tests.support.saved import committed

VOCAB = {"a": 0, "b": 1, "<|endoftext|>": 2}
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "BPE", "vocab": VOCAB, "merges": []},
    "added_tokens": [],
}
ODD_MODELS: tuple[dict[str, Any], ...] = (
    {"type": "other"},
    {"vocab": [["a", 0.0]]},
    {"type": "Unigram", "unk_id": None},
    {"vocab": {"a": True}},
    {"vocab": {"a": 1 << 32}},
)
"""Values that make TOKENIZER invalid."""


def corpus(prefix: Path, documents: int = 40, largest: int = 4000) -> Path:
    """Write documents of 100 tokens."""
    tokens = np.random.default_rng(0).integers(0, largest, 100 * documents).astype(np.uint16)
    tokens[:4] = largest - 1
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add(tokens, np.full(documents, 100))
    return prefix


def refused(words: list[str]) -> ConfigError:
    """Return the error with which `check` refuses a command line."""
    with pytest.raises(ConfigError) as caught:
        load(words, LAPTOP, {})
    return caught.value


def errors(words: list[str]) -> list[Problem]:
    return [p for p in refused(words).problems if p.severity == "error"]


def patched(path: Path, offset: int, data: bytes) -> None:
    body = bytearray(path.read_bytes())
    body[offset : offset + len(data)] = data
    path.write_bytes(body)


def _pointer_of_the_last(prefix: Path) -> None:
    patched(prefix.with_suffix(".idx"), HEADER.size + 4 * 40 + 8 * 39, struct.pack("<q", 7))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "magic": lambda p: patched(p.with_suffix(".idx"), 0, b"X"),
    "version": lambda p: patched(p.with_suffix(".idx"), 9, b"\x02"),
    "dtype": lambda p: patched(p.with_suffix(".idx"), 17, b"\x06"),
    "another dtype": lambda p: patched(p.with_suffix(".idx"), 17, b"\x04"),
    "sequences": lambda p: patched(p.with_suffix(".idx"), 18, struct.pack("<Q", 1 << 60)),
    "documents": lambda p: patched(
        p.with_suffix(".idx"), HEADER.size + 12 * 40 + 8 * 40, struct.pack("<q", 39)
    ),
    "pointer": _pointer_of_the_last,
    "pointers": lambda p: patched(
        p.with_suffix(".idx"), HEADER.size + 4 * 40, struct.pack("<40q", *([-4] * 39), 7)
    ),
    "indices": lambda p: patched(
        p.with_suffix(".idx"), HEADER.size + 12 * 40 + 8, struct.pack("<39q", *[1 << 60] * 39)
    ),
    "cut index": lambda p: os.truncate(p.with_suffix(".idx"), 200),
    "short index": lambda p: os.truncate(p.with_suffix(".idx"), 5),
    "cut tokens": lambda p: os.truncate(p.with_suffix(".bin"), 200),
    "more tokens": lambda p: p.with_suffix(".bin").write_bytes(
        p.with_suffix(".bin").read_bytes() + b"xx"
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DAMAGE)
def test_check_inconsistent_token_files_are_refused(name: str, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "tokens")
    words = ["data.kind=indexed", f"data.path={prefix}", "data.seq_length=64"]
    load(words, LAPTOP, {})
    DAMAGE[name](prefix)
    with pytest.raises(CorruptData):
        IndexedDataset(prefix)
    error = refused(words)
    assert [p.code for p in error.problems] == ["MT611"]
    assert error.exit_code == CorruptData.exit_code


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "shares", [(0.96, 0.03, 0.01), (0.5, 0.5, 0.0), (1.0, 0.0, 0.0), (0.2, 0.1, 0.7)]
)
@pytest.mark.parametrize("seq_length", [64, 101, 900, 3000, 5000])
def test_check_empty_split_is_refused_as_in_run(
    shares: tuple[float, float, float], seq_length: int, tmp_path: Path
) -> None:
    prefix = corpus(tmp_path / "tokens")
    whole = IndexedDataset(prefix)
    assert split_documents(TokenFiles(prefix), shares) == split_documents(whole, shares)
    words = [
        "data.kind=indexed",
        f"data.path={prefix}",
        f"data.seq_length={seq_length}",
        f"data.split=[{','.join(map(str, shares))}]",
        "model.max_position_embeddings=5000",
        "parallel=single",
        *(() if shares[1] else ("trainer.eval_iters=0", "trainer.eval_interval=0")),
    ]
    need = ("train", "validation") if shares[1] else ("train",)
    try:
        run = load(words, LAPTOP, {}).run
        said = set()
    except ConfigError as error:
        run = None
        said = {p.code for p in error.problems if p.severity == "error"}
    data = run.data if run is not None else None
    if run is None:
        plain = load(["data=mock", "data.seq_length=64", "parallel=single"], LAPTOP, {}).run.data
        update = {"kind": "indexed", "path": str(prefix), "seq_length": seq_length, "split": shares}
        data = plain.model_copy(update=update)
    assert data is not None
    try:
        open_splits(data, 4096, 0, prepare(data), need)
        opened: set[str] = set()
    except ConfigError as error:
        opened = {p.code for p in error.problems}
    assert said == opened


def test_check_large_token_ids_name_needed_vocabulary(
    tmp_path: Path,
) -> None:
    prefix = corpus(tmp_path / "tokens", largest=5000)
    words = ["data.kind=indexed", f"data.path={prefix}", "data.seq_length=64"]
    (problem,) = errors(words)
    assert (problem.code, "4999" in problem.rule) == ("MT612", True)
    assert problem.fix.startswith("model.vocab_size=5000")
    load([*words, "model.vocab_size=5000"], LAPTOP, {})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model": {}}',
        b'{"model": {"vocab": 3}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"x": NaN, ' + json.dumps(TOKENIZER).encode()[1:],
        *(
            json.dumps({**TOKENIZER, "model": {**TOKENIZER["model"], **odd}}).encode()
            for odd in ODD_MODELS
        ),
    ],
    ids=range(9 + len(ODD_MODELS)),
)
def test_check_non_tokenizer_is_refused_as_in_run(text: bytes, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "tokens")
    path = tmp_path / "tokenizer.json"
    words = [
        "data.kind=indexed",
        f"data.path={prefix}",
        "data.seq_length=64",
        f"data.tokenizer={path}",
    ]
    path.write_text(json.dumps(TOKENIZER))
    load(words, LAPTOP, {})
    path.write_bytes(text)
    with pytest.raises(MtrainError):
        Tokenizer(path)
    assert [p.code for p in errors(words)] == ["MT613"]


def test_check_tokenizer_facts_equal_library(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    added = [{"id": 9, "content": "<x>", "special": True, "single_word": False, "lstrip": False}]
    added[0] |= {"rstrip": False, "normalized": False}
    for end in ({}, {"<|endoftext|>": 2}, {"</s>": 3}):
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1, **end}, "merges": []}
        path.write_text(json.dumps({**TOKENIZER, "model": model, "added_tokens": added}))
        facts = tokenizer_facts(path)
        library = Tokenizer(path)
        assert facts is not None
        assert (facts.vocab_size, facts.eod) == (library.vocab_size, library.eod)


def test_check_end_of_document_must_be_known(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "tokens")
    path = tmp_path / "tokenizer.json"
    words = [
        "data.kind=indexed",
        f"data.path={prefix}",
        "data.seq_length=64",
        "data.eod_mask_loss=true",
    ]
    assert [p.code for p in errors(words)] == ["MT608"]
    path.write_text(json.dumps(TOKENIZER))
    load([*words, f"data.tokenizer={path}"], LAPTOP, {})
    path.write_text(
        json.dumps({**TOKENIZER, "model": {"type": "BPE", "vocab": {"a": 5000}, "merges": []}})
    )
    assert {p.code for p in errors([*words, f"data.tokenizer={path}"])} == {"MT607", "MT608"}
    moved = [*words[:-1], "data.fim.rate=0.5", "data.fim.ids=[10,11,12]"]
    assert [(p.code, p.path) for p in errors(moved)] == [("MT608", "data.fim.rate")]


def _links(folder: Path) -> dict[str, str]:
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "nowhere").symlink_to(folder / "nothing")
    (folder / "short.txt").write_text("a few words")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    (folder / "file").write_text("")
    (folder / "latin").mkdir()
    (folder / "latin/a.txt").write_bytes(b"caf\xe9 " * 1000)
    return {
        "data.path=fifo": "MT305",
        "data.path=loop": "MT305",
        "data.path=nowhere": "MT305",
        "data.path=/dev/null": "MT305",
        "data.path=": "MT305",
        "data.path=latin.txt": "MT305",
        "data.path=latin": "MT305",
        "data.path=short.txt": "MT605",
        "data.path=short.txt data.limit_mib=1": "MT605",
        "data.limit_mib=1e308": "MT014",
        "data.kind=indexed data.path=/": "MT306",
        "log.runs_dir=loop": "MT431",
        "log.runs_dir=nowhere/runs": "MT431",
        "log.runs_dir=file": "MT431",
        "log.runs_dir=fifo/x": "MT431",
        "log.runs_dir=/proc/runs": "MT431",
        "data.cache_dir=loop/x": "MT432",
        f"data.cache_dir={'x' * 300}": "MT432",
        "data.cache_dir=/proc/cache": "MT432",
        "checkpoint.resume=/": "MT433",
        "checkpoint.resume=loop": "MT433",
        "checkpoint.resume=fifo": "MT433",
        "checkpoint.resume=": "MT433",
    }


def test_check_unusable_paths_are_refused_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = _links(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert {words: {p.code for p in errors(words.split())} for words in cases} == {
        w: {c} for w, c in cases.items()
    }


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("atuo", "auto"),
        ("Auto", "auto"),
        ("lastest", "latest"),
        ("newest", "latest"),
        ("atuo/run", None),
        ("x1", None),
    ],
)
def test_check_misspelt_resume_word_is_no_missing_folder(
    said: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = errors([f"checkpoint.resume={said}"])
    assert problem.detail == "there is no such folder"
    assert problem.fix.split(" or ")[0] == (f"checkpoint.resume={meant}" if meant else "")


def test_check_existing_run_precedes_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latest2").mkdir()
    (tmp_path / "latest2/run.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    (problem,) = errors(["checkpoint.resume=latest1"])
    assert problem.fix.startswith("checkpoint.resume=latest2 or ")


def test_check_unreadable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o555)
    for key, code in (("log.runs_dir", "MT431"), ("data.cache_dir", "MT432")):
        words = [f"{key}={tmp_path / 'shut/x'}"]
        assert run_without_privileges(lambda words=words: [p.code for p in errors(words)]) == [code]


def test_check_resume_refusals_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        check.run([f"log.runs_dir={tmp_path}", "checkpoint.resume=latest"])
    half = tmp_path / "a/checkpoints/step_00000001"
    half.mkdir(parents=True)
    (half / "run.yaml").write_text("")
    with pytest.raises(CorruptData, match="not a committed checkpoint"):
        check.run([f"log.runs_dir={tmp_path}", f"checkpoint.resume={half}"])


def test_check_corpus_is_compared_with_checkpoint(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "tokens")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(TOKENIZER))
    words = [
        "data.kind=indexed",
        f"data.path={prefix}",
        "data.seq_length=64",
        f"data.tokenizer={tokenizer}",
    ]
    words += ["parallel=single", f"log.runs_dir={tmp_path}/runs"]
    run = load(words, LAPTOP, {}).run
    home = tmp_path / "runs/a"
    data = open_splits(run.data, 4096, 0, prepare(run.data)).describe()
    committed(run, home / "checkpoints", data=data)
    (home / "run.yaml").write_text(run_yaml(run.recorded()))
    resume = [*words, "checkpoint.resume=latest"]
    assert check.run(resume) == 0
    assert answered([str(home)]).data == "the same corpus in the same order"
    tokenizer.write_text(json.dumps({**TOKENIZER, "version": "1.1"}))
    with pytest.raises(ConfigError, match="the tokenizer is not the one"):
        check.run(resume)
    assert check.run([*resume, "checkpoint.accept_changes=true"]) == 0
    tokenizer.write_text(json.dumps(TOKENIZER))
    corpus(prefix, largest=3999)
    with pytest.raises(ConfigError, match="the corpus is not the one"):
        check.run(resume)
    answer = answered([str(home)])
    assert [problem.code for problem in answer.problems] == ["MT609"]
    assert answer.exit_code == 2
    assert check.run([*resume, "checkpoint.accept_changes=true"]) == 0
