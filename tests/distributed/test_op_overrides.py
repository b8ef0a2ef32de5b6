"""Kernels in the place of megatron-core's operations: the same numbers, in every layout that they
meet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mtrain_kernels import linear
from mtrain_kernels.linear_cross_entropy import chunks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain.config.engine import release
from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from tests.support import interpreted
from tests.support.commands import STEPS_ONLY
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

TP2 = {"ranks": 2, "tp": 2}
SP = {**TP2, "sequence_parallel": True}
TIED = {"tie_word_embeddings": True}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "one rank, tied": (TIED, {}),
    "one rank, two predictions more": (MTP, {}),
    "tp2": ({}, TP2),
    "tp2 sequence parallel": ({}, SP),
    "tp2 sequence parallel, tied, two predictions more": ({**TIED, **MTP}, SP),
    "pp2, tied": (TIED, {"ranks": 2, "pp": 2}),
    "cp2, two predictions more": (MTP, {"ranks": 2, "cp": 2}),
    "fsdp2": ({}, {"ranks": 2, "fsdp": "fsdp2"}),
    "megatron's fsdp, tied": (
        TIED,
        {"ranks": 2, "fsdp": "megatron", "fsdp_sharding": "optim_grads_params"},
    ),
    "dp2 overlapped": (
        {},
        {
            "ranks": 2,
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
}


def _trained(
    run: RunConfig, folder: Path, steps: int = 2, before: Callable[[], None] = lambda: None
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    def job() -> list[tuple[float, float]]:
        before()
        return train_steps(run, steps, gradients_to=folder)

    return run_ranks(run.parallel.ranks, job)[0], whole_tensors(folder / "step_00000000")


def _agree(found: Any, expected: Any, tolerance: float) -> None:
    for (loss, norm), (right, right_norm) in zip(found[0], expected[0], strict=True):
        assert loss == pytest.approx(right, rel=tolerance)
        assert norm == pytest.approx(right_norm, rel=10 * tolerance)
    assert found[1].keys() == expected[1].keys()
    for key, gradient in expected[1].items():
        assert (found[1][key] - gradient).norm() <= 10 * tolerance * gradient.norm(), key


ALWAYS = ["megatron's fsdp, tied"]
OF_A_RELEASE = ["tp2 sequence parallel, tied, two predictions more"]


def _with_megatrons_losses() -> None:
    """Let megatron-core compare with labels, in MTP layers too."""
    from megatron.core.models.gpt import GPTModel

    from mtrain.mcore.models.language_model import LanguageModel

    def postprocess(
        self: Any, *args: Any, labels: Any = None, loss_mask: Any = None, **context: Any
    ) -> Any:
        losses = GPTModel._postprocess(self, *args, labels=labels, loss_mask=loss_mask, **context)
        return (losses * loss_mask).sum() if self.post_process else losses

    LanguageModel._postprocess = postprocess  # type: ignore[method-assign]


def _by_the_count_of_the_main_loss() -> None:
    """Divide the losses of MTP layers by the divisor of the main loss, as megatron-core 0.16.1
    does.
    """
    from mtrain.mcore.models import language_model

    language_model.FURTHER_LOSS_SHARES = "an attribute that no configuration has"


@pytest.mark.parametrize("name", some(LAYOUTS, ALWAYS, engine=OF_A_RELEASE))
def test_op_override_chunked_loss_trains_as_megatron(name: str, tmp_path: Path) -> None:
    model, parallel = LAYOUTS[name]
    run = tiny_run(model={"num_layers": 2, **model}, **parallel)
    all_logits = apply(run, {"kernels.loss": "megatron"})
    whole = _trained(all_logits, tmp_path / "whole")
    _agree(_trained(run, tmp_path / "parts"), whole, 1e-6)
    if "mtp_num_layers" in model:
        if release.at_least(
            0, 19
        ):  # it divides the losses of MTP layers by the tokens of a micro-batch
            return
        whole = _trained(all_logits, tmp_path / "main count", before=_by_the_count_of_the_main_loss)
    _agree(whole, _trained(all_logits, tmp_path / "megatron", before=_with_megatrons_losses), 1e-6)


@pytest.mark.parametrize("name", some(["tp2", "tp2 sequence parallel"], ["tp2 sequence parallel"]))
def test_op_override_vocab_parallel_loss_equals_one_rank(name: str, tmp_path: Path) -> None:
    alone = _trained(tiny_run(), tmp_path / "one", steps=1)
    cut = _trained(tiny_run(**LAYOUTS[name][1]), tmp_path / "two", steps=1)
    assert cut[0][0][0] == pytest.approx(alone[0][0][0], rel=1e-6)
    key = "model/output_layer.weight"
    assert (cut[1][key] - alone[1][key]).norm() <= 1e-6 * alone[1][key].norm()


@pytest.mark.full
@pytest.mark.parametrize(
    "name", some(["one rank", "tp2", "tp2 sequence parallel"], ["tp2 sequence parallel"])
)
def test_op_override_either_gemm_library_trains_as_megatron(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = LAYOUTS[name][1]
    monkeypatch.setattr(linear, "SMALLEST", 1)
    monkeypatch.setattr("mtrain.mcore.layers.linear._adds_in_place", lambda *_: False)
    right = _trained(tiny_run(**parallel), tmp_path / "megatron")
    monkeypatch.undo()
    monkeypatch.setattr(linear, "SMALLEST", 1)
    for library in ("blas", "onednn"):
        run = apply(tiny_run(**parallel), {"kernels.cpu_matmul": library})
        _agree(_trained(run, tmp_path / library), right, 1e-6)


@pytest.mark.full
def test_op_override_half_precision_trains_with_chunked_loss(tmp_path: Path) -> None:
    run = tiny_run(dtype="bf16", **SP)
    whole = _trained(apply(run, {"kernels.loss": "megatron"}), tmp_path / "whole")
    parts = _trained(run, tmp_path / "parts")
    for (loss, norm), (right, right_norm) in zip(parts[0], whole[0], strict=True):
        assert loss == pytest.approx(right, rel=1e-3)
        assert norm == pytest.approx(right_norm, rel=2e-2)


class _Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return out


@pytest.mark.parametrize("loss", ["reference", "megatron"])
def test_op_override_only_megatron_loss_holds_all_logits(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", 1 << 16)  # 128 tokens of 512 at a time
    run = tiny_run(
        model={"vocab_size": 512}, trainer={"global_batch_size": 32, "micro_batch_size": 32}
    )
    run = apply(run, {"kernels.loss": loss})

    def most() -> int:
        with _Largest() as watch:
            train_steps(run, 1)
        return watch.most

    logits = run.trainer.micro * run.data.seq_length * run.model.padded_vocab_size
    held = run_ranks(1, most)[0]
    assert held >= logits if loss == "megatron" else held <= logits / 2, (
        f"{held} elements; logits are {logits}"
    )


SMALL = (
    "data=mock",
    "data.seq_length=16",
    "trainer.train_iters=4",
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=2",
    *STEPS_ONLY,
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.vocab_size=128",
)
MIXTRAL = ("model=mixtral_tiny", "model.moe.ffn_hidden_size=32")
DEEPSEEK = ("model=deepseek_tiny", "model.moe.first_dense_layers=0", "model.moe.ffn_hidden_size=32")
INTERPRETED = {
    "one rank": ("parallel=single",),
    "tp2 sequence parallel": ("parallel=tp2sp",),
    "experts": (*MIXTRAL, "parallel=tp2ep2etp1sp"),
    "MLA, experts by groups, a prediction more, cp2": (*DEEPSEEK, "parallel=cp2"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", some(INTERPRETED, ["one rank"]))
def test_op_override_triton_steps_equal_reference(name: str) -> None:
    values = interpreted.trained(
        {k: [*INTERPRETED[name], *SMALL, f"kernels={k}"] for k in ("reference", "triton")}
    )
    ours = values["triton"]
    right = values["reference"]
    assert len(ours) == len(right) == 8
    assert ours == pytest.approx(right, abs=1e-4)


@pytest.mark.full
def test_op_override_triton_steps_round_in_their_own_way() -> None:
    # in fp32 the definition and the interpreted kernels can agree in every bit
    words = [*INTERPRETED["one rank"], *SMALL, "precision=bf16"]
    values = interpreted.trained({k: [*words, f"kernels={k}"] for k in ("reference", "triton")})
    assert values["triton"] != values["reference"], "not one bit differs: Triton did nothing"
    assert values["triton"] == pytest.approx(values["reference"], abs=1e-2)


OVERLAPPED = (
    "parallel=dp parallel.ranks=2 parallel.distributed_optimizer=true"
    " parallel.overlap_grad_reduce=true"
)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp8_blockwise"])
def test_op_override_experts_await_overlapped_gather(precision: str) -> None:
    words = (*MIXTRAL, *OVERLAPPED.split(), *SMALL, "kernels=triton", f"precision={precision}")
    # a bucket for each weight
    few = (
        "parallel.ddp_bucket_size=1000",
        "trainer.micro_batch_size=1",
    )
    gathers = {
        how: [*words, *few, f"parallel.overlap_param_gather={how}"] for how in ("true", "false")
    }
    values = interpreted.trained(gathers)
    assert values["true"] == values["false"]


ATTENTION = {
    "sinks, windows, packed": (
        "model=gpt_oss_tiny",
        "model.kv_channels=16",
        "data.packed=true",
        "parallel=single",
    ),
    "caps": (
        "model=gemma2_9b",
        "model.num_attention_heads=4",
        "model.num_query_groups=2",
        "model.kv_channels=24",
        "parallel=single",
    ),
    "windows in a ring": ("model=gemma_tiny", "parallel=cp2", "parallel.cp_comm_type=p2p"),
    "sinks in a ring": (
        "model=gpt_oss_tiny",
        "model.kv_channels=16",
        "parallel=cp2",
        "parallel.cp_comm_type=p2p",
    ),
    "sinks, keys gathered": ("model=gpt_oss_tiny", "model.kv_channels=16", "parallel=cp2"),
    "sinks, heads exchanged": ("model=gpt_oss_tiny", "parallel=cp2", "parallel.cp_comm_type=a2a"),
}
KINDS = ("reference", "triton")
CHANGED = {"trainer.train_iters": 10, "data.seq_length": 24, "model.num_layers": 2}
ATTENDS = (
    *(word for word in SMALL if word.partition("=")[0] not in CHANGED),
    *(f"{key}={value}" for key, value in CHANGED.items()),
    "model.window_size=7",
)


@pytest.mark.full
@pytest.mark.parametrize("name", ATTENTION)
def test_op_override_fused_attention_steps_equal_reference(name: str) -> None:
    runs = {
        k: [*ATTENTION[name], *ATTENDS, "kernels=reference", f"kernels.attention={k}"]
        for k in KINDS
    }
    values = interpreted.trained(runs, timeout_s=500)
    ours = values["triton"]
    right = values["reference"]
    assert len(ours) == len(right) == 20
    assert ours == pytest.approx(right, rel=1e-4)
    assert ours != right, "not one bit differs, so Triton did nothing"
