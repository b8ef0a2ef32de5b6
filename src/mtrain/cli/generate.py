"""`generate RUN`: text from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from mtrain.ckpt import folder as ckpt_folder
from mtrain.cli.resume import beneath, relaid, run_file, target_of
from mtrain.cli.setup import load
from mtrain.config.paths import CHECKPOINTS, program
from mtrain.errors import ConfigError, Problem
from mtrain.launching import local, preflight

USAGE = f"{program()} generate runs/<name> [prompt=TEXT] [tokens=N] [temperature=T] [overrides]"
WITHOUT_DATA = (
    "data.kind=mock",
    "data.path=null",
    "data.blend=null",
    "data.blend_weights=null",
    "data.tokenizer=null",
    "data.limit_mib=null",
    "trainer.sample_tokens=0",
)
"""The corpus of the run may be gone: its tokenizer is in the run folder."""
OPTIONS = {"prompt": "def ", "tokens": "64", "temperature": "0.8"}


def run(argv: list[str], *, debug: bool) -> int:
    """Print a continuation of `prompt` by the newest checkpoint of a run, or by the checkpoint named."""
    target, rest = target_of(argv, "generate", USAGE)
    options, overrides = dict(OPTIONS), []
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and key in OPTIONS:
            options[key] = value
        else:
            overrides.append(word)
    composed = load([f"run={run_file(target)}", *beneath([*WITHOUT_DATA, *relaid(overrides)], overrides)])
    if composed.run.parallel.cp > 1:
        cp = composed.run.parallel.cp
        rule = f"text is generated with whole sequences on a rank, and cp is {cp}"
        raise ConfigError([Problem("MT313", "parallel.cp", cp, rule, "parallel.cp=1")])
    preflight.check(composed.run, rest)
    tokens, temperature = _number(options, "tokens", int), _number(options, "temperature", float)
    local.generate(composed.run, _source(target), options["prompt"], int(tokens), temperature)
    return 0


def _source(target: Path) -> local.Source:
    """The checkpoint of a run or checkpoint folder, and the tokenizer that the run kept."""
    if target.parent.name == CHECKPOINTS:
        home, checkpoint = target.parent.parent, target
    else:
        home = target
        saved = ckpt_folder.committed(home / CHECKPOINTS)
        if not saved:
            raise ConfigError([Problem("MT502", "", None, f"{target} has no checkpoint yet", USAGE)])
        checkpoint = saved[-1]
    tokenizer = home / "tokenizer.json"
    if not tokenizer.is_file():
        rule = f"{home} has no tokenizer.json: its data has no tokenizer, so no text can be generated"
        raise ConfigError(
            [Problem("MT506", "", None, rule, "a run on data=stdlib, data=text or data.tokenizer=FILE")]
        )
    return local.Source(checkpoint, tokenizer)


def _number(options: dict[str, str], key: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(options[key])
    except ValueError:
        value = kind(-1)
    if not 0 <= value < 1e6:
        fix = f"{key}={OPTIONS[key]}"
        raise ConfigError(
            [Problem("MT003", key, options[key], "must be a number of at least 0", fix, "command line")]
        )
    return value
