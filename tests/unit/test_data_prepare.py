"""Preparation of text files as a cached token corpus: order, messages, atomicity, concurrency."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, verify
from mtrain.data.samples.token_stream import entropy_nats
from mtrain.data.store import cache
from mtrain.data.store.indexed import IndexedDataset, IndexedWriter
from mtrain.data.text.tokenize import TextCorpus, cut, open_corpus
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, Problem
from tests.support.forked import run_without_privileges
from tests.support.patience import patient


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = random.Random(0)
    root = tmp_path / "text"
    for i in range(30):
        path = root / f"d{i % 4}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"word{words.randrange(300)} says né 漢 {i}" for _ in range(40)))
    return root


def config(folder: Path, **more: object) -> DataConfig:
    values = {
        "path": str(folder),
        "kind": "text",
        "cache_dir": str(folder.parent / "cache"),
        "tokenizer_vocab_size": 500,
    }
    return DataConfig(**(values | {"seq_length": 16, "split": (0.7, 0.2, 0.1)} | more))


def refused(data: DataConfig) -> Problem:
    with pytest.raises(ConfigError) as caught:
        prepare(data)
    (problem,) = caught.value.problems
    return problem


def test_prepare_documents_round_trip(folder: Path) -> None:
    corpus = prepare(config(folder))
    assert corpus.prefix is not None
    assert corpus.tokenizer is not None
    dataset = IndexedDataset(corpus.prefix)
    tokenizer = Tokenizer(corpus.tokenizer)
    texts = dict(open_corpus(config(folder)))
    assert sorted(texts) == sorted(os.path.relpath(p, folder) for p in folder.rglob("*.txt"))
    assert dataset.num_documents == len(texts) == 30
    for i, text in enumerate(texts.values()):
        ids = dataset[i].tolist()
        assert ids[-1] == 0
        assert 0 not in ids[:-1]
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids[:-1]
    assert tokenizer.eod == 0
    assert corpus.meta["text_bytes"] == sum(len(t.encode()) for t in texts.values())
    assert corpus.meta["tokens"] == dataset.num_tokens
    assert corpus.meta["unigram_entropy_nats"] == pytest.approx(
        entropy_nats(np.bincount(dataset.tokens))
    )
    assert open_splits(config(folder), 512, 1, corpus).describe()["documents"] == 30


def test_prepare_same_text_gives_same_bytes(folder: Path) -> None:
    first = prepare(config(folder))
    second = prepare(config(folder, cache_dir=str(folder.parent / "other")))
    assert first.meta["files"] == second.meta["files"]


def test_prepare_end_token_lookalike_ends_no_document(folder: Path) -> None:
    (folder / "d0" / "00.txt").write_text("before <|endoftext|> after")
    corpus = prepare(config(folder))
    assert corpus.prefix is not None
    assert (IndexedDataset(corpus.prefix).tokens == 0).sum() == 30


def test_prepare_document_order_is_fixed_and_mixes_folders(folder: Path) -> None:
    names = [name for name, _ in open_corpus(config(folder))]
    assert names == [name for name, _ in open_corpus(config(folder))]
    assert names != sorted(names)
    (folder / "d1" / "new.txt").write_text("new")
    assert [n for n, _ in open_corpus(config(folder)) if n != "d1/new.txt"] == names


def test_prepare_non_utf8_and_empty_files_are_skipped(folder: Path) -> None:
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "empty.txt").touch()
    corpus = prepare(config(folder))
    assert (corpus.meta["documents"], corpus.meta["skipped"]) == (30, 1)


def test_prepare_limit_bounds_text(folder: Path) -> None:
    meta = prepare(config(folder, limit_mib=0.01)).meta
    assert 10_485 - 4 < meta["text_bytes"] <= 10_485
    assert meta["documents"] < 30


@pytest.mark.parametrize("name", ["book.txt", ""], ids=["one file", "a folder"])
def test_prepare_limit_bounds_reading(name: str, tmp_path: Path) -> None:
    tmp_path.joinpath("book.txt").write_text("é" * 5000)
    os.truncate(tmp_path / "book.txt", 1 << 40)  # the rest is a terabyte that is not there
    if not name:
        tmp_path.joinpath("other.txt").write_text("é" * 5000)
    texts = dict(open_corpus(config(tmp_path / name, limit_mib=1001 / 2**20)))
    assert "".join(texts.values()) == "é" * 500  # half a letter is dropped


def test_prepare_single_file_is_cut_into_documents(folder: Path) -> None:
    text = "\n\n".join(f"Paragraph {i}. " + "text " * 60 for i in range(400))
    (folder / "book.txt").write_text(text)
    documents = [t for _, t in open_corpus(config(folder / "book.txt"))]
    assert sorted(documents) == sorted(cut(text))
    assert len(documents) == 8
    assert prepare(config(folder / "book.txt")).meta["documents"] == len(documents)


@pytest.mark.parametrize("text", ["", "a", "a" * 100, "a\n" * 50, "a\n\n" * 50, "\n\n" + "é" * 99])
def test_prepare_pieces_make_the_text(text: str) -> None:
    pieces = list(cut(text, 8))
    assert "".join(pieces) == text
    assert all(8 <= len(p) <= 32 for p in pieces[:-1])
    assert all(len(p) <= 32 for p in pieces)


def test_prepare_standard_library_excludes_its_tests() -> None:
    corpus = open_corpus(DataConfig(kind="text", seq_length=16))
    names = {file.name for file in corpus.files}
    assert {"os.py", "json/decoder.py", "pydoc_data/topics.py"} <= names
    assert not any(
        {"test", "tests", "site-packages", "__pycache__", "idle_test"} & set(n.split("/"))
        for n in names
    )


def test_prepare_second_call_reads_nothing_changes_are_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = time.time() - 3600
    monkeypatch.setattr("mtrain.data.text.tokenize.SETTLED_NS", -(10**18))
    first = prepare(config(folder))
    monkeypatch.setattr(TextCorpus, "_read", lambda *_: pytest.fail("a file was read"))
    assert prepare(config(folder)) == first
    monkeypatch.undo()
    target = folder / "d0" / "00.txt"
    target.write_text(target.read_text().replace("word", "WORD"))
    os.utime(target, (past, past))
    assert prepare(config(folder)).meta["fingerprint"] != first.meta["fingerprint"]


def test_prepare_recent_file_is_not_trusted_by_time_only(folder: Path) -> None:
    prepare(config(folder))
    assert not list((folder.parent / "cache" / "seen").iterdir())


@pytest.mark.parametrize(
    "change", [{"tokenizer_vocab_size": 400}, {"limit_mib": 0.02}, {"suffixes": (".txt",)}], ids=str
)
def test_prepare_changed_settings_get_a_new_folder(folder: Path, change: dict[str, object]) -> None:
    (folder / "extra.md").write_text("more")
    assert prepare(config(folder)).prefix != prepare(config(folder, **change)).prefix


@pytest.mark.parametrize(
    "damage", ["cut tokens.bin", "no tokens.idx", "bad meta.json", "no meta.json"]
)
def test_prepare_damaged_cache_is_rebuilt_with_note(folder: Path, damage: str) -> None:
    first = prepare(config(folder))
    assert first.prefix is not None
    how, name = damage.split()
    target = first.prefix.parent / name
    if how == "no":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[:-5])
    notes: list[str] = []
    again = prepare(config(folder), notes.append)
    assert again.meta["files"] == first.meta["files"]
    assert len(notes) == 1
    assert str(target.parent) in notes[0]
    verify(again)


def test_prepare_verify_finds_flipped_bit(folder: Path) -> None:
    corpus = prepare(config(folder))
    verify(corpus)
    target = Path(f"{corpus.prefix}.bin")
    raw = bytearray(target.read_bytes())
    raw[77] ^= 4
    target.write_bytes(raw)
    with pytest.raises(CorruptData, match=r"tokens\.bin: sha256"):
        verify(corpus)


BUILDER = """
import json, os, sys, time
import mtrain.data.text.tokenize as t
from mtrain.data.text import tokenizer as bpe
from mtrain.config.schema.data import DataConfig
folder, where, mark = sys.argv[1], sys.argv[2], sys.argv[3]
cache = os.path.dirname(folder) + "/cache"
data = DataConfig(kind='text', path=folder, cache_dir=cache, tokenizer_vocab_size=500,
                  seq_length=16, split=(0.7, 0.2, 0.1))
def hang():
    open(mark, "w").close()
    time.sleep(10_000)
train, encode, tokenize, build = bpe.train_bpe, bpe.encode_documents, t._tokenize, t._build
def slow_train(*a):
    out = train(*a); hang(); return out
def slow_encode(*a):
    for batch in encode(*a):
        yield batch
        hang()
def slow_rename(*a):
    meta = tokenize(*a); hang(); return meta
def counted(*a):
    with open(mark, "a") as file: file.write("built\\n")
    return build(*a)
if where == "train": bpe.train_bpe = slow_train
if where == "encode": bpe.encode_documents = slow_encode
if where == "rename": t._tokenize = slow_rename
if where == "count": t._build = counted
print(json.dumps(t.prepare(data).meta))
"""


def start(folder: Path, where: str, mark: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", BUILDER, str(folder), where, str(mark)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("where", ["train", "encode", "rename"])
def test_prepare_killed_build_is_no_corpus(folder: Path, tmp_path: Path, where: str) -> None:
    mark = tmp_path / "mark"
    with start(folder, where, mark) as process:
        deadline = time.monotonic() + patient(30)
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert mark.exists()
    cache = tmp_path / "cache"
    assert [
        p.name.startswith(".building-") for p in cache.iterdir() if p.is_dir() and p.name != "seen"
    ] == [True]
    corpus = prepare(config(folder), pytest.fail)
    verify(corpus)
    assert not list(cache.glob(".building-*"))


def test_prepare_concurrent_processes_build_once(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    processes = [start(folder, "count", mark) for _ in range(2)]
    metas = [json.loads(p.communicate(timeout=patient(60))[0]) for p in processes]
    assert metas[0] == metas[1]
    assert mark.read_text() == "built\n"


FORKING = """
import os, signal, sys
from mtrain.config.schema.data import DataConfig
from mtrain.data.text.tokenize import prepare
cache = sys.argv[1] + "/../cache"
first, second = (
    DataConfig(kind='text', path=sys.argv[1], cache_dir=cache, seq_length=16,
               tokenizer_vocab_size=size)
    for size in (300, 400)
)
prepare(first)
if (pid := os.fork()) == 0:
    signal.alarm(30)
    prepare(second)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_prepare_forks_work_after_tokenizing(folder: Path) -> None:
    more = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    arguments = [sys.executable, "-c", FORKING, str(folder)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=patient(60), env=more, check=True
    )
    assert done.stdout == "0\n", done.stderr


def test_prepare_changing_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain.data.text import tokenizer as bpe

    train = bpe.train_bpe

    def meddle(*arguments: object) -> object:
        (folder / "d0" / "00.txt").write_text("changed")
        return train(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bpe, "train_bpe", meddle)
    assert "changed while they were read" in refused(config(folder)).rule
    assert not list((folder.parent / "cache").glob("*/meta.json"))


def test_prepare_missing_path_names_nearest(folder: Path) -> None:
    problem = refused(config(folder.parent / "texs"))
    assert (problem.path, problem.value) == ("data.path", str(folder.parent / "texs"))
    assert problem.detail.endswith("No such file or directory")
    assert problem.fix == f"data.path={folder}"
    assert (
        f"of this one {folder.parent} does"
        in refused(config(folder.parent / "no" / "such" / "folder")).fix
    )


def test_prepare_folder_without_texts_lists_its_endings(folder: Path) -> None:
    problem = refused(config(folder, suffixes=(".c", ".h")))
    assert "no file ends in any of .c, .h; endings found: .txt (30)" in problem.rule
    empty = folder.parent / "empty"
    empty.mkdir()
    assert "the folder is empty" in refused(config(empty)).rule


def test_prepare_corpus_without_text_is_refused_in_numbers(folder: Path) -> None:
    root = folder.parent / "nothing"
    root.mkdir()
    (root / "a.txt").touch()
    (root / "b.txt").write_bytes(b"\xff")
    assert "no text: 2 files, 1 of them not UTF-8" in refused(config(root)).rule
    assert not list((folder.parent / "cache").glob("nothing*"))


def test_prepare_irregular_path_is_refused(folder: Path) -> None:
    assert refused(config(folder, path="")).rule == "cannot be an empty path"
    irregular = refused(config(Path("/dev/null")))
    assert irregular.rule == "cannot be read because it is neither a file nor a folder"
    assert "no path" in refused(config(folder).model_copy(update={"path": "a\0b"})).rule


def test_prepare_unreadable_file_is_named(folder: Path) -> None:
    (folder / "d0" / "00.txt").chmod(0)
    rule = run_without_privileges(lambda: refused(config(folder)).rule)
    assert "00.txt cannot be read: Permission denied" in rule


def test_prepare_failing_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".txt":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    assert ".txt cannot be read: Permission denied" in refused(config(folder)).rule


def test_prepare_unwritable_cache_is_an_environment_error(folder: Path) -> None:
    (folder.parent / "file").touch()
    with pytest.raises(BadEnvironment, match=r"data.cache_dir = .*free at"):
        prepare(config(folder, cache_dir=str(folder.parent / "file" / "cache")))


@pytest.mark.parametrize("settled", [True, False])
def test_prepare_read_only_cache_is_read(
    settled: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settled:
        monkeypatch.setattr("mtrain.data.text.tokenize.SETTLED_NS", -(10**18))
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        data = config(Path(shutil.copytree(folder, f"{home}/text")))
        made = prepare(data)
        assert made.prefix is not None
        notes = made.prefix.parents[1] / "seen"
        assert len(list(notes.iterdir())) == settled
        places = [notes, made.prefix.parent, made.prefix.parents[1]]
        for place in places:
            os.chmod(place, 0o555)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.seteuid(65534)  # root may write everywhere
                assert not os.access(notes, os.W_OK, effective_ids=True)
                code = 0 if prepare(data).prefix == made.prefix else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for place in places:
            os.chmod(place, 0o755)


def test_prepare_given_files_report_every_problem(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "wiki", np.dtype("<u2")) as writer:
        writer.add(np.arange(9))
    data = DataConfig(
        kind="indexed",
        seq_length=16,
        path=str(tmp_path / "wika"),
        tokenizer=str(tmp_path / "none.json"),
    )
    with pytest.raises(ConfigError) as caught:
        prepare(data)
    path, tokenizer = caught.value.problems
    assert path.fix == f"data.path={tmp_path / 'wiki'}"
    assert "wika.bin and wika.idx" in path.rule
    assert tokenizer.path == "data.tokenizer"
    assert (
        refused(data.model_copy(update={"path": f"{tmp_path}/wiki.bin", "tokenizer": None})).fix
        == f"data.path={tmp_path / 'wiki'}"
    )
    assert refused(data.model_copy(update={"path": None, "tokenizer": None})).path == "data.path"
    (tmp_path / "wiki.bin").unlink()
    missing = data.model_copy(update={"path": f"{tmp_path}/wiki", "tokenizer": None})
    assert "no file wiki.bin in" in refused(missing).rule


def test_prepare_given_files_differ_by_fingerprint(tmp_path: Path) -> None:
    prints = []
    for value in (1, 2):
        with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
            writer.add(np.full(5000, value))
        data = DataConfig(kind="indexed", seq_length=16, path=str(tmp_path / "a"))
        prints.append(prepare(data).meta["fingerprint"])
    assert prints[0] != prints[1]


def test_prepare_too_large_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size=499: .* has 500 tokens"):
        open_splits(config(folder), 499, 1, prepare(config(folder)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a tokenizer.json"),
        (b"\xff", "offset 0: not UTF-8"),
        (b"[1", "not a tokenizer.json"),
    ],
)
def test_prepare_non_tokenizer_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CorruptData, match=message):
        Tokenizer(path)


def test_prepare_oversized_tokenizer_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{" + b" " * 2000)
    monkeypatch.setattr("mtrain.data.text.tokenizer.LIMIT_BYTES", 1000)
    with pytest.raises(CorruptData, match=r"2\.0 KiB; a tokenizer may have 1000 B"):
        Tokenizer(path)


def test_prepare_missing_tokenizer_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        Tokenizer(tmp_path / "none.json")


@pytest.fixture
def shelf(folder: Path) -> Callable[..., Path]:
    """Return a function that puts a corpus into the cache, last used so many days ago."""
    made = prepare(config(folder)).prefix
    assert made is not None

    def one(number: int, idle_days: float) -> Path:
        place = made.parent.with_name(f"text-{number:016x}")
        shutil.copytree(made.parent, place)
        moment = time.time() - idle_days * 86_400
        os.utime(place / ".used", (moment, moment))
        return place

    return one


def test_prepare_new_corpus_removes_long_unused(folder: Path, shelf: Callable[..., Path]) -> None:
    old = shelf(1, cache.UNUSED_DAYS + 1)
    young = shelf(2, cache.UNUSED_DAYS - 1)
    foreign = shelf(3, cache.UNUSED_DAYS + 1)
    (foreign / "notes.txt").touch()
    note = folder.parent / "cache/seen/old"
    note.touch()
    os.utime(note, (0, 0))
    said: list[str] = []
    prepare(config(folder, tokenizer_vocab_size=400), said.append)
    assert [place.exists() for place in (old, young, foreign)] == [False, True, True]
    assert not note.exists()
    assert [str(old) in line for line in said] == [True]


def test_prepare_least_recent_corpora_go_when_over_limit(
    folder: Path, shelf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [shelf(n, days) for n, days in enumerate((5, 30, 3, 0.5))]
    size = sum(file.stat().st_size for file in places[0].iterdir())
    monkeypatch.setattr(cache, "LIMIT_BYTES", 4 * size + size // 2)  # of the six that there will be
    prepare(config(folder, tokenizer_vocab_size=400))
    assert [place.exists() for place in places] == [False, False, True, True]


def test_prepare_corpus_in_use_is_never_removed(folder: Path, shelf: Callable[..., Path]) -> None:
    place = shelf(1, 0)
    reading = (
        "import sys, time; from pathlib import Path; from mtrain.data.store import cache\n"
        "assert cache.use(Path(sys.argv[1])); print(flush=True); time.sleep(10_000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", reading, str(place)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.utime(place / ".used", (0, 0))
        assert cache.make_room(place.parent) == []
        process.kill()
    assert cache.make_room(place.parent) == [place]
    # nothing is noted of what is not there
    assert cache.use(place.parent / "text-0000000000000001")
    assert not place.exists()
