"""`prove` over every kind of layout; the faults that it exists to find are in `tests/museum`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.launching import local, prove
from tests.support.cases import cases_of
from tests.support.commands import mtrain
from tests.support.covering import some
from tests.support.runs import whole_tensors

DEEPSEEK = "model=deepseek_tiny"
MIXTRAL = "model=mixtral_tiny"
GEMMA = "model=gemma_tiny"
CAPS = "model.attn_logit_softcapping=0.5 model.final_logit_softcapping=2"
LAYOUTS = cases_of("layout_proofs")


STEPS = 2
"""The first gradient is compared, and the weights that the second step makes of the first one's."""


def _compared(words: str) -> list[Any]:
    """Return the rows of every number format that the configuration is proven in."""
    argv = words.split()
    full = load(argv).run
    return [
        row
        for dtype in prove.formats(full)
        for row in prove.compared(prove.comparable(full, argv, STEPS, dtype))
    ]


ALWAYS = (
    "multi-token prediction in a stage of its own",
    "capacity and padding",
    "Gemma 3 pp2vpp3",
    "tp2pp2ep2 of a small GLM-4.5",
)
"""Most axes and kinds of layer; the tests of layouts, families and positions have the others."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some(LAYOUTS, ALWAYS))
def test_layout_proof_layout_is_proven(name: str) -> None:
    rows = _compared(LAYOUTS[name])
    assert all(row.equal for row in rows), prove.table(rows)


RECOMPUTED = {
    "full, uniform": ("", "granularity=full"),
    "full, block": ("parallel=pp2", "granularity=full parallel.recompute.method=block"),
    "attention, norms and MLPs": (
        "parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[core_attn,layernorm,mlp]",
    ),
    "Gemma's attention, norms and MLPs": (
        f"{GEMMA} {CAPS} parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[core_attn,layernorm,mlp]",
    ),
    "Gemma, full": (f"{GEMMA} {CAPS}", "granularity=full"),
    "MLPs with biases": (
        "model=gpt_1.7b parallel=pp2",
        "granularity=selective parallel.recompute.modules=[mlp]",
    ),
    "experts": (
        f"{MIXTRAL} parallel=ep2",
        "granularity=selective parallel.recompute.modules=[moe]",
    ),
    "expert activations": (
        f"{MIXTRAL} parallel=ep2",
        "granularity=selective parallel.recompute.modules=[moe_act,layernorm]",
    ),
    "norms and MLPs side by side": (
        "model=pythia_tiny parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[layernorm,mlp]",
    ),
    "a hybrid, block": (
        "model=nemotron_h_tiny model.hidden_dropout=0.1 parallel=pp2",
        "granularity=full parallel.recompute.method=block",
    ),
    "a hybrid, FSDP": (
        "model=nemotron_h_tiny parallel=dp2 parallel.fsdp=fsdp2",
        "granularity=full",
    ),
    "a hybrid, groups": (
        "model=nemotron_h_tiny parallel=tp2sp",
        "granularity=full parallel.recompute.num_layers=2",
    ),
    "a hybrid's attention, norms and MLPs": (
        "model=nemotron_h_tiny parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[core_attn,layernorm,mlp]",
    ),
    "latent projections": (
        f"{DEEPSEEK} parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[mla_up_proj,shared_experts]",
    ),
}


RECOMPUTED_ALWAYS = ("full, block", "expert activations", "a hybrid, block")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some(RECOMPUTED, RECOMPUTED_ALWAYS))
def test_layout_proof_recomputation_is_bitwise(name: str, tmp_path: Path) -> None:
    layout, recompute = RECOMPUTED[name]
    ends = []
    for i, words in enumerate(
        (layout.split(), [*layout.split(), *f"parallel.recompute.{recompute}".split()])
    ):
        home = tmp_path / str(i)
        home.mkdir()
        local.observe(prove.shrunk(load(words).run, words, 2, "fp32"), home)
        ends.append(whole_tensors(home / "step_00000002"))
    kept, recomputed = ends
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[key], tensor) for key, tensor in recomputed.items())


def test_layout_proof_nan_loss_equals_nothing() -> None:
    from mtrain.train.verify.prove import relative

    assert relative(None, None) == relative(1.0, None) == relative(None, 1.0) == float("inf")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_layout_proof_interpreted_triton_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = (
        f"{MIXTRAL} parallel=tp2ep2etp1sp kernels=triton model.qk_layernorm=true"
        " model.moe.pad_alltoall=true"
    )
    done = mtrain("prove", *words.split(), "model.num_layers=2", cwd=tmp_path, timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("kernels: ")]
    ours = said.partition("; ")[0]
    assert all(op in ours for op in ("norm", "rope", "attention", "experts", "moe_permute", "loss"))
