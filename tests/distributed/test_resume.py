"""A resumed run ends bitwise where the uninterrupted one ends; another layout goes on from the same
weights.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.dsa import SparseAttentionConfig
from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.model import MLAConfig, MoEConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import Uninterrupted, rank_tensors, tiny_run, train_steps, whole_tensors

FIRST = 1
MORE = 2
BIASED = MoEConfig(
    num_experts=4,
    ffn_hidden_size=64,
    router_score_function="sigmoid",
    router_enable_expert_bias=True,
    router_bias_update_rate=1e-3,
    router_load_balancing_type="none",
)

KEPT = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
LOW_PRECISION = {
    "dtype": "bf16",
    "distributed_optimizer": True,
    "optim": {**KEPT, "store_param_remainders": True},
}
NO_MAIN = {
    "dtype": "bf16",
    "distributed_optimizer": True,
    "optim": {**KEPT, "main_params_dtype": "bf16"},
}
EIGHT = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
EXPERTS = {"moe": MoEConfig(num_experts=4, ffn_hidden_size=64)}
DROPS: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
NOISY = MoEConfig(num_experts=4, ffn_hidden_size=64, input_jitter_eps=0.1)

NEXT = {
    "linear_attention": LinearAttentionConfig(
        freq=2, num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8
    ),
    "attention_output_gate": True,
    **EXPERTS,
}

CHOSEN = {
    "mla": MLAConfig(
        q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
    ),
    "dsa": SparseAttentionConfig(indexer_n_heads=2, indexer_head_dim=8, indexer_topk=6),
    "num_query_groups": None,
    **EXPERTS,
}

CASES: dict[str, dict[str, Any]] = {
    "tp2pp2 sparse attention": {
        "ranks": 4,
        "tp": 2,
        "pp": 2,
        "sequence_parallel": True,
        "model": CHOSEN,
    },
    "tp2pp2 linear attention": {
        "ranks": 4,
        "tp": 2,
        "pp": 2,
        "sequence_parallel": True,
        "model": NEXT,
    },
    "one rank": {},
    "tp2": {"ranks": 2, "tp": 2},
    "dp2": {"ranks": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "dp2 distributed optimizer": {"ranks": 2, "distributed_optimizer": True},
    "tp2dp2 distributed optimizer overlapped": {
        "ranks": 4,
        "tp": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "dp2 bf16 distributed optimizer": {"ranks": 2, "distributed_optimizer": True, "dtype": "bf16"},
    "tp2 dropout, sequence parallel": {
        "ranks": 2,
        "tp": 2,
        "sequence_parallel": True,
        "model": DROPS,
    },
    "pp2dp2 dropout": {"ranks": 4, "pp": 2, "model": DROPS},
    "cp2 dropout, noise of routers": {"ranks": 2, "cp": 2, "model": {**DROPS, "moe": NOISY}},
    "dp2 sgd": {"ranks": 2, "optim": {"name": "sgd"}},
    "sgd without momentum": {"optim": {"name": "sgd", "momentum": 0.0}},
    "tp2 own adam": {"ranks": 2, "tp": 2, "kernel": "reference"},
    "dp2 own adam, distributed optimizer": {
        "ranks": 2,
        "kernel": "reference",
        "distributed_optimizer": True,
    },
    "ep2 own adam": {"ranks": 2, "ep": 2, "kernel": "reference", "model": EXPERTS},
    "dp2 low precision": {"ranks": 2, **LOW_PRECISION},
    "tp2dp2 low precision overlapped": {
        "ranks": 4,
        "tp": 2,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        **LOW_PRECISION,
    },
    "dp4 low precision, two replicas": {"ranks": 4, "hsdp_replicas": 2, **LOW_PRECISION},
    "pp2dp2 low precision": {"ranks": 4, "pp": 2, **LOW_PRECISION},
    "ep2 low precision": {"ranks": 2, "ep": 2, "model": EXPERTS, **LOW_PRECISION},
    "dp2 no main weights": {"ranks": 2, **NO_MAIN},
    "dp2 moments in eight bits": {"ranks": 2, "distributed_optimizer": True, "optim": EIGHT},
    "pp2 bf16 moments with main weights": {"ranks": 2, "pp": 2, "dtype": "bf16", "optim": KEPT},
}


def _steps(
    run: object, steps: int, save: Path | None, load: Path | None
) -> list[tuple[float, float]]:
    return train_steps(run, steps, save_to=save, load_from=load)  # type: ignore[arg-type]


def _same(a: Path, b: Path) -> list[str]:
    """Return the keys of tensors that differ in any bit between two checkpoints."""
    left = whole_tensors(a)
    right = whole_tensors(b)
    assert left.keys() == right.keys()
    differing = [k for k in left if not torch.equal(_bits(left[k]), _bits(right[k]))]
    for rank, (x, y) in enumerate(zip(rank_tensors(a), rank_tensors(b), strict=True)):
        assert x.keys() == y.keys()
        differing += [f"rank {rank} {k}" for k in x if not torch.equal(x[k], y[k])]
    return differing


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


ALWAYS = (
    "tp2dp2 distributed optimizer overlapped",
    "tp2 dropout, sequence parallel",
    "dp2 own adam, distributed optimizer",
    "dp2 no main weights",
)
"""Every way in which state is kept, and what is drawn."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """Return runs of `FIRST + MORE` steps, by the name of their layout."""
    return Uninterrupted(tmp_path_factory.mktemp("whole"), FIRST, FIRST + MORE)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_resume_is_bitwise(name: str, whole: Uninterrupted, tmp_path: Path) -> None:
    run = tiny_run(**CASES[name])
    values, first, last = whole(name, run)
    assert run_ranks(run.parallel.ranks, _steps, run, MORE, tmp_path, first)[0] == values[FIRST:]
    assert _same(last, tmp_path / last.name) == []


@pytest.mark.parametrize("name", some(["one rank", "tp2 dropout, sequence parallel"], ["one rank"]))
def test_resume_saving_changes_nothing(name: str, whole: Uninterrupted) -> None:
    run = tiny_run(**CASES[name])
    assert (
        run_ranks(run.parallel.ranks, _steps, run, FIRST + MORE, None, None)[0]
        == whole(name, run)[0]
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param("tp2", "pp2", marks=pytest.mark.full),
        pytest.param("tp2pp2", "dp2 distributed optimizer", marks=pytest.mark.full),
        pytest.param("dp2 distributed optimizer", "tp2", marks=pytest.mark.full),
        pytest.param("dp2 distributed optimizer", "one rank", marks=pytest.mark.full),
        ("tp2dp2 distributed optimizer overlapped", "tp2pp2"),
        pytest.param("dp2 own adam, distributed optimizer", "tp2", marks=pytest.mark.full),
        ("pp2", "dp2 own adam, distributed optimizer"),
    ],
)
def test_resume_works_in_another_layout(saved: str, resumed: str, whole: Uninterrupted) -> None:
    after = tiny_run(**CASES[resumed])
    _, first, _ = whole(saved, tiny_run(**CASES[saved]))
    rest = run_ranks(after.parallel.ranks, _steps, after, MORE, None, first)[0]
    for (loss, norm), (expected, expected_norm) in zip(
        rest, whole("one rank", tiny_run())[0][FIRST:], strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param("tp2dp2 distributed optimizer overlapped", "tp2pp2", marks=pytest.mark.full),
        pytest.param(
            "tp2dp2 low precision overlapped", "pp2dp2 low precision", marks=pytest.mark.full
        ),
        ("dp2 low precision", "pp2dp2 low precision"),
        pytest.param("pp2dp2 low precision", "dp2 low precision", marks=pytest.mark.full),
    ],
)
def test_resume_resharding_keeps_all_bits(
    saved: str, resumed: str, whole: Uninterrupted, tmp_path: Path
) -> None:
    after = tiny_run(**CASES[resumed])
    _, first, _ = whole(saved, tiny_run(**CASES[saved]))
    run_ranks(after.parallel.ranks, _steps, after, 0, tmp_path, first)
    left = whole_tensors(first)
    right = whole_tensors(tmp_path / first.name)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)


def test_resume_generators_differ_by_rank_and_step(tmp_path: Path) -> None:
    after = tiny_run(ranks=2, pp=2)
    found = []
    for step in (1, 2):
        run_ranks(1, _steps, tiny_run(), step, tmp_path / "one", None)
        run_ranks(2, _steps, after, 0, tmp_path / "two", tmp_path / "one" / f"step_{step:08d}")
        found += rank_tensors(tmp_path / "two" / f"step_{step:08d}")
    streams = [key for key in found[0] if "gauss" not in key]
    assert "rng/tracker/model-parallel-rng" in streams
    assert all(
        not torch.equal(a[key], b[key]) for a, b in combinations(found, 2) for key in streams
    )


def test_resume_main_weights_are_saved_whole(tmp_path: Path) -> None:
    whole = tiny_run(dtype="bf16", distributed_optimizer=True)
    parts = tiny_run(**LOW_PRECISION)
    run_ranks(1, _steps, parts, FIRST, tmp_path / "parts", None)
    checkpoint = tmp_path / "parts" / f"step_{FIRST:08d}"
    run_ranks(1, _steps, whole, 0, tmp_path / "whole", checkpoint)
    left = whole_tensors(checkpoint)
    right = whole_tensors(tmp_path / "whole" / f"step_{FIRST:08d}")
    assert left.keys() == right.keys()
    mains = [key for key in left if key.startswith("optim/main_weight/")]
    assert mains
    assert all(
        left[key].dtype == torch.float32 and torch.equal(left[key], right[key]) for key in mains
    )
    assert any(not torch.equal(left[key].bfloat16().float(), left[key]) for key in mains)


def test_resume_fp32_bias_loads_into_half_model() -> None:
    run = tiny_run(dtype="bf16", model={"moe": BIASED})

    def formats() -> dict[str, torch.dtype]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.world.init import joined

        with joined(run) as world:
            shards = model_shards(build_model(run, world))
            return {shard.key: shard.tensor.dtype for shard in shards if "expert_bias" in shard.key}

    (found,) = run_ranks(1, formats)
    assert len(found) == run.model.num_layers
    assert set(found.values()) == {torch.float32}
