"""`generate RUN`: text from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder as ckpt_folder
from mtrain.cli.resume import beneath, relaid, run_file, target_of
from mtrain.cli.setup import load, say_replaced
from mtrain.cli.words import Word, number, read_words, texts, yes
from mtrain.config.compose.dump import override
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import CHECKPOINTS, program
from mtrain.config.disk.files import kind_of
from mtrain.config.messages.keys import schema_keys
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.launching import local, preflight
from mtrain.models.registry import family_of
from mtrain.train.generate.request import Request, Sampling

USAGE = f"{program()} generate runs/<name> [prompt=TEXT] [tokens=N] [temperature=T] [overrides]"
_OF_SAMPLES = frozenset(
    f"data.{key}"
    for key in (
        *(
            "kind",
            "seq_length",
            "split",
            "packed",
            "packed_multiple",
            "eod_mask_loss",
            "prefetch",
            "cache_dir",
        ),
        *("suffixes", "tokenizer_vocab_size", "remote_cache_gib"),
    )
)
"""Keys that say nothing of a corpus."""
_OF_A_CORPUS = {
    key: field.get_default(call_default_factory=True)
    for key, field in schema_keys().items()
    if key.startswith("data.") and key not in _OF_SAMPLES
}
WITHOUT_START = "peft.init_from=null"
"""The adapters that a run began with are in its checkpoint."""
WITHOUT_DATA = (
    "data.kind=mock",
    *(override(key, default) for key, default in _OF_A_CORPUS.items()),
    "trainer.sample_tokens=0",
    WITHOUT_START,
)
"""The corpus of the run may be gone: its tokenizer is in the run folder."""
WORDS = {
    "prompt": Word(None, aka=("text", "input")),
    "prompts": Word(None, Path),
    "chat": Word(False, yes, "true or false", "chat=true"),
    "tokens": Word(
        64,
        number(int, 0, 1e6),
        "a number of at least 0",
        "tokens=64",
        aka=("max_length", "n_predict"),
    ),
    "temperature": Word(
        0.8, number(float, 0, 1e6), "a number of at least 0", "temperature=0.8", aka=("temp",)
    ),
    "top_k": Word(
        0, number(int, 0, 1e9), "a whole number of at least 0, which keeps all", "top_k=50"
    ),
    "top_p": Word(
        1.0, number(float, 0, 1, above=True), "a number above 0, and at most 1", "top_p=0.9"
    ),
    "min_p": Word(0.0, number(float, 0, 1), "a number from 0 to 1", "min_p=0.05"),
    "seed": Word(None, number(int, 0, 2**63 - 1), "a whole number of at least 0", "seed=1"),
    "stop": Word((), texts, "a text, or a JSON list of texts", 'stop="\\n\\n"', many=True),
    "batch": Word(8, number(int, 1, 4096), "a whole number from 1 to 4096", "batch=8"),
    "cache": Word(True, yes, "true or false", "cache=true"),
}
PROMPT = "def "
MAX_BYTES = 64 << 20
LINES_OF_JSON = (".jsonl", ".json")


def run(argv: list[str], *, as_json: bool = False) -> int:
    """Print what the newest checkpoint of a run, or the checkpoint named, writes after
    each prompt.
    """
    target, rest = target_of(argv, "generate", USAGE)
    words, overrides = read_words(rest, WORDS)
    source = source_of(target, USAGE)
    request = _request(words, source, as_json)
    said = [f"run={run_file(target)}", *beneath([*WITHOUT_DATA, *relaid(overrides)], overrides)]
    composed = load(said)
    say_replaced(composed)
    must_write(composed.run)
    preflight.check(composed.run, said)
    local.generate(composed.run, source, request)
    return 0


def must_write(run: RunConfig) -> None:
    """Raise ConfigError for a model that continues no text, and a layout that splits a sequence
    over ranks.
    """
    if not family_of(run.model).writes:
        rule = f"a model of the family {run.model.family} does not continue texts"
        raise ConfigError(
            [Problem("MT247", "model.family", run.model.family, rule, "evaluate, for its loss")]
        )
    if run.parallel.cp > 1:
        rule = f"text is generated with whole sequences on a rank, and cp is {run.parallel.cp}"
        raise ConfigError([Problem("MT313", "parallel.cp", run.parallel.cp, rule, "parallel.cp=1")])


def source_of(target: Path, usage: str) -> local.Source:
    """Return the checkpoint of a run or checkpoint folder, and the tokenizer that the run kept.

    Raises:
        ConfigError: there is no checkpoint, or no tokenizer.
    """
    home, checkpoint = checkpoint_of(target, usage)
    tokenizer = home / "tokenizer.json"
    if not tokenizer.is_file():
        rule = (
            f"{home} has no tokenizer.json: its data has no tokenizer, so no text can be generated"
        )
        raise ConfigError(
            [
                Problem(
                    "MT506",
                    "",
                    None,
                    rule,
                    "a run on data=stdlib, data=text or data.tokenizer=FILE",
                )
            ]
        )
    return local.Source(checkpoint, tokenizer)


def checkpoint_of(target: Path, usage: str) -> tuple[Path, Path]:
    """Return the run folder and the checkpoint of a run or checkpoint folder.

    Raises:
        ConfigError: the run has no checkpoint.
    """
    if target.parent.name == CHECKPOINTS:
        return target.parent.parent, target
    saved = ckpt_folder.committed(target / CHECKPOINTS)
    if not saved:
        raise ConfigError([Problem("MT502", "", None, f"{target} has no checkpoint yet", usage)])
    return target, saved[-1]


def _request(words: dict[str, Any], source: local.Source, as_json: bool) -> Request:
    if words["prompt"] is not None and words["prompts"] is not None:
        rule = "prompt and prompts are both said"
        raise ConfigError(
            [Problem("MT004", "prompt", words["prompt"], rule, "one of the two", COMMAND_LINE)]
        )
    plain = words["prompt"] if words["prompt"] is not None else PROMPT
    prompts = [plain] if words["prompts"] is None else read_prompts(words["prompts"])
    chats = [
        one if isinstance(one, list) else [{"role": "user", "content": one}] for one in prompts
    ]
    is_chat = [words["chat"] or isinstance(one, list) for one in prompts]
    if any(is_chat):
        from mtrain.data.chat import ChatFormat

        form = ChatFormat(source.tokenizer.parent)
        prompts = [
            form.render(c) if is_one else p
            for p, c, is_one in zip(prompts, chats, is_chat, strict=True)
        ]
    names = ("tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    return Request(
        prompts=tuple(prompts),
        sampling=Sampling(**{name: words[name] for name in names}),
        stop=tuple(stop for stop in words["stop"] if stop),
        rows=words["batch"],
        cache=words["cache"],
        with_prompt=not any(is_chat),
        as_json=as_json,
    )


def read_prompts(path: Path) -> list[Any]:
    """Return the prompts of a file: each line is one, of a .jsonl a JSON string, an object with
    `prompt` or `messages`, or a list of messages. A prompt is a text, or the messages of a chat.

    Raises:
        ConfigError: the file cannot be read, or a line is none of this.
    """
    path = path.expanduser()
    try:
        kind = kind_of(path) or ("too large" if path.stat().st_size > MAX_BYTES else "")
        if kind:
            lines = []
        else:
            lines = [line for line in path.read_bytes().decode().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        kind = f"not readable: {getattr(error, 'strerror', None) or error}"
        lines = []
    if not lines:
        rule = f"the file is {kind or 'empty'}"
        raise ConfigError(
            [
                Problem(
                    "MT002", "prompts", str(path), rule, "a file with a prompt a line", COMMAND_LINE
                )
            ]
        )
    if path.suffix not in LINES_OF_JSON:
        return list(lines)
    return [_from_json(line, f"{path}:{i}") for i, line in enumerate(lines, 1)]


def _from_json(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, str) or _are_messages(value):
        return value
    rule = (
        'must be a JSON string, {"prompt": TEXT} or {"messages": [{"role": ..., "content": ...},'
        " ...]}"
    )
    raise ConfigError([Problem("MT003", "prompts", line, rule, '"a prompt"', where)])


def _are_messages(value: Any) -> bool:
    messages: Sequence[Any] = value if isinstance(value, list) else ()
    return bool(messages) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    )
