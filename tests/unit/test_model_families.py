"""Families of models: what ships, how a plug-in is found, and that building and planning ask for
it.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from mtrain.config import families
from mtrain.config.machine import installed
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import BadEnvironment, ConfigError
from mtrain.loading.configuration import load
from mtrain.models import registry
from mtrain.models.gpt.family import FAMILY as GPT
from mtrain.plan import count
from mtrain.plan.shrink import shrink
from tests.support.configs import LAPTOP
from tests.support.forked import run_alone
from tests.support.runs import tiny_run

toy = dataclasses.replace(
    GPT,
    name="toy",
    builder=f"{__name__}:toy_chunk",
    parameters=lambda model: 7,
    flops_per_token=lambda model, seq_length, *, causal=True: 42.0,
    shrink=lambda model, p, *, layers, seq_length: GPT.shrink(
        model, p, layers=layers + 1, seq_length=seq_length
    ),
)
mixture = dataclasses.replace(GPT, name="toy", section="moe")
no_family = object()


def toy_chunk(run: Any, config: Any, stage: int | None) -> tuple[str, int, int | None]:
    """Return the chunk of the toy family: its facts."""
    return "toy", config.num_layers, stage


def _plug_in(monkeypatch: pytest.MonkeyPatch, value: str) -> list[str]:
    """Install a family; return the groups whose entry points are looked up from then on."""
    entry = EntryPoint("toy", value, families.GROUP)
    looked = list[str]()

    def entry_points(group: str) -> list[EntryPoint]:
        looked.append(group)
        return [entry] if group == families.GROUP else []

    monkeypatch.setattr(installed, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_load", functools.cache(registry._load.__wrapped__))
    return looked


def _toy_model(**more: Any) -> ModelConfig:
    return tiny_run(model={"family": "toy", **more}).model


def test_families_ship_gpt_as_default() -> None:
    assert registry.names()[0] == "gpt"
    assert registry.family_of(tiny_run().model) is GPT


def test_families_unknown_is_reported_with_other_problems() -> None:
    with pytest.raises(ConfigError) as raised:
        load(
            ["model.family=gptt", "trainer.global_batch_size=7", "trainer.micro_batch_size=2"],
            LAPTOP,
            {},
        )
    found = {problem.path: problem for problem in raised.value.problems}
    assert len(found) == 2
    problem = found["model.family"]
    assert (problem.code, problem.source, problem.fix) == (
        "MT245",
        "command line",
        "model.family=gpt",
    )


def test_families_plan_uses_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _plug_in(monkeypatch, f"{__name__}:toy")
    run = tiny_run(model={"family": "toy"})
    assert registry.names()[-1] == "toy"
    assert count.parameters(run.model) == 7
    assert count.flops_per_token(run.model, 8) == 42.0
    layers = shrink(tiny_run(), steps=2).model.num_layers
    assert shrink(run, steps=2).model.num_layers == layers + 1


def test_families_plug_in_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = _plug_in(monkeypatch, f"{__name__}:toy")
    run = tiny_run(model={"family": "toy"})
    for _ in range(3):
        count.flops_per_token(run.model, 8)
    assert looked == [families.GROUP]


def test_families_build_uses_plug_in() -> None:
    run = tiny_run(model={"family": "toy"}, ranks=2, pp=2, vpp=2)

    def job() -> list[Any]:
        from mtrain.world.fake_world import fake_world

        with pytest.MonkeyPatch.context() as patch, fake_world(run, 0) as world:
            from mtrain.assembly.model import blank_model

            _plug_in(patch, f"{__name__}:toy")
            return blank_model(run, world)

    assert run_alone(job) == [("toy", 4, 0), ("toy", 4, 1)]


@pytest.mark.parametrize(
    ("value", "said"), [("nowhere:x", "does not load"), (f"{__name__}:no_family", "is no mtrain")]
)
def test_families_broken_plug_in_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    _plug_in(monkeypatch, value)
    with pytest.raises(BadEnvironment, match=said):
        registry.family_of(_toy_model())


def test_families_without_section_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _plug_in(monkeypatch, f"{__name__}:mixture")
    (problem,) = registry.problems(_toy_model(), {"model.moe": "recipe.yaml:3"})
    assert (problem.code, problem.path, problem.source) == ("MT246", "model.moe", "recipe.yaml:3")
    assert registry.problems(_toy_model(moe={"num_experts": 4, "ffn_hidden_size": 64}), {}) == []
