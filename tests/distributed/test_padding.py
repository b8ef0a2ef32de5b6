"""Losses other than that of the next token: averages over tokens, however a batch is padded or
split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.model import MoEConfig
from mtrain.config.schema.run import RunConfig
from mtrain.loading.configuration import load
from mtrain.models.hybrid.config import HybridConfig
from tests.support.chats import drawn_chats
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

CHATS = 8
VOCAB = 320
LENGTH = 64
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 1.0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write chats of unlike lengths, some with a single learned token, and a tokenizer."""
    return drawn_chats(tmp_path_factory.mktemp("padding"), CHATS)


def moe(**more: Any) -> MoEConfig:
    own = {
        "num_experts": 4,
        "router_topk": 2,
        "ffn_hidden_size": 32,
        "aux_loss_coeff": 1.0,
        "z_loss_coeff": 0.1,
    }
    return MoEConfig(**(own | more))


def run_with(
    home: Path, *, length: int = LENGTH, average: str = "token", micro: int = 1, **more: Any
) -> RunConfig:
    """Return a run of one step over all chats; `experts` are keys of `model.moe`, `model` those of
    `model`, the rest of `parallel`.
    """
    trainer = {"global_batch_size": CHATS, "micro_batch_size": micro, "loss_average": average}
    model = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "moe": moe(**more.pop("experts", {})),
    }
    if named := more.pop("named", ""):
        model = dict(
            load(
                [named, "cluster=cpu", "parallel=single", f"model.vocab_size={VOCAB}", "data=mock"]
            ).run.model
        )
    run = tiny_run(model={**model, **more.pop("model", {})}, trainer=trainer, **more)
    data = DataConfig(
        kind="sft",
        path=str(home / "chats.jsonl"),
        tokenizer=str(home / "tokenizer.json"),
        cache_dir=str(home / "cache"),
        seq_length=length,
        split=(1.0, 0.0, 0.0),
    )
    return run.model_copy(update={"data": data})


def gradient(run: RunConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole gradient of the first step, and the state after it."""

    def job() -> list[tuple[float, float]]:
        return train_steps(run, 1, gradients_to=folder / "gradient", save_to=folder / "state")

    run_ranks(run.parallel.ranks or 1, job)
    [saved] = (folder / "gradient").glob("step_*")
    [state] = (folder / "state").glob("step_*")
    biases = {key: value for key, value in whole_tensors(state).items() if "expert_bias" in key}
    return {**whole_tensors(saved), **biases}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of tensors relative to the largest number of all."""
    assert one.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in one.values())
    return max(float((one[key] - other[key]).abs().max()) for key in one) / largest


MIXER: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "state_dim": 16,
    "num_groups": 2,
    "chunk_size": 16,
}
BIAS = {
    "router_enable_expert_bias": True,
    "router_score_function": "sigmoid",
    "router_bias_update_rate": 1.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "balanced": {},
    "by sequence": {"experts": {"router_load_balancing_type": "seq_aux_loss"}},
    "by a bias": {"experts": BIAS},
    "further tokens": {"model": FURTHER},
    "of samples": {"average": "sample", "model": FURTHER},
    "capacity": {"experts": {"expert_capacity_factor": 1.0}},
    "capacity by position": {
        "experts": {"expert_capacity_factor": 0.75, "token_drop_policy": "position"}
    },
    "padded to a capacity": {
        "experts": {"expert_capacity_factor": 1.0, "pad_expert_input_to_capacity": True}
    },
    "sinkhorn": {
        "experts": {
            "router_load_balancing_type": "sinkhorn",
            "aux_loss_coeff": 0.0,
            "router_topk": 1,
        }
    },
    "by lists": {"experts": {**BIAS, "pad_alltoall": True}},
    "latent and sparse attention": {"named": "model=deepseek_v3_2_tiny"},
    "hybrid": {"model": {"family": "hybrid", "hybrid": HybridConfig(pattern="ME*E", **MIXER)}},
    "recomputed": {
        "model": FURTHER,
        "recompute": {"granularity": "full", "method": "uniform", "num_layers": 1},
    },
}


@pytest.mark.engine
@pytest.mark.parametrize("name", some(KINDS, ["by sequence", "padded to a capacity", "recomputed"]))
def test_padding_longer_samples_keep_gradient(name: str, home: Path, tmp_path: Path) -> None:
    one, other = (
        gradient(run_with(home, length=length, **KINDS[name]), tmp_path / str(length))
        for length in (64, 192)
    )
    assert apart(one, other) < 1e-6


SEQUENCES = {"router_load_balancing_type": "seq_aux_loss", **BIAS}
LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulated by 4": {"micro": 4},
    "dp2": {"ranks": 2, "micro": 2},
    "cp2": {"ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True, "micro": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2, "micro": 2},
    "pp4": {"ranks": 4, "pp": 4},
    "ep2": {"ranks": 2, "ep": 2, "micro": 4},
    "tp2 ep2 etp1": {"ranks": 4, "tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1},
    "tp2 pp2, recomputed": {
        **{"ranks": 4, "tp": 2, "pp": 2, "sequence_parallel": True, "micro": 2},
        "recompute": {"granularity": "full", "method": "uniform", "num_layers": 1},
    },
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("average", some(["token", "sample"], ["sample"]))
@pytest.mark.parametrize("name", some(LAYOUTS, ["cp2", "pp2vpp2"]))
def test_padding_any_layout_has_same_gradient(
    name: str, average: str, home: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"experts": SEQUENCES, "model": FURTHER, "average": average}
    one = gradient(run_with(home, **more), tmp_path / "one")
    assert apart(one, gradient(run_with(home, **more, **LAYOUTS[name]), tmp_path / "other")) < 1e-6


def _last_router(
    run: RunConfig, folder: Path
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return the gradient of the last layer's router, its logits in each micro-batch, and its
    weight; a job for a rank.
    """
    from mtrain.mcore import api
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        (chunk,) = parts.state.chunks
        last = [m for m in unwrap(chunk).modules() if isinstance(m, api.TopKRouter)][-1]
        gating = last.gating
        seen: list[torch.Tensor] = []
        weight = last.weight.detach().clone()

        def noted(x: torch.Tensor) -> Any:
            seen.append(x.detach().clone())
            return gating(x)

        last.gating = noted
        numbers = parts.train_data.numbers(0)
        windows = torch.from_numpy(parts.train_data.samples.batch(numbers.ravel()))[:, :-1]
        record_gradients(parts, folder)
        train_step(parts, stop_requested=False)
    (saved,) = folder.glob("step_*")
    found = [g for key, g in sorted(whole_tensors(saved).items()) if key.endswith("router.weight")][
        -1
    ]
    there = [rows.t() >= 0 for rows in windows.split(run.trainer.micro)]
    if run.data.packed:  # one row of all samples
        there = [rows.t().reshape(-1, 1) for rows in there]
    return found, [x[rows] for x, rows in zip(seen, there, strict=True)], weight


def _data(kind: str, home: Path) -> DataConfig:
    if kind == "chats":
        return run_with(home).data
    if kind == "masked ends":
        (home / "text").mkdir(exist_ok=True)
        for i in range(200):
            (home / f"text/{i}.txt").write_text(f"{i} " * (1 + i % 5))
        own = {
            "kind": "text",
            "path": str(home / "text"),
            "suffixes": [".txt"],
            "tokenizer_vocab_size": 300,
        }
        return DataConfig.model_validate(
            {
                **own,
                "cache_dir": str(home / "cache"),
                "seq_length": LENGTH,
                "eod_mask_loss": True,
                "packed": False,
            }
        )
    return DataConfig(kind="mock", seq_length=LENGTH, packed=True, packed_by=kind)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["chats", "first_fit", "stream", "masked ends"])
def test_padding_layer_loss_equals_transformers(kind: str, home: Path, tmp_path: Path) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")

    def of(coefficient: float) -> RunConfig:
        experts = {"aux_loss_coeff": coefficient, "z_loss_coeff": coefficient or None}
        run = run_with(home, micro=2, experts=experts)
        return run.model_copy(update={"data": _data(kind, home)})

    def job() -> Any:
        return [
            _last_router(of(coefficient), tmp_path / str(coefficient)) for coefficient in (1.0, 0.0)
        ]

    (with_losses, seen, weight), (without, _, _) = run_ranks(1, job)[0]
    weight.requires_grad_()
    for hidden in seen:
        logits = hidden @ weight.t()
        balance = mixtral.load_balancing_loss_func((logits,), 4, 2) / 2
        (len(hidden) * balance + logits.logsumexp(-1).square().sum()).backward()
    wanted = weight.grad / sum(len(hidden) for hidden in seen)
    torch.testing.assert_close(with_losses - without, wanted, rtol=1e-4, atol=1e-6)
