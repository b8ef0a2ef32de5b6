"""LoRA and DoRA in training: what is frozen stays, what is saved goes on bitwise, and layouts
compute the same.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.launching import prove
from mtrain.plan.count import adapter_parameters, flops_of_token, parameters, state_bytes
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def run_with(
    kind: str = "lora", *, moe: bool = False, dropout: float = 0.0, **more: Any
) -> RunConfig:
    """Return a tiny model with adapters of rank 4 on all layers; keyword arguments are those of
    `tiny_run`.
    """
    model: dict[str, Any] = (
        {"moe": MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=32)} if moe else {}
    )
    run = tiny_run(model=model, optim={"lr": 3e-3}, **more)
    peft = PeftConfig(kind=kind, r=4, alpha=8.0, dropout=dropout)  # type: ignore[arg-type]
    return resolve(run.model_copy(update={"peft": peft}), Machine(cpu_cores=1, memory_bytes=0))


RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "lora": ({}, 1),
    "dora, tp2, sequence parallel": (
        {"kind": "dora", "ranks": 2, "tp": 2, "sequence_parallel": True},
        2,
    ),
    "bf16, sharded state": ({"dtype": "bf16", "ranks": 2, "distributed_optimizer": True}, 2),
    "dropout, tp2": ({"dropout": 0.3, "ranks": 2, "tp": 2}, 2),
    "experts, ep2": ({"moe": True, "ranks": 2, "ep": 2}, 2),
    "dora, pp2, bf16": ({"kind": "dora", "dtype": "bf16", "ranks": 2, "pp": 2}, 2),
}


@pytest.mark.parametrize("name", some(RUNS, ["lora"]))
def test_peft_frozen_weights_stay_and_resume_is_bitwise(name: str, tmp_path: Path) -> None:
    given, ranks = RUNS[name]
    run = run_with(**given)
    plain = run_with(**given).model_copy(update={"peft": PeftConfig()})
    rows = run_ranks(ranks, lambda: train_steps(run, 4, save_to=tmp_path / "a", save_after=2))[0]
    run_ranks(ranks, lambda: train_steps(plain, 0, save_to=tmp_path / "plain"))
    begun = whole_tensors(tmp_path / "plain/step_00000000")
    middle, ended = (tmp_path / f"a/step_{n:08d}" for n in (2, 4))
    tensors = whole_tensors(ended)
    weights = {key for key in begun if key.startswith("model/")}
    adapters = {key for key in tensors if key.startswith("model/")} - weights
    assert all(torch.equal(begun[key], tensors[key]) for key in weights)
    assert all(any(f"{layer}.lora_b" in key for key in adapters) for layer in LAYERS)
    assert all(bool(tensors[key].any()) for key in adapters), "every adapter has moved"
    assert {key.split("/", 2)[2] for key in tensors if key.startswith("optim/")} == {
        k[6:] for k in adapters
    }
    assert rows[-1][0] < rows[0][0]
    for rank in range(ranks):
        files = [folder / f"frozen_{rank:05d}.safetensors" for folder in (middle, ended)]
        assert files[0].stat().st_ino == files[1].stat().st_ino, "frozen weights are on disk once"
    again = run_ranks(ranks, lambda: train_steps(run, 2, save_to=tmp_path / "b", load_from=middle))[
        0
    ]
    assert again == rows[2:]
    last = whole_tensors(tmp_path / "b/step_00000004")
    assert last.keys() == tensors.keys()
    assert all(torch.equal(last[key], tensors[key]) for key in tensors)


@pytest.mark.full
def test_peft_router_biases_are_frozen(tmp_path: Path) -> None:
    run = load(
        ["model=glm45_tiny", "peft=lora", "parallel=single", "data=mock", "data.seq_length=32"]
    ).run
    batch = {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 20, "eval_iters": 0}
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update=batch)})
    run_ranks(1, lambda: train_steps(run, 2, save_to=tmp_path, save_after=0))
    begun, ended = (whole_tensors(tmp_path / f"step_{n:08d}") for n in (0, 2))
    still = {key for key in begun if key.startswith("model/") and "lora_" not in key}
    assert any(key.endswith("expert_bias") for key in still)
    assert all(torch.equal(begun[key], ended[key]) for key in still)


LAYOUTS = cases_of("peft")


def compared(words: str) -> list[Any]:
    """Return the rows of `prove` for a model with these words."""
    argv = words.split()
    full = load(argv).run
    return [
        row
        for dtype in prove.formats(full)
        for row in prove.compared(prove.shrunk(full, argv, 4, dtype))
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(LAYOUTS, ["tp2, sequence parallel", "ep2"]))
def test_peft_layout_equals_one_rank(name: str) -> None:
    rows = compared(LAYOUTS[name])
    assert all(row.equal for row in rows), prove.table(rows)


COUNTED = cases_of("peft_counted")


@pytest.mark.parametrize("name", some(COUNTED, ["mtp, shared experts, a dense layer"]))
def test_peft_plan_counts_built_adapters(name: str) -> None:
    run = load([*COUNTED[name].split(), "parallel=single"]).run

    def built() -> tuple[int, int]:
        from mtrain.convert.boxes import adapter_boxes

        numbers = {key: prod(tensor.shape) for key, tensor in adapter_boxes(run).items()}
        experts = sum(n for key, n in numbers.items() if ".experts.linear" in key)
        return sum(numbers.values()) - experts, experts

    assert run_alone(built) == adapter_parameters(run)
    trained = sum(adapter_parameters(run))
    plain = load(
        [
            *(word for word in COUNTED[name].split() if not word.startswith("peft")),
            "parallel=single",
        ]
    ).run
    assert state_bytes(run) == state_bytes(plain) - 12 * parameters(run.model) + 16 * trained, (
        "fp32: 4 + 4 + 8"
    )
    assert (
        0.6 * flops_of_token(plain)
        < flops_of_token(run)
        < 0.8 * flops_of_token(plain) + 6 * trained
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("copy_to_tensor_model_parallel_region", "model=llama_tiny peft=lora parallel=tp2"),
        (
            "all_gather_last_dim_from_tensor_parallel_region",
            "model=mixtral_tiny peft=lora parallel=tp1ep1etp2",
        ),
    ],
)
def test_peft_unsummed_gradient_is_found(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.mcore.layers import low_rank

    real = getattr(low_rank, name)

    class Alone(torch.autograd.Function):
        """The same forward; each rank's own gradient."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.width = x.shape[-1]
            ctx.rank = group.rank()
            return real(x, group=group).clone()

        @staticmethod
        def backward(ctx: Any, *dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            parts = dy[0].split(ctx.width, -1)
            return parts[ctx.rank if len(parts) > 1 else 0].contiguous(), None

    monkeypatch.setattr(low_rank, name, lambda x, group: Alone.apply(x, group))
    assert not all(row.equal for row in compared(words))
