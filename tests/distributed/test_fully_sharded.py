"""Weights, gradients and optimizer state that are spread (FSDP2, megatron-core's FSDP, replicas) or
moved to host memory compute what one rank computes, and go on from a checkpoint as if nothing had
been.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.config.schema.run import RunConfig
from mtrain.launching import prove
from mtrain.plan.shrink import alone
from tests.museum.exhibit import seeded
from tests.museum.resumes import unreduced
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import Uninterrupted, rank_tensors, train_steps, whole_tensors

FSDP2 = "parallel.fsdp=fsdp2"
LAYOUTS = cases_of("fully_sharded")
STEPS = 3
HALF = 1


def _run(words: str, dtype: str | None = None) -> RunConfig:
    """Return the layout that `words` describe, small enough for a test."""
    argv = words.split()
    full = load(argv).run
    return prove.shrunk(full, argv, STEPS, dtype or prove.formats(full)[-1])


def _on(run: RunConfig, ranks: int) -> RunConfig:
    """Return the same run on another number of data-parallel ranks."""
    batch = run.trainer.model_copy(update={"global_batch_size": 2 * ranks})
    return run.model_copy(
        update={"parallel": run.parallel.model_copy(update={"ranks": ranks}), "trainer": batch}
    )


@pytest.mark.full
@pytest.mark.parametrize("name", some(["fsdp2", "megatron"], ["megatron"]))
def test_fully_sharded_uneven_ranks_are_proven(name: str) -> None:
    rows = prove.compared(_on(_run(LAYOUTS[name]), 3))
    assert all(row.equal for row in rows), prove.table(rows)


ALWAYS = ("fsdp2 tied", "megatron optimizer bf16", "offload bf16, distributed optimizer")
"""Every way of keeping state."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(LAYOUTS, ALWAYS))
def test_fully_sharded_layout_is_proven(name: str) -> None:
    rows = prove.compared(_run(LAYOUTS[name]))
    assert all(row.equal for row in rows), prove.table(rows)


def _job(
    run: RunConfig, steps: int, save: Path, after: int | None, load: Path | None
) -> list[tuple[float, float]]:
    return train_steps(run, steps, save_to=save, save_after=after, load_from=load)


RESUMED = [
    "fsdp2",
    "fsdp2 tp2",
    "fsdp2 pp2vpp2",
    "fsdp2 ep2 replicas",
    "fsdp2 bf16",
    "megatron",
    "megatron optimizer",
    "megatron optimizer bf16",
    "megatron tp2",
    "megatron pp2 tied",
    "megatron replicas",
    "megatron bf16",
    "distributed optimizer replicas",
    "offload half",
    "offload half, distributed optimizer",
    "offload bf16, distributed optimizer",
]
"""One of each way in which state is kept; the others of `LAYOUTS` are kept in one of these ways."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """Return runs of `STEPS` steps, by the name of their layout."""
    return Uninterrupted(tmp_path_factory.mktemp("whole"), HALF, STEPS)


RESUMED_ALWAYS = ("megatron optimizer bf16", "offload bf16, distributed optimizer")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(RESUMED, RESUMED_ALWAYS))
def test_fully_sharded_resume_is_bitwise(name: str, whole: Uninterrupted, tmp_path: Path) -> None:
    run = _run(LAYOUTS[name])
    values, first, last = whole(name, run)
    more = run_ranks(run.parallel.ranks or 1, _job, run, STEPS - HALF, tmp_path, None, first)
    assert values[HALF:] == more[0]
    expected = whole_tensors(last)
    found = whole_tensors(tmp_path / last.name)
    assert expected.keys() == found.keys()
    assert any(key.startswith(("optim/exp_avg/", "optim/momentum_buffer/")) for key in found)
    assert [k for k in expected if not torch.equal(expected[k], found[k])] == []
    for before, after in zip(rank_tensors(last), rank_tensors(tmp_path / last.name), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


PLAIN = cases_of("fully_sharded_from")


CHANGES = [
    ("fsdp2", "tp2"),
    ("tp2", "fsdp2"),
    ("fsdp2 tp2", "one rank"),
    ("one rank", "fsdp2 replicas"),
    ("fsdp2 replicas", "tp2pp2"),
    ("fsdp2 ep2 replicas", "ep2"),
    ("ep2", "fsdp2 ep2 replicas"),
    ("fsdp2", "megatron tp2"),
    ("megatron", "fsdp2 cp2"),
    ("megatron tp2", "tp2pp2"),
    ("tp2pp2", "megatron"),
    ("megatron optimizer replicas", "dp2 distributed optimizer"),
    ("dp2 distributed optimizer", "megatron optimizer"),
    ("megatron ep2", "fsdp2 ep2 replicas"),
    ("distributed optimizer replicas", "offload"),
    ("offload half, distributed optimizer", "fsdp2"),
    ("megatron", "offload half"),
    ("fsdp2 bf16", "megatron bf16"),
    ("megatron optimizer bf16", "fsdp2 bf16"),
    ("one rank bf16", "offload half bf16"),
    ("offload bf16, distributed optimizer", "one rank bf16"),
]
CHANGED_ALWAYS = (
    ("tp2pp2", "megatron"),
    ("megatron optimizer bf16", "fsdp2 bf16"),
)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(*pair, marks=() if pair in CHANGED_ALWAYS else pytest.mark.full)
        for pair in CHANGES
    ],
)
def test_fully_sharded_resume_across_layouts_keeps_state_bits(
    saved: str, resumed: str, whole: Uninterrupted, tmp_path: Path
) -> None:
    tables = {**LAYOUTS, **PLAIN}
    before = _run(tables[saved])
    after = _run(tables[resumed]).model_copy(
        update={"trainer": before.trainer, "data": before.data, "model": before.model}
    )
    values, first, _ = whole(saved, before)
    found = run_ranks(after.parallel.ranks or 1, _job, after, STEPS - HALF, tmp_path, 0, first)[0]
    left = whole_tensors(first)
    right = whole_tensors(tmp_path / first.name)
    assert left.keys() == right.keys()
    assert [k for k in left if not torch.equal(left[k], right[k])] == []
    tolerance = 2e-2 if before.precision.dtype == "bf16" else 1e-5
    for (loss, norm), (expected, expected_norm) in zip(found, values[HALF:], strict=True):
        assert loss == pytest.approx(expected, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=tolerance)


def _use(run: RunConfig) -> tuple[float, list[int], float]:
    """Return the validation loss and generated tokens after two steps, and the loss of the second
    step that follows.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.generate.sampler import Sampler
    from mtrain.train.loop.step import evaluate, train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        for _ in range(2):
            train_step(parts, stop_requested=False)
        assert parts.valid_data is not None
        valid = evaluate(parts, parts.valid_data, 2)
        tokens = Sampler(run, world, parts.state.chunks).generate([1, 2, 3], 8, temperature=0)
        train_step(parts, stop_requested=False)  # its update must reach what was gathered before
        return valid, tokens, train_step(parts, stop_requested=False).loss


USED = ["fsdp2 tp2", "fsdp2 replicas", "fsdp2 pp2 tied", "megatron tp2", "megatron optimizer"]


@pytest.mark.full
@pytest.mark.parametrize("name", some(USED, ["fsdp2 pp2 tied"]))
def test_fully_sharded_evaluates_and_samples_between_steps(name: str) -> None:
    run = _run(LAYOUTS[name])
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"eval_iters": 2})})
    expected_loss, expected_tokens, expected_next = run_ranks(1, _use, alone(run))[0]
    for loss, tokens, following in run_ranks(run.parallel.ranks or 1, _use, run):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert tokens == expected_tokens
        assert following == pytest.approx(expected_next, rel=1e-5)


UNREDUCED = ["fsdp2", "fsdp2 replicas", "megatron", "megatron replicas"]


@pytest.mark.parametrize("name", some(UNREDUCED, []))
def test_fully_sharded_unreduced_shard_is_found(name: str) -> None:
    with seeded(unreduced):
        rows = prove.compared(_run(LAYOUTS[name]))
    assert any(row.what == "gradient" and row.error > 0.1 for row in rows), prove.table(rows)


def _memory(run: RunConfig) -> dict[str, float]:
    """Return the bytes of weights: all, with memory before the model was cut, and kept between
    steps; and bytes of all live memory then.
    """
    from mtrain.assembly import model
    from mtrain.mcore.state.local_params import local_params
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    found: dict[str, float] = {"made": 0}
    inherited = _live_bytes()  # of earlier tests in the process that was forked
    shard = model._fully_shard

    def measure(run: Any, config: Any, chunk: Any, *given: Any) -> Any:
        found["all"] = sum(p.numel() for p in chunk.parameters())
        found["made"] = sum(p.numel() for p in chunk.parameters() if not p.is_meta)
        return shard(run, config, chunk, *given)

    model._fully_shard = measure
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        for _ in range(2):
            train_step(parts, stop_requested=False)
        found["kept"] = sum(k.weight.numel() for k in local_params(parts.state.chunks[0]))
        found["live"] = _live_bytes() - inherited
    return found


def _live_bytes() -> int:
    """Return the bytes of the memory that tensors of this process share among them."""
    gc.collect()
    tensors = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if not t.is_meta
        }.values()
    )


@pytest.mark.parametrize("name", ["fsdp2", "megatron"])
def test_fully_sharded_rank_never_holds_whole_weights(name: str) -> None:
    ranks = 2
    for rank in run_ranks(ranks, _memory, _on(_run(LAYOUTS[name]), ranks)):
        assert rank["made"] < 0.01 * rank["all"], "weights had memory before they were cut"
        assert rank["kept"] == pytest.approx(rank["all"] / ranks, rel=0.05)
        # between steps nothing lives but a part of the weights, of their gradients and of two
        # moments
        assert rank["live"] < 1.15 * 16 * rank["all"] / ranks
