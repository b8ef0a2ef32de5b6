"""`generate RUN`: text from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mtrain import api
from mtrain.cli.named_values import OFF, ON, Word, number, read_words, texts, whole
from mtrain.cli.output import refusal, say_json
from mtrain.config.compose.paths import program
from mtrain.config.disk.files import kind_of
from mtrain.errors import say_page
from mtrain.launching.local import Source
from mtrain.loading.checkpoints import source_of, target_of

USAGE = f"{program()} generate runs/<name> [prompt=TEXT] [tokens=N] [temperature=T] [overrides]"
WORDS = {
    "prompt": Word(None, aka=("text", "input")),
    "prompts": Word(None, Path),
    "chat": OFF,
    "tokens": replace(
        whole(64, 0, 10**6, "64", "a number of at least 0"), aka=("max_length", "n_predict")
    ),
    "temperature": Word(0.8, number(float, 0, 1e6), "a number of at least 0", "0.8", ("temp",)),
    "top_k": whole(0, 0, 10**9, "50", "a whole number of at least 0, which keeps all"),
    "top_p": Word(1.0, number(float, 0, 1, above=True), "a number above 0, and at most 1", "0.9"),
    "min_p": Word(0.0, number(float, 0, 1), "a number from 0 to 1", "0.05"),
    "seed": whole(None, 0, 2**63 - 1, "1"),
    "stop": Word((), texts, "a text, or a JSON list of texts", '"\\n\\n"', many=True),
    "batch": whole(8, 1, 4096, "8", "a whole number from 1 to 4096"),
    "cache": ON,
}
PROMPT = "def "
MAX_BYTES = 64 << 20
LINES_OF_JSON = (".jsonl", ".json")


def run(words: list[str], *, as_json: bool = False) -> int:
    """Print how the newest checkpoint of a run, or a named one, continues each prompt."""
    target, rest = target_of(words, "generate", USAGE)
    own, overrides = read_words(rest, WORDS)
    source = source_of(target, USAGE)
    prompts, is_chat = _prompts(own, source)
    names = ("tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    written = api.generate(
        target,
        prompts,
        sampling=api.Sampling(**{name: own[name] for name in names}),
        stop=[stop for stop in own["stop"] if stop],
        batch=own["batch"],
        cache=own["cache"],
        overrides=overrides,
    )
    if as_json:
        facts = {
            "texts": [asdict(one) for one in written.texts],
            "tokens": written.tokens,
            "seconds": written.seconds,
            "tokens_per_s": written.tokens_per_s,
            "no_cache": written.no_cache or None,
            "no_graph": written.no_graph or None,
            "steady_tokens_per_s": written.steady_tokens_per_s,
        }
        say_json(facts)
        return 0
    for place, one in enumerate(written.texts, 1):
        head = "" if len(written.texts) == 1 else f"[{place}] "
        say_page(head + ("" if is_chat else one.prompt) + one.text)
    if written.no_cache:
        say_page(f"note: keys and values are recomputed: {written.no_cache}", error=True)
    if written.no_graph:
        say_page(f"note: steps are not captured: {written.no_graph}", error=True)
    speed = f"{written.seconds:.2f} s, {written.tokens_per_s:.1f} tokens/s"
    say_page(f"{written.tokens} tokens in {speed}", error=True)
    return 0


def _prompts(words: dict[str, Any], source: Source) -> tuple[list[str], bool]:
    """Return the prompts as texts, and whether any is a chat."""
    if words["prompt"] is not None and words["prompts"] is not None:
        rule = "prompt and prompts are both set"
        raise refusal(rule, "one of the two", "MT004", "prompt", words["prompt"])
    plain = words["prompt"] if words["prompt"] is not None else PROMPT
    prompts = [plain] if words["prompts"] is None else read_prompts(words["prompts"])
    if not (words["chat"] or any(isinstance(one, list) for one in prompts)):
        return prompts, False
    from mtrain.data.chats.template import ChatFormat

    template = ChatFormat(source.tokenizer.parent)
    rendered = []
    for one in prompts:
        if isinstance(one, list):
            rendered.append(template.render(one))
        elif words["chat"]:
            rendered.append(template.render([{"role": "user", "content": one}]))
        else:
            rendered.append(one)
    return rendered, True


def read_prompts(path: Path) -> list[Any]:
    """Return the prompts of a file: each line is one, of a .jsonl a JSON string, an object with
    `prompt` or `messages`, or a list of messages. A prompt is a text, or the messages of a chat.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    path = path.expanduser()
    try:
        # A pipe or a device would be read without an end.
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
        raise refusal(rule, "a file with a prompt a line", "MT002", "prompts", str(path))
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
    raise refusal(rule, '"a prompt"', "MT003", "prompts", line, where)


def _are_messages(value: Any) -> bool:
    messages: Sequence[Any] = value if isinstance(value, list) else ()
    return bool(messages) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    )
