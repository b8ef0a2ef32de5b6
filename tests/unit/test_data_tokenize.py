"""`data tokenize`: the bytes of megatron-core's builder, whatever the tokenizer, the format and the
processes.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.cli.main import main
from mtrain.config.disk.token_files import read_manifest
from mtrain.data.preprocess import build, gigatoken, journal, sources
from mtrain.data.preprocess.encoder import OtherIds
from mtrain.data.preprocess.record import splitter
from tests.support.covering import some
from tests.support.token_corpora import (
    MAKERS,
    TEXTS,
    bpe,
    documents,
    ids_of,
    jsonl,
    same_files,
    with_builder,
)

CASES = {
    f"{kind} {dtype} {'eod' if eod else 'bare'} {workers}": (kind, dtype, eod, workers)
    for kind in MAKERS
    for dtype in ("uint16", "int32")
    for eod in (True, False)
    for workers in (1, 3)
}


def tokenize(*words: object) -> int:
    return main(["data", "tokenize", *map(str, words)])


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UNIT", 1 << 12)
    monkeypatch.setattr(build, "UNIT", 1 << 12)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return bpe(tmp_path)


USUAL = ["bpe uint16 eod 3", "sentencepiece int32 eod 1", "tiktoken uint16 bare 1"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", some(CASES, USUAL))
def test_tokenize_bytes_equal_megatron_builder(tmp_path: Path, case: str) -> None:
    kind, dtype, eod, workers = CASES[case]
    (made := tmp_path / "made").mkdir()
    path = MAKERS[kind](made)
    texts = [*TEXTS, *documents(150)]
    source = jsonl(tmp_path / "docs.jsonl", texts)
    encode, end = ids_of(kind, path)
    with_builder(tmp_path / "theirs", texts, encode, end if eod else None, getattr(np, dtype))
    words = [f"--dtype={dtype}", f"--workers={workers}", *([] if eod else ["--eod=false"])]
    assert tokenize(source, "--out", tmp_path / "ours", "--tokenizer", path, *words) == 0
    assert same_files(tmp_path / "ours", tmp_path / "theirs")
    assert main(["data", "verify", str(tmp_path / "ours")]) == 0
    assert not (tmp_path / "ours.partial").exists()


def test_tokenize_sentence_lists_equal_megatron_builder(tmp_path: Path, tokenizer: Path) -> None:
    texts: list[Any] = [["One.", "", "Two more."], [], ["", ""], "whole", ["end"]]
    encode, end = ids_of("bpe", tokenizer)
    with_builder(tmp_path / "theirs", texts, encode, end, np.uint16)
    assert (
        tokenize(
            jsonl(tmp_path / "d.jsonl", texts), f"out={tmp_path / 'o'}", f"tokenizer={tokenizer}"
        )
        == 0
    )
    assert same_files(tmp_path / "o", tmp_path / "theirs")


def packed(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def as_tar(texts: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for i, text in enumerate(texts):
            for ending, data in (
                ("txt", text.encode()),
                ("json", json.dumps({"caption": text}).encode()),
                ("jpg", b"x"),
            ):
                member = tarfile.TarInfo(f"part/{i:06}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def as_arrow(path: Path, texts: list[str], *, stream: bool) -> Path:
    import pyarrow as pa

    table = pa.table({"id": list(range(len(texts))), "text": texts})
    writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    with writer(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=20)
    return path


def as_parquet(path: Path, texts: list[str]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=20
    )
    return path


def as_zst(data: bytes) -> bytes:
    import pyarrow as pa

    half = len(data) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def text_files(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:06}.txt").write_bytes(text.encode())
    return folder


FORMATS: dict[str, tuple[Callable[[Path, list[str]], Path], list[str]]] = {
    "gz": (lambda at, texts: packed(at / "d.jsonl.gz", gzip.compress(lines(texts))), []),
    "zst": (lambda at, texts: packed(at / "d.jsonl.zst", as_zst(lines(texts))), []),
    "parquet": (lambda at, texts: as_parquet(at / "d.parquet", texts), []),
    "arrow stream": (lambda at, texts: as_arrow(at / "d.arrow", texts, stream=True), []),
    "arrow file": (lambda at, texts: as_arrow(at / "d.arrow", texts, stream=False), []),
    "tar": (lambda at, texts: packed(at / "d.tar", as_tar(texts)), ["key=txt"]),
    "tar.gz": (
        lambda at, texts: packed(at / "d.tar.gz", gzip.compress(as_tar(texts))),
        ["key=json.caption"],
    ),
    "text": (lambda at, texts: text_files(at / "texts", texts), []),
    "template": (lambda at, texts: packed(at / "d.jsonl", lines(texts)), ["template={text}"]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", some(FORMATS, ["zst", "parquet", "arrow stream", "tar.gz"]))
def test_tokenize_formats_give_equal_documents(tmp_path: Path, tokenizer: Path, form: str) -> None:
    texts = [*TEXTS, *documents(60)]
    make, words = FORMATS[form]
    source = jsonl(tmp_path / "plain.jsonl", texts)
    (tmp_path / "in").mkdir()
    assert tokenize(source, f"out={tmp_path / 'a'}", f"tokenizer={tokenizer}", "workers=1") == 0
    other = make(tmp_path / "in", texts)
    assert (
        tokenize(other, f"out={tmp_path / 'b'}", f"tokenizer={tokenizer}", "workers=2", *words) == 0
    )
    assert same_files(tmp_path / "a", tmp_path / "b")


def test_tokenize_folder_is_ordered_and_ignores_readme(tmp_path: Path, tokenizer: Path) -> None:
    (folder := tmp_path / "set").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        jsonl(folder / name, [name])
    (folder / "README.md").write_text("about")
    assert tokenize(folder, f"out={tmp_path / 'o'}", f"tokenizer={tokenizer}") == 0
    held = read_manifest(tmp_path / "o")
    assert held is not None
    assert [Path(one["file"]).name for one in held.body["inputs"]] == ["a.jsonl", "b.jsonl"]


BAD = {
    3: (b'{"text": "cut', "not JSON"),
    5: (b'{"other": 1}', "no key text"),
    9: (b'{"text": "\xff\xfe"}', "0xff at offset 10"),
    12: (b'{"text": 7}', "a number"),
    14: (b'{"text": "\\ud800"}', "half of a letter"),
    16: (b"[" * 5000, ""),
    200: (b"{}", "no key text"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "compressed", [False, pytest.param(True, marks=pytest.mark.full)], ids=["plain", "gz"]
)
def test_tokenize_bad_lines_are_skipped_and_named(
    tmp_path: Path, tokenizer: Path, compressed: bool
) -> None:
    texts = documents(250, 3)
    good = lines(texts).splitlines()
    mixed = list(good)
    left = [text for i, text in enumerate(texts) if i + 1 not in BAD]
    for number, (line, _) in BAD.items():
        mixed[number - 1] = line
    data = b"\n".join(mixed) + b"\n"
    source = packed(
        tmp_path / ("d.jsonl.gz" if compressed else "d.jsonl"),
        gzip.compress(data) if compressed else data,
    )
    words = (f"tokenizer={tokenizer}", "workers=2")
    assert tokenize(source, f"out={tmp_path / 'o'}", *words) == 0
    rows = [json.loads(line) for line in (tmp_path / "o.rejects.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rows] == [(str(source), number) for number in BAD]
    assert all(why in row["why"] for row, (_, why) in zip(rows, BAD.values(), strict=True))
    assert tokenize(jsonl(tmp_path / "good.jsonl", left), f"out={tmp_path / 'g'}", *words) == 0
    assert same_files(tmp_path / "o", tmp_path / "g")
    assert tokenize(source, f"out={tmp_path / 'p'}", *words, f"max_rejects={len(BAD) - 1}") == 4
    assert not (tmp_path / "p.bin").exists()
    assert tokenize(source, f"out={tmp_path / 'p'}", *words, f"max_rejects={len(BAD)}") == 0
    assert same_files(tmp_path / "o", tmp_path / "p")


@pytest.mark.full
def test_tokenize_overlong_lines_are_skipped(tmp_path: Path, tokenizer: Path) -> None:
    data = lines(["a"]) + b'{"text": "' + b"x" * (3 << 20) + b'"}\n' + lines(["b"])
    words = (f"tokenizer={tokenizer}", "max_document=1")
    for name, content in (("d.jsonl", data), ("e.jsonl.gz", gzip.compress(data))):
        source = packed(tmp_path / name, content)
        out = tmp_path / name[0]
        assert tokenize(source, f"out={out}", *words) == 0
        assert json.loads(Path(f"{out}.rejects.jsonl").read_text())["line"] == 2
        held = read_manifest(out)
        assert held is not None
        assert held.count("documents") == 2


def killed(work: Callable[[], object], after_s: float) -> bool:
    """Return whether an unhandled alarm ended a forked process that does some work."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after_s)
        work()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("points", [2, pytest.param(50, marks=pytest.mark.full)])
def test_tokenize_killed_run_resumes_to_equal_bytes(
    tmp_path: Path, tokenizer: Path, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*TEXTS, *documents(1500)]
    source = jsonl(tmp_path / "d.jsonl", [text if i % 50 else 3 for i, text in enumerate(texts)])
    words = (source, f"tokenizer={tokenizer}", "workers=2")
    assert tokenize(*words, f"out={tmp_path / 'whole'}") == 0
    rng = np.random.default_rng(points)
    kills = 0
    out = tmp_path / "o"
    ends = (".bin", ".idx", ".manifest.json", ".rejects.jsonl")
    monkeypatch.setattr(journal, "SYNC_S", 0.0)
    while kills < points:
        ended = killed(lambda: tokenize(*words, f"out={out}"), float(rng.uniform(0.03, 0.6)))
        kills += ended
        if not ended:
            for end in ends:
                assert (
                    Path(f"{out}{end}").read_bytes()
                    == Path(f"{tmp_path / 'whole'}{end}").read_bytes()
                )
                Path(f"{out}{end}").unlink()
    if not Path(f"{out}.bin").exists() or Path(f"{out}.partial").exists():
        assert tokenize(*words, f"out={out}") == 0
    for end in ends:
        assert Path(f"{out}{end}").read_bytes() == Path(f"{tmp_path / 'whole'}{end}").read_bytes()


@pytest.mark.full
def test_tokenize_torn_journal_is_not_trusted(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", [*documents(600), 7])
    words = (source, f"tokenizer={tokenizer}", "workers=1")
    assert tokenize(*words, f"out={tmp_path / 'whole'}") == 0
    for at in (50, 20_000):
        out = tmp_path / f"o{at}"
        assert tokenize(*words, f"out={out}", "max_rejects=0") == 4, "it stops at the last record"
        with open(f"{out}.partial/journal", "ab") as file:
            file.write(b'00000000 {"unit": 99')
        with open(f"{out}.partial/tokens.bin", "r+b") as file:
            file.seek(at)
            file.write(b"\xff\xff")
        assert tokenize(*words, f"out={out}") == 0
        assert same_files(out, tmp_path / "whole")


@pytest.mark.full
def test_tokenize_leftovers_of_other_settings_are_not_resumed(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "d.jsonl", documents(300))
    data = source.read_bytes()
    words = (source, f"tokenizer={tokenizer}", f"out={tmp_path / 'o'}", "max_rejects=0")
    source.write_bytes(data + b"no json\n")
    assert tokenize(*words) == 4
    assert tokenize(*words, "eod=false") == 2
    assert "MT622" in capsys.readouterr().err
    source.write_bytes(data)
    assert tokenize(*words) == 2
    assert "inputs" in capsys.readouterr().err
    assert tokenize(*words, "fresh=true") == 0
    assert tokenize(*words) == 2
    assert tokenize(*words, "overwrite=true") == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nowhere.jsonl"], "MT601"),
        (["d.jsonl", "tokenizer=nowhere.json"], "MT603"),
        (["d.jsonl", "eod_token=<nope>"], "MT603"),
        (["d.jsonl", "template={a!r}"], "MT003"),
        (["d.jsonl", "keyy=x"], "MT003"),
        (["d.jsonl", "--nope", "x"], "MT010"),
        (["d.jsonl", "dtype=int8"], "MT003"),
        (["d.jsonl", "key=nothing"], "MT601"),
        (["d.jsonl", "d.jsonl"], "MT601"),
        (["d.jsonl", "out=o.bin"], "MT602"),
        (["d.xyz"], "MT601"),
        (["d.jsonl", "lower_case=false"], "MT003"),
        (["d.jsonl", "keep_newlines=true"], "MT003"),
    ],
)
def test_tokenize_impossible_is_refused_with_a_fix(
    tmp_path: Path,
    tokenizer: Path,
    words: list[str],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "d.jsonl", ["a"])
    (tmp_path / "d.xyz").write_text("x")
    said = [word.partition("=")[0] for word in words]
    more = [
        word for word in ("out=o", "tokenizer=tokenizer.json") if word.partition("=")[0] not in said
    ]
    assert tokenize(*words, *more) == 2
    err = capsys.readouterr().err
    assert f"[{code}]" in err
    assert re.search(r" (Use|Leave|Name) ", err)
    assert {path.name for path in tmp_path.iterdir()} == {"d.jsonl", "d.xyz", "tokenizer.json"}


def test_tokenize_gigatoken_is_skipped_for_special_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gigatoken, "find_spec", lambda _: object())
    encoder: Any = SimpleNamespace(spec=SimpleNamespace(plain=True), file="tokenizer.json")
    assert gigatoken.gigatoken_packer(encoder, "H", "{}") == (None, "")


@pytest.mark.full
def test_tokenize_differing_gigatoken_falls_back_with_note(
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gigatoken")
    source = jsonl(tmp_path / "docs.jsonl", [*documents(100), "the one with other ids"])
    words = [source, f"tokenizer={tokenizer}"]
    assert tokenize(*words, f"out={tmp_path / 'plain'}", "engine=tokenizers") == 0
    assert tokenize(*words, f"out={tmp_path / 'fast'}") == 0
    assert "by gigatoken" in capfd.readouterr().out
    assert same_files(tmp_path / "fast", tmp_path / "plain")
    pack = gigatoken.GigatokenPacker.pack
    for name, wrong in (
        ("on-the-sample", gigatoken.SAMPLE[0]),
        ("later", "the one with other ids"),
    ):

        def other(self: Any, texts: Sequence[str], wrong: str = wrong) -> list[bytes]:
            if wrong in texts:
                raise OtherIds(
                    "tokenizer.json: gigatoken gives other ids than tokenizers for a text"
                )
            return pack(self, texts)

        monkeypatch.setattr(gigatoken.GigatokenPacker, "pack", other)
        assert tokenize(*words, f"out={tmp_path / name}") == 0
        said = capfd.readouterr()
        assert "gigatoken gives other ids than tokenizers" in said.err
        assert "by tokenizers" in said.out
        assert same_files(tmp_path / name, tmp_path / "plain")
    assert tokenize(*words, f"out={tmp_path / 'named'}", "engine=gigatoken") == 4


PROSE = (
    "We met Dr. Smith at 5 p.m. in the old hall.\nDr. Smith was late again.  He said nothing. Why?"
    " Nobody asked! "
)


@pytest.fixture
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put data of Punkt for an invented language where nltk finds it."""
    module = pytest.importorskip("nltk.tokenize.punkt")
    data = pytest.importorskip("nltk.data")
    from nltk.tabdata import TabEncoder

    learned = module.PunktParameters()
    tab = TabEncoder()
    learned.abbrev_types = {"dr", "p.m"}
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "nobodys"
    folder.mkdir(parents=True)
    (folder / "collocations.tab").write_text(tab.tups2tab(learned.collocations))
    (folder / "sent_starters.txt").write_text(tab.set2txt(learned.sent_starters))
    (folder / "abbrev_types.txt").write_text(tab.set2txt(learned.abbrev_types))
    (folder / "ortho_context.tab").write_text(tab.ivdict2tab(learned.ortho_context))
    monkeypatch.setattr(data, "path", [str(tmp_path / "nltk_data")])
    return learned


def test_tokenize_punkt_cuts_sentences(tmp_path: Path, tokenizer: Path, punkt: Any) -> None:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    texts = [PROSE, "", "One line", PROSE * 3]
    source = jsonl(tmp_path / "d.jsonl", texts)
    words = [f"tokenizer={tokenizer}", "sentences=nobodys"]
    cut = [PunktSentenceTokenizer(punkt).tokenize(text) for text in texts]
    assert len(cut[0]) == 5
    encode, end = ids_of("bpe", tokenizer)
    with_builder(tmp_path / "theirs", cut, encode, end, np.uint16)
    assert tokenize(source, f"out={tmp_path / 'o'}", *words) == 0
    assert same_files(tmp_path / "o", tmp_path / "theirs")
    kept = splitter("nobodys", keep_newlines=True)(PROSE)
    assert "".join(kept) == PROSE.rstrip(), "white space stays with the sentence before it"
    assert kept[0] == "We met Dr. Smith at 5 p.m. in the old hall.\n"


def test_tokenize_language_without_data_states_what_to_get(
    tmp_path: Path, tokenizer: Path, punkt: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "d.jsonl", ["One. Two."])
    assert (
        tokenize(source, f"out={tmp_path / 'o'}", f"tokenizer={tokenizer}", "sentences=klingon")
        == 3
    )
    assert "punkt_tab" in capsys.readouterr().err


def test_tokenize_unlearned_record_is_skipped_and_reported(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"text": f"document {i}"} for i in range(8)]
    flags: dict[int, dict[str, Any]] = {
        1: {"weight": 0},
        3: {"train": False},
        5: {"loss": 0.0},
        6: {"loss_mask": 1},
    }
    for at, flag in flags.items():
        rows[at] |= flag
    source = tmp_path / "d.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tokenize(source, f"out={tmp_path / 'o'}", f"tokenizer={tokenizer}") == 0
    said = capsys.readouterr().out
    assert "3 records left out" in said
    for key in ("weight", "train", "loss"):
        assert f"1 left out because {key} is 0 or false" in said
        assert f"ignored_keys={key}" in said
    left = [json.loads(line) for line in (tmp_path / "o.rejects.jsonl").read_text().splitlines()]
    assert [row["line"] for row in left] == [2, 4, 6]
    assert "it says that it is not learned (weight: 0); ignored_keys=weight" in left[0]["why"]
    assert "ignored_keys=loss" in left[2]["why"]
    named = ("ignored_keys=weight", "ignored_keys=train", "ignored_keys=loss")
    assert tokenize(source, f"out={tmp_path / 'all'}", f"tokenizer={tokenizer}", *named) == 0
    assert not (tmp_path / "all.rejects.jsonl").exists()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("key", "value", "workers"), [("loss", 2.31, 2), ("weight", 0.4, 1), ("train", "yes", 1)]
)
def test_tokenize_unexpected_json_column_ends_without_loss(
    key: str,
    value: Any,
    workers: int,
    tmp_path: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[dict[str, Any]] = [{"text": f"document {i} " * 9, key: i % 2} for i in range(120)]
    rows[99][key] = value
    source = tmp_path / "d.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert source.stat().st_size > 2 * sources.UNIT, "the line is not of the first unit"
    words = (source, f"out={tmp_path / 'o'}", f"tokenizer={tokenizer}", f"workers={workers}")
    assert tokenize(*words) == 2
    said = capsys.readouterr().err
    assert f"origin: {source}:100" in said
    assert f" {key}=" in said
    assert str(value)[:3] in said
    assert f"Use ignored_keys={key}" in said
    assert tokenize(*words, f"ignored_keys={key}") == 0, "nothing is left of what was begun"
    held = read_manifest(tmp_path / "o")
    assert held is not None
    assert held.count("documents") == 120


def test_tokenize_unexpected_table_column_ends_the_command(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    from pyarrow import parquet

    source = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "loss": [1.0, None, 0.7]}), source)
    assert tokenize(source, f"out={tmp_path / 'o'}", f"tokenizer={tokenizer}") == 2
    err = capsys.readouterr().err
    assert " loss=0.7: " in err
    assert f"origin: {source}:3" in err
    named = (f"out={tmp_path / 'tokenizer.new'}", "vocab_size=300")
    assert main(["data", "train-tokenizer", str(source), *named]) == 2
    err = capsys.readouterr().err
    assert " loss=0.7: " in err
    assert f"origin: {source}:3" in err
