"""Replicas with different weights are found and named; equal ones are left in peace."""

from __future__ import annotations

import io
import platform
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

STEPS = 4
MODEL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
MODEL |= {"num_attention_heads": 4, "num_query_groups": 2}
MOE = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}}
SHARDED = {"distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2, "distributed_optimizer": False},
    "tp2dp2": {"ranks": 4, "tp": 2, "distributed_optimizer": False},
    "distributed optimizer": {"ranks": 2, **SHARDED},
    "overlapped gather": {
        "ranks": 2,
        **SHARDED,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "dp3": {"ranks": 3, "distributed_optimizer": False},
    "cp2": {"ranks": 2, "cp": 2, "distributed_optimizer": False},
    "pp2dp2": {"ranks": 4, "pp": 2, **SHARDED},
    "ep2dp4": {"ranks": 4, "ep": 2, **SHARDED},
}
USUAL = ["dp2", "overlapped gather"]
"""Layouts of the default tier."""


def checked(name: str, interval: int) -> RunConfig:
    keys = LAYOUTS[name]
    model = MODEL | (MOE if "ep" in keys else {})
    trainer = {"train_iters": STEPS, "global_batch_size": 12, "micro_batch_size": 1}
    run = tiny_run(model=model, trainer=trainer, optim={"warmup_iters": 1}, **keys)
    resilience = run.resilience.model_copy(update={"replica_check_interval": interval})
    log = run.log.model_copy(update={"progress": "none"})
    return run.model_copy(update={"resilience": resilience, "log": log})


def flip(chunks: Sequence[Any], part: str, bit: int) -> str:
    """Flip a bit of the first weight whose name has `part`; return its name."""
    from mtrain.mcore.state.local_params import local_params

    own = next(own for chunk in chunks for own in local_params(chunk) if part in own.name)
    own.weight.view(torch.int32)[5] ^= 1 << bit
    return own.name


def train(
    run: RunConfig, home: Path, flips: dict[int, int], part: str = "linear_fc1"
) -> tuple[str, int | None, list[str], str]:
    """Train on this rank; `flips` has the step in which a rank flips a bit after backward.

    Returns:
        The error, the rank at fault, the checkpoints and the flipped tensor.
    """
    from mtrain.ckpt.folder import committed
    from mtrain.errors import TrainingError
    from mtrain.mcore import api
    from mtrain.train.loop import step as loop
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank

    home.mkdir(parents=True, exist_ok=True)
    when = flips.get(dist.get_rank())
    flipped = []
    real = loop.gradients

    def gradients(context: Any, batches: Any) -> Any:
        found = real(context, batches)
        if context.state.step + 1 == when:
            flipped.append(flip(context.state.chunks, part, 3 + dist.get_rank()))
        return found

    loop.gradients = gradients
    try:
        with redirect_stdout(io.StringIO()):
            train_rank(run, lambda _: Paths(home), lambda *_: None)
    except TrainingError as error:
        saved = [path.name for path in committed(home / "checkpoints")]
        api.parallel_state.destroy_model_parallel()
        return str(error), error.rank, saved, "".join(flipped)
    finally:
        loop.gradients = real
    return "", None, [path.name for path in committed(home / "checkpoints")], "".join(flipped)


@pytest.mark.parametrize("name", some(LAYOUTS, USUAL))
def test_replicas_bit_flip_is_named_and_clean_run_is_not(name: str, tmp_path: Path) -> None:
    import_engine()
    ranks = LAYOUTS[name]["ranks"]
    culprit = ranks - 1
    # A distributed optimizer writes weights anew in each step: an earlier flip would be gone.
    when = 2 if LAYOUTS[name].get("distributed_optimizer") else 1

    def job() -> list[Any]:
        clean = train(checked(name, 1), tmp_path / "clean", {})
        return [clean, train(checked(name, 2), tmp_path / "flipped", {culprit: when})]

    ends = run_ranks(ranks, job)
    assert all(clean == ("", None, ["step_00000004"], "") for clean, _ in ends)
    tensor = ends[culprit][1][3]
    assert tensor
    texts = {end[0] for _, end in ends}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith("step 2: the weights of ")
    assert text.endswith(f"{tensor}; nothing of this step is saved")
    who = f"rank {culprit} on {platform.node()}"
    assert who in text
    majority = name == "dp3"
    assert ("differ from those of its replicas, ranks 0, 1:" in text) == majority
    assert ("no majority says which is right" in text) != majority
    assert {end[1] for _, end in ends} == {culprit if majority else None}
    assert all(end[2] == [] for _, end in ends)


@pytest.mark.full
def test_replicas_of_experts_differ_only_within_their_group(tmp_path: Path) -> None:
    import_engine()

    def job() -> Any:
        return train(checked("ep2dp4", 2), tmp_path / "run", {1: 2}, "experts")

    for text, _, _, _ in run_ranks(4, job):
        machine = platform.node()
        assert f"the replicas rank 1 on {machine} and rank 3 on {machine} differ" in text


def test_replicas_majority_decides_each_tensor() -> None:
    from mtrain.train.hooks.replicas import Difference, difference, in_words

    assert difference([[1, 2], [1, 2]]) == Difference([], [0, 1], [])
    assert difference([[1, 2], [1, 3]]) == Difference([0, 1], [], [1])
    assert difference([[1, 2, 9], [1, 3, 9], [1, 2, 9]]) == Difference([1], [0, 2], [1])
    assert difference([[1, 2], [1, 3], [4, 2], [1, 2]]) == Difference([1, 2], [0, 3], [0, 1])
    # two against two: nobody knows
    assert difference([[1], [1], [2], [2]]) == Difference([0, 1, 2, 3], [], [0])
    found = Difference([5], [1, 3], [0, 1, 2, 3, 4])
    assert in_words(found, {5: "b", 1: "a", 3: "a"}, list("vwxyz")) == (
        "the weights of rank 5 on b differ from those of its replicas, ranks 1, 3:"
        " v, w, x and 2 more tensors"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_replicas_checksum_shows_every_flipped_bit(dtype: torch.dtype) -> None:
    from mtrain.train.hooks.replicas import INTEGERS, checksum

    weight = torch.arange(1, 8).to(dtype)
    size = weight.element_size()
    before = checksum(weight)
    for bit in range(8 * size):
        bits = weight.clone().view(INTEGERS[size])
        mask = 1 << bit if bit < 8 * size - 1 or size == 1 else -(1 << bit)
        bits[3] ^= mask
        assert checksum(bits.view(dtype)) != before
