"""Mamba-2, Nemotron-H and Granite 4 compared with transformers: logits, losses, gradients and
steps, on one rank and sharded; import and export of files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.models.hybrid import hf
from mtrain.models.table import to_theirs
from tests.parity_hf import two_steps
from tests.parity_hf.compare import largest_difference, tensor_bytes
from tests.parity_hf.hf_reference import Biases
from tests.parity_hf.two_steps import STEPS, Sides, convert
from tests.support.forked import run_alone, run_ranks

MIXER = {"n_groups": 2, "conv_kernel": 4, "chunk_size": 8, "vocab_size": 331, "hidden_size": 48}
NEMOTRON = {
    **MIXER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "time_step_min": 0.1,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
GRANITE = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 32,
    "shared_intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
    "router_aux_loss_coef": 0.0,
    "rms_norm_eps": 1e-5,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba 2": (
        "mamba2",
        {
            **MIXER,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 16,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron h": ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M-*M"}),
    "nemotron 3": ("nemotron_h", {**NEMOTRON, **EXPERTS, "hybrid_override_pattern": "ME*E"}),
    "granite": (
        "granitemoehybrid",
        {
            **GRANITE,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 0,
            "tie_word_embeddings": True,
        },
    ),
    "granite experts": (
        "granitemoehybrid",
        {
            **GRANITE,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
LENGTH = 30
WORDS = f"{two_steps.WORDS} data.seq_length={LENGTH} optim.eps=1e-3"
LAYOUTS = {
    "single": (1, "parallel=single trainer.micro_batch_size=4"),
    "tp2sp": (2, "parallel=tp2sp trainer.micro_batch_size=2"),
    "pp2": (2, "parallel=pp2 trainer.micro_batch_size=2"),
    "tp2pp2sp": (4, "parallel=tp2pp2sp trainer.micro_batch_size=1"),
}
ALWAYS = {
    ("mamba 2", "single"),
    ("nemotron h", "tp2sp"),
    ("nemotron 3", "single"),
    ("granite experts", "single"),
}
CASES = [
    pytest.param(name, layout, marks=() if (name, layout) in ALWAYS else pytest.mark.full)
    for name in KINDS
    for layout in LAYOUTS
]


def _model(name: str) -> Any:
    """Return a model of transformers whose every weight has an effect."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = KINDS[name]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), **plain)
        .float()
        .train()
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in _tensors(made).items():
            noise = torch.randn(tensor.shape, generator=draw)
            scale = 1.0 if "norm" in name or name.endswith(".D") else 0.0
            tensor.copy_(
                noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 0.2 * noise + scale
            )
    return made


def _tensors(made: Any) -> dict[str, Tensor]:
    saved = made.state_dict().keys()
    return dict(made.named_parameters()) | {
        name: b for name, b in made.named_buffers() if name in saved
    }


def saved(name: str, folder: Path) -> Path:
    """Return the folder, in which transformers has saved a model of the case `name`."""
    run_alone(lambda: _model(name).save_pretrained(folder))
    return folder


def _loaded(run: Path, layout: str = "single", *more: str) -> Any:
    from mtrain.api import load

    return load([f"run={run / 'run.yaml'}", *WORDS.split(), *LAYOUTS[layout][1].split(), *more]).run


def _logits(chunk: Any, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = chunk(batch["tokens"], batch["position_ids"], None)
    return found


def _theirs(name: str, run: Path) -> dict[str, Any]:
    from mtrain.models.gpt.data import collator

    made = _model(name)
    found = _loaded(run)
    moved = found.model.moe.router_bias_update_rate if found.model.moe is not None else None
    biases = Biases(made, moved or 0.0)

    def forward(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = made(input_ids=batch["tokens"]).logits
        labels = batch["labels"].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels), logits

    data = two_steps.batches(found, collator)
    return two_steps.theirs(made, found, data, forward, _tensors, biases.move)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """Return our run folder with transformers' weights, and the results of transformers."""
    return two_steps.sides_of(tmp_path_factory, saved, _theirs)


def _as_theirs(
    name: str, checkpoint: Path, run: Path, layers: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights, or gradients, in a checkpoint by the names of `layers`."""
    from mtrain.models.hybrid.family import FAMILY as HYBRID
    from mtrain.train.verify.prove import whole_tensors

    model = _loaded(run).model
    keys = {
        key.removeprefix("model/"): t
        for key, t in whole_tensors(checkpoint).items()
        if key.startswith("model/")
    }
    out = {}
    for step in hf.LAYERS[KINDS[name][0]].entries(model):
        for ours in step.ours:
            key = HYBRID.saved_as(model, ours)
            expert = re.search(r"\.experts\.experts\.(\d+)\.", key)
            # all experts are one tensor
            key = key.replace(f".{expert[1]}.linear", ".linear") if expert else key
            if key in keys:
                out[ours] = keys[key][int(expert[1])] if expert else keys[key]
    found = to_theirs(hf.LAYERS[KINDS[name][0]], model, out)
    return {key: tensor for key, tensor in found.items() if key in layers}


def _differences(
    name: str, layout: str, sides: Sides, out: Path, *more: str, flaw: float = 0.0
) -> dict[str, tuple[float, str]]:
    """Return the largest relative difference of each quantity, and its place."""
    run, theirs = sides(name)
    ranks, _ = LAYOUTS[layout]

    def flawed(state: Any) -> None:
        """Add the flaw to a weight."""
        from mtrain.mcore.state.local_params import unwrap

        if flaw:
            unwrap(state.chunks[0]).decoder.layers[0].mixer.dt_bias.data += flaw

    loaded = _loaded(run, layout, *more)
    found = run_ranks(ranks, two_steps.ours, loaded, run, out, _logits, flawed)[0]
    errors = {}
    for i, what in enumerate(("losses", "norms")):
        apart = [abs(one[i] / other - 1) for one, other in zip(found, theirs[what], strict=True)]
        errors[what] = max(apart), ""
    if ranks == 1:
        logits = torch.load(out / "logits.pt")
        errors["logits"] = (
            float((logits - theirs["logits"]).abs().max() / theirs["logits"].abs().max()),
            "",
        )
    gradients = _as_theirs(name, out / "gradients/step_00000000", run, theirs["gradients"])
    errors["gradients"] = largest_difference(
        gradients, theirs["gradients"], theirs["gradients"], 1e-2
    )
    moved = {name: after - theirs["before"][name] for name, after in theirs["weights"].items()}
    after = _as_theirs(name, out / f"step_{STEPS:08d}", run, theirs["weights"])
    errors["weights"] = largest_difference(after, theirs["weights"], moved, 1.0)
    return errors


LIMITS = {"losses": 1e-5, "norms": 1e-5, "logits": 1e-5, "gradients": 1e-5, "weights": 1e-4}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_hybrid_two_steps_equal_transformers(
    name: str, layout: str, sides: Sides, tmp_path: Path
) -> None:
    errors = _differences(name, layout, sides, tmp_path)
    assert {what: found for what, found in errors.items() if found[0] > LIMITS[what]} == {}
    assert convert("export", tmp_path / "step_00000000", tmp_path / "again") == 0
    assert tensor_bytes(tmp_path / "again") == tensor_bytes(sides(name)[0].parent / "theirs")


def test_hybrid_other_time_step_is_found(sides: Sides, tmp_path: Path) -> None:
    errors = _differences("mamba 2", "single", sides, tmp_path, flaw=1e-3)
    assert errors["logits"][0] > 3 * LIMITS["logits"]
    assert errors["gradients"][0] > 3 * LIMITS["gradients"]


FACTORS = (
    "hybrid.residual_multiplier",
    "hybrid.embedding_multiplier",
    "hybrid.logits_scaling",
    "softmax_scale",
)


@pytest.mark.full
@pytest.mark.parametrize("key", FACTORS)
def test_hybrid_other_factor_is_found(key: str, sides: Sides, tmp_path: Path) -> None:
    errors = _differences("granite experts", "single", sides, tmp_path, f"model.{key}=1.1")
    assert min(errors[what][0] / LIMITS[what] for what in ("losses", "logits", "gradients")) > 3


REFUSED = {
    "mlp_hidden_act": "silu",
    "mamba_hidden_act": "gelu",
    "use_bias": True,
    "use_conv_bias": False,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("key", REFUSED)
def test_hybrid_unsupported_is_refused_by_name(
    key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from mtrain.convert.huggingface.model import configuration
    from mtrain.errors import ConfigError

    values = {**KINDS["nemotron h"][1], "model_type": "nemotron_h", key: REFUSED[key]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        configuration(tmp_path / "config.json")
    assert any(key in problem.rule for problem in raised.value.problems)


REFUSED_OF_GRANITE = {
    "position_embedding_type": "rope",
    "layer_types": ["mlp", "full_attention"],
    "attention_bias": True,
    "mamba_conv_bias": False,
    "mamba_expand": 3,
    "hidden_act": "gelu",
}


@pytest.mark.parametrize("key", REFUSED_OF_GRANITE)
def test_hybrid_unsupported_granite_is_refused_by_name(key: str, tmp_path: Path) -> None:
    from mtrain.convert.huggingface.model import configuration
    from mtrain.errors import ConfigError

    values = {**KINDS["granite"][1], "model_type": "granitemoehybrid", key: REFUSED_OF_GRANITE[key]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        configuration(tmp_path / "config.json")
    assert any(key in problem.rule for problem in raised.value.problems)
