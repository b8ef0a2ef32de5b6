"""Precedence of layers that set the same key, for every pair of layers; the named line is the one
that set it.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from tests.support.covering import some

VALUES = {
    "default": 0.11,
    "recipe": 0.12,
    "command": 0.13,
    "base": 0.01,
    "recipe value": 0.5,
    "command value": 0.6,
}
"""Values of optim.lr in each layer; a base of a file has a slightly lower value than the file."""
KINDS = ("plain", "own", "nested", "both")
"""A group file that does not set the key; sets it; stands on one that does; and both."""


def _files(folder: Path, chooser: str) -> None:
    """Write the four kinds of file for one chooser, with the key on a line of its own in each."""
    own = VALUES[chooser]
    base = VALUES[chooser] - VALUES["base"]
    nested = f"defaults:\n  - base_{chooser}\n  - _self_\n"
    texts = {
        f"base_{chooser}": f"# a base\n\nname: adamw\n\nlr: {base:.2f}\n",
        f"plain_{chooser}": "name: adamw\n",
        f"own_{chooser}": f"name: adamw\n# a remark\nlr: {own}\n",
        f"nested_{chooser}": nested + "\nweight_decay: 0.1\n",
        f"both_{chooser}": nested + f"\nweight_decay: 0.1\nlr: {own}\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


LINES = {"own": ("own", 3), "nested": ("base", 5), "both": ("both", 6)}
"""Kind -> which file has the key, and on which line."""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "conf"
    shutil.copytree(paths.conf_dir(), folder)
    for chooser in ("default", "recipe", "command"):
        _files(folder / "optim", chooser)
    monkeypatch.setattr(paths, "conf_dir", lambda: folder)
    return folder


def _default(conf: Path, kind: str) -> None:
    config = (conf / "config.yaml").read_text()
    line = next(row for row in config.splitlines() if row.strip().startswith("- optim:"))
    (conf / "config.yaml").write_text(config.replace(line, f"  - optim: {kind}_default"))


def _expected(chosen: tuple[str, str], recipe: Path | None, command: bool) -> tuple[float, str]:
    """Return the effective value and its origin, from the chosen file and the values above it."""
    chooser, kind = chosen
    if command:
        return VALUES["command value"], "command line"
    if recipe is not None:
        return VALUES["recipe value"], f"{recipe}:5"
    if kind == "plain":
        return None, "default"
    file, line = LINES[kind]
    value = VALUES[chooser] - (VALUES["base"] if kind == "nested" else 0)
    return pytest.approx(value), f"conf/optim/{file}_{chooser}.yaml:{line}"  # type: ignore[return-value]


@pytest.mark.full
@pytest.mark.parametrize("kind", some(KINDS, ["both"]))
def test_precedence_higher_layer_wins_and_is_named(kind: str, conf: Path, tmp_path: Path) -> None:
    """Set the key in each layer, lowest first: schema, the base of a group file, the file itself, a
    recipe's values, the command line's.

    Which group file that is, the command line says before a recipe, and a recipe before
    `config.yaml`. A choice on the command line takes the place of all that a recipe says of its
    group.
    """
    _default(conf, kind)
    for in_recipe, on_command in itertools.product(
        (None, "plain", "own", "both"), (None, "plain", "own", "nested")
    ):
        for recipe_value, command_value in itertools.product((False, True), repeat=2):
            recipe = tmp_path / "mine.yaml"
            if in_recipe:
                choice = f"  - override /optim: {in_recipe}_recipe\n"
            else:
                choice = "  - override /model: llama_tiny\n"
            if recipe_value:
                value = f"optim:\n\n  lr: {VALUES['recipe value']}\n"
            else:
                value = "trainer:\n  seed: 1\n"
            recipe.write_text(f"defaults:\n{choice}{value}")
            words = [f"recipe={recipe}"]
            words += [f"optim={on_command}_command"] if on_command else []
            words += [f"optim.lr={VALUES['command value']}"] if command_value else []
            if on_command:
                chosen = ("command", on_command)
            else:
                if in_recipe:
                    chosen = ("recipe", in_recipe)
                else:
                    chosen = ("default", kind)
            composed = compose(words)
            found = composed.run.optim.lr, composed.origins["optim.lr"]
            # a choice on the command line replaces it
            holds = recipe if recipe_value and not on_command else None
            assert found == _expected(chosen, holds, command_value), words
            replaced = bool(on_command) and recipe_value and not command_value
            assert [w.path for w in composed.warnings] == (["optim"] if replaced else []), words


def test_precedence_choices_and_values_over_run_file(conf: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(run_yaml(compose(["optim.lr=0.3"]).run))
    line = next(n for n, row in enumerate(file.read_text().splitlines(), 1) if row == "  lr: 0.3")
    for kind, command_value in itertools.product((None, *KINDS), (False, True)):
        words = [f"run={file}"] + ([f"optim={kind}_command"] if kind else [])
        words += [f"optim.lr={VALUES['command value']}"] if command_value else []
        composed = compose(words)
        expected = (
            _expected(("command", kind), None, command_value) if kind else (0.3, f"{file}:{line}")
        )
        if kind is None and command_value:
            expected = VALUES["command value"], "command line"
        assert (composed.run.optim.lr, composed.origins["optim.lr"]) == expected, words


def test_precedence_explain_shows_overridden(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults:\n  - override /optim: both_recipe\noptim:\n\n  lr: 0.5\n")
    assert main(["explain", "--json", "optim.lr", f"recipe={recipe}", "optim.lr=0.6"]) == 0
    chain = json.loads(capsys.readouterr().out)["chain"]
    assert [(row["value"], row["source"]) for row in chain] == [
        ("null", "default"),
        ("0.11", "conf/optim/base_recipe.yaml:5"),
        ("0.12", "conf/optim/both_recipe.yaml:6"),
        ("0.5", f"{recipe}:5"),
        ("0.6", "command line"),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optim:\n  lr: 0.5\n", 2),
        ("# a\n\n# b\noptim:\n\n  # c\n  lr: 0.5   # d\n", 7),
        ("optim: {eps: 1e-8,\n  lr: 0.5}\n", 2),
        ("optim:\r\n  eps: 1e-8\r\n  lr: 0.5\r\n", 3),
        ("\ufeffoptim:\n  lr: 0.5\n", 2),
        ('"optim":\n  "lr": 0.5\n', 2),
        ("recipe:\n  purpose: >\n    many\n    lines\n\n    of it\noptim: {lr: 0.5}\n", 7),
        ("recipe: {title: 'two\n  lines'}\noptim:\n  lr:\n    0.5\n", 4),
        ("recipe: {title: &t \u00e9\u20ac\U0001f600, purpose: *t}\noptim:\n  lr: 0.5\n", 3),
        ("---\noptim:\n  lr: 0.5\n...\n", 3),
    ],
)
def test_precedence_line_is_right_in_any_style(text: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text.encode())
    composed = compose([f"recipe={file}"])
    assert (composed.run.optim.lr, composed.origins["optim.lr"]) == (0.5, f"{file}:{line}")


@pytest.mark.sampled
@pytest.mark.parametrize("part", range(3))
def test_precedence_shown_lines_hold_their_values(part: int) -> None:
    """Check each key that a file of a shared recipe set: the named line has its last value."""
    shared = sorted(
        p.relative_to(paths.recipes_dir()).with_suffix("").as_posix()
        for p in paths.recipes_dir().rglob("*.yaml")
    )[part::3]
    texts: dict[str, list[str]] = {}
    seen = 0
    for name in shared:
        composed = compose([f"recipe={name}"])
        for key, origin in composed.origins.items():
            file, _, number = origin.rpartition(":")
            if not number.isdigit():
                continue
            root = (
                paths.conf_dir().parent if file.startswith("conf/") else paths.recipes_dir().parent
            )
            lines = texts.setdefault(file, (root / file).read_text().splitlines())
            said = lines[int(number) - 1]
            word = key.rpartition(".")[2]
            assert f"{word}:" in said or ("parallel" in said and key.startswith("parallel.")), (
                key,
                origin,
                said,
            )
            seen += 1
    assert seen > 20 * len(shared)
