"""Muon trains in every layout as on one rank, and its state is saved, cut otherwise and gone on
from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.model import MoEConfig
from mtrain.layout.grid import RankGrid, held_stages
from mtrain.plan.states import Matrix, matrices_of, shared_out, update_of
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, trained, whole_tensors

STEPS = 3
EXPERTS = {"model": {"moe": MoEConfig(num_experts=4, ffn_hidden_size=64)}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "tp4 with two key/value heads": {"ranks": 4, "tp": 4, "model": {"num_query_groups": 2}},
    "pp2 tied": {"ranks": 2, "pp": 2, "model": {"tie_word_embeddings": True}},
    "ep2": {"ranks": 2, "ep": 2, **EXPERTS},
    "dp2 sharded": {"ranks": 2, "distributed_optimizer": True},
    "dp2 tp2 sharded": {
        "ranks": 4,
        "tp": 2,
        "distributed_optimizer": True,
        "model": {"num_layers": 3},
    },
    "dp4 ep2 sharded": {"ranks": 4, "ep": 2, "distributed_optimizer": True, **EXPERTS},
    "tp2 etp1": {"ranks": 2, "tp": 2, "etp": 1, "sequence_parallel": True, **EXPERTS},
}


def _run(optim: dict[str, Any] | None = None, **keys: Any) -> Any:
    return tiny_run(**keys, optim={"name": "muon", **(optim or {})})


@pytest.mark.parametrize("name", some(LAYOUTS, ["dp2 tp2 sharded"]))
def test_muon_layout_equals_one_rank(name: str) -> None:
    keys = LAYOUTS[name]
    one = _run(model=keys.get("model"))
    many = _run(**keys)
    expected = trained(one, STEPS)
    found = trained(many, STEPS)
    for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.mark.full
def test_muon_split_heads_are_orthogonalised_separately() -> None:
    whole, blocks = (
        _run({"muon": {"tp_mode": mode}}, ranks=2, tp=2) for mode in ("duplicated", "blockwise")
    )
    a, b = (trained(run, 3)[-1][0] for run in (whole, blocks))
    assert 1e-6 < abs(a - b) / b < 1e-2


RESUMED: dict[str, dict[str, Any]] = {
    "fp32": {"tp": 2, "dtype": "fp32"},
    "bf16": {"tp": 2, "dtype": "bf16"},
    "bf16, sharded": {"dtype": "bf16", "distributed_optimizer": True},
}


@pytest.mark.full
@pytest.mark.parametrize("name", some(RESUMED, ["bf16, sharded"]))
def test_muon_resume_is_bitwise_and_reshards(name: str, tmp_path: Path) -> None:
    keys = RESUMED[name]
    run = _run(ranks=2, **keys)
    other = _run(ranks=2, pp=2, dtype=keys["dtype"])
    whole = run_ranks(2, lambda: train_steps(run, 4, save_to=tmp_path / "whole"))[0]
    first = run_ranks(2, lambda: train_steps(run, 2, save_to=tmp_path / "first"))[0]
    point = tmp_path / "first/step_00000002"
    rest = run_ranks(2, lambda: train_steps(run, 2, save_to=tmp_path / "rest", load_from=point))[0]
    assert first + rest == whole
    left, right = (whole_tensors(tmp_path / name / "step_00000004") for name in ("whole", "rest"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    run_ranks(2, lambda: train_steps(other, 0, save_to=tmp_path / "other", load_from=point))
    left, right = (
        whole_tensors(folder / "step_00000002")
        for folder in (tmp_path / "first", tmp_path / "other")
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_muon_matrix_owner_is_unique_and_balanced() -> None:
    run = _run(ranks=2, distributed_optimizer=True, model={"num_layers": 3})

    def spread() -> list[Any]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        with joined(run) as world:
            muon = (
                assemble(run, world, splits_of(run)).state.optimizer.chained_optimizers[0].optimizer
            )
            return [
                [m.owner, m.pieces, m.param.numel() * min(m.param.shape), m.param.numel()]
                for group in muon._spread
                for m in group
            ]

    found, other = run_ranks(2, spread)
    assert found == other
    assert all(
        sum(end - start for _, start, end in pieces) == numel for _, pieces, _, numel in found
    )
    assert any(len(pieces) == 2 for _, pieces, *_ in found)
    work = [sum(cost for owner, _, cost, _ in found if owner == rank) for rank in (0, 1)]
    assert max(work) < 1.5 * min(work)


@pytest.mark.parametrize(
    "name",
    some(
        {n: LAYOUTS[n] for n in ("dp2 tp2 sharded", "dp4 ep2 sharded", "tp2 etp1")},
        ["dp2 tp2 sharded"],
    ),
)
def test_muon_rank_multiplies_as_planned(name: str) -> None:
    run = _run(**LAYOUTS[name])

    def counted() -> list[int]:
        from torch.utils.flop_counter import FlopCounterMode

        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        found: list[int] = []

        def orthogonal(multiply: Any) -> Any:
            def wrapped(*args: Any) -> Any:
                with FlopCounterMode(display=False) as counter:
                    out = multiply(*args)
                found.append(counter.get_total_flops())
                return out

            return wrapped

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            for one in parts.state.optimizer.chained_optimizers:
                one.optimizer._orthogonal = orthogonal(one.optimizer._orthogonal)
            train_step(parts, stop_requested=False)
        return found

    groups = zip(*run_ranks(run.parallel.ranks or 1, counted), strict=True)
    assert sum(map(max, groups)) == _planned(run), (
        "ranks wait for each other behind each group of parameters"
    )


def _planned(run: Any) -> int:
    """Return the FLOPs of the most that a rank has of each group of parameters."""
    grid = RankGrid.of(run)
    steps = run.optim.muon.num_ns_steps
    total = 0
    every = matrices_of(run, held_stages(run)[0])
    how = update_of(run)
    assert how is not None
    for kind in {(one.expert, len(one.parts)) for one in every}:
        of = {one: number for one, number in every.items() if (one.expert, len(one.parts)) == kind}
        if run.parallel.distributed_optimizer:
            ranks = grid.edp if kind[0] else grid.dp
        else:
            ranks = 1
        total += max(
            sum(n * _flops(one, steps) for one, n in owned) for owned in shared_out(of, ranks, how)
        )
    return total


def _flops(matrix: Matrix, steps: int) -> int:
    sides = [sorted(part) for part in matrix.parts]
    return steps * sum(4 * short**2 * long + 2 * short**3 for short, long in sides)


def test_muon_matrices_have_momentum_rest_adam() -> None:
    run = _run(
        {"muon": {"adamw_lr": 1e-4}}, model={"tie_word_embeddings": False, "qk_layernorm": True}
    )

    def groups() -> dict[str, list[Any]]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            train_step(parts, stop_requested=False)
            names = {p: n for chunk in parts.state.chunks for n, p in chunk.named_parameters()}
            inner = parts.state.optimizer.chained_optimizers[0].optimizer
            return {
                names[p].removeprefix("module."): [
                    sorted(inner.state[p]),
                    group["lr"],
                    group["weight_decay"],
                ]
                for group in inner.param_groups
                for p in group["params"]
            }

    found = run_ranks(1, groups)[0]
    rate = found["decoder.layers.0.mlp.linear_fc1.weight"][1]
    for name, (state, lr, decay) in found.items():
        matrix = name.endswith(
            ("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight")
        )
        assert state == (["momentum_buffer"] if matrix else ["exp_avg", "exp_avg_sq"]), name
        assert lr == pytest.approx(rate if matrix else rate / 10), name
        assert decay == (0.0 if "norm" in name else 0.1), name
    assert {name.split(".")[0] for name, (state, *_) in found.items() if "exp_avg" in state} > {
        "embedding",
        "output_layer",
    }


def test_muon_qkv_and_gate_are_separate_matrices() -> None:
    run = _run(model={"attention_output_gate": True})

    def cut() -> tuple[Any, int]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        with joined(run) as world:
            state = assemble(run, world, splits_of(run)).state
            weights = dict(state.chunks[0].named_parameters())
            fused = next(p for name, p in weights.items() if name.endswith("linear_qkv.weight"))
            return state.optimizer.chained_optimizers[0].optimizer.qkv_rows, fused.shape[0]

    rows, height = run_ranks(1, cut)[0]
    model = run.model
    queries = model.num_attention_heads // model.query_groups * model.head_dim
    assert rows == (queries, queries, model.head_dim, model.head_dim)
    assert sum(rows) * model.query_groups == height
