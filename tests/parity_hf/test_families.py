"""Our models compared with Hugging Face's: the import of a config.json computes the same as
transformers.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mtrain.models.count import parameters
from mtrain.models.gpt.hf import TABLES
from tests.parity_hf import hf_reference
from tests.parity_hf.compare import Case, Result, compare, half_precision_errors, imported
from tests.parity_hf.drawn import FAMILIES, draw
from tests.parity_hf.families import CASES, REFUSED
from tests.support.covering import some
from tests.support.forked import run_ranks

TOLERANCES = {
    "logits": 1e-5,
    "loss": 1e-6,
    "gradient": 2e-5,
    "gradient of padding": 0.0,
    "loss of a step": 1e-5,
    "gradient norm": 1e-5,
    "weights after the steps": 1e-3,  # of the update: Adam divides what is small by what is small
}
ROUNDING = {"qwen3_next": 10.0}
"""Times the tolerances: the gated delta rule is rounded to fp32 by transformers in any dtype.

Compared with the rule in fp64, the outputs of a head are 1.2e-6 off in chunks, theirs as ours, and
2.1e-6 once they are normed, because the first ones are small; without chunks theirs are 1.7e-6 off.
In fp64 ours are 3e-15 off: nothing but rounding differs.
"""
NEEDED = {
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
}
NEEDED |= {"max_position_embeddings", "n_layer", "n_embd", "n_head", "n_positions"}
"""Without one of these a file is refused."""
DRAWN = int(os.environ.get("PARITY_CASES", "1"))
"""Random configurations of each family."""


def assert_agrees(result: Result, rounding: float = 1.0) -> None:
    assert not result.refused
    assert not result.problems
    assert result.errors.keys() | {"gradient of padding"} == TOLERANCES.keys()
    apart = {
        q: found for q, found in result.errors.items() if not found[0] <= rounding * TOLERANCES[q]
    }
    assert not apart
    ours, expected = result.text
    assert ours == expected


ALWAYS = (
    "llama 3.2, tied",
    "mixtral with kinds of layers",
    "gemma 2",
    "qwen2 moe",
    "qwen3 next",
    "gpt oss beyond its window",
    "deepseek v3",
    "gpt2 with exact gelu, untied, narrow",
    "nemotron 4, with heads narrower than the model",
)
"""Each kind of layer, with what is most its own."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_families_compute_as_transformers(name: str) -> None:
    assert_agrees(run_ranks(1, compare, CASES[name])[0], ROUNDING.get(CASES[name].kind, 1.0))


@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_families_plan_counts_as_transformers(name: str) -> None:
    config = hf_reference.configuration(CASES[name].kind, CASES[name].values)
    m = imported(CASES[name], config.to_dict())[0].model
    padding = (
        (m.padded_vocab_size - m.vocab_size) * m.hidden_size * (1 if m.tie_word_embeddings else 2)
    )
    assert parameters(m) - padding == sum(
        p.numel() for p in hf_reference.model(config, 0).parameters()
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", range(DRAWN))
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_random_config_agrees_or_names_key(kind: str, seed: int) -> None:
    case = draw(kind, seed)
    result = run_ranks(1, compare, case)[0]
    if result.refused:
        # transformers makes layer_types of the keys of windows
        said = {
            *case.values,
            "layer_types",
        }
        assert {key.partition(".")[0] for key in result.refused} <= said
    elif result.problems:
        assert all(" model." in problem for problem in result.problems)
    else:
        assert_agrees(result, ROUNDING.get(kind, 1.0))


@pytest.mark.sampled
@pytest.mark.parametrize("name", REFUSED)
def test_families_other_model_is_refused_by_key(name: str) -> None:
    case, key = REFUSED[name]
    assert key in run_ranks(1, compare, case)[0].refused


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_missing_key_takes_transformers_default(kind: str) -> None:
    needed = {"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}
    values = hf_reference.configuration(kind, needed).to_dict()
    sizes = {key: value for key, value in values.items() if key in NEEDED | needed.keys()}
    run, refused = imported(Case(kind, {}), {"model_type": kind, **sizes})
    assert (run, refused) == imported(Case(kind, {}), values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama 3.1", "qwen3, tied", "gpt2", "gemma 2", "gemma 3"])
def test_families_bf16_is_as_near_fp32_as_transformers(name: str) -> None:
    ours, others = run_ranks(1, half_precision_errors, CASES[name])[0]
    assert ours.keys() == others.keys()
    for quantity, error in ours.items():
        # the last bit of bf16 is 2^-8 of a value; a few products in a row add some of them up
        assert 0 < others[quantity] < 8 * 2**-8
        assert 0 < error < 1.5 * others[quantity], quantity


def test_families_all_have_cases_and_random_configs() -> None:
    from mtrain.recipes.huggingface.importer import KINDS

    known = {name for name, kind in KINDS.items() if kind.family == "gpt"}
    assert {case.kind for case in CASES.values()} == FAMILIES.keys() == TABLES.keys() == known


def test_families_wrong_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the comparison can fail: every quantity changes if a norm's weight is slightly
    larger on one side.
    """
    result: Result = run_ranks(1, compare, replace(CASES["llama 3.1"], flaw=1e-3))[0]
    seen = {q for q, (error, _) in result.errors.items() if error > TOLERANCES[q]}
    assert seen >= {
        "logits",
        "loss",
        "gradient",
        "loss of a step",
        "gradient norm",
        "weights after the steps",
    }
