"""Every family and format that ships is captured in CUDA graphs, or refused by a rule's code.

What a graph would keep is recorded without a GPU (`tests/support/captured_steps.py`), over two
steps of two micro-batches with an evaluation between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.config.families import FIRST, packages
from mtrain.train.trace.stand_ins import DEPENDS, WAITS
from tests.support.capture_recorder import CHANGES, FREED
from tests.support.captured_steps import recorded

CONF = Path(__file__).resolve().parents[2] / "conf"
IMPL = "trainer.cuda_graph_impl"
PARTS = "trainer.cuda_graph_modules"
IMPLS = ("local", "full_iteration")
PADDED = "model.moe.pad_alltoall=true"
TO_CAPACITY = (
    "model=mixtral_tiny model.moe.expert_capacity_factor=1.25"
    " model.moe.pad_expert_input_to_capacity=true"
)
TWO = "cluster.devices_per_node=2 parallel=auto"
AGAIN = "parallel.recompute.granularity"
SHORTER = {"granite4_h_tiny": "model.num_layers=4 model.hybrid.pattern=ME*E"}
"""Changes of models that are tiny only by name."""

SEVERAL_INPUTS = ["MT416"]
UNKNOWN_COUNTS = ["MT413"]
REFUSED: dict[str, list[str]] = {
    **dict.fromkeys(("bert_tiny", "megatron_bert_tiny", "t5_tiny", "llava_tiny"), SEVERAL_INPUTS),
    **dict.fromkeys(
        ("mixtral_tiny", "deepseek_tiny", "glm45_tiny", "gpt_oss_tiny", "granite4_h_tiny"),
        UNKNOWN_COUNTS,
    ),
    "qwen3_next_tiny": UNKNOWN_COUNTS,
    "deepseek_v3_2_tiny": ["MT413", "MT452"],
}
"""Models that are refused as they ship: layers with more inputs than hidden states, and experts
whose rows are not padded.
"""
EXPERTS = [name for name, codes in REFUSED.items() if "MT413" in codes]
FORMATS: dict[str, dict[str, list[str]]] = {
    "fp16": {"full_iteration": ["MT416"]},
    # TransformerEngine's formats, without it and on this device.
    "fp8_delayed": {impl: ["MT442"] for impl in IMPLS},
    "mxfp8": {impl: ["MT442", "MT443"] for impl in IMPLS},
    "nvfp4": {impl: ["MT442", "MT443"] for impl in IMPLS},
}
"""Format -> what captures it -> the codes that refuse that."""

CASES: dict[str, list[str]] = {
    # dropout, and what is computed again
    "model=llama_tiny model.hidden_dropout=0.1 model.attention_dropout=0.1 IMPL=full_iteration": [],
    "model=llama_tiny model.hidden_dropout=0.1 trainer.eval_iters=0 IMPL=local": [],
    "model=llama_tiny model.hidden_dropout=0.1 IMPL=local": ["MT416"],
    f"model=llama_tiny {AGAIN}=selective IMPL=full_iteration": [],
    f"model=llama_tiny {AGAIN}=selective IMPL=local": ["MT415"],
    f"model=llama_tiny {AGAIN}=full IMPL=full_iteration": [],
    f"model=llama_tiny {AGAIN}=full IMPL=local": ["MT415"],
    f"model=llama_tiny {AGAIN}=full model.hidden_dropout=0.1 IMPL=full_iteration": [],
    # parts of layers
    f"model=llama_tiny IMPL=local {PARTS}=[attn]": [],
    f"model=llama_tiny IMPL=local {PARTS}=[mlp]": [],
    f"model=deepseek_tiny IMPL=local {PARTS}=[attn,mlp]": [],
    f"model=mixtral_tiny IMPL=local {PARTS}=[attn]": [],
    f"model=qwen3_next_tiny IMPL=local {PARTS}=[attn]": [],
    f"model=nemotron_h_tiny IMPL=local {PARTS}=[attn,mlp,mamba]": [],
    f"model=pythia_tiny IMPL=local {PARTS}=[attn,mlp]": ["MT412"],
    f"model=mixtral_tiny IMPL=local {PARTS}=[attn,moe_router]": ["MT412"],
    f"{TO_CAPACITY} IMPL=local {PARTS}=[moe]": [],
    # experts with a capacity
    f"{TO_CAPACITY} IMPL=local": [],
    f"{TO_CAPACITY} IMPL=full_iteration": [],
    f"{TO_CAPACITY} IMPL=full_iteration precision=fp8_blockwise": [],
    f"{TO_CAPACITY} IMPL=local {TWO} parallel.ep=2": [],
    # several ranks, whose weights are gathered within the step
    f"model=llama_tiny IMPL=local {TWO}": [],
    f"model=llama_tiny IMPL=full_iteration {TWO}": [],
    f"model=llama_tiny IMPL=full_iteration {TWO} parallel.tp=2": [],
    f"model=llama_tiny IMPL=full_iteration {TWO} parallel.cp=2": [],
    f"model=llama_tiny IMPL=full_iteration {TWO} parallel.pp=2": [],
    f"model=llama_tiny IMPL=local {TWO} parallel.pp=2": [],
    f"model=mixtral_tiny {PADDED} IMPL=full_iteration {TWO} parallel.ep=2": [],
    f"model=mixtral_tiny IMPL=local {PARTS}=[attn] {TWO} parallel.ep=2": [],
    # other implementations and losses
    "model=llama_tiny IMPL=full_iteration kernels=reference": [],
    "model=llama_tiny IMPL=full_iteration kernels=auto": [],
    f"model=mixtral_tiny {PADDED} IMPL=full_iteration kernels=reference": ["MT413"],
    "model=llama_tiny IMPL=local kernels.gradient_accumulation_fusion=true": [],
    "model=llama_tiny IMPL=full_iteration trainer.z_loss_coeff=0.001 log.token_accuracy=true": [],
    "model=llama_tiny IMPL=full_iteration trainer.loss_average=sample": [],
    # (synthetic tokens are not packed, either)
    "model=llama_tiny IMPL=local data=packed": ["MT301", "MT416"],
}
"""Words -> the codes that refuse them; IMPL is `trainer.cuda_graph_impl`."""

FAULTS = {"item": WAITS, "shape": DEPENDS, "counter": CHANGES, "freed": FREED}


def _differences(expected: dict[str, list[str]]) -> list[str]:
    """Return what was refused, found or not captured against the expectation."""
    cases = {words: words.replace("IMPL=", f"{IMPL}=").split() for words in expected}
    wrong = []
    for words, found in recorded(cases).items():
        if found["refused"] != expected[words]:
            wrong.append(f"{words}: refused by {found['refused']}")
        wrong += [f"{words}: {each}" for each in found["found"]]
        if not found["refused"] and not found["graphs"]:
            wrong.append(f"{words}: nothing was captured")
    return wrong


@pytest.mark.full
def test_captured_steps_experts_have_no_findings() -> None:
    experts = f"model=mixtral_tiny {PADDED} IMPL=full_iteration precision=fp8_tensorwise"
    assert _differences({experts: []}) == []


@pytest.mark.full
def test_captured_steps_every_family_is_captured_or_refused() -> None:
    names = sorted(path.stem for path in (CONF / "model").glob("*_tiny.yaml"))
    expected: dict[str, list[str]] = {}
    for name in names:
        words = f"model={name} {SHORTER.get(name, '')}"
        for impl in IMPLS:
            expected[f"{words} IMPL={impl}"] = REFUSED.get(name, [])
            if name in EXPERTS:
                rest = [code for code in REFUSED[name] if code != "MT413"]
                expected[f"{words} {PADDED} IMPL={impl}"] = rest
    assert _differences(expected) == []


def test_captured_steps_every_family_has_a_tiny_model() -> None:
    texts = [path.read_text() for path in (CONF / "model").glob("*_tiny.yaml")]
    named = {line.split()[1] for text in texts for line in text.split("\n") if "family:" in line}
    assert set(packages()) <= named | {FIRST}


@pytest.mark.full
def test_captured_steps_every_format_is_captured_or_refused() -> None:
    expected: dict[str, list[str]] = {}
    for path in (CONF / "precision").glob("*.yaml"):
        for impl in IMPLS:
            codes = FORMATS.get(path.stem, {}).get(impl, [])
            for model in ("llama_tiny", f"mixtral_tiny {PADDED}"):
                words = f"model={model} model.num_layers=2 IMPL={impl} precision={path.stem}"
                if "num_layers_at_start_in_bf16" in path.read_text():
                    # Two layers are all that the model has.
                    ends = ("start", "end")
                    words += "".join(f" precision.num_layers_at_{end}_in_bf16=0" for end in ends)
                expected[words] = codes
    assert _differences(expected) == []


@pytest.mark.full
def test_captured_steps_every_way_is_captured_or_refused() -> None:
    assert _differences(CASES) == []


@pytest.mark.full
def test_captured_steps_faults_in_layers_are_found() -> None:
    cases: dict[str, list[str]] = {
        fault: ["model=llama_tiny", "model.num_layers=2", f"{IMPL}=local", f"fault={fault}"]
        for fault in FAULTS
    }
    found: dict[str, Any] = recorded(cases)
    for fault, kind in FAULTS.items():
        assert any(
            each.endswith(kind) and "captured_steps_faults.py:" in each
            for each in found[fault]["found"]
        ), found[fault]
