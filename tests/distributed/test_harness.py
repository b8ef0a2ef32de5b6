"""lm-evaluation-harness asks, and our model answers with its own log probabilities and texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.data.text.tokenizer import Tokenizer, train_bpe
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

pytest.importorskip("lm_eval", reason="pip install 'mtrain[eval]'")

TEXT = "the cat sat on the mat. über den Dächern\n"
CHOICE = """task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: "{{a}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(train_bpe([TEXT * 9], 300).to_str())
    return file


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def _ask(run: Any, file: Path, task: Path | None = None) -> Any:
    from mtrain.assembly.model import build_model
    from mtrain.train.generate.harness import Model, results
    from mtrain.train.generate.request import Questions
    from mtrain.train.generate.sampler import Sampler
    from mtrain.train.generate.score import score
    from mtrain.world.init import joined

    def requests(*each: Any) -> list[Any]:
        return [SimpleNamespace(args=args) for args in each]

    with joined(run) as world:
        sampler = Sampler(run, world, build_model(run, world, wrap=False))
        tokenizer = Tokenizer(file)
        model = Model(sampler, tokenizer, 3)
        if task is not None:
            return results(model, Questions((str(task),)))
        pairs = model.loglikelihood(
            requests(("the cat", " sat on"), ("", "the mat"), ("the " * 40, "cat"))
        )
        long = TEXT * 5
        (rolling,) = model.loglikelihood_rolling(requests((long,)))
        texts = model.generate_until(
            requests(
                ("the ", {"until": ["\n"], "max_gen_toks": 5}),
                ("cat", {"until": "x", "max_gen_toks": 3}),
            )
        )
        ids = [tokenizer.eod or 0, *tokenizer.encode(long)]
        whole = score(sampler, [ids[i : i + 33] for i in range(0, len(ids) - 1, 32)])
        before = tokenizer.encode("the cat")
        after = tokenizer.encode(" sat on")
        alone = score(sampler, [before + after])[0]
        return (
            (pairs, rolling, texts),
            (
                sum(alone.log_probabilities[-len(after) :]),
                [sum(one.log_probabilities) for one in whole],
            ),
        )


def test_harness_answers_are_equal_in_any_layout(tokenizer: Path) -> None:
    (pairs, rolling, texts), (pair, windows) = run_ranks(1, _ask, tiny_run(), tokenizer)[0]
    assert pairs[0][0] == pytest.approx(pair, abs=1e-5)
    assert all(value < 0 for value, _ in pairs)
    # the last window has the whole context before what is left, and so has more to go by than by
    # hand
    assert rolling == pytest.approx(sum(windows), rel=1e-2)
    assert all(texts)
    for answers, _ in run_ranks(2, _ask, tiny_run(ranks=2, tp=2), tokenizer):
        assert [value for value, _ in answers[0]] == pytest.approx(
            [value for value, _ in pairs], abs=1e-4
        )
        assert answers[1] == pytest.approx(rolling, rel=1e-5)
        assert answers[2] == texts


def test_harness_file_task_runs(tokenizer: Path, tmp_path: Path) -> None:
    lines = [{"q": "the cat", "c": [" sat", " zzz qqq xxx ###"], "a": i % 2} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = tmp_path / "choice.yaml"
    task.write_text(CHOICE.replace("FILE", str(tmp_path / "data.jsonl")))
    found = run_ranks(1, _ask, tiny_run(), tokenizer, task)[0]
    assert found["results"]["choice"]["acc,none"] == 0.5
