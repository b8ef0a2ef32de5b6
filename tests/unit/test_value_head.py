"""A value head in counts, micro-batches and verbs that need an output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.convert.huggingface.model import HEAD, _new_head
from mtrain.data.chats.samples import Sample
from mtrain.data.pairs import at_last_tokens
from mtrain.errors import ConfigError
from mtrain.layout.grid import held_stages
from mtrain.loading.checkpoints import require_writing
from mtrain.models.count import adapter_parameters
from mtrain.plan.count import flops_per_token, parameters
from mtrain.plan.states import stage_weights
from tests.support.forked import import_engine, run_ranks


def run_of(*words: str, layout: str = "single") -> RunConfig:
    given = ("objective=reward", "data=mock", f"parallel={layout}", *words)
    return resolve(compose(given).run, Machine(cpu_cores=1, memory_bytes=0))


def sample(*tokens: int) -> Sample:
    ids = np.array(tokens)
    return Sample(ids, ids == 7, (0,), (0,))


def test_value_head_is_read_at_the_last_token() -> None:
    """Read the token behind the learned ones, too, which a template writes, as transformers
    does.
    """
    rows = [sample(3, 7, 7, 4, -1), sample(3, 7, -1, -1, -1), sample(3, 7, 7, 7, 7)]
    found = at_last_tokens(rows)
    assert found.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]


def test_value_head_is_counted_in_place_of_output() -> None:
    run = run_of("model=llama_tiny")
    tied = run_of("model=llama_tiny", "model.tie_word_embeddings=true")
    table = run.model.padded_vocab_size * run.model.hidden_size
    plain = run.model.model_copy(update={"head": None})
    assert parameters(run.model) == parameters(plain) - table + run.model.hidden_size
    assert parameters(tied.model) == parameters(run.model)
    seen = [flops_per_token(one, 64) for one in (plain, run.model, tied.model)]
    assert seen[0] - seen[1] == 6 * (table - run.model.hidden_size)
    assert seen[1] == seen[2]


@pytest.mark.parametrize("words", [(), pytest.param(("peft=lora",), marks=pytest.mark.full)])
def test_value_head_weights_are_those_that_are_built(words: tuple[str, ...]) -> None:
    """Compare names, shapes and what is trained, and an imported head with a built one."""
    run = run_of("model=llama_tiny", "model.tie_word_embeddings=true", *words)

    def built() -> tuple[dict[str, tuple[tuple[int, ...], bool]], torch.Tensor]:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        with joined(run) as world:
            (chunk,) = build_model(run, world, wrap=False)
            weights = dict(chunk.named_parameters())
            facts = {n: (tuple(w.shape), w.requires_grad) for n, w in weights.items()}
            return facts, weights[HEAD].detach().clone()

    import_engine()
    facts, head = run_ranks(1, built)[0]
    ((held,),) = held_stages(run)
    assert facts == {w.name: (w.shape, not w.frozen) for w in stage_weights(run, held)}
    assert torch.equal(_new_head(run, "F32"), head)
    assert float(head.std()) == pytest.approx(run.model.value_head_std, rel=0.2)
    if words:
        trained = sum(int(np.prod(shape)) for shape, learns in facts.values() if learns)
        assert sum(adapter_parameters(run)) == trained


def test_value_head_continues_no_text() -> None:
    with pytest.raises(ConfigError) as found:
        require_writing(run_of("model=llama_tiny"))
    assert [problem.code for problem in found.value.problems] == ["MT377"]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "tp2pp2"])
def test_value_head_begins_on_weights_of_a_plain_run(layout: str, tmp_path: Path) -> None:
    """Start from a language model: the decoder is its own, the head new; then resume from the run
    itself, bit by bit.
    """

    def job(run: RunConfig, begin: str | None, end: str) -> dict[str, Any]:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            state = context.state
            if begin is not None:
                path = ckpt_state.opened(tmp_path / begin / "step_00000000", run, world)
                ckpt_state.load_weights(path, state)
            ckpt_state.save(tmp_path / end, run, world, state, {})
            return {s.key: float(s.tensor.double().sum()) for s in model_shards(state.chunks)}

    import_engine()
    plain = resolve(
        compose(("model=llama_tiny", "data=mock", "parallel=single", "trainer.seed=5")).run,
        Machine(cpu_cores=1, memory_bytes=0),
    )
    rewards = run_of("model=llama_tiny", layout=layout)
    (there,) = run_ranks(1, job, plain, None, "plain")
    ranks = rewards.parallel.ranks
    here = run_ranks(ranks, job, rewards, "plain", "rewards")
    new = run_ranks(ranks, job, rewards, None, "new")
    again = run_ranks(ranks, job, rewards, "rewards", "again")
    assert again == here
    head = f"model/{HEAD}"
    assert here[-1][head] == new[-1][head]
    norm = "model/decoder.final_layernorm.weight"
    assert here[-1][norm] == there[norm]
    if ranks == 1:
        assert {k: v for k, v in here[0].items() if k != head} == {
            k: v for k, v in there.items() if k != "model/output_layer.weight"
        }
