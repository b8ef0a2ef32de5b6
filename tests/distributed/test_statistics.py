"""Statistics of whole tensors: in every layout those of one rank, of a step that stays as it is."""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.events.read import events
from mtrain.models.hybrid.config import HybridConfig
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import rank_tensors, tiny_run, whole_tensors

STEPS = 2
KINDS = ("weights", "gradients", "updates", "exp_avg", "exp_avg_sq", "activations")
KINDS += ("losses", "attention")
DENSE: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64}
DENSE |= {"num_attention_heads": 4, "num_query_groups": 2}
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32, "first_dense_layers": 1}
EXPERTS |= {"router_score_function": "sigmoid", "router_enable_expert_bias": True}
MOE = {"moe": EXPERTS}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8}
MLA = {"mla": LATENT | {"v_head_dim": 8}, "num_query_groups": None}
MODELS = {"dense": DENSE, "moe": DENSE | MOE, "mla": DENSE | MLA}
MODELS["tied"] = DENSE | {"tie_word_embeddings": True}
MODELS["further"] = DENSE | {"num_layers": 2, "mtp_num_layers": 2}
MIXER = {"num_heads": 4, "head_dim": 16, "state_dim": 16, "num_groups": 4, "chunk_size": 8}
PATTERN = {"hybrid": HybridConfig(pattern="M*-M", **MIXER), "activation": "squared_relu"}
MODELS["hybrid"] = DENSE | PATTERN | {"family": "hybrid", "position_embedding_type": "none"}
SHARDED = {"distributed_optimizer": True}
TP2SP = {"ranks": 2, "tp": 2, "sequence_parallel": True}
LEVELS = {"ranks": 4, "cp": 4, "cp_comm_type": "a2a+p2p", "hierarchical_cp_sizes": (2, 2)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense tp2sp": ("dense", TP2SP),
    "dense pp2": ("dense", {"ranks": 2, "pp": 2}),
    "dense pp2vpp2": ("dense", {"ranks": 2, "pp": 2, "vpp": 2}),
    "dense cp2": ("dense", {"ranks": 2, "cp": 2}),
    "dense cp2 ring": ("dense", {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"}),
    "dense cp2 heads": ("dense", {"ranks": 2, "cp": 2, "cp_comm_type": "a2a"}),
    "dense cp4 two levels": ("dense", LEVELS),
    "dense dp2": ("dense", {"ranks": 2, "distributed_optimizer": False}),
    "dense distributed optimizer": ("dense", {"ranks": 2, **SHARDED}),
    "dense fsdp2": ("dense", {"ranks": 2, "fsdp": "fsdp2"}),
    "dense fsdp of megatron": ("dense", {"ranks": 2, "fsdp": "megatron"}),
    "dense recomputed": ("dense", TP2SP | {"recompute": {"granularity": "full"}}),
    "tied pp2": ("tied", {"ranks": 2, "pp": 2}),
    "mla tp2sp": ("mla", TP2SP),
    "mla pp2": ("mla", {"ranks": 2, "pp": 2}),
    "mla cp2": ("mla", {"ranks": 2, "cp": 2}),
    "mla distributed optimizer": ("mla", {"ranks": 2, **SHARDED}),
    "mla fsdp2": ("mla", {"ranks": 2, "fsdp": "fsdp2"}),
    "hybrid tp2sp": ("hybrid", TP2SP),
    "hybrid pp2": ("hybrid", {"ranks": 2, "pp": 2}),
    "hybrid pp2vpp2": ("hybrid", {"ranks": 2, "pp": 2, "vpp": 2}),
    "hybrid cp2": ("hybrid", {"ranks": 2, "cp": 2}),
    "hybrid cp2 ring": ("hybrid", {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"}),
    "hybrid distributed optimizer": ("hybrid", {"ranks": 2, **SHARDED}),
    "hybrid fsdp2": ("hybrid", {"ranks": 2, "fsdp": "fsdp2"}),
    "moe tp2sp": ("moe", TP2SP),
    "moe cp2": ("moe", {"ranks": 2, "cp": 2}),
    "moe distributed optimizer": ("moe", {"ranks": 2, **SHARDED}),
    "moe fsdp2": ("moe", {"ranks": 2, "fsdp": "fsdp2"}),
    "moe ep2etp2": ("moe", TP2SP | {"ranks": 4, "ep": 2, "etp": 2}),
    "moe ep2pp2": ("moe", {"ranks": 4, "ep": 2, "pp": 2, **SHARDED}),
}
USUAL = ["moe ep2etp2"]
Rows = dict[str, dict[str, list[float]]]


def described(name: str, interval: int | None = 1, **keys: Any) -> RunConfig:
    trainer = {"train_iters": STEPS, "global_batch_size": 4, "micro_batch_size": 1}
    run = tiny_run(model=MODELS[name], trainer=trainer, optim={"warmup_iters": 1}, **keys)
    statistics = run.log.statistics.model_copy(update={"interval": interval})
    log = run.log.model_copy(update={"progress": "none", "statistics": statistics})
    # the loss that computes logits
    kernels = run.kernels.model_copy(update={"loss": "megatron"})
    return run.model_copy(update={"log": log, "kernels": kernels})


def train(run: RunConfig, home: Path) -> None:
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank

    home.mkdir(parents=True, exist_ok=True)

    def job() -> None:
        with redirect_stdout(io.StringIO()):
            train_rank(run, lambda _: Paths(home), lambda *_: None)

    run_ranks(run.parallel.ranks or 1, job)


def found(home: Path) -> tuple[Rows, float]:
    """Return rows by kind, and the gradient norm, of the last step."""
    last = [event for event in events(home) if event["step"] == STEPS]
    (norm,) = [event["values"]["grad_norm"] for event in last if event["kind"] == "step"]
    return {event["of"]: event["rows"] for event in last if event["kind"] == "statistics"}, norm


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the rows of a model on one rank; each model trains once."""
    import_engine()
    known: dict[str, Rows] = {}

    def of(name: str) -> Rows:
        if name not in known:
            home = tmp_path_factory.mktemp(name)
            train(described(name), home)
            known[name] = found(home)[0]
        return known[name]

    return of


def differences(one: Rows, many: Rows) -> list[str]:
    """Return the statistics that differ by more than 1e-5."""
    assert many.keys() == one.keys()
    out = []
    for kind, rows in one.items():
        assert many[kind].keys() == rows.keys()
        for name, values in rows.items():
            # An update is the difference of two rounded weights.
            rounding = one["weights"][name][2] * 2**-23 if kind == "updates" else 0.0
            for place, (a, b) in enumerate(zip(values, many[kind][name], strict=True)):
                # Experts are distributed over the ranks of one layout only.
                if (kind, place) == ("experts", 1):
                    continue
                # A mean is the rest of a sum: compare it with the size of what was added.
                scale = values[2] if place == 1 and len(values) > 3 else abs(a)
                ratio = one["weights"][name][0] if (kind, place) == ("updates", 4) else 1.0
                if abs(a - b) > 1e-5 * scale + rounding / ratio:
                    out.append(f"{kind} {name} {place}: {a} and {b}")
    return out


@pytest.mark.parametrize("case", some(CASES, USUAL))
def test_statistics_equal_those_of_one_rank(case: str, alone: Any, tmp_path: Path) -> None:
    name, keys = CASES[case]
    one = alone(name)
    train(described(name, **keys), tmp_path)
    many, norm = found(tmp_path)
    assert tuple(one) == (*KINDS, "experts")[: len(KINDS) + (name == "moe")]
    part = "decoder.layers.3.mixer" if name == "hybrid" else "decoder.layers.3.mlp"
    assert {"decoder.layers.3", part, "output_layer"} <= one["activations"].keys()
    assert differences(one, many) == []
    squares = sum(row[0] ** 2 for row in many["gradients"].values())
    assert squares == pytest.approx(norm**2, rel=1e-6)


@pytest.mark.full
def test_statistics_of_experts_have_loads_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_engine()
    from mtrain.train.alerts.machines import Experts, OverloadedRank

    # The load of every rank is too much, and one described step enough.
    monkeypatch.setattr(OverloadedRank, "FACTOR", 0.5)
    monkeypatch.setattr(Experts, "RECENT", 1)
    train(described("moe", ranks=2, ep=2), tmp_path)
    last = next(e for e in events(tmp_path) if e["step"] == STEPS and e.get("of") == "experts")
    for name in (f"decoder.layers.{layer}.mlp.router" for layer in (1, 2, 3)):
        loads = last["loads"][name]
        assert sum(loads) == 4 * 32 * 2, "samples, tokens of each, experts of a token"
        ranks = [loads[0] + loads[1], loads[2] + loads[3]]
        assert last["rank_loads"][name] == ranks
        over, rank_over, entropy, dropped, *_ = last["rows"][name]
        assert over == pytest.approx(max(loads) / 64)
        assert rank_over == pytest.approx(max(ranks) / 128)
        assert 1.3 < entropy <= math.log(4) + 1e-6
        assert dropped == 0
        # after one update, each bias has moved by the rate in one of two directions
        assert {abs(bias) for bias in last["biases"][name]} <= {0.0, 0.001}
    alerts = [event["name"] for event in events(tmp_path) if event["kind"] == "alert"]
    assert "overloaded_rank" in alerts


@pytest.mark.full
def test_statistics_of_an_uncounted_part_differ(alone: Any, tmp_path: Path) -> None:
    from mtrain.mcore.state import sharding

    real = sharding.gradient_shards

    def lacks_one(*args: Any) -> Any:
        shards = real(*args)
        return shards[1:] if torch.distributed.get_rank() == 1 else shards

    with mock.patch.object(sharding, "gradient_shards", lacks_one):
        train(described("dense", **CASES["dense tp2sp"][1]), tmp_path)
    many, norm = found(tmp_path)
    assert {line.split()[0] for line in differences(alone("dense"), many)} == {"gradients"}
    squares = sum(row[0] ** 2 for row in many["gradients"].values())
    assert squares != pytest.approx(norm**2, rel=1e-6)


@pytest.mark.parametrize("case", some(CASES, ["dense distributed optimizer"]))
def test_statistics_leave_every_bit_of_a_step(case: str, tmp_path: Path) -> None:
    import_engine()
    name, keys = CASES[case]
    states = []
    for interval in (1, None):
        home = tmp_path / str(interval)
        train(described(name, interval, **keys), home)
        saved = home / "checkpoints" / f"step_{STEPS:08d}"
        states.append((whole_tensors(saved), rank_tensors(saved), found(home)[1]))
    (tensors, ranks, norm), (others, other_ranks, other_norm) = states
    assert norm == other_norm
    assert tensors.keys() == others.keys()
    assert all(torch.equal(value, others[key]) for key, value in tensors.items())
    pairs = zip(ranks, other_ranks, strict=True)
    assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_statistics_names_are_those_that_patterns_are_checked_by(name: str, alone: Any) -> None:
    from mtrain.models.selection import weights_of

    found = set(alone(name)["weights"])
    if name == "hybrid":
        # a mixer has several parts of one weight, such as in_proj.weight.x
        found = {re.sub(r"\.(weight|bias)\.\w+$", r".\1", weight) for weight in found}
    assert found == set(weights_of(described(name)))


@pytest.mark.parametrize("name", some({"dense": (), "moe": ()}, ["dense"]))
def test_statistics_do_not_ask_the_device(name: str, tmp_path: Path) -> None:
    import_engine()

    def job() -> list[tuple[int, list[tuple[int, str]]]]:
        return [_asked(name, tmp_path / str(interval), interval) for interval in (None, 1)]

    ((usual, nothing), (asked, noted)) = run_ranks(1, job)[0]
    assert nothing == []
    kinds = [*KINDS, *(["experts"] if name == "moe" else [])]
    assert noted == [(step, kind) for step in (1, 2) for kind in kinds]
    assert asked == usual


def _asked(name: str, home: Path, interval: int | None) -> tuple[int, list[tuple[int, str]]]:
    from collections import Counter

    from mtrain.train.hooks.base import Hook
    from mtrain.train.hooks.metrics import Metrics
    from mtrain.train.hooks.statistics import Statistics
    from mtrain.train.loop.trainer import Trainer
    from tests.distributed.test_async_steps import Asked, assembled
    from tests.support.devices import stand_in

    run = described(name, interval)
    noted: list[tuple[int, str]] = []

    class Noted(Metrics):
        def note(self, kind: str, step: int, **facts: Any) -> None:
            noted.append((step, facts["of"]))

    class Begins(Hook):
        def start(self, context: Any) -> None:
            asked.count = 0

    asked = Asked()
    hooks = [Statistics(run, Noted(home))] if interval else []
    with assembled(run, stand_in(Counter())) as parts, asked:
        Trainer(parts, [*hooks, Begins()]).fit()
    return asked.count, noted
