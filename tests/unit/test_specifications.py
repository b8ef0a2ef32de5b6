"""Optimizers, number formats and devices are each described once, and what is described is true."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.engine import formats
from mtrain.config.engine.kernels import update_obstacle
from mtrain.config.machine import devices, installed
from mtrain.config.messages.keys import choices_of, key_of, schema_keys, when_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.optim import OptimConfig
from mtrain.errors import BadEnvironment
from tests.support.configs import LAPTOP


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_specifications_optimizer_has_an_implementation(name: str) -> None:
    assert name in choices_of_group("optim")
    run = resolve(compose([f"optim={name}"]).run, LAPTOP)
    assert run.optim.name == name
    assert update_obstacle(run.kernels.optimizer or "", run) is None


def test_specifications_schema_has_optimizers_and_their_keys() -> None:
    assert choices_of("optim.name") == tuple(OPTIMIZERS)
    sections = {name for name, spec in OPTIMIZERS.items() if spec.section is not None}
    keys = set(OptimConfig.model_fields)
    assert sections < keys
    assert all(spec.keys <= keys for spec in OPTIMIZERS.values())
    for name in sections:
        of_section = {path for path in schema_keys() if path.startswith(f"optim.{name}.")}
        said = {path for path in of_section if key_of(path).null is not None}
        computed = {f"optim.{name}.{key}" for key in OPTIMIZERS[name].defaults}
        assert said | computed == of_section, "null means something for each"
        assert not said & computed
        assert all(when_of(path) == f"optim.name={name}" for path in of_section)


@pytest.mark.parametrize(
    "word", [w for w, facts in formats.FORMATS.items() if facts.torch.startswith(("float", "bf"))]
)
def test_specifications_format_equals_its_dtype(word: str) -> None:
    facts = formats.FORMATS[word]
    dtype = getattr(torch, facts.torch)
    assert facts.bytes == dtype.itemsize
    assert facts.largest == pytest.approx(torch.finfo(dtype).max, rel=0 if word != "tf32" else 1e-3)


def test_specifications_muon_splits_vision_heads_by_own_width() -> None:
    run = resolve(compose(["model=llava_tiny", "optim=muon", "model.kv_channels=16"]).run, LAPTOP)
    matrix: Any = SimpleNamespace(ndim=2)

    def settings(name: str) -> dict[str, Any]:
        groups = [g.settings for g in OPTIMIZERS["muon"].groups(run) if g.contains(matrix, name)]
        return {key: value for group in groups for key, value in group.items()}

    assert run.model.llava is not None
    own = (run.model.llava.head_dim,) * 3
    layer = "layers.0.self_attention.linear_qkv.weight"
    assert settings(f"vision.encoder.{layer}") == {"matrix": "qkv", "qkv_rows": own}
    assert settings(f"decoder.{layer}") == {"matrix": "qkv"}
    assert settings("decoder.layers.0.self_attention.linear_proj.weight") == {"matrix": "whole"}
    assert settings("decoder_relative_pos_emb.relative_attention_bias.weight") == {}, (
        "a table is looked up in"
    )


def test_specifications_format_words_are_in_table() -> None:
    kinds = (
        formats.WeightFormat,
        formats.MainFormat,
        formats.MomentFormat,
        formats.ProductFormat,
        formats.Format,
    )
    assert all(set(get_args(kind)) <= formats.FORMATS.keys() for kind in kinds)
    assert set(get_args(formats.Format)) == formats.FORMATS.keys()


toy = devices.DeviceFacts(name="toy", triton=True)
no_facts = object()


def _plug_in(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("toy", value, devices.FACTS_GROUP)
    monkeypatch.setattr(
        installed, "entry_points", lambda group: [entry] if group == devices.FACTS_GROUP else []
    )
    devices._of_plug_in.cache_clear()


def test_specifications_plug_in_states_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    _plug_in(monkeypatch, f"{__name__}:toy")
    assert devices.facts_of("toy").triton
    assert devices.facts_of("another") == devices.DeviceFacts(name="another")


@pytest.mark.parametrize(
    ("value", "said"), [("nowhere:x", "does not load"), (f"{__name__}:no_facts", "is no mtrain")]
)
def test_specifications_bad_facts_are_named(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plug_in(monkeypatch, value)
    with pytest.raises(BadEnvironment, match=said):
        devices.facts_of("toy")


def test_specifications_shipped_facts_match_devices() -> None:
    from mtrain.devices import registry

    assert set(devices.SHIPPED) == set(registry._SHIPPED)
    assert registry._load("cuda").name == devices.CUDA.name
    assert (registry._load("cpu").count() is None) == devices.CPU.on_host
