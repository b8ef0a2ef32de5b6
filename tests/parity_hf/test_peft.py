"""LoRA and DoRA beside `peft` over transformers: the same loss, gradients of adapters, and two steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity_hf import compare, theirs
from tests.parity_hf.families import CASES
from tests.support.covering import some
from tests.support.forked import run_ranks

ALL = "[qkv,proj,fc1,fc2,experts]"
PEFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama 3", f"peft=lora peft.target={ALL}", {}),
    "llama, dora": ("llama 3", "peft=dora", {"use_dora": True}),
    "llama, one key head, attention alone": ("llama 3.2, tied", "peft=lora peft.target=[qkv,proj]", {}),
    "llama with biases, dora": (
        "llama with heads wider than the model, and biases",
        "peft=dora",
        {"use_dora": True},
    ),
    "mixtral": ("mixtral", f"peft=lora peft.target={ALL}", {}),
    "qwen3": ("qwen3", "peft=lora peft.target=[qkv,fc2]", {}),
    "gpt oss": ("gpt oss beyond its window", "peft=lora", {}),
    "qwen2 moe": ("qwen2 moe", "peft=lora", {}),
    "gpt2": ("gpt2", "peft=lora peft.target=[proj,fc2]", {}),
    "deepseek v3": ("deepseek v3", "peft=lora", {}),
    "deepseek v2, dora": ("deepseek v2", "peft=dora peft.target=[qkv,proj]", {"use_dora": True}),
    "phi3": ("phi3", "peft=lora", {}),
}
RANK, ALPHA = 4, 12.0
TOLERANCE = 1e-4


def adapters(chunk: Any, value: Any) -> dict[str, Any]:
    """`value` of each tensor of each adapter of a chunk, by the name of the weight."""
    from mtrain.mcore.merging import Whole, names_beside

    own = compare._own_tensors(chunk)
    found = {name: names_beside(name) for name in own}
    return {
        name: Whole(value(own[n.a]), value(own[n.b]), value(own[n.magnitude]) if n.magnitude in own else None)
        for name, n in found.items()
        if n is not None and n.a in own
    }


def with_peft(made: Any, given: Any, options: dict[str, Any]) -> Any:
    """The model with `peft`'s adapters, which hold the tensors `given`."""
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
    assert not left.unexpected_keys
    assert not [name for name in left.missing_keys if "lora" in name]
    return model


def named(model: Any, value: Any) -> dict[str, Tensor]:
    """`value` of what `peft` trains, by the names that it saves them under."""
    return {
        name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): value(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def compared(name: str, flaw: float = 0.0) -> compare.Result:
    """Both sides from the same weights and adapters, none of which is 0; a job for one rank."""
    from mtrain.config.resolve import Machine, resolve
    from mtrain.convert.adapters import to_peft
    from mtrain.mcore import low_rank
    from mtrain.models.gpt.hf import TABLES
    from mtrain.models.table import to_ours
    from mtrain.train.step import train_step
    from mtrain.world.init import joined

    kind, words, options = PEFT[name]
    case = replace(CASES[kind], extra=(*CASES[kind].extra, *words.split(), f"peft.r={RANK}", f"peft.alpha={ALPHA}"))
    config = theirs.configuration(case.kind, case.values)
    run, _ = compare.imported(case, config.to_dict())
    run = resolve(run, Machine.here(), 1)
    made, table, result = theirs.model(config, case.seed), TABLES[case.kind], compare.Result()
    windows = compare.Windows(config.vocab_size, case.length, case.seed)
    with joined(run) as world:
        parts = compare._parts(run, world, windows)
        chunk = parts.state.chunks[0]
        base = {k: t for k, t in compare._own_tensors(chunk).items() if "lora_" not in k and "magnitude" not in k}
        compare.load(to_ours(table, run.model, theirs.tensors(made)), base, run)
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
        their = theirs.loss(made, tokens, labels)
        (their.cross_entropy + their.balance).backward()
        logits, loss, _ = compare._forward_backward(parts, tokens)
        result.note("logits", "", logits, their.logits)
        result.note("loss", "", torch.tensor(loss), their.cross_entropy)
        gradients = named(model, lambda p: p.grad.clone())
        for key, tensor in to_peft(table, run.model, adapters(chunk, lambda t: t.main_grad)).tensors.items():
            result.note("gradient", key, tensor, gradients[key])
        model.zero_grad()
        before = named(model, lambda p: p.detach().clone())
        update = theirs.optimizer(made, run.optim)
        for number in range(compare.STEPS):
            ours = train_step(parts, stop_requested=False)
            their = theirs.loss(made, *windows.step(number))
            (their.cross_entropy + their.balance).backward()
            norm = update(ours.lr)
            result.note("loss of a step", str(number), torch.tensor(ours.loss), their.cross_entropy)
            result.note("gradient norm", str(number), torch.tensor(ours.grad_norm), torch.tensor(norm))
        after = named(model, lambda p: p.detach())
        for key, tensor in to_peft(table, run.model, adapters(chunk, lambda t: t.detach())).tensors.items():
            result.note("adapters after the steps", key, tensor, after[key])
            result.note("their update", key, tensor, after[key], after[key] - before[key])
    return result


@pytest.mark.parametrize("name", some(PEFT, ["llama", "llama with biases, dora", "mixtral"]))
def test_training_an_adapter_is_what_peft_does_with_transformers(name: str) -> None:
    (result,) = run_ranks(1, compared, name)
    assert len(result.errors) == 7
    # Adam divides what is small by what is small
    allowed = {"their update": 10 * TOLERANCE}
    assert {what: e for what, e in result.errors.items() if not e[0] <= allowed.get(what, TOLERANCE)} == {}
