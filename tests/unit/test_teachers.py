"""Teachers that cannot teach: refused before the run, with the numbers and the ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.errors import ConfigError
from mtrain.plan.count import frozen_copy_bytes
from mtrain.plan.teacher import teacher_of

WORDS = ("objective=distil", "data=mock", "parallel=pp2", "cluster=cpu")


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load([*WORDS, *words])
    return "\n".join(problem.render() for problem in error.value.problems)


def folder(path: Path, vocabulary: int, **more: int) -> Path:
    """Return a folder with the configuration of a Llama, and a tokenizer of some words."""
    path.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3} | more
    config = {"model_type": "llama", "vocab_size": vocabulary, "intermediate_size": 128, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    words = {f"w{number}": number for number in range(10)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return path


def test_teachers_that_are_missing_are_refused(tmp_path: Path) -> None:
    assert "MT387" in refused()
    assert f"{tmp_path} has no run.yaml and no config.json" in refused(
        f"objective.teacher={tmp_path}"
    )


def test_teachers_of_other_vocabularies_are_refused(tmp_path: Path) -> None:
    """Name the numbers of ids and, where both tokenizers are known, the ids that differ."""
    ours = load([*WORDS, "objective.teacher=drawn"]).run.model.vocab_size
    path = folder(tmp_path / "other", ours + 128)
    teacher = f"objective.teacher={path}"
    assert f"MT389] {teacher}" in refused(teacher)
    assert f"the teacher has {ours + 128} ids, the student {ours}" in refused(teacher)
    same = folder(tmp_path / "same", ours)
    mine = tmp_path / "tokenizer.json"
    words = json.loads((same / "tokenizer.json").read_text())
    del words["model"]["vocab"]["w3"]
    words["model"]["vocab"]["other"] = 3
    mine.write_text(json.dumps(words))
    text = refused(f"objective.teacher={same}", f"data.tokenizer={mine}")
    assert "ids that differ: 3 ('w3' there, 'other' here)" in text


def test_teachers_follow_the_layout_of_students(tmp_path: Path) -> None:
    """Split three layers over two stages; refuse heads that tp does not divide."""
    ours = load([*WORDS, "objective.teacher=drawn"]).run.model.vocab_size
    path = folder(tmp_path / "odd", ours)
    run = load([*WORDS, f"objective.teacher={path}"]).run
    teacher = teacher_of(run)
    assert teacher is not None
    assert teacher.parallel.layers_per_stage == (1, 2)
    assert frozen_copy_bytes(run) > 0
    wide = folder(tmp_path / "wide", ours, num_attention_heads=3, hidden_size=48)
    assert "MT391" in refused(f"objective.teacher={wide}", "parallel.tp=2")
