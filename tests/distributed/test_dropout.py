"""Random numbers of a forward pass: which ranks draw the same, how good they are, and what they do
to training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, stdev
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from mtrain.config.schema.model import MoEConfig
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, train_steps

RATE = 0.25
DROPS: dict[str, Any] = {"hidden_dropout": RATE, "attention_dropout": RATE}
MOE = MoEConfig(
    num_experts=4, ffn_hidden_size=64, input_jitter_eps=0.1, router_force_load_balancing=True
)
SMALL = {"global_batch_size": 4, "micro_batch_size": 1}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2pp2vpp2": ({"ranks": 4, "tp": 2, "pp": 2, "vpp": 2}, {}),
    "dp2cp2": ({"ranks": 4, "cp": 2}, {}),
    "tp2dp2ep4 sequence parallel": (
        {"ranks": 4, "tp": 2, "sequence_parallel": True, "ep": 4, "etp": 1},
        {"moe": MOE},
    ),
}

Drawn = dict[str, list[torch.Tensor]]


@contextmanager
def recorded() -> Iterator[Drawn]:
    """Record all random numbers drawn inside, by kind and in order: masks of hidden states and of
    attention, noise of routers.
    """
    found: Drawn = {"hidden": [], "attention": [], "jitter": [], "balance": []}
    dropout = F.dropout
    attention = F.scaled_dot_product_attention
    uniform = torch.distributions.Uniform.rsample
    normal = torch.Tensor.normal_

    def hidden(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or not p:
            return dropout(x, p, training, inplace)
        mask = dropout(torch.ones_like(x), p)
        found["hidden"].append(mask.detach() != 0)
        return x * mask

    def attend(
        q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: bool = False, **more: Any
    ) -> Any:
        if p:
            state = torch.get_rng_state()
            # the probabilities themselves
            each = torch.eye(k.shape[-2], dtype=v.dtype).expand(*v.shape[:-2], -1, -1)
            kept = attention(q * 0, k, each, torch.zeros(k.shape[-2]), p, **more)
            found["attention"].append(kept.detach() != 0)
            torch.set_rng_state(state)
        return attention(q, k, v, mask, p, causal, **more)

    def jitter(self: Any, shape: Any = ()) -> torch.Tensor:
        found["jitter"].append(uniform(self, shape))
        return found["jitter"][-1]

    def balance(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found["balance"].append(normal(self, *args, **kwargs).clone())
        return self

    with (
        mock.patch.object(F, "dropout", hidden),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(torch.distributions.Uniform, "rsample", jitter),
        mock.patch.object(torch.Tensor, "normal_", balance),
    ):
        yield found


def drawn_in_a_step(run: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """Return this rank's place in the grid and its random numbers in the first step: by kind, a row
    for each drawing.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        with recorded() as found:
            train_step(parts, stop_requested=False)
    rows = {
        kind: [drawn.float().flatten()[:2048] for drawn in each] for kind, each in found.items()
    }
    return world.coords, {kind: torch.stack(each).numpy() for kind, each in rows.items() if each}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_ranks_draw_alike_for_shared_tensors(name: str) -> None:
    parallel, model = LAYOUTS[name]
    run = tiny_run(model=DROPS | model, trainer=SMALL, **parallel)
    ranks = run_ranks(run.parallel.ranks, drawn_in_a_step, run)
    whole = not run.parallel.sequence_parallel
    for kind in ("hidden", "attention", *(("jitter", "balance") if "moe" in model else ())):
        distinct = []
        named = []
        for rank, (at, drawn) in enumerate(ranks):
            holders = [
                r
                for r, (there, _) in enumerate(ranks)
                if all(there[a] == at[a] for a in ("pp", "dp", "cp"))
            ]
            if kind == "hidden" and whole and holders[0] != rank:
                assert (drawn[kind] == ranks[holders[0]][1][kind]).all(), (
                    f"{at}: a whole tensor has two masks"
                )
                continue
            distinct.append(torch.from_numpy(drawn[kind]))
            named += [(at, i) for i in range(len(drawn[kind]))]
        every = torch.cat(distinct)
        likeness = (torch.corrcoef(every) * every.shape[1] ** 0.5).fill_diagonal_(0.0)
        worst = divmod(int(likeness.abs().argmax()), len(every))
        assert likeness.abs().max() < 6, (
            f"{kind}: {named[worst[0]]} and {named[worst[1]]} are drawn alike"
        )
        if kind in ("hidden", "attention"):
            spread = (RATE * (1 - RATE) / every.numel()) ** 0.5
            assert float(every.mean()) == pytest.approx(1 - RATE, abs=5 * spread)


def losses(run: Any, steps: int, seeds: tuple[int, ...]) -> list[float]:
    """Return the mean loss of the last four steps of a training, for each seed of the generators;
    all else is the same.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.generators import seed_generators
    from mtrain.world.init import joined

    ends = []
    with joined(run) as world:
        for seed in seeds:
            parts = assemble(run, world, splits_of(run))
            seed_generators(seed, world.coords)
            ends.append(
                mean([train_step(parts, stop_requested=False).loss for _ in range(steps)][-4:])
            )
    return ends


@pytest.mark.full  # what is drawn is tested above; this is its effect
def test_dropout_layouts_learn_as_one_rank() -> None:
    def trained(rate: float, seeds: tuple[int, ...], **parallel: Any) -> list[float]:
        model = {"hidden_dropout": rate, "attention_dropout": rate, "num_layers": 2}
        run = tiny_run(
            model=model, trainer=SMALL, optim={"lr": 1e-2, "warmup_iters": 2}, **parallel
        )
        return run_ranks(run.parallel.ranks, losses, run, 16, seeds)[0]

    [without] = trained(0.0, (1,))
    alone = trained(0.5, (1, 2, 3))
    effect = mean(alone) - without
    assert effect > 4 * stdev(alone), (
        "too small to tell a layout that drops nothing from one that drops"
    )
    ring = {"ranks": 4, "tp": 2, "cp": 2, "cp_comm_type": "p2p", "sequence_parallel": True}
    for parallel in ({"ranks": 2, "pp": 2}, ring):
        (sharded,) = trained(0.5, (4,), **parallel)
        assert sharded - without == pytest.approx(effect, rel=0.5), (
            f"{parallel}: {sharded}, alone {alone}"
        )


@pytest.mark.full
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_recomputation_repeats_masks(sequence_parallel: bool) -> None:
    found = []
    for recompute in (
        {},
        {"granularity": "full", "method": "uniform", "num_layers": 1},
        {"granularity": "selective"},
    ):
        parallel = {"tp": 2, "sequence_parallel": sequence_parallel, "recompute": recompute}
        run = tiny_run(model=DROPS | {"num_layers": 2}, trainer=SMALL, ranks=2, **parallel)
        found.append(run_ranks(2, train_steps, run, 3)[0])
    assert found[0] == found[1] == found[2]


def test_dropout_evaluation_keeps_later_draws() -> None:
    def steps(evaluated: bool) -> list[float]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import evaluate, train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            if evaluated:
                evaluate(parts, parts.train_data, 1)
            return [train_step(parts, stop_requested=False).loss for _ in range(2)]

    run = tiny_run(model=DROPS | {"moe": MOE, "num_layers": 2}, trainer=SMALL)
    assert run_ranks(1, steps, True) == run_ranks(1, steps, False)


class _Tracker:
    """Tracker like megatron-core's: a dictionary of states, replaced as a whole or not."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def test_dropout_graph_generators_continue() -> None:
    def job() -> tuple[bool, bool, bool]:
        from mtrain.ckpt import state

        known = torch.Generator().manual_seed(7)
        held = torch.zeros(3, dtype=torch.uint8)
        tracker = _Tracker({"model-parallel-rng": known})
        state.mcore.get_cuda_rng_tracker = lambda: tracker
        kept = state.tracker_tensors()
        expected = torch.rand(4, generator=known)
        state.set_tracker(kept)
        same = tracker.states["model-parallel-rng"] is known
        goes_on = torch.equal(torch.rand(4, generator=known), expected)
        tracker.states = {"model-parallel-rng": held}
        state.set_tracker(kept)
        return (
            same,
            goes_on,
            torch.equal(tracker.states["model-parallel-rng"], kept["model-parallel-rng"]),
        )

    assert run_alone(job) == (True, True, True)
