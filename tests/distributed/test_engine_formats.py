"""A quantized format is in megatron-core's configuration, and its layers ask for the context that
does it.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.precision import PrecisionConfig
from tests.support.configs import LAPTOP
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run

FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "delayed": (
        {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_margin": 2,
            "fp8_amax_history_len": 16,
            "fp8_wgrad": False,
        },
        {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_margin": 2,
            "fp8_amax_history_len": 16,
            "fp8_wgrad": False,
        },
    ),
    "tensorwise": (
        {"fp8": "e4m3", "num_layers_at_start_in_bf16": 1, "fp8_dot_product_attention": True},
        {
            "fp8": "e4m3",
            "fp8_recipe": "tensorwise",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 0,
            "fp8_dot_product_attention": True,
        },
    ),
    "blockwise": ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, {"fp8_recipe": "blockwise"}),
    "mxfp8": (
        {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
        {"fp8_recipe": "mxfp8", "first_last_layers_bf16": False},
    ),
    "nvfp4": ({"fp4": "e2m1"}, {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8": None}),
    "none": ({}, {"fp8": None, "fp4": None, "first_last_layers_bf16": False}),
}


def _by_te() -> None:
    """Leave FP8 to megatron-core, as if TransformerEngine multiplied; for a process of its own."""
    from mtrain.config.engine import core_fields
    from mtrain.models.gpt import build

    core_fields.FIELDS["fp8"] = lambda r: r.precision.fp8
    build.recipe = lambda run: None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_engine_formats_recipe_is_set(name: str) -> None:
    keys, fields = FORMATS[name]
    run = tiny_run(dtype="bf16")
    run = resolve(
        run.model_copy(update={"precision": PrecisionConfig(dtype="bf16", **keys)}), LAPTOP
    )

    def job() -> dict[str, Any]:
        from mtrain.assembly.model import transformer_config
        from mtrain.devices import registry

        _by_te()
        built = transformer_config(run, registry.get("cpu"))
        return {field: getattr(built, field) for field in fields}

    assert run_alone(job) == fields


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("delayed", [-1]),
        ("tensorwise", [0, 1, 2, 3]),
        ("mxfp8", [0, 1, 2, 3]),
        ("nvfp4", [0, 1, 2, 3]),
        ("none", []),
    ],
)
def test_engine_formats_every_layer_uses_its_context(name: str, asked: list[int]) -> None:
    run = tiny_run(dtype="bf16")
    run = resolve(
        run.model_copy(update={"precision": PrecisionConfig(dtype="bf16", **FORMATS[name][0])}),
        LAPTOP,
    )

    def job() -> list[int]:
        import torch
        from megatron.core.transformer import transformer_block

        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        _by_te()
        seen: list[int] = []
        for context in ("get_fp8_context", "get_fp4_context"):
            asks = getattr(transformer_block, context)

            def noting(
                config: Any, layer: int = -1, is_init: bool = False, asks: Any = asks
            ) -> Any:
                if not is_init:
                    seen.append(layer)
                return asks(config, layer, is_init)

            setattr(transformer_block, context, noting)
        with joined(run) as world:
            (model,) = build_model(run, world, wrap=False)
            tokens = torch.zeros(1, 16, dtype=torch.long)
            model(tokens, torch.arange(16)[None], None)
        return seen

    assert run_ranks(1, job)[0] == asked
