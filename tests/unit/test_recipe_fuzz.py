"""Seeded nonsense in what is imported, compared and verified: an answer or problems, no traceback,
never slow.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.cli.recipe.files import diff
from mtrain.config.compose.composer import compose
from mtrain.config.compose.lock_file import read_lock
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import ConfigError, MtrainError
from mtrain.recipes.delta import delta, recipe_text
from mtrain.recipes.huggingface.importer import import_config
from mtrain.recipes.lock import lock_text, mismatches
from mtrain.recipes.megatron.importer import import_scripts
from mtrain.recipes.megatron.table import known_flags
from tests.support.configs import LAPTOP
from tests.unit.test_recipe_hf import DEEPSEEK, LLAMA3

pytestmark = pytest.mark.full

FOLDER = Path(__file__).resolve().parents[1] / "support/megatron_scripts"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
YAML = sorted(FOLDER.glob("*.yaml"))
PIECES = (
    "$(",
    "${",
    "$((",
    "`",
    "'",
    '"',
    "\\",
    "\n",
    "#",
    "(",
    ")",
    "<<E",
    ";",
    "&&",
    "|",
    "=",
    "${A[@]}",
    "$A",
    "\0",
    "then",
    "else",
    "elif",
    "case",
    "esac",
    "[[",
    "]]",
    "((",
    "))",
    "||",
    "{",
    "}",
    "!",
    ";;",
    "do",
    "done",
    "-1",
    "0",
    "1e400",
    "nan",
    "9" * 40,
    "x" * 300,
    "é",
    "--",
    "--=",
    "[0]*9",
    "(((((",
    "*",
    "~",
    "if",
    "fi",
    "\t",
)


def mutated(text: str, rng: random.Random, pieces: tuple[str, ...]) -> str:
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text = text[:at] + rng.choice(pieces) + text[at:]
            case 1:
                text = text[:at] + text[at + rng.randint(1, 30) :]
            case 2:
                words = text.split(" ")
                words[rng.randrange(len(words))] = rng.choice(pieces)
                text = " ".join(words)
            case _:
                text = text[:at] + text[rng.randrange(len(text) + 1) :][:200] + text[at:]
    return text


def answered(work: Callable[[], object]) -> None:
    start = time.process_time()
    rules = ["answered"]
    try:
        work()
    except ConfigError as error:
        rules = [problem.rule for problem in error.problems]
    except MtrainError as error:
        rules = [str(error)]
    assert all(rules)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_recipe_fuzz_script_is_imported_or_refused(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    flags = tuple(sorted(known_flags()))
    file = tmp_path / "x.sh"

    def work() -> None:
        run = import_scripts([file]).run
        (tmp_path / "r.yaml").write_text(recipe_text(delta(run), {"title": "x"}))
        if "${" not in str(run.to_dict()):  # a literal `${` cannot stand in a recipe
            assert compose([f"recipe={tmp_path / 'r.yaml'}"]).run.digest() == run.digest()

    for _ in range(60 if seed else 12):
        file.write_text(
            mutated(rng.choice(SCRIPTS).read_text(), rng, (*PIECES, *rng.sample(flags, 20)))
        )
        answered(work)


def test_recipe_fuzz_numbers_end_with_report_or_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the whole command: its report may be about a run that breaks any rule, such as one with
    too few ranks.
    """
    rng = random.Random(11)
    codes = set()
    for _ in range(25):
        source = rng.choice([*SCRIPTS, *YAML, *YAML])
        words = re.split(r"(?<![\w.])([0-9]+)(?![\w.])", source.read_text())
        for index in rng.sample(range(1, len(words), 2), 4):
            words[index] = rng.choice(
                ("0", "1", "3", "7", "64", "1000", "-1", "1e3", "x", "0.5", "9" * 19)
            )
        file = tmp_path / f"x{source.suffix}"
        file.write_text("".join(words))
        start = time.process_time()
        codes.add(main(["recipe", "import", str(file)]))
        assert time.process_time() - start < 2
    assert codes == {0, 2}, capsys.readouterr().err[-2000:]


def test_recipe_fuzz_foreign_config_is_imported_or_refused(tmp_path: Path) -> None:
    rng = random.Random(5)
    file = tmp_path / "config.json"
    values = (
        "null",
        "[]",
        "{}",
        "-1",
        '"x"',
        "true",
        "1e999",
        "NaN",
        '{"factor": "big"}',
        "[[[[",
        "9" * 50,
    )
    for _ in range(150):
        text = json.dumps(rng.choice([LLAMA3, DEEPSEEK]))
        for _ in range(rng.randint(1, 4)):
            parts = text.split(", ")
            index = rng.randrange(len(parts))
            parts[index] = f"{parts[index].split(':')[0]}: {rng.choice(values)}"
            text = ", ".join(parts)
        file.write_text(text if rng.random() < 0.8 else mutated(text, rng, PIECES))
        answered(lambda: import_config(file))


def test_recipe_fuzz_lock_is_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(7)
    file = tmp_path / "x.lock.yaml"
    text = lock_text(
        resolve(compose([]).run, LAPTOP), {"data": "a"}, {"conf/config.yaml": "a"}, LAPTOP
    )
    for _ in range(150):
        file.write_text(
            mutated(
                text,
                rng,
                (*PIECES, "!!python/name:os.system", "&a", "*a", "_target_", "${oc.env:HOME}"),
            )
        )
        answered(lambda: mismatches(read_lock(file), {}, {}, LAPTOP))


def test_recipe_fuzz_file_is_compared_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(9)
    file = tmp_path / "x.yaml"
    text = "defaults:\n  - override /model: llama3_8b\noptim: {lr: 3e-4}\nmodel: {num_layers: 2}\n"
    for _ in range(100):
        file.write_text(
            mutated(text, rng, (*PIECES, "_target_", "hydra", "${oc.env:HOME}", "null", "{}"))
        )
        answered(lambda: diff([str(file), "llama/tiny_cpu"], as_json=False))
    capsys.readouterr()
