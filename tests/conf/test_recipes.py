"""Every shared recipe: validated as a stranger's would be, valid for its hardware, and a short
delta.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.api import load as checked
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import recipes_dir
from mtrain.config.compose.yaml_reader import load
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import check
from tests.support.configs import LAPTOP
from tests.support.covering import some_recipes

RECIPES = sorted(recipes_dir().rglob("*.yaml"))
NAMES = [file.relative_to(recipes_dir()).with_suffix("").as_posix() for file in RECIPES]


def test_recipes_mission_set_is_present() -> None:
    assert {
        "llama/tiny_cpu",
        "llama3/8b_h100x8",
        "llama3/70b_h100x64",
        "mixtral/8x7b_h100x64",
    } <= set(NAMES)


@pytest.mark.parametrize("name", some_recipes(NAMES))
def test_recipes_pass_rules_without_warning(name: str) -> None:
    raw = compose([f"recipe={name}"]).run
    assert check(resolve(raw, LAPTOP), raw=raw, resolve=lambda run: resolve(run, LAPTOP)) == []


@pytest.mark.parametrize("file", RECIPES, ids=NAMES)
def test_recipes_are_short_deltas_with_header(file: Path) -> None:
    lines = [
        line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    block = [i for i, line in enumerate(lines) if line == "recipe:"]
    end = next(i for i in range(block[0] + 1, len(lines)) if not lines[i].startswith(" "))
    assert len(lines) - (end - block[0]) <= 12
    assert set(load(file).values["recipe"]) == {
        "title",
        "purpose",
        "hardware",
        "source",
        "verified",
    }


def test_recipes_70b_equals_published_recipe() -> None:
    run = resolve(compose(["recipe=llama3/70b_h100x64"]).run, LAPTOP)
    p = run.parallel
    t = run.trainer
    o = run.optim
    assert (p.tp, p.pp, p.sequence_parallel, p.ranks) == (4, 4, True, 64)
    assert (t.global_batch_size, t.micro_batch_size, run.data.seq_length) == (1024, 1, 4096)
    assert (o.lr, o.schedule, o.warmup_iters, o.weight_decay, o.clip_grad) == (
        3e-4,
        "cosine",
        2000,
        0.1,
        1.0,
    )
    assert run.precision.dtype == "bf16"


def test_recipes_laptop_equals_default_run() -> None:
    recipe, default = (
        checked(words, LAPTOP, {}).run for words in (["recipe=llama/tiny_cpu", "cluster=local"], [])
    )
    assert recipe.digest() == default.digest()


def test_recipes_comments_keep_digest(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("recipe: {title: another}\n")
    assert compose([f"recipe={file}"]).run.digest() == compose([]).run.digest()
