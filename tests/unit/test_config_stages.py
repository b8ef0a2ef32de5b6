"""Contents of each pipeline stage: written as a layout, as sizes, or counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.resolve.resolution import resolve
from mtrain.config.resolve.stages import Stage, parse_pipeline_layout, stages
from mtrain.config.rules import apply
from mtrain.layout.grid import embedding_stages, held_stages
from tests.support.configs import LAPTOP, tiny


def test_stages_deepseek_v3_layout_reads_as_megatron() -> None:
    found = parse_pipeline_layout("Et*3|(tt|)*29,m|L")
    assert len(found) == 32
    assert found[0] == Stage(range(3), embedding=True)
    assert found[1] == Stage(range(3, 5))
    assert found[-2] == Stage(range(61, 61), mtp=1)
    assert found[-1] == Stage(range(61, 61), loss=True)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("tt|tL", "E .embedding. stands 0 times"),
        ("EtE|tL", "E .embedding. stands 2 times"),
        ("Et|t", "L .loss. stands 0 times"),
        ("tE|tL", "E must be the first"),
        ("Et|Lt", "L the last of the last"),
        ("Em|tL", "follows an m"),
        ("Et|m|mL", "all m must be in one stage"),
        ("Et|xL", "cannot read 'x'"),
        ("Et*|L", "cannot read '\\*'"),
        ("E(t|)*9999(t|)*9999L", "repeats make|stages"),
        ("E" + "t" * 3000 + "L", "3002 letters"),
    ],
)
def test_stages_impossible_layout_states_reason(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_pipeline_layout(text)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_stages_sizes_and_layout_are_equivalent(sizes: list[int]) -> None:
    text = "|".join("t" * n for n in sizes)
    keys = {
        "model.num_layers": sum(sizes),
        "parallel.pp": len(sizes),
        "parallel.layers_per_stage": sizes,
    }
    run = resolve(apply(tiny(), keys), LAPTOP)
    assert stages(run) == parse_pipeline_layout(f"E{text}L")


def test_stages_embedding_and_loss_replace_a_layer() -> None:
    keys = {
        f"parallel.account_for_{what}_in_pipeline_split": True for what in ("embedding", "loss")
    }
    sizes = {"model.num_layers": 14, "parallel.pp": 4, "parallel.vpp": 2}
    run = resolve(apply(tiny(), {**sizes, **keys}), LAPTOP)
    assert [len(stage.layers) for stage in stages(run)] == [1, 2, 2, 2, 2, 2, 2, 1]
    assert [[len(s.layers) for s in held] for held in held_stages(run)] == [
        [1, 2],
        [2, 2],
        [2, 2],
        [2, 1],
    ]


def _embeddings(keys: dict[str, Any]) -> list[int]:
    return embedding_stages(resolve(apply(tiny(), keys), LAPTOP))


def test_stages_middle_mtp_shares_embedding() -> None:
    keys: dict[str, Any] = {"model.num_layers": 5, "parallel.pp": 4, "model.mtp_num_layers": 1}
    keys["parallel.pipeline_layout"] = "Ett|ttt|m|L"
    assert _embeddings(keys) == [0, 2]
    assert _embeddings({**keys, "model.tie_word_embeddings": True}) == [0, 2, 3]
    assert _embeddings({"parallel.pp": 4}) == [0, 3]
