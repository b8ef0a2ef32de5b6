"""Shipped models have as many parameters as transformers builds of their public config.json,
without weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.plan.count import parameters
from mtrain.recipes.delta import section
from tests.support.forked import run_alone

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "conf/public_configs.json").read_text()
)
MODELS = ("bert_345m", "nemotron4_340b")
"""Models whose vocabulary needs no padding here."""


def _built(config: dict[str, Any]) -> int:
    """Return the number of parameters of the class that a config.json names, each tied one once."""
    import transformers

    (name,) = config["architectures"]
    values = {
        key: value for key, value in config.items() if key not in ("architectures", "model_type")
    }
    with torch.device("meta"):
        made = getattr(transformers, name)(
            transformers.AutoConfig.for_model(config["model_type"], **values)
        )
    return sum(parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_published_counts_equal_transformers(name: str) -> None:
    model: Any = section("model", name)
    assert model.padded_vocab_size == model.vocab_size
    assert (
        parameters(model)
        == run_alone(lambda: _built(FACTS[name]["config"]))
        == FACTS[name]["parameters"]
    )


def test_published_counts_nemotron4_equals_report() -> None:
    """Expect 9.4 and 331.6 billion: arXiv 2406.11704, section 2.2."""
    model: Any = section("model", "nemotron4_340b")
    embeddings = 2 * model.vocab_size * model.hidden_size
    assert f"{embeddings / 1e9:.1f} {(parameters(model) - embeddings) / 1e9:.1f}" == "9.4 331.6"
