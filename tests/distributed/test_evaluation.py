"""Evaluation of a checkpoint: the run's own validation loss, the same in any layout, and
log-likelihoods of texts.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.data import DataConfig
from mtrain.data.text.tokenizer import Tokenizer, train_bpe
from mtrain.errors import ConfigError
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

LAYOUTS = {
    "one": {},
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "dp2": {"ranks": 2},
}
TEXT = "the cat sat on the mat. über den Dächern\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    home = tmp_path_factory.mktemp("corpus")
    (home / "text").mkdir()
    for i in range(30):
        (home / f"text/{i:02}.txt").write_text(TEXT * (20 + i))
    return DataConfig(
        kind="text",
        path=str(home / "text"),
        seq_length=32,
        tokenizer_vocab_size=300,
        cache_dir=str(home / "cache"),
        split=(0.5, 0.4, 0.1),
        suffixes=(".txt",),
        packed=False,
    )


def _run(data: DataConfig, **layout: Any) -> Any:
    run = tiny_run(trainer={"eval_iters": 3}, **layout)
    return run.model_copy(update={"data": data})


def _measured(run: Any, limit: int | None) -> dict[str, Any]:
    from mtrain.assembly.model import build_model
    from mtrain.data import prepare, validation_of
    from mtrain.train.generate.evaluation import measured
    from mtrain.world.init import joined

    tokenizer = prepare(run.data).tokenizer
    with joined(run) as world, torch.no_grad():
        splits = validation_of(run.data, run.model.vocab_size, run.trainer.seed, tokenizer)
        return asdict(
            measured(run, world, build_model(run, world, wrap=False), splits, tokenizer, limit)
        )


def _own(run: Any) -> float:
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import evaluate
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        assert parts.valid_data is not None
        found = evaluate(parts, parts.valid_data, run.trainer.eval_iters)
        assert found is not None
        return found


def test_evaluation_over_run_samples_equals_run_loss(data: DataConfig) -> None:
    run = _run(data)
    samples = run.trainer.eval_iters * run.trainer.batch
    found = run_ranks(1, _measured, run, samples)[0]
    assert found["loss"] == run_ranks(1, _own, run)[0]
    assert (found["samples"], found["tokens"]) == (samples, samples * 32)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_token"] == pytest.approx(found["loss"] / math.log(2))
    assert found["bits_per_byte"] == pytest.approx(
        found["bits_per_token"] * found["tokens"] / found["bytes"]
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(LAYOUTS, ["tp2 sequence parallel", "cp2"]))
def test_evaluation_partial_step_counts_each_sample_once(name: str, data: DataConfig) -> None:
    expected = run_ranks(1, _measured, _run(data), 11)[0]
    assert (expected["samples"], expected["tokens"]) == (11, 11 * 32)
    run = _run(data, **LAYOUTS[name])
    for found in run_ranks(run.parallel.ranks or 1, _measured, run, 11):
        for key in ("samples", "tokens", "bytes"):
            assert found[key] == expected[key], key
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", some(LAYOUTS, ["cp2"]))
def test_evaluation_request_beyond_split_measures_all(name: str, data: DataConfig) -> None:
    expected = run_ranks(1, _measured, _run(data), None)[0]
    run = _run(data, **LAYOUTS[name])
    more = {"eval_iters": expected["samples"] // run.trainer.batch + 2}
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update=more)})
    for found in run_ranks(run.parallel.ranks or 1, _own, run):
        assert found == pytest.approx(expected["loss"], rel=1e-6)


def test_evaluation_tokens_count_bytes_of_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(train_bpe([TEXT * 9], 300).to_str())
    tokenizer = Tokenizer(file)
    for text in (TEXT, "日本語 <|x|>\n\t", "ß" * 7):
        assert tokenizer.byte_counts[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.byte_counts[tokenizer.eod or 0] == 0


def test_evaluation_foreign_tokenizer_is_refused(data: DataConfig, tmp_path: Path) -> None:
    from mtrain.data import prepare, validation_of

    other = tmp_path / "tokenizer.json"
    other.write_text(train_bpe(["another text"], 300).to_str())
    own = prepare(data)
    assert own.tokenizer is not None
    assert prepare(data, tokenizer=own.tokenizer).prefix == own.prefix
    theirs = validation_of(data, 300, 1, other).corpus
    assert theirs.prefix != own.prefix
    assert theirs.tokenizer is not None
    assert theirs.tokenizer.read_bytes() == other.read_bytes()
    assert validation_of(data, 300, 1, other).corpus.prefix == theirs.prefix
    indexed = {"kind": "indexed", "path": str(own.prefix), "tokenizer": str(own.tokenizer)}
    with pytest.raises(ConfigError, match="another tokenizer") as refused:
        validation_of(data.model_copy(update=indexed), 300, 1, other)
    assert [problem.code for problem in refused.value.problems] == ["MT609"]


SEQUENCES = [[5, 17, 8, 250, 31, 9], [9, 4], list(range(40, 73)), [1, 2, 3]]


def _scored(run: Any) -> list[tuple[list[float], list[bool]]]:
    from mtrain.assembly.model import build_model
    from mtrain.train.generate.sampler import Sampler
    from mtrain.train.generate.score import score
    from mtrain.world.init import joined

    with joined(run) as world:
        found = score(Sampler(run, world, build_model(run, world, wrap=False)), SEQUENCES, rows=3)
        return [(one.log_probabilities, one.likeliest) for one in found]


def _by_hand(run: Any) -> list[tuple[list[float], list[bool]]]:
    from mtrain.assembly.model import build_model
    from mtrain.world.init import joined

    out = []
    with joined(run) as world, torch.no_grad():
        chunk = build_model(run, world, wrap=False)[0].eval()
        for ids in SEQUENCES:
            tokens = torch.tensor([ids[:-1]])
            labels = torch.tensor(ids[1:])
            logits = chunk(tokens, torch.arange(len(ids) - 1)[None], None)[
                0, :, : run.model.vocab_size
            ]
            chosen = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
            out.append((chosen.tolist(), (logits.argmax(-1) == labels).tolist()))
    return out


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["tp2 sequence parallel", "pp2vpp2"])
def test_evaluation_log_probabilities_equal_logits(name: str) -> None:
    expected = run_ranks(1, _by_hand, tiny_run())[0]
    run = tiny_run(**LAYOUTS[name])
    for found in run_ranks(run.parallel.ranks or 1, _scored, run):
        for (values, likeliest), (right, greedy) in zip(found, expected, strict=True):
            assert values == pytest.approx(right, abs=1e-5)
            assert likeliest == greedy
