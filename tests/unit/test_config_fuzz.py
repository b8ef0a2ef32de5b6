"""Seeded nonsense: every input ends in a configuration or in problems, never in a traceback, and
never slowly.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
from pathlib import Path

import pytest

from mtrain.config.messages.keys import schema_keys
from tests.support.fuzz import CANARY, attacks, mutations, validated, warm
from tests.support.hostile import kinds

pytestmark = pytest.mark.full

KEYS = [
    *schema_keys(),
    "model",
    "parallel",
    "recipe",
    "run",
    "hydra",
    "model.moe",
    "foo.bar",
    "model.moe.x.y",
]
VALUES = (
    "",
    "0",
    "-1",
    "2.5",
    "nan",
    "1e400",
    "null",
    "true",
    "[1,2]",
    "{a: 1}",
    "a b",
    "'x'",
    '"',
    "~nobody/x",
    "a\0b",
    "${model.name}",
    "${x",
    "1,2",
    "range(1)",
    "tp-1",
    "../x",
    "x" * 300,
    "9" * 5000,
    "[[[",
    "\\'",
    "é\u202e",
    "extend_list(1)",
)


def test_config_fuzz_mutated_recipes_are_judged(tmp_path: Path) -> None:
    warm()
    found = mutations(60, seed=1, file=tmp_path / "r.yaml")
    assert {"accepted", "MT003"} <= found.keys()
    assert len(found) >= 5, "the mutations are all of a few kinds"


def test_config_fuzz_hostile_input_is_refused_without_effect(tmp_path: Path) -> None:
    warm()
    assert kinds() >= 500
    found = attacks(60, seed=1, file=tmp_path / "r.yaml")
    assert found["MT006"] > 12


def test_config_fuzz_canary_detects_each_side_effect(tmp_path: Path) -> None:
    deeds = {
        "open": lambda: (tmp_path / "x").write_text("x"),
        "socket.bind": lambda: socket.socket().bind(("127.0.0.1", 0)),
        "os.system": lambda: os.system("true"),
        "subprocess.Popen": lambda: subprocess.run(["true"], check=True),
        "os.mkdir": lambda: (tmp_path / "y").mkdir(),
        "exec": lambda: exec("1"),
    }
    for name, deed in deeds.items():
        with pytest.raises(AssertionError, match=name), CANARY.watching():
            deed()


def test_config_fuzz_command_line_nonsense_is_judged() -> None:
    rng = random.Random(1)
    warm()
    for _ in range(50):
        signs = ("=", "=", "=", "", "==", "@a=", "/b=", ":")
        validated(
            [
                f"{rng.choice(KEYS)}{rng.choice(signs)}{rng.choice(VALUES)}"
                for _ in range(rng.randint(1, 3))
            ]
        )
