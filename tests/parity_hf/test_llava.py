"""LLaVA compared with transformers' LlavaForConditionalGeneration: logits, losses, every gradient,
import and export of folders.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtrain.cli.main import main
from mtrain.plan.count import parameters
from mtrain.recipes.huggingface.exporter import config_json, differing
from mtrain.recipes.huggingface.importer import import_config
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks

TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 17,
    "patch_size": 5,
}


@dataclass(frozen=True)
class Case:
    """A configuration of transformers, and images in each of two samples."""

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    images: tuple[int, int] = (1, 2)

    def values(self) -> dict[str, Any]:
        """Return the values of `config.json`."""
        text = {**TEXT, **self.text}
        vision = {**VISION, **self.vision}
        return {"image_token_index": 97, **self.both, "text_config": text, "vision_config": vision}


CASES = {
    "one and two images": Case(),
    "no image in one of two": Case(images=(0, 1)),
    "features of the last layer, tied": Case(
        {"tie_word_embeddings": True}, both={"vision_feature_layer": -1}
    ),
    "features of the first layer": Case(
        vision={"num_attention_heads": 3}, both={"vision_feature_layer": 1}
    ),
    "other activations, no bias": Case(
        vision={"hidden_act": "gelu", "layer_norm_eps": 1e-6},
        both={"projector_hidden_act": "gelu_pytorch_tanh", "multimodal_projector_bias": False},
    ),
    "a wide tower of many patches": Case(
        {"num_key_value_heads": 6, "head_dim": 16, "attention_bias": True},
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 5,
            "image_size": 20,
            "patch_size": 4,
        },
        {"vision_feature_layer": -3, "image_token_index": 3},
        (1, 1),
    ),
}
REFUSED = {
    "features of several layers": ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
    "the class token kept": (
        {"vision_feature_select_strategy": "full"},
        "vision_feature_select_strategy",
    ),
    "another activation": ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
    "another tower": (
        {"vision_config": {**VISION, "model_type": "siglip_vision_model"}},
        "vision_config",
    ),
    "another language model": ({"text_config": {**TEXT, "model_type": "mistral"}}, "text_config"),
    "channels": ({"vision_config": {**VISION, "num_channels": 1}}, "vision_config.num_channels"),
    "dropout in the tower": (
        {"vision_config": {**VISION, "attention_dropout": 0.1}},
        "vision_config.attention_dropout",
    ),
    "a key of the first LLaVA's own files": (
        {"mm_vision_select_layer": -2},
        "mm_vision_select_layer",
    ),
    "a key of text that is not known": (
        {"text_config": {**TEXT, "strange": 1}},
        "text_config.strange",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _imported_before_ranks_are_forked() -> None:
    import transformers.models.llava.modeling_llava  # noqa: F401

    import mtrain.train.assemble  # noqa: F401


def configuration(values: dict[str, Any]) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(**values)


def their_model(values: dict[str, Any], seed: int = 0) -> Any:
    """Return transformers' model, with weights such that every part has an effect."""
    from transformers import LlavaForConditionalGeneration

    made = LlavaForConditionalGeneration._from_config(
        configuration(values), attn_implementation="eager"
    ).float()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            noise = torch.randn(tensor.shape, generator=draw)
            fan = math.prod(tensor.shape[1:])
            scale = "norm" in name and "bias" not in name
            tensor.copy_(noise / fan**0.5 if tensor.ndim > 1 else 0.2 * noise + float(scale))
    return made


def run_of(values: dict[str, Any]) -> Any:
    """Return the resolved run of a `config.json` with these values."""
    from mtrain.config.resolve.resolution import Machine, resolve

    extra = (
        "cluster=cpu",
        "data.seq_length=40",
        "trainer.global_batch_size=2",
        "trainer.micro_batch_size=2",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(values))
        found = import_config(file, extra)
    assert differing(found) == []
    return resolve(found.run, Machine.here(), 1)


def drawn_batch(run: Any, case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens [2, 40] with image tokens at places of their own, images, labels and their
    mask.
    """
    own = run.model.llava
    draw = torch.Generator().manual_seed(seed)
    length = 40
    rows = []
    for images in case.images:
        text = torch.randint(
            0, run.model.vocab_size - 1, (length - images * own.image_tokens,), generator=draw
        )
        text += (text >= own.image_token_id).long()
        parts = [text]
        for place in sorted(random.Random(seed).sample(range(len(text)), images), reverse=True):
            first = parts.pop(0)
            parts = [
                first[:place],
                torch.full((own.image_tokens,), own.image_token_id),
                first[place:],
                *parts,
            ]
        rows.append(torch.cat(parts))
    tokens = torch.stack(rows)
    pixels = torch.randn(sum(case.images), 3, own.image_size, own.image_size, generator=draw)
    labels = torch.randint(0, run.model.vocab_size, tokens.shape, generator=draw)
    return tokens, pixels, labels, (torch.rand(tokens.shape, generator=draw) > 0.3).float()


def errors(case: Case, seed: int = 0, flaw: float = 0.0) -> dict[str, float]:
    """Return the differences between both sides: logits, loss, and the worst gradient; a job for
    one rank.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    from mtrain.assembly.model import build_model
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.models.llava.hf import in_memory
    from mtrain.models.table import to_ours, to_theirs
    from mtrain.world.init import joined

    values = configuration(case.values()).to_dict()
    run = run_of(values)
    made = their_model(case.values(), seed)
    tokens, pixels, labels, mask = drawn_batch(run, case, seed)
    out = made(input_ids=tokens, pixel_values=pixels)
    each = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    loss = (each * mask.flatten()).sum()
    loss.backward()
    theirs = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    with joined(run) as world:
        (chunk,) = build_model(run, world)
        own = dict(unwrap(chunk).named_parameters())
        table = in_memory(run.model)
        given = to_ours(table, run.model, dict(made.named_parameters()))
        assert given.keys() == own.keys()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor[: len(given[name])].copy_(given[name][: len(tensor)])
            own["vision.pre_layernorm.weight"].mul_(1 + flaw)
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
            logits = chunk(tokens, places, None, images=pixels)[..., : run.model.vocab_size]
        chunk.zero_grad_buffer()
        total = chunk(tokens, places, None, labels=labels, loss_mask=mask, images=pixels)
        total.backward()
        gradients = {name: p.main_grad for name, p in own.items() if hasattr(p, "main_grad")}
        ours = to_theirs(table, run.model, gradients)
    assert ours.keys() == theirs.keys()
    largest = torch.stack([g.abs().max() for g in theirs.values()]).max()
    # a bias of keys moves all scores of a query alike: its gradient is 0 but for rounding, without
    # a scale of its own
    scales = {n: largest if n.endswith("k_proj.bias") else g.abs().max() for n, g in theirs.items()}
    worst = max(float((ours[n] - g).abs().max() / scales[n]) for n, g in theirs.items())
    return {
        "logits": float((logits - out.logits).abs().max() / out.logits.abs().max()),
        "loss": float((total - loss).abs() / loss),
        "gradient": worst,
    }


@pytest.mark.parametrize(
    "name", some(CASES, ["one and two images", "a wide tower of many patches"])
)
def test_llava_computes_as_transformers(name: str) -> None:
    found = run_ranks(1, errors, CASES[name])[0]
    assert max(found.values()) < 1e-5, found


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
def test_llava_images_elsewhere_compute_as_transformers(seed: int) -> None:
    found = run_ranks(1, errors, CASES["one and two images"], seed)[0]
    assert max(found.values()) < 1e-5, found


def test_llava_tower_fault_is_found() -> None:
    found = run_ranks(1, errors, CASES["one and two images"], 0, 1e-3)[0]
    assert min(found["logits"], found["gradient"]) > 1e-5, found


@pytest.mark.parametrize("name", CASES)
def test_llava_plan_counts_as_transformers(name: str) -> None:
    m = run_of(configuration(CASES[name].values()).to_dict()).model
    padding = (
        (m.padded_vocab_size - m.vocab_size) * m.hidden_size * (1 if m.tie_word_embeddings else 2)
    )
    assert parameters(m) - padding == sum(
        p.numel() for p in their_model(CASES[name].values()).parameters()
    )


@pytest.mark.parametrize("name", CASES)
def test_llava_written_config_is_same_model(name: str) -> None:
    values = configuration(CASES[name].values())
    written = config_json(run_of(values.to_dict()).model, "float32")
    again = configuration(
        {k: v for k, v in written.items() if k not in ("model_type", "architectures")}
    )
    assert again.to_dict()["vision_config"] | {"projection_dim": 0} == values.to_dict()[
        "vision_config"
    ] | {"projection_dim": 0}
    for key in (
        "image_token_id",
        "vision_feature_layer",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ):
        assert getattr(again, key) == getattr(values, key)
    names = {"name": "written"}
    first, second = (
        run_of(one.to_dict()).model.model_copy(update=names) for one in (values, again)
    )
    assert first == second


@pytest.mark.parametrize("name", REFUSED)
def test_llava_other_model_is_refused_by_key(name: str, tmp_path: Path) -> None:
    values, key = REFUSED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llava", **Case().values(), **values}))
    found = differing(import_config(file))
    assert found
    assert all(text.startswith(f"{key} = ") for text in found)


def test_llava_published_config_is_shipped_model(tmp_path: Path) -> None:
    from mtrain.recipes.huggingface.exporter import shipped

    text = {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
    }
    vision |= {
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    }
    values = {
        "model_type": "llava",
        "ignore_index": -100,
        "image_token_index": 32000,
        "pad_token_id": 32001,
    }
    values |= {"projector_hidden_act": "gelu", "vision_feature_layer": -2, "vocab_size": 32064}
    values |= {
        "vision_feature_select_strategy": "default",
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
    }
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {**values, "text_config": text, "vision_config": {**vision, "vocab_size": 32000}}
        )
    )
    found = import_config(file)
    assert differing(found) == []
    assert shipped(found.run.model) == "llava15_7b"


def saved(folder: Path, naming: str) -> Path:
    """Return a folder as transformers writes it today, as version 4 did, or by the names in
    memory.
    """

    def save() -> None:
        made = their_model(Case().values())
        made.save_pretrained(folder)
        if naming == "today":
            return
        file = folder / "model.safetensors"
        tensors = load_file(file)
        if naming == "version 4":
            tensors = {
                name.replace("vision_tower.", "vision_tower.vision_model."): t
                for name, t in tensors.items()
            }
            tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(10)[None]
        else:
            tensors = {name: t.detach().contiguous() for name, t in made.named_parameters()}
        save_file(tensors, file, {"format": "pt"})

    run_alone(save)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def command(*words: object) -> int:
    """Run `convert WORDS` in a process of its own."""
    return int(run_alone(lambda: main(["convert", *map(str, words)])))


@pytest.mark.parametrize("naming", some(["today", "version 4", "in memory"], ["today"]))
def test_llava_export_is_read_by_transformers(naming: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "theirs", naming)
    run = tmp_path / "run"
    again = tmp_path / "again"
    assert command("import", theirs, run) == 0
    assert command("export", run, again) == 0

    def check() -> None:
        from transformers import LlavaForConditionalGeneration

        expected = dict(their_model(Case().values()).named_parameters())
        read = dict(LlavaForConditionalGeneration.from_pretrained(again).named_parameters())
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())

    run_alone(check)
    if naming == "today":
        a = tensors_of(theirs)
        b = tensors_of(again)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "words", some(["layer_norm", "mlp.fc", "self_attn.k_proj"], ["layer_norm"])
)
def test_llava_mutated_tower_table_is_found(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swap two tensors of the same shape: the imported model then computes other numbers for an
    image.
    """
    from mtrain.models.llava import hf

    theirs = saved(tmp_path / "theirs", "today")
    real = hf.files
    swaps = {
        "layer_norm": ("layer_norm1.", "layer_norm2."),
        "mlp.fc": ("layers.0.mlp", "layers.1.mlp"),
    }
    first, second = swaps.get(words, ("k_proj", "v_proj"))

    def swapped(name: str) -> str:
        if "vision_tower" not in name:
            return name
        return name.replace(first, "@").replace(second, first).replace("@", second)

    def files(kind: str, model: Any) -> Any:
        return tuple(
            replace(t, once=tuple(replace(e, theirs=tuple(map(swapped, e.theirs))) for e in t.once))
            for t in real(kind, model)
        )

    monkeypatch.setattr(hf, "files", files)
    assert command("import", theirs, tmp_path / "run") == 4
    assert not (tmp_path / "run").exists()


def _saved_in(layout: str, run: Path, into: Path) -> None:
    from tests.parity_hf.test_convert import _saved_in as saved_in

    saved_in(layout, run, into)


@pytest.mark.full
@pytest.mark.parametrize("layout", some(["tp2sp", "pp2"], ["tp2sp"]))
def test_llava_layout_round_trip_keeps_weights(layout: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "theirs", "today")
    run = tmp_path / "run"
    assert command("import", theirs, run) == 0
    run_ranks(2, _saved_in, f"parallel={layout}", run, tmp_path / "saved")
    assert command("export", tmp_path / "saved/step_00000000", tmp_path / "again") == 0
    a = tensors_of(theirs)
    b = tensors_of(tmp_path / "again")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("size", [(37, 50), (50, 37), (336, 336), (21, 300)])
def test_llava_image_equals_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    from PIL import Image

    from mtrain.data.image_text import load

    noise = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    processor = clip.CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    theirs = processor(Image.open(tmp_path / "noise.png"), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(load(tmp_path / "noise.png", 56), theirs, atol=1e-5)
