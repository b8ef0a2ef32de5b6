"""`data tokenize` and `data train-tokenizer`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.cli.named_values import (
    OFF,
    ON,
    Word,
    one_of,
    read_arguments,
    required,
    texts,
    whole,
)
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import user_path
from mtrain.errors import say
from mtrain.units import MIB, bytes_, count, seconds

USAGE = "tokenize INPUT... --out PREFIX --tokenizer PATH"
TRAIN_USAGE = "train-tokenizer INPUT... --out tokenizer.json --vocab-size N"
END = "<|endoftext|>"
FORMATS = ("jsonl", "parquet", "arrow", "tar", "text")
ENGINES = ("auto", "tokenizers", "gigatoken")
KINDS = ("tokenizer.json", "sentencepiece", "tiktoken", "gpt2", "bert")


def special(text: str) -> tuple[tuple[str, int], ...]:
    """Parse special tokens and their ids from JSON."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(
        type(i) is int and 0 <= i < 1 << 24 for i in found.values()
    ):
        raise ValueError(text)
    return tuple(sorted(found.items(), key=lambda one: one[1]))


WORDS = {
    "out": Word(None, user_path),
    "tokenizer": Word(None, user_path),
    "key": Word("text"),
    "template": Word(None),
    "ignored_keys": Word((), texts, "a key, or a JSON list of keys", "loss", many=True),
    "format": Word(None, one_of(*FORMATS), f"one of {', '.join(FORMATS)}", "jsonl"),
    "lines": OFF,
    "eod": ON,
    "eod_token": Word(None),
    "sentences": Word(None),
    "keep_newlines": OFF,
    "special": Word("token", one_of("token", "text"), "token or text", "text"),
    "dtype": Word(None, one_of("uint16", "int32"), "uint16 or int32", "int32"),
    "workers": whole(None, 1, 4096, "4", "a whole number from 1 to 4096"),
    "max_rejects": whole(1000, 0, 1 << 62, "1000"),
    "max_document": whole(64, 1, 1024, "64", "MiB, from 1 to 1024"),
    "fresh": OFF,
    "overwrite": OFF,
    "kind": Word(None, one_of(*KINDS), f"one of {', '.join(KINDS)}", "sentencepiece"),
    "engine": Word("auto", one_of(*ENGINES), f"one of {', '.join(ENGINES)}", "gigatoken"),
    "merges": Word(None, user_path),
    "lower_case": ON,
    "pattern": Word(None),
    "special_tokens": Word((), special, "JSON of names and ids", """'{"<|endoftext|>": 100}'"""),
    "num_special_tokens": whole(1000, 7, 1 << 17, "1000", "a whole number from 7"),
    "vocab_size": whole(None, 1, 1 << 24, "131072"),
}
# words of one kind of tokenizer
OF_KIND = {"merges": "gpt2", "lower_case": "bert"} | dict.fromkeys(
    ("pattern", "special_tokens", "num_special_tokens", "vocab_size"), "tiktoken"
)


def tokenize(words: Sequence[str], *, as_json: bool) -> int:
    """Make `.bin/.idx` of documents; return the exit code."""
    values, inputs = read_arguments(words, WORDS, USAGE)
    prefix = prefix_of(required(values, "out", USAGE))
    # Workers are processes: threads of tokenizers in each of them would compete for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from mtrain.data.preprocess.build import Limits
    from mtrain.data.preprocess.build import tokenize as build

    job = job_of(values, inputs)
    # the cores that this process may use: a container or a scheduler may give it fewer than all
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = values["workers"] or cores or 1
    limits = Limits(workers, values["max_rejects"], values["fresh"], values["overwrite"])
    with Shown([source.size for source in job.sources], speaks=not as_json) as shown:
        made = build(job, prefix, limits, shown, partial(say, error=True))
    if as_json:
        say(strict_json.dumps(made))
    else:
        say(*summary(prefix, made, shown.seconds))
    return 0


def job_of(values: Mapping[str, Any], inputs: Sequence[Path]) -> Any:
    """Return the job that every process receives.

    Raises:
        ConfigError: an input, the template or the tokenizer is invalid.
    """
    from mtrain.data.preprocess.sources import find_sources
    from mtrain.data.preprocess.workers import Job

    if values["keep_newlines"] and values["sentences"] is None:
        rule = "has no effect where documents are not cut into sentences"
        raise refusal(rule, "sentences=english", "MT003", "keep_newlines", True)
    return Job(
        spec_of(values),
        reading_of(values),
        tuple(find_sources(inputs, values["format"])),
        values["dtype"],
        values["eod"],
        values["sentences"],
        values["keep_newlines"],
    )


def reading_of(values: Mapping[str, Any]) -> Any:
    """Return how the text of a record is read.

    Raises:
        ConfigError: the template is invalid, or a key is named too.
    """
    from mtrain.data.preprocess.record import reading

    if values["template"] is not None and values["key"] != "text":
        rule = "a template names its keys; key= would have no effect"
        raise refusal(rule, "one of both", "MT004", "key", values["key"])
    return reading(
        values["key"],
        values["template"],
        by_line=values["lines"],
        max_bytes=values["max_document"] * MIB,
        ignored=tuple(values["ignored_keys"]),
    )


def spec_of(values: Mapping[str, Any]) -> Any:
    """Return the named tokenizer.

    Raises:
        ConfigError: no tokenizer is named, or it does not exist.
    """
    from mtrain.data.preprocess.encoder import find_tokenizer

    path = required(values, "tokenizer", USAGE)
    spec = find_tokenizer(
        path,
        values["merges"],
        values["kind"],
        plain=values["special"] == "text",
        engine=values.get("engine", "auto"),
        eod_token=values["eod_token"],
        lower_case=values["lower_case"],
        pattern=values["pattern"] or ("v2" if path.suffix == ".json" else "cl100k"),
        special_tokens=values["special_tokens"],
        num_special_tokens=values["num_special_tokens"],
        vocab_size=values["vocab_size"],
    )
    # A word without effect would look as if it had one.
    for name, kind in OF_KIND.items():
        if spec.kind != kind and values[name] != WORDS[name].default:
            rule = f"has no effect: it is of {kind}, and this tokenizer is {spec.kind}"
            raise refusal(rule, "leave it out", "MT003", name, values[name])
    return spec


def prefix_of(path: Path) -> Path:
    """Return a prefix, which is no file.

    Raises:
        ConfigError: it is the name of one of its files, or no name.
    """
    if path.suffix in (".bin", ".idx"):
        rule = f"cannot be a prefix because it ends in {path.suffix}"
        raise refusal(rule, f"out={path.with_suffix('')}", "MT602", "out", str(path))
    if not path.name or path.name == ".." or os.path.isdir(path):
        rule = "cannot be a prefix because it is a folder"
        raise refusal(rule, f"out={path / 'corpus'}", "MT602", "out", str(path))
    return path


def summary(prefix: Path, made: Mapping[str, Any], took: float) -> list[str]:
    """Describe a new corpus for a person."""
    from mtrain.data.preprocess.workers import BY
    from mtrain.data.records import FLAGS

    text = sum(one["text_bytes"] for one in made["inputs"])
    size = sum(one["bytes"] for one in made["files"].values())
    lines = [
        f"{prefix}: {count(made['documents'])} documents, {count(made['tokens'])} tokens"
        f" ({made['dtype']}, ids to {made['largest_id']}), {bytes_(size)}, of {bytes_(text)} of"
        f" text in {seconds(took)} by {made['tokenizer']['library']}"
    ]
    if made["rejected"]:
        lines.append(f"{made['rejected']} records left out: {prefix}.rejects.jsonl")
        lines += by_keys(
            {key: sum(one.get(f"{BY}{key}", 0) for one in made["inputs"]) for key in FLAGS}
        )
    return lines


def by_keys(counts: Mapping[str, int]) -> list[str]:
    """Describe the records that one of their keys excluded; `counts`: records by key."""
    fix = "where that does not say whether a record is learned, ignored_keys="
    return [
        f"  {many} left out because {key} is 0 or false; {fix}{key}"
        for key, many in counts.items()
        if many
    ]


class Shown:
    """The progress of a run: a line with rate and time left, only on a terminal."""

    def __init__(self, sizes: Sequence[int], *, speaks: bool) -> None:
        self._sizes = sizes
        self._seen = [0] * len(sizes)
        self._read = 0
        self._done = 0
        self._total = sum(sizes)
        self._last = 0
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        # A log file must not fill with the frames of a bar.
        self._live = speaks and sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began

    def __enter__(self) -> Shown:
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("tokenize"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
            more = (TextColumn("{task.fields[line]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, *more, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("tokenize", total=self._total, line="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, unit: Any, totals: Any) -> None:
        """Count a finished unit."""
        for part in unit:
            while self._last < part.source:
                # Units come in the order of their files. Units of a packed file do not add up to
                # its size on disk: a finished file counts as whole.
                self._done += self._sizes[self._last] - self._seen[self._last]
                self._last += 1
            step = min(part.size, self._sizes[part.source] - self._seen[part.source])
            self._seen[part.source] += step
            self._done += step
            self._read += part.size
        if self._bar is not None:
            rate = self._read / max(1e-9, self.seconds) / 1e6
            line = f"{rate:.1f} MB/s  {count(totals.sum('tokens'))} tokens"
            self._bar.update(self._task, completed=self._done, line=line)


TRAINED = {
    "out": Word(None, user_path),
    "vocab_size": whole(32000, 1, 1 << 22, "32000"),
    "kind": Word("bpe", one_of("bpe", "wordpiece", "unigram"), "bpe, wordpiece or unigram", "bpe"),
    "special": Word((), texts, "a text, or a JSON list of texts", f'"{END}"', many=True),
    "limit_mib": whole(1024, 1, 1 << 30, "1024", "MiB, a whole number of at least 1"),
} | {
    name: WORDS[name]
    for name in (
        "key",
        "template",
        "format",
        "lines",
        "max_document",
        "lower_case",
        "ignored_keys",
        "max_rejects",
    )
}


def train_tokenizer(words: Sequence[str], *, as_json: bool) -> int:
    """Train a tokenizer on documents and write its tokenizer.json; return the exit code."""
    values, inputs = read_arguments(words, TRAINED, TRAIN_USAGE)
    out = required(values, "out", TRAIN_USAGE)
    if os.path.lexists(out):
        rule = "cannot be written because it exists"
        raise refusal(rule, "another name", "MT622", "out", str(out))
    if not os.path.isdir(out.parent):
        rule = f"{out.parent} is no folder"
        raise refusal(rule, "out=FILE in an existing folder", "MT002", "out", str(out))
    from mtrain.data.preprocess.sources import find_sources
    from mtrain.data.preprocess.train import Texts, save, train

    sources = find_sources(inputs, values["format"])
    found = Texts(sources, reading_of(values), values["limit_mib"] * MIB, values["max_rejects"])
    if not all(one and one.isprintable() for one in values["special"]):
        rule = "a special token has letters, and each can be printed"
        raise refusal(rule, f"special='{END}'", "MT003", "special", values["special"])
    # train() adds BERT's own special tokens to a wordpiece.
    special = list(values["special"]) or ([] if values["kind"] == "wordpiece" else [END])
    made = train(found, values["kind"], values["vocab_size"], special, values["lower_case"])
    save(made, out)
    size = made.get_vocab_size()
    rejected = len(found.rejected)
    if as_json:
        facts = {"vocab_size": size, "text": found.read, "left_out": rejected}
        say(strict_json.dumps({"file": str(out), **facts}))
        return 0
    left = f", {rejected} records left out" if rejected else ""
    made_of = f"{values['kind']} of {size} tokens, trained on {bytes_(found.read)} of text"
    say(f"{out}: {made_of}{left}", *by_keys(found.by))
    return 0
