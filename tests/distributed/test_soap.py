"""SOAP makes the same of the same gradients in every layout, and its state is saved, cut otherwise
and read back.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.config.schema.model import MoEConfig
from mtrain.errors import CorruptData
from mtrain.launching import prove
from mtrain.layout.grid import RankGrid, held_stages
from mtrain.plan.rank import stage_memories
from mtrain.plan.states import matrices_of, rank_states, shared_out, update_of
from mtrain.plan.storage import storage_of
from tests.museum.exhibit import replace, seeded
from tests.support.covering import some
from tests.support.forked import RankFailed, run_ranks
from tests.support.runs import tiny_run, train_on_given, train_steps, trained, whole_tensors

STEPS = 4
SOAP = {"precondition_frequency": 2}
EXPERTS = {"model": {"moe": MoEConfig(num_experts=4, ffn_hidden_size=64), "num_layers": 2}}
TWO = {"model": {"num_layers": 2}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 sharded": {"ranks": 2, "distributed_optimizer": True, **TWO},
    "tp2": {"ranks": 2, "tp": 2, **TWO},
    "dp2 tp2 sharded": {"ranks": 4, "tp": 2, "distributed_optimizer": True, **TWO},
    "pp2 tied": {"ranks": 2, "pp": 2, "model": {"tie_word_embeddings": True, "num_layers": 2}},
    "ep2 sharded": {"ranks": 2, "ep": 2, "distributed_optimizer": True, **EXPERTS},
    "tp2 etp1": {"ranks": 2, "tp": 2, "etp": 1, "sequence_parallel": True, **EXPERTS},
    "tp4 with two key/value heads": {
        "ranks": 4,
        "tp": 4,
        "model": {"num_query_groups": 2, "num_layers": 2},
    },
}


def _run(soap: dict[str, Any] | None = None, **keys: Any) -> Any:
    optim = {"name": "soap", "soap": {**SOAP, **(soap or {})}, "clip_grad": None, "warmup_iters": 0}
    return tiny_run(**keys, optim=optim)


def _mix(optimizer: Any) -> None:
    """Seed a fault: fused weights are gathered as if their rows followed each other on each
    rank.
    """
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        leaf.optimizer._rows = {}


def _made(run: Any, folder: Path, *, fault: bool = False) -> dict[str, torch.Tensor]:
    run_ranks(
        run.parallel.ranks or 1,
        lambda: train_on_given(run, folder, STEPS, spoil=_mix if fault else None),
    )
    return whole_tensors(folder / f"step_{STEPS:08d}")


_ALONE: dict[str, dict[str, torch.Tensor]] = {}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soap")


def _alone(keys: dict[str, Any], home: Path) -> dict[str, torch.Tensor]:
    model = keys.get("model")
    key = str(model)
    if key not in _ALONE:
        _ALONE[key] = _made(_run(model=model), home / str(len(_ALONE)))
    return _ALONE[key]


@pytest.mark.parametrize("name", some(LAYOUTS, ["dp2 sharded"]))
def test_soap_every_layout_has_equal_bits(name: str, home: Path, tmp_path: Path) -> None:
    expected = _alone(LAYOUTS[name], home)
    found = _made(_run(**LAYOUTS[name]), tmp_path)
    assert expected.keys() == found.keys()
    assert {key.split("/")[1] for key in found if key.startswith("optim/")} >= {
        "gram_rows",
        "basis_columns",
    }
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    run = _run(**LAYOUTS[name])
    assert storage_of(run, stage_memories(run)).first == sum(
        tensor.nbytes for tensor in found.values()
    )


@pytest.mark.full
def test_soap_rank_ordered_rows_are_found(home: Path, tmp_path: Path) -> None:
    keys = LAYOUTS["dp2 tp2 sharded"]
    expected = _alone(keys, home)
    wrong = _made(_run(**keys), tmp_path, fault=True)
    assert any("linear_fc1" in key for key in wrong if not torch.equal(expected[key], wrong[key]))


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_soap_layout_equals_one_rank(name: str) -> None:
    keys = LAYOUTS[name]
    expected = trained(_run(model=keys.get("model")), 3)
    found = trained(_run(**keys), 3)
    for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-3)


@pytest.mark.full
def test_soap_split_blocks_rotate_by_themselves(
    tmp_path: Path,
) -> None:
    whole, blocks = (
        _run({"tp_mode": mode}, **LAYOUTS["tp2"]) for mode in ("duplicated", "blockwise")
    )
    a, b = (trained(run, 3)[-1][0] for run in (whole, blocks))
    assert 1e-6 < abs(a - b) / b < 1e-1
    run_ranks(2, lambda: train_steps(blocks, 2, save_to=tmp_path))
    point = tmp_path / "step_00000002"
    again = run_ranks(2, lambda: train_steps(blocks, 1, load_from=point))[0]
    assert again == trained(blocks, 3)[2:]
    with pytest.raises(RankFailed, match=CorruptData.__name__):
        run_ranks(1, lambda: train_steps(_run(**TWO), 1, load_from=point))


def _as_it_stands() -> None:
    """Seed a fault: rank 1 sends updates of the matrices that it owns in their bases."""
    from mtrain_kernels.optimizer import soap

    real = soap._turned

    def turned(factors: Any, matrix: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        if back and torch.distributed.get_rank() == 1:
            return matrix
        return real(factors, matrix, back=back)

    replace("mtrain_kernels.optimizer.soap", "_turned", turned)


@pytest.mark.full
@pytest.mark.parametrize("fault", [False, True])
def test_soap_prove_finds_wrong_owner(fault: bool) -> None:
    argv = ["optim=soap", "parallel=dp2", "parallel.distributed_optimizer=true"]
    with seeded(_as_it_stands) if fault else nullcontext():
        rows = prove.compared(prove.shrunk(load(argv).run, argv, 4, "fp32"))
    assert [row.what for row in rows if not row.equal] == (["loss", "weight"] if fault else []), (
        prove.table(rows)
    )


RESUMED: dict[str, dict[str, Any]] = {
    "fp32, tp": {"ranks": 2, "tp": 2, **TWO},
    "bf16": {"ranks": 2, "dtype": "bf16", **TWO},
    "bf16, sharded": {"ranks": 2, "dtype": "bf16", "distributed_optimizer": True, **TWO},
}


@pytest.mark.full
@pytest.mark.parametrize("name", RESUMED)
def test_soap_resume_is_bitwise_and_reshards(name: str, tmp_path: Path) -> None:
    """Save after the first step, which made bases, and continue past the step that uses them."""
    keys = RESUMED[name]
    run = _run(**keys)
    other = _run(**(keys | {"ranks": 1, "tp": 1, "distributed_optimizer": False}))
    whole = run_ranks(2, lambda: train_steps(run, 4, save_to=tmp_path / "whole", save_after=1))[0]
    point = tmp_path / "whole/step_00000001"
    rest = run_ranks(2, lambda: train_steps(run, 3, save_to=tmp_path / "rest", load_from=point))[0]
    assert rest == whole[1:]
    _same(tmp_path / "whole/step_00000004", tmp_path / "rest/step_00000004")
    run_ranks(1, lambda: train_steps(other, 0, save_to=tmp_path / "other", load_from=point))
    _same(point, tmp_path / "other/step_00000001")


def _same(one: Path, other: Path) -> None:
    left = whole_tensors(one)
    right = whole_tensors(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dp2 tp2 sharded", "ep2 sharded", "tp2 etp1"])
def test_soap_rank_keeps_and_multiplies_as_planned(name: str) -> None:
    run = _run({"max_precond_dim": 150}, **LAYOUTS[name])

    def measured() -> tuple[int, list[list[int]]]:
        from torch.utils.flop_counter import FlopCounterMode

        from mtrain.mcore.state.optimizer_state import leaf_optimizers
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        counted: list[list[int]] = []

        def rotated(multiply: Any) -> Any:
            def wrapped(*args: Any) -> Any:
                with FlopCounterMode(display=False) as counter:
                    out = multiply(*args)
                counted[-1].append(counter.get_total_flops())
                return out

            return wrapped

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            leaves = leaf_optimizers(parts.state.optimizer)
            for leaf in leaves:
                leaf.optimizer.rotated = rotated(leaf.optimizer.rotated)
            for _ in range(3):
                counted.append([])
                train_step(parts, stop_requested=False)
            tensors = [
                t for leaf in leaves for _, of, _, _ in leaf.optimizer.owned() for t in of.values()
            ]
            state = [
                t for leaf in leaves for of in leaf.optimizer.state.values() for t in of.values()
            ]
            return sum(t.nbytes for t in (*tensors, *state)), [[sum(step)] for step in counted]

    found = run_ranks(run.parallel.ranks or 1, measured)
    grid = RankGrid.of(run)
    for rank, (kept, _) in enumerate(found):
        at = grid.coords(rank)
        assert kept == rank_states(run, at["pp"]).optimizer_bytes(at["dp"])
    planned = _planned(run)
    assert max(steps[1][0] for _, steps in found) == planned(False)
    assert max(steps[2][0] for _, steps in found) == planned(True)


def _planned(run: Any) -> Any:
    """Return the multiplications and additions in products of the rank with the most; with new
    bases, or without.
    """
    grid = RankGrid.of(run)
    how = update_of(run)
    every = matrices_of(run, held_stages(run)[0])

    def flops(new: bool) -> int:
        total = 0
        for expert in (False, True):
            of = {one: number for one, number in every.items() if one.expert == expert}
            if run.parallel.distributed_optimizer:
                ranks = grid.edp if expert else grid.dp
            else:
                ranks = 1
            total += max(
                sum(n * _of(one.parts[0], new) for one, n in owned)
                for owned in shared_out(of, ranks, how)
            )
        return total

    def _of(shape: tuple[int, int], new: bool) -> int:
        rows, columns = shape
        return sum(2 * (4 * rows * columns * n + new * n**3) for n in how.sides(rows, columns))

    return flops
