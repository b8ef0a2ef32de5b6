"""Files that a user names: regular ones of bounded size, and of strangers only what says that it is
one of ours.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.disk.files import MAX_BYTES, read_bytes
from mtrain.errors import ConfigError

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter a working folder with a named pipe and a socket in it."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    os.mkfifo("pipe.json")
    os.symlink("pipe.yaml", "link.yaml")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.yaml")
        yield tmp_path


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "argv",
    [
        ["check", "run={}"],
        ["check", "recipe={}"],
        ["show", "run={}"],
        ["run={}"],
        ["recipe", "import", "{}"],
        ["recipe", "verify", "{}"],
        ["recipe", "show", "{}"],
        ["recipe", "diff", "{}", "llama/tiny_cpu"],
        ["recipe", "lock", "{}"],
        ["recipe", "new", "x", "recipe={}"],
        ["recipe", "export", "--megatron", "{}"],
        ["explain", "optim.lr", "{}"],
        ["-m", "check", "run={}", "optim.lr=1e-3,2e-3"],
    ],
    ids=" ".join,
)
def test_config_files_irregular_file_is_named_without_waiting(
    odd: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind in (
        ("pipe.yaml", "a named pipe"),
        ("link.yaml", "a named pipe"),
        ("socket.yaml", "a socket"),
        ("/dev/zero", "a character device"),
        ("/dev/null", "a character device"),
    ):
        assert main([word.format(name) for word in argv]) == 2
        out, err = capsys.readouterr()
        assert f"is {kind}" in out + err, (name, out, err)
        assert f"did you mean {name}" not in err, "a fix is not what was refused"


def test_config_files_piped_config_json_is_named(
    odd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "import", "pipe.json"]) == 2
    assert "is a named pipe" in capsys.readouterr().err


def test_config_files_file_swapped_for_pipe_is_not_awaited(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it was a regular file when its kind was read
    monkeypatch.setattr("mtrain.config.disk.files.kind_of", lambda path: "")
    with pytest.raises(ConfigError, match="is a named pipe"):
        read_bytes(odd / "pipe.yaml", "pipe.yaml")


def test_config_files_dash_reads_bounded_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        b"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
        b" --max-position-embeddings 8"
    )
    for data, code, word in (
        (flags + b" --vocab-size 9", 0, "num_layers: 2"),
        (b"#" * (MAX_BYTES + 1), 2, "MT005"),
        (b"\xff", 2, "MT003"),
    ):
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
        assert main(["recipe", "import", "-"]) == code
        assert word in "".join(capsys.readouterr())


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "verb", [["check", "recipe={}"], ["check", "run={}"], ["recipe", "import", "{}"]], ids=str
)
@pytest.mark.parametrize("name", ["environ", "shadow", "id_rsa", "link.yaml"])
def test_config_files_foreign_content_is_not_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    name: str,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    here = tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    for text in ("--s3cret", "s3cret: [", "s3cret: 1", "optim: {lr: s3cret}", "s3cret"):
        (elsewhere / name.removesuffix(".yaml")).write_text(text)
        if name.endswith(".yaml"):
            (here / name).unlink(missing_ok=True)
            (here / name).symlink_to(elsewhere / "link")
        given = here / name if name.endswith(".yaml") else elsewhere / name
        assert main([word.format(given) for word in verb]) == 2
        assert "s3cret" not in "".join(capsys.readouterr())
    monkeypatch.setenv("SOMETHING", "s3cret")
    monkeypatch.chdir("/")
    assert main([word.format("/proc/self/environ") for word in verb]) == 2
    assert "s3cret" not in "".join(capsys.readouterr())


def test_config_files_piped_tokenizer_is_named(odd: Path) -> None:
    from mtrain.data.text.tokenizer import Tokenizer

    with pytest.raises(ConfigError, match=r"MT603.*is a named pipe"):
        Tokenizer("pipe.json")
