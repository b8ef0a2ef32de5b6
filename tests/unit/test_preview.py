"""`data preview`: what it shows is what a model learns from, and nothing in a file is obeyed."""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.resolve.batches import asked
from mtrain.data import open_splits, prepare
from mtrain.data.store.indexed import IndexedWriter
from tests.support.chats import chats_file, folder_of, turns
from tests.support.configs import LAPTOP

SMALL = (
    "model.num_layers=2 model.vocab_size=400 data.seq_length=96 trainer.eval_iters=0"
    " trainer.eval_interval=0"
)
EVIL = "<script>alert(1)</script>\x1b[31m\"'&amp;"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("preview")
    folder_of(home, "chatml", marked=True)
    chats_file(home / "chats.jsonl", [turns("1", "2"), turns("3", EVIL), turns("4", "5")])
    chats_file(home / "pairs.jsonl", [{"prompt": "q", "chosen": "good", "rejected": "bad"}] * 3)
    (home / "text.txt").write_text("one two three. " * 400)
    return home


def shown(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> str:
    if any(w.startswith("data=sft") for w in words):
        named = [f"data.tokenizer={home}/tokenizer.json"]
    else:
        named = []
    assert (
        main(["data", "preview", *SMALL.split(), f"data.cache_dir={home}/cache", *named, *words])
        == 0
    )
    return capsys.readouterr().out


def samples(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown(capsys, home, *words, "--json"))["samples"]
    return found


def test_preview_equals_samples_of_chats(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    chats = ("data=sft", f"data.path={home}/chats.jsonl", "data.split=[1,0,0]")
    found = samples(capsys, home, *chats, "samples=3")
    learned = {"".join(t["text"] for t in row["documents"][0] if t["weight"]) for row in found}
    assert learned == {"2<|im_end|>", f"{EVIL}<|im_end|>", "5<|im_end|>"}
    page = shown(capsys, home, *chats, "data.packed=true", "samples=2")
    assert "of padding" in page
    assert "document 2, positions 0 to 58" in page
    assert "loss  2|<|im_end|>" in page
    assert "loss  5|<|im_end|>" in page
    assert "\x1b" not in page
    weights = samples(capsys, home, *chats, "samples=1", "trainer.loss_average=sample")[0][
        "documents"
    ][0]
    assert sum(token["weight"] for token in weights) == pytest.approx(1.0)


def test_preview_shows_both_answers_of_a_pair(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    words = (
        "data=sft",
        "data.kind=preference",
        f"data.path={home}/pairs.jsonl",
        "data.split=[1,0,0]",
        "samples=1",
    )
    page = shown(capsys, home, *words)
    assert "sample 0 of train, chosen" in page
    assert "sample 0 of train, rejected" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data=mock",), "sample 2 of train: 97 tokens, 96 carry loss"),
        (("data=mock", "data.packed=true"), "document 2, positions 0 to"),
        (("data=mock", "model=bert_tiny", "model.num_layers=2"), " -> "),
        (("data=mock", "model=t5_tiny", "model.num_layers=2"), "encoder reads: "),
        (("data=mock", "model=llava_tiny"), "carry loss"),
    ],
)
def test_preview_accepts_any_configuration(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    rest = [word for word in SMALL.split() if not word.startswith("model.")]
    assert main(["data", "preview", *rest, *words]) == 0
    assert said in capsys.readouterr().out


def test_preview_megatron_order_equals_run_of_same_steps(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    with IndexedWriter(home / "tokens", np.dtype("<u2")) as writer:
        writer.add(np.random.default_rng(0).integers(0, 400, 4000), np.full(40, 100))
    words = [
        "data=indexed",
        f"data.path={home}/tokens",
        "data.split=[1,0,0]",
        "data.order=megatron",
    ]
    found = samples(capsys, home, *words, "samples=2")
    run = load([*SMALL.split(), *words], LAPTOP, {}).run
    assert asked(run)[0] > 3 * 4000 // 96, "of several epochs"
    train = open_splits(
        run.data, 400, run.trainer.seed, prepare(run.data), ("train",), asked(run)
    ).train
    assert [[t["id"] for t in row["documents"][0]] for row in found] == train.batch(
        np.arange(2)
    ).tolist()


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.kinds = set[str]()
        self.words = list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kinds.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_preview_page_escapes_chat_markup(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    words = (
        "data=sft",
        f"data.path={home}/chats.jsonl",
        "data.split=[1,0,0]",
        "--html",
        str(tmp_path / "page.html"),
    )
    assert "3 samples: " in shown(capsys, home, *words)
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.kinds <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "span",
        "div",
        "br",
    }
    assert "alert" in "".join(page.words)
    assert "\x1b" not in text
    assert "default-src 'none'" in text
    assert main(["data", "preview", *SMALL.split(), *words]) == 2  # nothing is written over


def test_preview_page_positions_are_in_margin(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    said = "54 + 440 = 494\nand " + "1 + 2 = 3, " * 3
    file = chats_file(tmp_path / "sums.jsonl", [turns("add", said)])
    words = ("data=sft", f"data.path={file}", "data.split=[1,0,0]", "samples=1")
    shown(capsys, home, *words, "--html", str(tmp_path / "page.html"))
    rows = re.findall(
        r'<div class="row"><span class="n" aria-hidden="true">(\d+)</span><span'
        r' class="text">(.*?)</span></div>',
        (tmp_path / "page.html").read_text(),
    )
    text = "".join(
        unescape(re.sub("<[^>]*>", "", inside)) for _, inside in rows if "of padding" not in inside
    )
    assert said.replace("\n", "\\n").strip() in text
    tokens = samples(capsys, home, *words)[0]["documents"][0]
    firsts = [int(position) for position, _ in rows]
    assert firsts[0] == 0
    assert len(firsts) > 4
    assert firsts[-1] == next(token["position"] for token in tokens if token["padding"])


def test_preview_colours_are_for_terminals(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = ("data=sft", f"data.path={home}/chats.jsonl", "data.split=[1,0,0]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = shown(capsys, home, *chats)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    coloured = shown(capsys, home, *chats)
    assert "\x1b[1;32m" in coloured
    assert "\x1b[31m" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(capsys, home, *chats) == plain
