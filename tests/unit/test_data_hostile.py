"""Hostile documents, tokenizers and archives: said in words; nothing run, nothing written
elsewhere.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mtrain.cli.main import main
from tests.support.covering import some
from tests.support.token_corpora import MAKERS, documents, jsonl
from tests.unit.test_data_tokenize import as_arrow, as_parquet, as_tar, as_zst, lines

NOT_OURS = re.compile(r"unexpected [A-Z]\w+:")
Case = tuple[str, bytes]
"""Name of a file, and what is in it."""


def changed(raw: bytes, rng: np.random.Generator) -> bytes:
    """Change, remove or repeat some bytes of a file."""
    data = bytearray(raw)
    for _ in range(int(rng.integers(1, 6))):
        if len(data) < 2:
            break
        at = int(rng.integers(len(data)))
        many = int(rng.integers(1, 40))
        what = int(rng.integers(5))
        if what == 0:
            data[at : at + many] = rng.bytes(many)
        elif what == 1:
            del data[at : at + many]
        elif what == 2:
            data[at:at] = data[at : at + many]
        elif what == 3:
            data[at] ^= 1 << int(rng.integers(8))
        else:
            data[at : at + 8] = (b"\xff" * 8, b"\0" * 8, b"99999999")[int(rng.integers(3))]
    return bytes(data)


def member(name: str, data: bytes = b"hello", **facts: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for key, value in facts.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def header(**facts: object) -> bytes:
    """Return a header whose claims exceed the file."""
    info = tarfile.TarInfo("a.txt")
    for key, value in facts.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + b"x" * 512


TARS: list[bytes] = [
    member("../../escaped.txt"),
    member("/tmp/mtrain-escaped.txt"),
    member("a.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    member("a.txt", type=tarfile.LNKTYPE, linkname="../../etc/passwd"),
    member("a.txt", type=tarfile.FIFOTYPE),
    member("a.txt", type=tarfile.CHRTYPE),
    member("a.txt", b"\xff\xfe"),
    member("a\n\x1b[31m.txt", b"\xff"),
    header(size=1 << 40),
    header(size=1 << 33, type=tarfile.GNUTYPE_LONGNAME),
    header(size=1 << 33, type=tarfile.XHDTYPE),
    header(size=1 << 20, type=tarfile.GNUTYPE_SPARSE),
    b"",
    b"\0" * 10240,
    b"x" * 1000,
]
LINES: list[bytes] = [
    b"[" * 100_000,
    b'{"text":' * 50_000,
    b'{"text": "' + b"\\ud83d" * 100 + b'"}',
    b'{"text": NaN}',
    b'{"text": ' + b"9" * 10_000 + b"}",
    b'{"__class__": {"__init__": 1}}',
    b"\xff\xfe\x00\x00",
    b"\x00" * 1000,
    b'{"text": "\x1b]0;owned\x07"',
    b'{"text": ["a", {"b": 1}]}',
    b'{"text": {"text": "x"}}',
    b"null",
    b'"text"',
    b'{"text": "a"}\x00',
]


def tokenizer_bodies() -> Iterator[Case]:
    big = {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}
    for body in (
        {},
        [],
        {"model": None},
        {"model": big},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"model": {"type": "Unigram", "vocab": [["a", "x"]]}},
        {
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            "normalizer": {"type": "Replace", "content": "x" * 9999},
        },
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}},
    ):
        yield "tokenizer.json", json.dumps(body).encode()
    yield "tokenizer.json", b"\x80\x04c__builtin__\neval\n"
    yield "t.tiktoken", b"YQ== 0\nYg==\n"
    yield "t.tiktoken", b"!!! 0\n"
    yield "t.tiktoken", base64.b64encode(b"a") + b" " + b"9" * 30
    yield "t.model", b"\x0a\xff\xff\xff\xff\x0f"
    yield "t.model", b""
    yield "vocab.txt", b"a\nb\n"
    yield "vocab.txt", b"\xff\n"
    yield "tiktoken.json", b'[{"rank": 0}]'
    yield "tiktoken.json", b'[{"rank": 99999999999, "token_bytes": "YQ=="}]'


def run(folder: Path, source: Path, tokenizer: Path, *words: str) -> int:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code = main(
        [
            "data",
            "tokenize",
            str(source),
            f"out={folder / 'out' / 'o'}",
            f"tokenizer={tokenizer}",
            "workers=1",
            "engine=tokenizers",
            *words,
        ]
    )
    outside = {
        p: p.stat().st_mtime_ns for p in folder.rglob("*") if folder / "out" not in (p, *p.parents)
    }
    assert outside == {p: t for p, t in before.items() if folder / "out" not in (p, *p.parents)}
    for path in (folder / "out").glob("o*"):
        if path.is_file():
            path.unlink()
    subprocess.run(["rm", "-rf", str(folder / "out" / "o.partial")], check=True)
    return code


def said_in_words(code: int, capsys: pytest.CaptureFixture[str], case: object) -> None:
    text = "".join(capsys.readouterr())
    assert code in (0, 2, 3, 4), (code, case, text)
    assert "Traceback" not in text
    assert not NOT_OURS.search(text), (case, text)
    assert "\x1b" not in text


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "good").mkdir()
    MAKERS["bpe"](tmp_path / "good")
    return tmp_path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda at: jsonl(at / "d.jsonl", documents(20)),
    "gz": lambda at: written(at / "d.jsonl.gz", gzip.compress(lines(documents(20)))),
    "zst": lambda at: written(at / "d.jsonl.zst", as_zst(lines(documents(20)))),
    "tar": lambda at: written(at / "d.tar", as_tar(documents(10))),
    "parquet": lambda at: as_parquet(at / "d.parquet", documents(20)),
    "arrow": lambda at: as_arrow(at / "d.arrow", documents(20), stream=True),
}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.full
@pytest.mark.parametrize("form", some(SOURCES, ["jsonl", "tar", "arrow"]))
@pytest.mark.parametrize("many", [3, pytest.param(25, marks=pytest.mark.full)])
def test_data_hostile_changed_inputs_are_refused_or_skipped(
    place: Path, form: str, many: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(many)
    source = SOURCES[form](place)
    raw = source.read_bytes()
    key = ("key=txt",) if form == "tar" else ()
    for i in range(many):
        source.write_bytes(changed(raw, rng))
        said_in_words(run(place, source, place / "good/tokenizer.json", *key), capsys, (form, i))


@pytest.mark.parametrize("kind", some(MAKERS, ["bpe", "sentencepiece"]))
@pytest.mark.parametrize("many", [3, pytest.param(40, marks=pytest.mark.full)])
def test_data_hostile_changed_tokenizers_are_refused_or_work(
    place: Path, kind: str, many: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := place / "made").mkdir()
    made = MAKERS[kind](folder)
    file = made / "vocab.json" if made.is_dir() else made
    raw = file.read_bytes()
    rng = np.random.default_rng(many)
    source = jsonl(place / "d.jsonl", documents(10))
    for i in range(many):
        file.write_bytes(changed(raw, rng))
        said_in_words(run(place, source, made, "eod=false"), capsys, (kind, i))


def test_data_hostile_archives_write_and_follow_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, raw in enumerate(TARS):
        source = written(place / "d.tar", raw)
        code = run(place, source, place / "good/tokenizer.json", "key=txt")
        text = "".join(capsys.readouterr())
        assert code in (0, 2, 4), (i, text)
        assert not NOT_OURS.search(text), text
        assert "\x1b" not in text
        assert "root:" not in text
    assert not Path("/tmp/mtrain-escaped.txt").exists()


@pytest.mark.full
def test_data_hostile_non_record_lines_are_skipped(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(place / "d.jsonl", b"\n".join([*LINES, b'{"text": "good"}']))
    out = place / "out" / "o"
    assert (
        main(
            [
                "data",
                "tokenize",
                str(source),
                f"out={out}",
                f"tokenizer={place / 'good/tokenizer.json'}",
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in Path(f"{out}.rejects.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [i + 1 for i in range(len(LINES))]
    assert json.loads(Path(f"{out}.manifest.json").read_text())["documents"] == 1


@pytest.mark.full
def test_data_hostile_non_tokenizers_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(place / "d.jsonl", ["a b"])
    for name, raw in tokenizer_bodies():
        path = written(place / name, raw)
        code = run(place, source, path, "eod=false")
        text = "".join(capsys.readouterr())
        assert code in (2, 4), (name, raw[:80], code, text)
        assert not NOT_OURS.search(text), text
        assert name in text
        path.unlink()


BOMB = """
import resource, sys
from mtrain.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
code = main(["data", "tokenize", *sys.argv[2:]])
own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("KiB", max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
raise SystemExit(code)
"""
"""Prints the most memory that the command and its processes had; that of this process is not in it.
"""


@pytest.mark.full
def test_data_hostile_bomb_takes_no_memory(place: Path) -> None:
    line = b'{"text": "' + b"x" * (1 << 20)
    with gzip.open(place / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(600):
            file.write(line)
    long_name = header(size=600 << 20, type=tarfile.GNUTYPE_LONGNAME)
    with gzip.open(place / "bomb.tar.gz", "wb", compresslevel=1) as file:
        file.write(long_name)
        for _ in range(600):
            file.write(b"x" * (1 << 20))
    for name in ("bomb.jsonl.gz", "bomb.tar.gz"):
        words = [
            str(place / name),
            f"out={place / 'out/o'}",
            f"tokenizer={place / 'good/tokenizer.json'}",
        ]
        more = ["workers=1", "max_document=8"]
        done = subprocess.run(
            [sys.executable, "-c", BOMB, str(4 << 30), *words, *more],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (2, 4), done.stderr
        assert "Traceback" not in done.stderr
        grown = int(done.stdout.rpartition("KiB ")[2])
        assert 10 << 10 < grown < 400 << 10, f"{name}: {grown} KiB"


@pytest.mark.full
def test_data_hostile_pipe_is_never_opened(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(place / "p.jsonl")
    words = [f"out={place / 'out/o'}", f"tokenizer={place / 'good/tokenizer.json'}"]
    assert main(["data", "tokenize", str(place / "p.jsonl"), *words]) == 2
    os.mkfifo(place / "t.json")
    source = jsonl(place / "d.jsonl", ["a"])
    assert main(["data", "tokenize", str(source), words[0], f"tokenizer={place / 't.json'}"]) == 2
