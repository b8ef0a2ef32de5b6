"""muP: the same numbers in every layout, and logits that move alike at every width."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain.config.engine import release
from mtrain.config.optimizers import mup_groups
from mtrain.config.schema.mup import MupConfig
from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, trained

STEPS = 2
WIDER = {"mup": MupConfig(base_hidden_size=16, embedding_mult=3.0, base_head_dim=4.0)}
TIED = {"tie_word_embeddings": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 tied": {"ranks": 2, "tp": 2, "model": TIED},
    "pp2 with a prediction more": {"ranks": 2, "pp": 2, "model": {"mtp_num_layers": 1}},
    "dp2 sharded, lion": {"ranks": 2, "distributed_optimizer": True, "optim": {"name": "lion"}},
    "tp2 of sequences, sgd": {
        "ranks": 2,
        "tp": 2,
        "sequence_parallel": True,
        "optim": {"name": "sgd"},
    },
    "fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
    "megatron's fsdp": {"ranks": 2, "fsdp": "megatron", "fsdp_sharding": "optim_grads_params"},
    "dp2 in bf16": {"ranks": 2, "dtype": "bf16", "distributed_optimizer": True},
}


def _run(**keys: Any) -> RunConfig:
    return tiny_run(**(keys | {"model": {**WIDER, **keys.get("model", {})}}))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(LAYOUTS, ("tp2 tied", "pp2 with a prediction more")))
def test_mup_layout_equals_one_rank(name: str) -> None:
    keys = LAYOUTS[name]
    alone = {key: value for key, value in keys.items() if key in ("model", "optim", "dtype")}
    rel = 1e-6 if "dtype" not in keys else 1e-3
    for (loss, norm), (wanted, wanted_norm) in zip(
        trained(_run(**keys), STEPS), trained(_run(**alone), STEPS), strict=True
    ):
        assert loss == pytest.approx(wanted, rel=rel)
        assert norm == pytest.approx(wanted_norm, rel=10 * rel)


def _movement(run: RunConfig) -> float:
    """Return the movement of logits in a few steps, as a root mean square."""

    def job() -> float:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            (chunk,) = parts.state.chunks
            tokens = torch.randint(
                run.model.vocab_size, (8, 16), generator=torch.Generator().manual_seed(0)
            )
            seen = []
            for made in range(4):
                if made:
                    train_step(parts, stop_requested=False)
                with torch.no_grad():
                    seen.append(chunk(tokens, torch.arange(16).expand_as(tokens), None).float())
            return float((seen[-1] - seen[0]).square().mean().sqrt())

    return run_ranks(1, job)[0]


@pytest.mark.full
def test_mup_logits_move_alike_at_every_width() -> None:
    """Run the coordinate check of the paper (appendix D.1)."""
    optim = {"lr": 2e-2, "warmup_iters": 0, "schedule": "constant", "clip_grad": None}

    def movement(width: int, **mup: Any) -> float:
        shape = {
            "num_layers": 2,
            "hidden_size": width,
            "ffn_hidden_size": 2 * width,
            "num_query_groups": None,
        }
        return _movement(
            tiny_run(model={**shape, "num_attention_heads": width // 16, **mup}, optim=optim)
        )

    by_width = {"mup": MupConfig(base_hidden_size=64)}
    narrow = movement(64, **by_width)
    wide = movement(256, **by_width)
    assert 0.6 < wide / narrow < 1.6
    assert movement(256) / movement(64) > 3, "the check finds rates that do not follow the width"


@pytest.mark.skipif(not release.at_least(0, 19), reason="megatron-core has its own muP since 0.19")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_mup_factors_equal_megatron(name: str) -> None:
    run = _run(optim={"name": name, "min_lr": 1e-4})

    def job() -> tuple[list[float], list[float], list[dict[str, float]]]:
        from megatron.core.optimizer import OptimizerConfig, get_mup_config_overrides
        from megatron.core.transformer import TransformerConfig

        from mtrain.assembly.model import transformer_config
        from mtrain.devices import registry

        m = run.model
        ours = transformer_config(run, registry.get("cpu"))
        assert m.mup is not None
        theirs: Any = TransformerConfig(
            num_layers=m.num_layers,
            hidden_size=m.hidden_size,
            num_attention_heads=m.num_attention_heads,
            init_method_std=m.init_method_std,
            use_mup=True,
            mup_base_hidden_size=m.mup.base_hidden_size,
            mup_base_head_dim=m.mup.base_head_dim,
        )
        stds = [
            getattr(theirs, f"{what}init_method").keywords["std"]
            for what in ("", "output_layer_", "embedding_")
        ]
        own = [
            ours.init_method.std,
            ours.output_layer_init_method.std,
            ours.embedding_init_method.std,
        ]
        o = run.optim
        config = OptimizerConfig(lr=o.lr, min_lr=o.min_lr, adam_eps=o.eps)
        core_name = "adam" if o.name == "adamw" else o.name
        return (
            [*own, ours.softmax_scale, m.mup.logit_mult(m.hidden_size)],
            [*stds, theirs.softmax_scale, theirs.mup_output_mult],
            [
                dict(each)
                for each in get_mup_config_overrides(config, m.width_mult, core_name).values()
            ],
        )

    ours, theirs, overrides = run_alone(job)
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert [dict(group.settings) for group in mup_groups(run)] == [
        pytest.approx(each) for each in overrides
    ]
