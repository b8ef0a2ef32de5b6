"""Random command lines, composed to the same values as by Hydra, each value with its origin."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from mtrain.config.compose.composer import Rejected, compose
from mtrain.config.compose.layout_string import parse_layout
from mtrain.config.compose.paths import choices_of_group, conf_dir, recipe_names, recipes_dir
from mtrain.config.schema.run import GROUPS

CASES = int(os.environ.get("HYDRA_CASES", "40"))
LAYOUTS = ("tp2", "tp4pp4", "tp2dp2", "tp2ep4", "tp8pp12cp2vpp4ep8", "tp4sp")
VALUES = {
    "optim.lr": ("1e-3", "3e-4", "0.5"),
    "optim.weight_decay": ("0.2", "1"),
    "trainer.train_iters": ("7", "1_000"),
    "trainer.seed": ("0", "12"),
    "model.num_layers": ("8", "6"),
    "model.tie_word_embeddings": ("true", "False"),
    "model.name": ("mine", "'a b'", '"1"'),
    "data.split": ("[1,1,1]", "[0.5, 0.25, 0.25]"),
    "data.path": ("null", "a/b.txt", "'c,d'"),
    "checkpoint.save_interval": ("null", "5"),
    "log.runs_dir": ("runs/mine",),
    "model.moe": ("{num_experts: 4, ffn_hidden_size: 64}",),
    "model.moe.router_topk": ("2",),
}
"""Keys with values in the grammar of a command line.

Not all of these configurations make sense; all compose.
"""


def lines(seed: int) -> list[str]:
    """Return a random command line."""
    rng = random.Random(seed)
    words = [
        f"{group}={rng.choice(choices_of_group(group))}" for group in GROUPS if rng.random() < 0.35
    ]
    if rng.random() < 0.4:
        words = [word for word in words if not word.startswith("parallel=")] + [
            f"parallel={rng.choice(LAYOUTS)}"
        ]
    keys = rng.sample(sorted(VALUES), rng.randint(0, 6))
    if "model.moe" in keys and "model.moe.router_topk" in keys:  # said twice
        keys.remove("model.moe")
    signs = ("", "", "++")
    words += [f"{rng.choice(signs)}{key}={rng.choice(VALUES[key])}" for key in keys]
    if rng.random() < 0.4:
        words.append(f"recipe={rng.choice(recipe_names())}")
    rng.shuffle(words)
    return words


@contextmanager
def _stored(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words for Hydra: layouts and the recipe are configurations of its store, and new
    keys are added.
    """
    store = ConfigStore.instance()
    out = []
    texts = [word.partition("=")[2] for word in words if word.startswith("parallel=")]
    recipe = next((word.partition("=")[2] for word in words if word.startswith("recipe=")), None)
    known = yaml.safe_load((conf_dir() / "config.yaml").read_text())["defaults"]
    texts += [
        entry["parallel"] for entry in known if isinstance(entry, dict) and "parallel" in entry
    ]
    if recipe is not None:
        said = OmegaConf.load(recipes_dir() / f"{recipe}.yaml")
        texts += [
            str(v)
            for entry in said.get("defaults", [])
            for k, v in entry.items()
            if k.endswith("/parallel")
        ]
        for group in {word.partition("=")[0] for word in words} & {*GROUPS}:
            # a choice on the command line replaces what a recipe says of its group
            said.pop(group, None)  # type: ignore[call-arg]
        store.store(group="recipe", name="this", node=said, package="_global_")
        out.append("+recipe=this")
    for text in texts:
        if text not in choices_of_group("parallel"):
            store.store(group="parallel", name=text, node=parse_layout(text))
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key != "recipe":
            out.append(word.lstrip("+") if key in GROUPS else f"++{word.lstrip('+')}")
    yield out


def by_hydra_alone(words: Sequence[str]) -> dict[str, Any]:
    """Return the result of `hydra.compose` for `conf/` and a command line."""
    with _stored(words) as arguments, initialize_config_dir(str(conf_dir()), version_base="1.3"):
        found = OmegaConf.to_container(hydra_compose("config", arguments), resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def composed_by_us(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the values that the composer passes to the schema."""
    handed: list[dict[str, Any]] = []
    from mtrain.config.compose import composer as module

    validate = module.validate

    def noted(values: dict[str, Any], where: Any) -> Any:
        handed.append(dict(values))
        return validate(values, where)

    monkeypatch.setattr(module, "validate", noted)
    with suppress(module.Rejected):
        compose(words)
    return handed[0]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(CASES))
def test_hydra_composes_equal_trees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = lines(seed)
    ours = composed_by_us(words, monkeypatch)
    assert ours == by_hydra_alone(words), words


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(CASES))
def test_hydra_origin_states_every_value(seed: int) -> None:
    """Trace each value to the command line, or to the named line of the named file, which has
    it.
    """
    words = [
        word
        for word in lines(seed)
        if not word.lstrip("+").startswith(("model.moe", "model.name", "data.split"))
    ]

    try:
        composed = compose(words)
    except Rejected as error:
        if error.partial is None:
            return
        composed = error.partial
    said = {word.lstrip("+").partition("=")[0] for word in words}
    for key, origin in composed.origins.items():
        if key in said:
            assert origin == "command line", (key, words)
            continue
        file, _, number = origin.rpartition(":")
        if not number.isdigit():
            assert origin in ("default", "command line"), (key, origin)
            assert origin == "default" or key.startswith("parallel."), (key, origin, words)
            continue
        root = conf_dir().parent if file.startswith("conf/") else recipes_dir().parent
        line = (root / file).read_text().splitlines()[int(number) - 1]
        last = key.rpartition(".")[2]
        assert re.search(rf"\b{last}:", line) or "parallel:" in line, (key, origin, line)


def test_hydra_other_application_in_process_continues(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert hydra_compose("config").x == 1
        compose(["model=llama3_8b"])
        assert hydra_compose("config", ["x=2"]).x == 2
