"""Commands of a first day: faults that people met, and the answers they get now. Those of the table
run in processes of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.data.store.indexed import IndexedWriter
from tests.support import commands
from tests.support.covering import some
from tests.support.launched import mtrain
from tests.unit.test_start_from_weights import MIXTRAL

ANSWERS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "the data decides the weights": (
        "explain data.path",
        0,
        ("contents: the resulting weights",),
    ),
    "so does a chat template": (
        "explain data.chat_template",
        0,
        ("contents: the resulting weights",),
    ),
    "fine-tuning has a rate of its own": (
        "explain optim.lr trainer=sft data=sft model=llama31_8b cluster=h100x8",
        0,
        ("value     5e-06", "resolved from Tulu 3"),
    ),
    "a path with an equals sign": (
        "check checkpoint.init_from=/c/epoch=3",
        2,
        ("""init_from="/c/epoch=3\"""",),
    ),
    "a name that is a number": ("check log.name=1.10", 2, ("""'log.name="1.10"'""",)),
    "the version": ("version", 0, ("mtrain 0.",)),
    "the version behind a verb": ("check --version", 0, ("mtrain 0.",)),
    "help": ("help", 0, ("usage: python launch.py [VERB]", "verbs\n")),
    "help behind a verb": ("check -h", 0, ("usage: python launch.py check",)),
    "a bracket that is not closed": (
        "-m optim.lr=range(1",
        2,
        ("1 opening and 0 closing brackets",),
    ),
    "a range that counts the wrong way": ("-m trainer.seed=range(10,1)", 2, ("range(10,1,-1)",)),
    "a stage with less than nothing": (
        "check parallel=pp2 parallel.layers_per_stage=[5,-1]",
        2,
        ("would hold -1 layers", "Use parallel.layers_per_stage=[3,1]"),
    ),
    "the beginning of a name": ("check model=llama3", 2, ("Use model=llama3_8b or",)),
    "what was changed": ("show --changed optim.lr=1e-3", 0, ("optim.lr=0.001  # command line\n",)),
    "a name on the hub": ("recipe import org/a-model", 2, ("hf download org/a-model config.json",)),
    "a trillion parameters": (
        "check recipe=gpt/1t_a100x3072",
        0,
        ("1.01T parameters", "ranks   3072"),
    ),
    "340 billion parameters": (
        "check recipe=nemotron/4_340b_h100x6144",
        0,
        ("341.03B parameters", "ranks   6144"),
    ),
    "a weak scaling": (
        "plan --scale 8,16 --weak model=gpt_1.7b cluster=a100",
        0,
        ("weak scaling: 24 samples a device", "\n       16    384 "),
    ),
}


@pytest.mark.parametrize(
    "name", some(ANSWERS, ["the version", "a stage with less than nothing", "a name on the hub"])
)
def test_fresh_process_answers_command(name: str, tmp_path: Path) -> None:
    words, code, said = ANSWERS[name]
    done = commands.mtrain(*words.split(), cwd=tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    for part in said:
        assert part in text, text
    assert "Traceback" not in text
    assert not (tmp_path / "runs").exists(), "nothing is started"


def corpus(prefix: Path, lengths: list[int]) -> None:
    """Write a corpus of documents of these lengths."""
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.zeros(sum(lengths), np.int64), np.array(lengths))


@pytest.mark.full
def test_fresh_process_small_blend_share_passes_zero_warns(tmp_path: Path) -> None:
    for name in "abc":
        corpus(tmp_path / name, [3000] * 8)
    words = "data=indexed data.blend=[a,b,c] data.blend_weights=[1,1.8e-7,0]"
    done = mtrain("check", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning[MT319]" in done.stderr + done.stdout


@pytest.mark.full
def test_fresh_process_sample_has_what_fits(tmp_path: Path) -> None:
    corpus(tmp_path / "c", [12_000, 40_000, 9_000])
    done = mtrain("data", "sample", "c", "--out", "few", "--tokens", "10000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1000 tokens fewer than the 10000 that were asked for" in done.stdout
    done = mtrain("data", "sample", "c", "--out", "all", "--tokens", "61000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all: 3 documents, 61.00k tokens\n" in done.stdout


@pytest.mark.full
def test_fresh_process_unread_layer_kinds_keep_window(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        **MIXTRAL,
        "sliding_window": 16,
        "layer_types": ["full_attention"] * 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    done = mtrain("recipe", "import", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "window_size: 16" in done.stdout
    assert "is read by no layer of Mixtral" in done.stdout + done.stderr
