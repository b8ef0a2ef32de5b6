"""Input that would be lost: truncated input is refused, and skipped input is named."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.data import tokenize as tokenize_words
from mtrain.cli.main import main
from mtrain.config.disk.token_files import read_manifest
from mtrain.data.preprocess import build, encoder, journal, readers, sources, tokenizers
from mtrain.data.preprocess.sources import find_sources
from tests.support.covering import some
from tests.support.token_corpora import bpe, documents, gpt2, same_files
from tests.unit.test_data_tokenize import as_tar, as_zst, lines, packed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return bpe(tmp_path_factory.mktemp("tokenizer")).read_bytes()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tokenizer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder with `tokenizer.json`, and use small units."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "UNIT", 1 << 12)
    monkeypatch.setattr(build, "UNIT", 1 << 12)
    Path("tokenizer.json").write_bytes(tokenizer)


def tokenize(*words: object) -> int:
    return main(["data", "tokenize", *map(str, words), "tokenizer=tokenizer.json", "workers=1"])


def counts(prefix: str) -> dict[str, int]:
    held = read_manifest(Path(prefix))
    assert held is not None
    return {name: held.body[name] for name in ("documents", "rejected")}


def rejects(prefix: str) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]
    return [(row["line"], row["why"]) for row in rows]


def members(*named: tuple[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in named:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name in links:
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = "/etc/passwd"
            tar.addfile(info)
    return out.getvalue()


TEXT = lines(documents(400, 2))
TAR = as_tar(documents(20, 2))
CUT = {
    "d.jsonl.gz": gzip.compress(TEXT)[:-9],
    "d.jsonl.zst": as_zst(TEXT)[:-3],
    "e.jsonl.zst": as_zst(TEXT)[: len(as_zst(TEXT)) * 2 // 3],
    "d.tar": TAR[: tarfile.BLOCKSIZE * 2 * 6],
    "d.tar.gz": gzip.compress(TAR[: tarfile.BLOCKSIZE * 2 * 6]),
    "e.tar": TAR + TAR,
}


@pytest.mark.parametrize("name", some(CUT, ["d.jsonl.zst", "d.tar", "e.tar"]))
def test_lossless_truncated_or_overlong_input_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(CUT[name])
    assert tokenize(name, "out=o", f"key={'txt' if 'tar' in name else 'text'}") == 4
    assert f"{name}: " in capsys.readouterr().err
    assert not Path("o.bin").exists()


def test_lossless_every_tar_member_is_a_document_or_named() -> None:
    named = (
        ("a.txt", b"one"),
        ("b.txt", b"two"),
        ("b.txt", b"three"),
        ("c.txt", b"four"),
        ("x/.txt", b"five"),
    )
    packed(Path("d.tar"), members(*named, links=("l.txt", "m.json")))
    assert tokenize("d.tar", "out=o", "key=txt") == 0
    assert counts("o") == {"documents": 3, "rejected": 3}
    two, link, other = rejects("o")
    assert two == (2, "b.txt: there are two txt in the sample")
    assert link == (5, "l.txt: l.txt is a link or no regular file")
    assert other[0] == 6


@pytest.mark.parametrize("name", ["d.jsonl", pytest.param("d.jsonl.gz", marks=pytest.mark.full)])
def test_lossless_empty_lines_are_counted(name: str) -> None:
    good = b'{"text": "a few words"}\n'
    data = good * 300 + b"\n" * 9000 + b"no json\n" + good + b"\r\n \n"
    Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert tokenize(name, "out=o") == 0
    assert [line for line, _ in rejects("o")] == [9301]
    assert counts("o") == {"documents": 301, "rejected": 1}


@pytest.mark.parametrize(
    "name", some(dict.fromkeys(["d.jsonl", "d.jsonl.gz", "d.jsonl.zst"]), ["d.jsonl.gz"])
)
def test_lossless_byte_order_mark_is_dropped(name: str) -> None:
    data = b"\xef\xbb\xbf" + TEXT
    made = {"gz": gzip.compress, "zst": as_zst}.get(name.rpartition(".")[2], bytes)(data)
    Path(name).write_bytes(made)
    assert tokenize(name, "out=o") == 0
    assert counts("o") == {"documents": 400, "rejected": 0}


def test_lossless_corpus_next_to_inputs_is_no_input() -> None:
    Path("in").mkdir()
    Path("in/d.jsonl").write_bytes(TEXT + b"no json\n")
    assert tokenize("in", "out=in/o", "max_rejects=0") == 4, "it leaves a folder to go on with"
    assert Path("in/o.partial/rejects.jsonl").exists()
    assert tokenize("in", "out=in/o") == 0
    before = Path("in/o.bin").read_bytes()
    assert tokenize("in", "out=in/o", "overwrite=true") == 0
    assert Path("in/o.bin").read_bytes() == before


def test_lossless_changing_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("d.jsonl").write_bytes(TEXT)
    real = build.Draft.commit

    def commit(draft: Any, result: Any) -> None:
        if not draft.units:
            Path("d.jsonl").write_bytes(TEXT[: len(TEXT) // 2])
        real(draft, result)

    with monkeypatch.context() as patched:
        patched.setattr(build.Draft, "commit", commit)
        assert tokenize("d.jsonl", "out=o") == 2
    assert (
        "input=d.jsonl: cannot be tokenized because it changed while it was read"
        in capsys.readouterr().err
    )
    assert not Path("o.bin").exists()
    assert tokenize("d.jsonl", "out=o") == 0, "nothing is left of it"


@pytest.mark.parametrize("name", some(dict.fromkeys(journal.GROWING), ["lengths"]))
def test_lossless_killed_run_files_are_verified(name: str) -> None:
    Path("d.jsonl").write_bytes(b"no json\n" + TEXT + b"no json\n")
    assert tokenize("d.jsonl", "out=whole") == 0
    assert tokenize("d.jsonl", "out=o", "max_rejects=1") == 4
    raw = bytearray(Path(f"o.partial/{name}").read_bytes())
    raw[5] ^= 1
    Path(f"o.partial/{name}").write_bytes(raw)
    assert tokenize("d.jsonl", "out=o") == 0
    for end in (".bin", ".idx", ".manifest.json", ".rejects.jsonl"):
        assert Path(f"o{end}").read_bytes() == Path(f"whole{end}").read_bytes()


def test_lossless_tokenizer_is_chosen_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "both").mkdir()
    gpt2(folder)
    Path("tokenizer.json").rename(folder / "tokenizer.json")
    Path("d.jsonl").write_bytes(TEXT)
    words = ("data", "tokenize", "d.jsonl", "tokenizer=both", "workers=1")
    assert main([*words, "out=a", "kind=gpt2"]) == 0
    assert main([*words, "out=b"]) == 0
    kinds = []
    for prefix in "ab":
        held = read_manifest(Path(prefix))
        assert held is not None
        kinds.append(held.body["tokenizer"]["kind"])
    assert kinds == ["gpt2", "tokenizer.json"]
    assert main([*words, "out=c", "kind=bert"]) == 2
    assert "the folder has no tokenizer of the kind bert" in capsys.readouterr().err


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("tokenize", "d.jsonl", f"out={LONG}", "tokenizer=tokenizer.json"),
        ("tokenize", "d.jsonl", "out=o", f"tokenizer={LONG}"),
        ("verify", LONG),
        ("verify", f"a={LONG}"),
        ("verify", "~nobody-here/o"),
        ("train-tokenizer", "d.jsonl", f"out={LONG}", "vocab_size=300"),
        ("train-tokenizer", "d.jsonl", "out=t.json", "vocab_size=100"),
        ("train-tokenizer", "d.jsonl", "out=t.json", "vocab_size=100", "kind=unigram"),
        ("train-tokenizer", "d.jsonl", "out=t.json", "vocab_size=7", "kind=wordpiece"),
        ("train-tokenizer", "d.jsonl", "out=t.json", "special="),
        ("train-tokenizer", "d.jsonl", "out=t.json", "template={text}", "key=other"),
    ],
)
def test_lossless_impossible_names_and_sizes_are_reported(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("d.jsonl").write_bytes(TEXT)
    assert main(["data", *words]) in (2, 3)
    err = capsys.readouterr().err
    assert "unexpected" not in err
    assert re.search(r" (Use|Leave) |  fix: ", err)
    assert not Path("t.json").exists()


def test_lossless_training_counts_bytes_and_names_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("d.jsonl").write_text(
        '{"text": "日本"}\n' + "\n" * 9000 + '{"text": "\\ud800"}\n' + "no json\n"
    )
    assert (
        main(["data", "train-tokenizer", "--json", "d.jsonl", "out=t.json", "vocab_size=300"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["text"] == 6
    assert main(["data", "train-tokenizer", "d.jsonl", "out=u.json", "max_rejects=1"]) == 4
    assert (
        "2 records are left out so far; the last: d.jsonl:9003: not JSON" in capsys.readouterr().err
    )


@pytest.mark.full
@pytest.mark.parametrize("form", ["parquet", pytest.param("arrow", marks=pytest.mark.full)])
def test_lossless_large_row_group_is_processed_in_pieces(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(readers, "PIECE", 1 << 13)
    monkeypatch.setattr(readers, "ROWS", 16)
    texts = documents(700, 4)
    Path("d.jsonl").write_bytes(lines(texts))
    table = pa.table({"text": [*texts[:300], None, *texts[300:]]})
    if form == "parquet":
        pq.write_table(table, "d.parquet", row_group_size=500)
    else:
        with pa.ipc.new_file("d.arrow", table.schema) as out:
            out.write_table(table)
    parts = readers.cut(find_sources([Path(f"d.{form}")])[0])
    assert max(size for *_, size in parts) < 3 << 13
    assert [stop for _, stop, _ in parts] == [*(first for first, *_ in parts[1:]), 701]
    words = ("data", "tokenize", "tokenizer=tokenizer.json", "workers=2")
    assert main([*words, "d.jsonl", "out=a"]) == 0
    assert main([*words, f"d.{form}", "out=b"]) == 0
    assert same_files(Path("a"), Path("b"))
    assert rejects("b") == [(301, "text is null, and not a text")]


def test_lossless_command_words_match_the_work() -> None:
    assert tuple(sources.FORMATS) == tokenize_words.FORMATS
    assert tokenize_words.KINDS == encoder.KINDS == tuple(tokenizers.LOADERS)
