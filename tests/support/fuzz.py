"""Seeded nonsense and malice against `check`: a configuration or problems come out, and nothing
else happens.

`python -m tests.support.fuzz` validates 10,000 mutated recipes and 500 hostile inputs; an audit
hook notices every file that is written, socket, process, foreign import and code object; and a
sample through the command.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.api import TooFewDevices, load
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.paths import conf_dir, recipes_dir
from mtrain.errors import ConfigError, Problem
from tests.support.configs import LAPTOP, SECONDS, tiny, within_a_second
from tests.support.covering import EVERY_CASE, Part
from tests.support.hostile import hostile
from tests.support.mutators import mutated
from tests.support.patience import patient

ROOT = Path(__file__).resolve().parents[2]
SECRET = "CANARY", "b1rd-that-must-not-sing"
"""An environment variable that nothing may read out."""
FORBIDDEN = re.compile(
    r"(socket\.(connect|bind|sendto|getaddrinfo|gethostby.*)|subprocess\.Popen|os\.(system|exec|fork|forkpty|posix_spawn"
    r"|spawn|remove|rename|mkdir|rmdir|link|symlink|truncate|chmod|chown|putenv|unsetenv|kill)|shutil\..*|ctypes\..*"
    r"|pickle\.find_class|ftplib.*|urllib.*|smtplib.*|webbrowser.*|tempfile.*|builtins\.input)\Z"
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
KNOWN = (
    "mtrain",
    "hydra",
    "omegaconf",
    "antlr4",
    "pydantic",
    "yaml",
    "_yaml",
    "encodings",
    "importlib",
    "tests",
)


@dataclass
class Canary:
    """Audit hook that records forbidden events while something is validated."""

    armed: bool = False
    fired: tuple[str, ...] = ()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event if it is forbidden."""
        if self.armed and self._forbids(event, args):
            self.fired += (f"{event} {str(args)[:200]}",)

    @staticmethod
    def _forbids(event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            mode = args[1]
            flags = args[2]
            if isinstance(mode, str):
                return bool(set(mode or "") & set("wax+"))
            return bool(flags & WRITING)
        if event == "import":
            top = str(args[0]).partition(".")[0]
            return (
                top not in sys.modules and top not in KNOWN and top not in sys.stdlib_module_names
            )
        if event in ("exec", "compile", "marshal.loads"):
            # To import a module does all three, and the standard library compiles the classes that
            # it makes.
            frame: Any = sys._getframe(2)
            while frame is not None and frame.f_globals.get("__name__", "") != "tests.support.fuzz":
                if frame.f_code.co_filename.startswith(("<frozen importlib", sys.base_prefix)):
                    return False
                frame = frame.f_back
            return True
        return FORBIDDEN.match(event) is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Arm the canary inside the block.

        Raises:
            AssertionError: it fired, at the end of the block.
        """
        self.armed = True
        self.fired = ()
        try:
            yield
        finally:
            self.armed = False
        assert not self.fired, self.fired


CANARY = Canary()
sys.addaudithook(CANARY)


def validated(words: Sequence[str]) -> list[Problem]:
    """Return the problems that `check` finds in a command line, without warnings.

    Raises:
        AssertionError: it took long, fired the canary, leaked a secret, or refused without naming a
        key.
    """
    problems: list[Problem] = []
    with CANARY.watching(), within_a_second():
        try:
            said = str(load(words, LAPTOP, {}).run.to_dict())
        except (ConfigError, TooFewDevices) as error:
            problems = list(error.problems)
            said = str(error)
            assert problems, "refused without a problem"
    assert SECRET[1] not in said
    for problem in problems:
        assert problem.rule
        assert problem.path or re.search(r":\d+\Z", problem.source) or problem.code in WHOLE, (
            problem
        )
        assert problem.render().isprintable() or "\n" in problem.render()
    return problems


WHOLE = ("MT001", "MT002", "MT003", "MT005", "MT010")
"""Codes of what has neither a key nor a line: a file as a whole, an argument that the rule repeats.
"""


def texts() -> list[str]:
    """Return the texts to mutate: every shared recipe, group files as recipes, and a whole run
    file.
    """
    shared = [file.read_text() for file in sorted(recipes_dir().rglob("*.yaml"))]
    groups = [
        f"{file.parent.name}:\n" + "".join(f"  {line}\n" for line in file.read_text().splitlines())
        for file in sorted(conf_dir().glob("*/*.yaml"))
    ]
    return [*shared, *groups, run_yaml(tiny())]


def mutations(count: int, seed: int, file: Path, part: Part = EVERY_CASE) -> Counter[str]:
    """Validate a part of `count` mutated recipes; return how often each code came."""
    rng = random.Random(seed)
    originals = texts()
    codes = Counter[str]()
    for index in range(count):
        data = mutated(rng.choice(originals), rng)
        base = rng.choice(("recipe", "recipe", "run"))
        if not part.has(index):
            continue
        file.write_bytes(data)
        try:
            found = validated([f"{base}={file}"])
        except BaseException as error:
            raise AssertionError(
                f"seed {seed}, mutation {index}: {error!r}\n{data[:2000]!r}"
            ) from error
        codes.update({problem.code for problem in found} or {"accepted"})
    return codes


def attacks(count: int, seed: int, file: Path, part: Part = EVERY_CASE) -> Counter[str]:
    """Validate a part of `count` hostile inputs; those that exceed data must be refused."""
    codes = Counter[str]()
    for index, attack in enumerate(hostile(count, seed)):
        if not part.has(index):
            continue
        file.write_bytes(attack.data)
        words = [word.replace("{file}", str(file)) for word in attack.words]
        try:
            found = validated(words)
            assert found or not attack.must_fail, "was accepted"
        except BaseException as error:
            raise AssertionError(
                f"seed {seed}: {words} {attack.data[:2000]!r}: {error!r}"
            ) from error
        codes.update({problem.code for problem in found} or {"accepted"})
    return codes


def through_the_command(count: int, seed: int, folder: Path) -> None:
    """Run a sample through the command line: exit code 0 or 2, no traceback, and no leftovers."""
    rng = random.Random(seed)
    originals = texts()
    for index in range(count):
        (folder / "r.yaml").write_bytes(mutated(rng.choice(originals), rng))
        before = sorted(folder.iterdir())
        command = [sys.executable, str(ROOT / "launch.py"), "check", "recipe=r.yaml"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=patient(60)
        )
        assert done.returncode in (0, 2), (index, done.stderr)
        assert "Traceback" not in done.stderr + done.stdout, (index, done.stderr)
        assert sorted(folder.iterdir()) == before


def warm() -> None:
    """Import the modules that a validation imports late, so that the canary detects no import of
    ours.
    """
    os.environ[SECRET[0]] = SECRET[1]
    for words in (
        ["optim.lr=[1]", "model.hiden_size=[a,{b: c}]", "cluster.device=tpu"],
        ["recipe=llama/tiny_cpu"],
        ["parallel.auto=true", "cluster=h100"],  # the search imports the plan, and numpy
        [
            "recipe=llama/tiny_cpu",
            "cluster=a100",
            "parallel=tp2",
        ],  # what this machine lacks is for launching to say
        [],
    ):
        try:
            load(words, LAPTOP, {})
        except (ConfigError, TooFewDevices) as error:
            error.problems[0].render()


def main(argv: list[str] | None = None) -> int:
    """Validate all inputs and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=500)
    parser.add_argument("--commands", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=Part.parse, default="1/1", help="K/N: each N-th input")
    args = parser.parse_args(argv)
    warm()
    with tempfile.TemporaryDirectory() as home:
        began = time.monotonic()
        file = Path(home) / "r.yaml"
        recipes = mutations(args.recipes, args.seed, file, args.part)
        print(f"{recipes.total()} codes of mutated recipes: {dict(recipes.most_common())}")
        hostiles = attacks(args.hostile, args.seed, file, args.part)
        print(f"{hostiles.total()} codes of hostile inputs: {dict(hostiles.most_common())}")
        file.unlink()
        through_the_command(args.commands, args.seed, Path(home))
        print(f"{args.commands} through the whole command; {time.monotonic() - began:.0f} s in all")
        print(f"the slowest validation took {max(SECONDS):.2f} s of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
