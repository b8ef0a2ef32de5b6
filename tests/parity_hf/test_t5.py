"""T5 compared with Hugging Face's T5ForConditionalGeneration: logits, loss, gradients, steps of
AdamW, and folders.
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.cli.main import main
from tests.parity_hf.test_convert import data_of
from tests.support.covering import some
from tests.support.forked import RankFailed, run_alone, run_ranks

SMALL = {
    "vocab_size": 131,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "v1.0: relu, tied, scaled": {},
    "v1.1: gated gelu, untied": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
        "layer_norm_epsilon": 1e-5,
    },
    "tied and not scaled": {
        "tie_word_embeddings": False,
        "kept_tied": True,
        "num_decoder_layers": None,
    },
    "other activations, few buckets": {
        "feed_forward_proj": "gated-silu",
        "relative_attention_num_buckets": 7,
        "relative_attention_max_distance": 9,
        "num_heads": 6,
        "d_kv": 12,
        "num_decoder_layers": 4,
    },
    "a vocabulary of whole blocks": {
        "vocab_size": 256,
        "feed_forward_proj": "gelu",
        "num_layers": 1,
    },
}
ALWAYS = ["v1.0: relu, tied, scaled", "v1.1: gated gelu, untied"]
TOLERANCES = {
    "logits": 1e-5,
    "loss": 1e-6,
    "gradient": 1e-5,
    "loss of a step": 1e-5,
    "gradient norm": 1e-5,
    "weights after the steps": 1e-3,  # of the update
}
TOKENS = 40
BATCH = 2
STEPS = 2
WORDS = (
    "cluster=cpu data=mock trainer.eval_iters=0 optim.lr=1e-2 optim.warmup_iters=0"
    f" optim.schedule=constant optim.clip_grad=0.5 optim.eps=1e-4 data.seq_length={TOKENS}"
    f" trainer.global_batch_size={BATCH} trainer.micro_batch_size={BATCH}"
).split()


def saved(name: str, folder: Path, **more: Any) -> Path:
    """Return a folder as transformers saves a T5 with drawn weights."""

    def save() -> None:
        _made(name, **more).save_pretrained(folder)

    run_alone(save)
    return folder


def _made(name: str, seed: int = 0, **more: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    values = {**SMALL, **CASES[name], **more}
    kept_tied = values.pop("kept_tied", False)
    config = T5Config(**values)
    config._attn_implementation = "eager"
    made = T5ForConditionalGeneration(config).float().train()
    if not (config.scale_decoder_outputs or kept_tied):
        made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
        made._tied_weights_keys = {
            k: v for k, v in made._tied_weights_keys.items() if k != "lm_head.weight"
        }
        made.all_tied_weights_keys.pop("lm_head.weight", None)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            inputs = parameter.shape[-1] * (config.d_kv if name.endswith("n.q.weight") else 1)
            parameter.copy_(noise / inputs**0.5 if parameter.ndim > 1 else 1 + 0.2 * noise)
        for stack in (made.encoder, made.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(3)
    return made


@dataclass
class Apart:
    """The largest error of each quantity."""

    errors: dict[str, tuple[float, str]]

    def note(
        self, quantity: str, where: str, ours: Tensor, other: Tensor, scale: Tensor | None = None
    ) -> None:
        size = float((other if scale is None else scale).detach().abs().max())
        apart = float((ours.detach() - other.detach()).abs().max()) / (size or 1.0)
        apart = math.inf if math.isnan(apart) else apart
        if apart > self.errors.get(quantity, (-1.0, ""))[0]:
            self.errors[quantity] = (apart, where)


def compare(
    folder: Path, name: str, layout: str = "", flaw: float = 0.0
) -> dict[str, tuple[float, str]]:
    """Compare both models of a folder on our batches; a job for the ranks of a layout."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from mtrain.api import load
    from mtrain.ckpt import state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    run = load([f"run={folder / 'run' / 'run.yaml'}", *WORDS, *layout.split()]).run
    made = _made(name)
    found = Apart({})
    with torch.no_grad():
        made.encoder.final_layer_norm.weight *= 1 + flaw
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        state.load_weights(Checkpoint.open(folder / "run/checkpoints/step_00000000"), parts.state)
        chunk = parts.state.chunks[0]
        batches = parts.train_data
        if world.size == 1:
            _compare_gradients(run, parts, made, found)
        chunk.zero_grad_buffer()
        before = {n: p.detach().clone() for n, p in made.named_parameters()}
        update = _optimizer(made, run.optim)
        for number in range(STEPS):
            (batch,) = batches.microbatches(BATCH * number, BATCH)
            ours = train_step(parts, stop_requested=False)
            their = _their_loss(made, batch)[1]
            their.backward()
            norm = update(ours.lr)
            found.note("loss of a step", str(number), torch.tensor(ours.loss), their)
            found.note(
                "gradient norm", str(number), torch.tensor(ours.grad_norm), torch.tensor(norm)
            )
        if world.size == 1:
            after = _as_theirs(run, {n: t.detach() for n, t in _own(chunk).items()})
            for key, parameter in made.named_parameters():
                moved = parameter.detach() - before[key]
                found.note("weights after the steps", key, after[key], parameter, moved)
    return found.errors


def _optimizer(made: Any, o: Any) -> Any:
    """Return a function that makes a step of AdamW with clipping at a rate and returns the norm;
    only norms do not decay.
    """
    groups = [
        {
            "params": [p for p in made.parameters() if (p.ndim > 1) == decays],
            "weight_decay": decays * o.weight_decay,
        }
        for decays in (True, False)
    ]
    adam = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)

    def step(rate: float) -> float:
        for group in adam.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(list(made.parameters()), o.clip_grad)
        adam.step()
        adam.zero_grad()
        return float(norm)

    return step


def _own(chunk: Any) -> dict[str, Tensor]:
    from mtrain.mcore.state.local_params import unwrap

    return dict(unwrap(chunk).named_parameters())


def _as_theirs(run: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from mtrain.models.t5.hf import files
    from mtrain.models.table import to_theirs

    return to_theirs(files("t5", run.model)[0], run.model, tensors)


def _their_loss(made: Any, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    given = {"input_ids": batch["encoder_tokens"], "attention_mask": batch["encoder_mask"].long()}
    out = made(**given, decoder_input_ids=batch["tokens"], labels=labels)
    return out.logits, out.loss


def _compare_gradients(run: Any, parts: Any, made: Any, found: Apart) -> None:
    from mtrain.train.loop.step import reduce_report, run_schedule

    [batch] = parts.train_data.microbatches(0, BATCH)
    chunk = parts.state.chunks[0]
    assert (~batch["encoder_mask"]).any(), "padding is compared, too"
    with torch.no_grad():
        own = {k: batch[k] for k in ("encoder_tokens", "encoder_mask")}
        logits = chunk(batch["tokens"], batch["position_ids"], None, **own)[
            ..., : run.model.vocab_size
        ]
    chunk.zero_grad_buffer()
    loss = reduce_report(
        parts.world, parts.table, run_schedule(parts, [batch], forward_only=False), False
    )["loss"]
    their_logits, their_loss = _their_loss(made, batch)
    their_loss.backward()
    there = batch["loss_mask"] > 0
    found.note("logits", "", logits[there], their_logits[there])
    found.note("loss", "", torch.tensor(loss), their_loss)
    # main_grad is the mean over the tokens once gradients are finished, as run_schedule leaves them
    ours = _as_theirs(run, {n: p.main_grad for n, p in _own(chunk).items()})  # type: ignore[attr-defined]
    gradients = {n: p.grad for n, p in made.named_parameters()}
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        found.note("gradient", name, ours[name], gradient)
    made.zero_grad()


def command(*words: object) -> int:
    """Run `convert WORDS` in a process of its own."""
    return int(run_alone(lambda: main(["convert", *map(str, words)])))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_t5_computes_as_transformers_and_round_trips(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "theirs")
    run = tmp_path / "run"
    again = tmp_path / "again"
    assert command("import", source, run) == 0
    assert command("export", run, again) == 0
    assert data_of(again) == data_of(source)
    for folder in (run, again):
        compared = json.loads((folder / "conversion.json").read_text())["logits"]
        assert compared["largest_error"] <= 1e-5 * max(1.0, compared["largest_logit"])
    errors = run_ranks(1, compare, tmp_path, name)[0]
    assert errors.keys() == TOLERANCES.keys()
    assert not _beyond(errors)
    if name == ALWAYS[0]:
        assert _beyond(run_ranks(1, compare, tmp_path, name, "", 1e-3)[0]) == TOLERANCES.keys(), (
            "a flaw is seen"
        )
        for errors in run_ranks(2, compare, tmp_path, name, "parallel=tp2sp"):
            assert errors.keys() == {"loss of a step", "gradient norm"}
            assert not _beyond(errors)


def test_t5_plan_counts_as_transformers(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from mtrain.plan.count import flops_per_token, parameters

    name = "a vocabulary of whole blocks"
    made = _made(name)
    model, _ = _read(tmp_path, **made.config.to_dict())
    assert parameters(model) == sum(p.numel() for p in made.parameters())
    # of 64 tokens 58 and 14 are needed
    read = torch.zeros(1, 64).long()
    written = torch.zeros(1, 16).long()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        made(input_ids=read, decoder_input_ids=written)
    assert flops_per_token(model, 64, causal=False) * 64 == 3 * counted.get_total_flops()
    assert flops_per_token(model, 64) < flops_per_token(model, 64, causal=False)


def _beyond(errors: dict[str, tuple[float, str]]) -> set[str]:
    return {
        quantity for quantity, (error, _) in errors.items() if not error <= TOLERANCES[quantity]
    }


@pytest.mark.full
def test_t5_wrong_table_is_found_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.models.t5 import hf
    from mtrain.models.table import GATE_UP

    source = saved(ALWAYS[0], tmp_path / "theirs")
    monkeypatch.setattr(hf, "KV", GATE_UP)  # all keys, then all values
    with pytest.raises(RankFailed, match="exit code 4"):
        run_alone(lambda: _must(main(["convert", "import", str(source), str(tmp_path / "run")])))
    assert not (tmp_path / "run").exists()


def _must(code: int) -> None:
    assert code == 0, f"exit code {code}"


@pytest.mark.full
def test_t5_embedding_copies_are_read_if_equal(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    source = saved(ALWAYS[0], tmp_path / "theirs")
    held = load_file(source / "model.safetensors")
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    held |= {name: held["shared.weight"].clone() for name in names}
    held["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(
        32, 4
    )
    save_file(held, source / "model.safetensors", {"format": "pt"})
    assert command("import", source, tmp_path / "run") == 0
    held["decoder.embed_tokens.weight"][3, 3] += 1
    save_file(held, source / "model.safetensors", {"format": "pt"})
    assert command("import", source, tmp_path / "another") == 4


def _read(tmp_path: Path, **values: Any) -> tuple[Any, list[str]]:
    """Return the model of a `config.json`, and its keys that change the numbers and are not
    imported.
    """
    from mtrain.recipes.huggingface.exporter import differing
    from mtrain.recipes.huggingface.importer import import_config

    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "t5", **values}))
    found = import_config(file)
    return found.run.model, [said.partition(" ")[0] for said in differing(found)]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "mish"}, "feed_forward_proj"),
        ({"is_decoder": True}, "is_decoder"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder"),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, "scale_decoder_outputs"),
        ({"attention_biases": True}, "attention_biases"),
    ],
)
def test_t5_other_model_is_refused_by_key(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert _read(tmp_path, **values)[1] == [key]


def test_t5_missing_keys_take_transformers_defaults(tmp_path: Path) -> None:
    from transformers import T5Config

    assert _read(tmp_path) == _read(tmp_path, **T5Config().to_dict())
    assert _read(tmp_path)[1] == []


@pytest.mark.parametrize("name", ["t5_small", "t5_11b", "t5_v1_1_base", "t5_v1_1_xxl"])
def test_t5_shipped_model_round_trips(name: str, tmp_path: Path) -> None:
    from mtrain.recipes.delta import section
    from mtrain.recipes.huggingface.exporter import config_json, shipped

    values = config_json(section("model", name), "float32")
    assert values["architectures"] == ["T5ForConditionalGeneration"]
    model, refused = _read(tmp_path, **values)
    assert (shipped(model), refused) == (name, [])
    assert _made_by(values) == section("model", name).tie_word_embeddings  # type: ignore[attr-defined]


def _made_by(values: dict[str, Any]) -> bool:
    from transformers import T5Config

    return bool(T5Config(**values).scale_decoder_outputs)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.full) for s in range(6)])
def test_t5_random_config_agrees_with_transformers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setitem(
        CASES,
        "drawn",
        {
            "vocab_size": draw.randint(80, 400),
            "d_model": draw.randrange(16, 64, 2),
            "d_kv": draw.randint(3, 16),
            "num_heads": draw.randint(1, 6),
            "d_ff": draw.randint(16, 90),
            "num_layers": draw.randint(1, 4),
            "num_decoder_layers": draw.choice([None, 1, 2, 4]),
            "feed_forward_proj": draw.choice(
                ["relu", "gelu_new", "gated-gelu", "gated-silu", "relu2"]
            ),
            "relative_attention_num_buckets": draw.randint(4, 40),
            "relative_attention_max_distance": draw.randint(21, 200),
            "tie_word_embeddings": draw.choice([True, False]),
            "kept_tied": draw.choice([True, False]),
        },
    )
    source = saved("drawn", tmp_path / "theirs")
    run = tmp_path / "run"
    again = tmp_path / "again"
    assert command("import", source, run) == 0
    assert command("export", run, again) == 0
    assert data_of(again) == data_of(source)
    assert not _beyond(run_ranks(1, compare, tmp_path, "drawn")[0])
