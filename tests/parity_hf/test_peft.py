"""LoRA and DoRA compared with `peft` over transformers: the same loss, gradients of adapters, and
two steps.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity_hf import compare, hf_reference
from tests.parity_hf.families import CASES, VOCAB
from tests.parity_hf.test_convert import command, saved
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks

ALL = "[qkv,proj,fc1,fc2,experts]"
PEFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama 3", f"peft=lora peft.target={ALL}", {}),
    "llama, dora": ("llama 3", "peft=dora", {"use_dora": True}),
    "llama, one key head, only attention": (
        "llama 3.2, tied",
        "peft=lora peft.target=[qkv,proj]",
        {},
    ),
    "llama with biases, dora": (
        "llama with heads wider than the model, and biases",
        "peft=dora",
        {"use_dora": True},
    ),
    "mixtral": ("mixtral", f"peft=lora peft.target={ALL}", {}),
    "gpt oss": ("gpt oss beyond its window", "peft=lora", {}),
    "qwen2 moe": ("qwen2 moe", "peft=lora", {}),
    "gpt2": ("gpt2", "peft=lora peft.target=[proj,fc2]", {}),
    "deepseek v3": ("deepseek v3", "peft=lora", {}),
    "deepseek v2, dora": ("deepseek v2", "peft=dora peft.target=[qkv,proj]", {"use_dora": True}),
}
RANK = 4
ALPHA = 12.0
TOLERANCE = 1e-4


def adapters(chunk: Any, value: Any) -> dict[str, Any]:
    """Return `value` of each tensor of each adapter of a chunk, by the name of the weight."""
    from mtrain.mcore.layers.merging import Whole, names_beside

    own = compare._own_tensors(chunk)
    found = {name: names_beside(name) for name in own}
    return {
        name: Whole(
            value(own[n.a]),
            value(own[n.b]),
            value(own[n.magnitude]) if n.magnitude in own else None,
        )
        for name, n in found.items()
        if n is not None and n.a in own
    }


def with_peft(made: Any, given: Any, options: dict[str, Any]) -> Any:
    """Return the model with `peft`'s adapters, which hold the tensors `given`."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=given.modules or None,
        target_parameters=given.parameters or None,
        fan_in_fan_out=given.transposed,
        **options,
    )
    model = get_peft_model(made, config)
    left = set_peft_model_state_dict(model, given.tensors)
    assert not left.unexpected_keys  # type: ignore[attr-defined]
    assert not [name for name in left.missing_keys if "lora" in name]  # type: ignore[attr-defined]
    return model


def named(model: Any, value: Any) -> dict[str, Tensor]:
    """Return `value` of the tensors that `peft` trains, by the names under which it saves them."""
    return {
        name.replace(".default", "").replace(
            "lora_magnitude_vector.weight", "lora_magnitude_vector"
        ): value(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def compared(name: str, flaw: float = 0.0) -> compare.Result:
    """Compare both sides from the same weights and nonzero adapters; a job for one rank."""
    from mtrain.config.resolve.resolution import Machine, resolve
    from mtrain.convert.peft.adapters import to_peft
    from mtrain.mcore.layers import low_rank
    from mtrain.models.gpt.hf import TABLES
    from mtrain.models.table import to_ours
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    kind, words, options = PEFT[name]
    case = replace(
        CASES[kind],
        extra=(*CASES[kind].extra, *words.split(), f"peft.r={RANK}", f"peft.alpha={ALPHA}"),
    )
    config = hf_reference.configuration(case.kind, case.values)
    run, _ = compare.imported(case, config.to_dict())
    run = resolve(run, Machine.here(), 1)
    made = hf_reference.model(config, case.seed)
    table = TABLES[case.kind]
    result = compare.Result()
    windows = compare.Windows(config.vocab_size, case.length, case.seed)
    with joined(run) as world:
        parts = compare._parts(run, world, windows)
        chunk = parts.state.chunks[0]
        base = {
            k: t
            for k, t in compare._own_tensors(chunk).items()
            if "lora_" not in k and "magnitude" not in k
        }
        compare.load(to_ours(table, run.model, hf_reference.tensors(made)), base, run)
        low_rank.start_magnitudes(parts.state.chunks)
        draw = torch.Generator().manual_seed(3)
        for tensor in (t for k, t in compare._own_tensors(chunk).items() if "lora_b" in k):
            tensor.data.copy_(0.1 * torch.randn(tensor.shape, generator=draw))
        parts.state.optimizer.reload_model_params()
        given = to_peft(table, run.model, adapters(chunk, lambda t: t.detach().clone()))
        model = with_peft(made, given, options)
        assert named(model, lambda p: p.shape) == {k: t.shape for k, t in given.tensors.items()}
        for key, tensor in compare._own_tensors(chunk).items():
            tensor.data.mul_(1 + flaw * ("lora_a" in key))
        tokens, labels = windows.step(0)
        their = hf_reference.loss(made, tokens, labels)
        (their.cross_entropy + their.balance).backward()
        logits, loss, _ = compare._forward_backward(parts, tokens)
        result.note("logits", "", logits, their.logits)
        result.note("loss", "", torch.tensor(loss), their.cross_entropy)
        gradients = named(model, lambda p: p.grad.clone())
        for key, tensor in to_peft(
            table, run.model, adapters(chunk, lambda t: t.main_grad)
        ).tensors.items():
            result.note("gradient", key, tensor, gradients[key])
        model.zero_grad()
        before = named(model, lambda p: p.detach().clone())
        update = hf_reference.optimizer(made, run.optim)
        for number in range(compare.STEPS):
            ours = train_step(parts, stop_requested=False)
            their = hf_reference.loss(made, *windows.step(number))
            (their.cross_entropy + their.balance).backward()
            norm = update(ours.lr)
            result.note("loss of a step", str(number), torch.tensor(ours.loss), their.cross_entropy)
            result.note(
                "gradient norm", str(number), torch.tensor(ours.grad_norm), torch.tensor(norm)
            )
        after = named(model, lambda p: p.detach())
        for key, tensor in to_peft(
            table, run.model, adapters(chunk, lambda t: t.detach())
        ).tensors.items():
            result.note("adapters after the steps", key, tensor, after[key])
            result.note("their update", key, tensor, after[key], after[key] - before[key])
    return result


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(PEFT, ["llama with biases, dora", "mixtral"]))
def test_peft_training_equals_peft(name: str) -> None:
    (result,) = run_ranks(1, compared, name)
    assert len(result.errors) == 7
    # Adam divides what is small by what is small
    allowed = {"their update": 10 * TOLERANCE}
    assert {
        what: e for what, e in result.errors.items() if not e[0] <= allowed.get(what, TOLERANCE)
    } == {}


FOLDERS: dict[str, tuple[str, str]] = {
    "llama, dora": ("llama 3", "peft=dora"),
    "mixtral": ("mixtral", "peft=lora"),
    "mixtral, as peft 0.18 has it": ("mixtral", "peft=lora"),
    "phi 3, whose layers are fused": ("phi 3 beyond its window", "peft=lora"),
    "gpt oss, whose experts are transposed": ("gpt oss beyond its window", "peft=lora"),
    "gpt2": ("gpt2", "peft=lora"),
    "deepseek v3": ("deepseek v3", "peft=lora"),
    "gpt neox": ("gpt neox", "peft=lora"),
}


def trained(run_folder: Path) -> None:
    """Save a checkpoint of step 1 of an imported run, with nonzero adapters; a job for one rank."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.config.compose.lock_file import read_run_file
    from mtrain.world.init import joined

    run = read_run_file(run_folder / "run.yaml")
    with joined(run) as world:
        parts = compare._parts(run, world, compare.Windows(run.model.vocab_size, 16, 0))
        ckpt_state.load_weights(
            Checkpoint.open(run_folder / "checkpoints/step_00000000"), parts.state
        )
        draw = torch.Generator().manual_seed(5)
        for key, tensor in compare._own_tensors(parts.state.chunks[0]).items():
            if "lora_b" in key or "magnitude" in key:
                tensor.data.add_(0.1 * torch.randn(tensor.shape, generator=draw))
        ckpt_state.renew(parts.state)
        parts.state.step = 1
        ckpt_state.save(run_folder / "checkpoints", run, world, parts.state, {})


def logits_of(folder: Path, adapters_at: Path | None) -> Tensor:
    """Return the logits that transformers computes from a folder, with the adapters that `peft`
    loads.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain)
    if adapters_at is not None:
        made = PeftModel.from_pretrained(made, adapters_at)
    ids = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return made.eval()(input_ids=ids).logits  # type: ignore[no-any-return]


def as_peft_018_adds_it(made: Any, folder: Path) -> None:
    """Add adapters of experts as `peft` 0.18 does: the first axis of a parameter is its inputs."""
    from safetensors.torch import load_file

    held = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_version"].startswith("0.18.")
    scale = config["lora_alpha"] / config["r"]
    with torch.no_grad():
        for name in config["target_parameters"]:
            module = name.rpartition(".")[0]
            at = f"base_model.model.{module}" + (".base_layer" if "gate_up" in name else "")
            parameter = made.get_parameter(name)
            a = held[f"{at}.lora_A.weight"].reshape(parameter.shape[0], -1, parameter.shape[1])
            b = held[f"{at}.lora_B.weight"].reshape(parameter.shape[2], -1, parameter.shape[0])
            parameter += scale * torch.einsum("ore,eri->eio", b, a)
        for name in config["target_modules"]:
            a, b = (held[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
            made.get_submodule(name).weight += scale * b @ a


@pytest.mark.full
@pytest.mark.parametrize("name", FOLDERS)
def test_peft_exports_compute_as_run_and_round_trip(name: str, tmp_path: Path) -> None:
    kind, words = FOLDERS[name]
    version = "0.18" if "0.18" in name else "0.19"
    base, run, merged, alone = (tmp_path / part for part in ("base", "run", "merged", "alone"))
    saved(kind, base)
    given = [*words.split(), "peft.r=4", "peft.alpha=10.5"]
    assert command("import", base, run, *given) == 0
    run_ranks(1, lambda: trained(run))
    assert command("export", run, merged) == 0
    found = json.loads((merged / "conversion.json").read_text())["logits"]
    assert found["largest_error"] <= 1e-5 * max(1.0, found["largest_logit"]), (
        "merged weights, and separate adapters"
    )
    assert command("export", run, alone, f"peft={version}") == 0

    def apart() -> tuple[float, float]:
        whole = logits_of(merged, None)
        plain = logits_of(base, None)
        if version == "0.18":
            from transformers import AutoModelForCausalLM

            made = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            as_peft_018_adds_it(made, alone)
            made.save_pretrained(tmp_path / "added")
            theirs_ = logits_of(tmp_path / "added", None)
        else:
            theirs_ = logits_of(base, alone)
        return float((theirs_ - whole).abs().max()), float((plain - whole).abs().max())

    error, change = run_alone(apart)
    assert error < 1e-4 < 1e-2 < change
    again = tmp_path / "again"
    assert command("import", base, again, *given, f"peft.init_from={alone}") == 0

    def tensors(folder: Path) -> dict[str, Tensor]:
        from mtrain.train.verify.prove import whole_tensors

        held = whole_tensors(folder)
        return {key: tensor for key, tensor in held.items() if key.startswith("model/")}

    first, second = (
        run_alone(lambda at=at: tensors(at))
        for at in (run / "checkpoints/step_00000001", again / "checkpoints/step_00000000")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.full
def test_peft_export_is_rounded_once(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    base = tmp_path / "base"
    run = tmp_path / "run"
    saved("llama 3", base)
    assert command("import", base, run, "peft=lora", "peft.r=4") == 0
    assert command("export", run, tmp_path / "start") == 0
    theirs_, ours = (
        load_file(folder / "model.safetensors") for folder in (base, tmp_path / "start")
    )
    assert ours.keys() == theirs_.keys()
    assert all(torch.equal(ours[name], theirs_[name]) for name in ours)
    run_ranks(1, lambda: trained(run))
    for out, words in {
        "whole": (),
        "half": ("dtype=bf16",),
        "beside": ("peft=0.19", "dtype=bf16"),
    }.items():
        assert command("export", run, tmp_path / out, *words) == 0
    whole, half = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "half"))
    assert all(torch.equal(whole[name].bfloat16(), half[name]) for name in whole)
    adapters_ = load_file(tmp_path / "beside/adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapters_.values()} == {torch.bfloat16}


@pytest.mark.full
def test_peft_adapters_a_thousandth_apart_are_found() -> None:
    (result,) = run_ranks(1, compared, "llama", 1e-3)
    assert {what for what, error in result.errors.items() if error[0] > TOLERANCE} >= {
        "logits",
        "gradient",
    }


@pytest.mark.full
def test_peft_qv_adapters_are_read_without_keys(
    tmp_path: Path,
) -> None:
    base, alone, run = (tmp_path / part for part in ("base", "alone", "run"))
    saved("llama 3", base)

    def made() -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        targets = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, **targets)
        )
        model.save_pretrained(alone)

    run_alone(made)
    batch = (
        "trainer.global_batch_size=2",
        "trainer.micro_batch_size=2",
        "data=mock",
        "data.seq_length=16",
    )
    words = (*batch, "peft=lora", "peft.r=4", "peft.alpha=8.0", "peft.target=[qkv]")
    assert command("import", base, run, *words, f"peft.init_from={alone}") == 0
    assert command("export", run, tmp_path / "merged") == 0
    apart = run_alone(
        lambda: float((logits_of(base, alone) - logits_of(tmp_path / "merged", None)).abs().max())
    )
    assert apart < 1e-4

    def stepped() -> dict[str, Tensor]:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.ckpt.store import Checkpoint
        from mtrain.config.compose.lock_file import read_run_file
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        read = read_run_file(run / "run.yaml")
        with joined(read) as world:
            parts = compare._parts(read, world, compare.Windows(VOCAB, 16, 0))
            ckpt_state.load_weights(Checkpoint.open(run / "checkpoints/step_00000000"), parts.state)
            train_step(parts, stop_requested=False)
            own = compare._own_tensors(parts.state.chunks[0])
            return {
                name: tensor.detach().clone() for name, tensor in own.items() if "layers.0" in name
            }

    (after,) = run_ranks(1, stepped)
    of_keys = after["decoder.layers.0.self_attention.linear_qkv.lora_a"][4:8]
    assert not bool(of_keys.any())
