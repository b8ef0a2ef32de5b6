"""A model of rewards on the ranks of the policy: the scores of transformers, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.loading.reward_models import problems
from mtrain.plan.count import frozen_copy_bytes
from mtrain.plan.states import rank_states
from tests.distributed.test_answers import Recorded, prompts_run, records
from tests.support.chats import folder_of, turns
from tests.support.covering import some
from tests.support.forked import import_engine, run_alone, run_ranks
from tests.support.objective_steps import FEW, LAYOUTS
from tests.support.runs import tiny_run

ALL = {
    "single": {},
    **{name: LAYOUTS[name] for name in ("tp2sp", "pp2", "cp2", "dp2", "tp2pp2", "micro8")},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
}
ASKED = ("aab", "bbbbb", "a")
SAID = ("It is 3", "", "naïvely 12 + 30, no")
KIND = "llama3"


def classifier(folder: Path) -> list[float]:
    """Write a classifier of one label with a tokenizer of its own; return its scores."""
    from transformers import AutoTokenizer
    from transformers.models.llama import modeling_llama  # noqa: F401

    from tests.parity_hf import hf_reference

    folder_of(folder, KIND)
    shape = {"vocab_size": 640, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = hf_reference.configuration(
        "llama", {**shape, **heads, "num_labels": 1, "pad_token_id": None}
    )
    made = hf_reference.model(config, 1, "AutoModelForSequenceClassification").eval()
    made.config.architectures = [type(made).__name__]
    made.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(turns(ask, say), tokenize=False)
        for ask, say in zip(ASKED, SAID, strict=True)
    ]
    with torch.no_grad():
        rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        return [float(made(torch.tensor([row])).logits) for row in rows]


def judged(run: RunConfig, model: Path, **more: Any) -> RunConfig:
    given = {"rewards": ("model", "exact", "length"), "reward_model": str(model), **more}
    # The policy has layers for two chunks on each of two stages.
    sections = {
        "rollout": run.rollout.model_copy(update=given),
        "model": run.model.model_copy(update={"num_layers": 4}),
    }
    changed = run.model_copy(update=sections)
    return resolve(changed, Machine(cpu_cores=1, memory_bytes=0))


def scores(run: RunConfig, answers: list[str], asked: list[str]) -> tuple[list[float], list[str]]:
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.rollouts.scores import ModelScores
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        held = [p for chunk in context.state.reward_model for p in chunk.parameters()]
        assert not any(p.requires_grad or hasattr(p, "main_grad") for p in held)
        stage = world.coords["pp"]
        own = sum(p.numel() for p in held)
        assert own == rank_states(run, stage).teacher
        lines = [{"prompt": text, "answer": "0"} for text in asked]
        said = [[{"role": "assistant", "content": text}] for text in answers]
        found, whys = ModelScores(context).scores(lines, said)
    return found.tolist(), whys


@pytest.mark.full
@pytest.mark.parametrize("name", some(ALL, ["pp2vpp2"]))
def test_reward_model_scores_as_transformers(name: str, tmp_path: Path) -> None:
    import_engine()
    wanted = run_alone(lambda: classifier(tmp_path / "model"))
    run = judged(prompts_run(tmp_path / "data", **ALL[name]), tmp_path / "model")
    run = run.model_copy(update={"data": run.data.model_copy(update={"seq_length": 64})})
    assert problems(run, {}) == []
    assert frozen_copy_bytes(run) > 0
    answers = [*SAID, "long " * 40]
    for found, whys in run_ranks(run.parallel.ranks, scores, run, answers, [*ASKED, "b"]):
        assert found[:3] == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert found[3] == 0
        assert whys[:3] == ["", "", ""]
        assert "tokens of the model of rewards, not 1 to 64" in whys[3]


@pytest.mark.full
def test_reward_model_of_a_run_judges_steps(tmp_path: Path) -> None:
    """Take the scores into steps, the same in two layouts, from a run of objective=reward."""

    def save() -> None:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.config.schema.objective import ObjectiveConfig
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        run = tiny_run(model=FEW | {"vocab_size": 640, "init_method_std": 0.3})
        run = run.model_copy(update={"objective": ObjectiveConfig(name="reward")})
        run = resolve(run, Machine(cpu_cores=1, memory_bytes=0))
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            ckpt_state.save(tmp_path / "run/checkpoints", run, world, context.state, {})

    import_engine()
    run_ranks(1, save)
    folder_of(tmp_path / "run", KIND)
    model = tmp_path / "run/checkpoints/step_00000000"
    given = {"failed_rewards": 1.0}
    runs = [
        judged(prompts_run(tmp_path / "data", **layout), model, **given)
        for layout in ({}, LAYOUTS["tp2pp2"])
    ]
    for run in runs:
        assert problems(run, {}) == []
    one = run_ranks(1, records, runs[0], tmp_path / "one", Recorded)[0]
    for found in run_ranks(4, records, runs[1], tmp_path / "two", Recorded):
        for step, same in zip(found, one, strict=True):
            assert step == {k: pytest.approx(v, rel=2e-5, abs=2e-6) for k, v in same.items()}
    assert len({step["reward_model"] for step in one} - {0.0}) == 2


@pytest.mark.full
def test_reward_model_that_cannot_judge_is_refused(tmp_path: Path) -> None:
    import_engine()
    model = tmp_path / "model"
    run_alone(lambda: classifier(model))
    run = judged(prompts_run(tmp_path / "data"), model)

    def why() -> str:
        return " ".join(problem.detail for problem in problems(run, {}))

    assert why() == ""
    (model / "tokenizer_config.json").rename(tmp_path / "kept")
    assert "no chat template" in why()
    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in why()
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("ForSequenceClassification", "ForCausalLM"))
    assert "no value head" in why()
