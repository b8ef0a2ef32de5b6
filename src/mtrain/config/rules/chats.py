"""Chats: their file, the tokenizer and the template that write them, and who learns from them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePath

from mtrain.config.compose.dump import override
from mtrain.config.compose.paths import names_near, user_path
from mtrain.config.disk.files import (
    form_of_preferences,
    is_documents,
    kind_of,
    kind_of_chats,
    records_of,
    unreadable,
)
from mtrain.config.resolve.defaults import CHATS
from mtrain.config.rules.data import NO_MIDDLE, UNPACKED
from mtrain.config.rules.finding import Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

BESIDE = ("chat_template.jinja", "tokenizer_config.json")
"""Files next to a tokenizer.json that hold a template."""
MAX_SETTINGS = 16 << 20
TEMPLATE = "data.chat_template"


@rule(
    Code(
        "MT340",
        help="Name a .jsonl file with a chat in each line.",
        example="data=sft data.path=/nowhere/chats.jsonl data.tokenizer=/nowhere/tokenizer.json",
    ),
    reads="data.kind data.path",
    disk=True,
)
def chat_file_existence(run: RunConfig) -> Iterator[Finding]:
    """Cannot read the chats because their .jsonl file is missing or unreadable."""
    d = run.data
    if d.kind not in CHATS:
        return
    hint = "data.path=FILE.jsonl"
    # The file may be named where the run starts, so `check` only warns.
    if d.path is None:
        yield Finding("MT340", "data.path", f"kind {d.kind}", hint=hint, lacks="input")
        return
    path = user_path(d.path)
    found = None
    detail = "the name is empty"
    if d.path:
        found, detail = records_of(path, "what the chats are")
    if found is None:
        yield Finding("MT340", "data.path", detail, each("data.path", names_near(path)))
    elif found.stat().st_size == 0:
        yield Finding("MT340", "data.path", f"{found} is empty", hint=hint)


@rule(
    Code(
        "MT341",
        help=(
            "Name a tokenizer.json with its tokenizer_config.json in the same folder, or"
            f" {TEMPLATE}."
        ),
        example="data=sft data.path=/nowhere/chats.jsonl",
    ),
    reads=f"data.kind data.tokenizer {TEMPLATE}",
    disk=True,
)
def chat_template_existence(run: RunConfig) -> Iterator[Finding]:
    """Cannot write the chats because that takes a tokenizer and its chat template."""
    d = run.data
    if d.kind not in CHATS:
        return
    if d.tokenizer is None:
        hint = "data.tokenizer=PATH of a tokenizer.json, or checkpoint.init_from=HF_DIR"
        yield Finding("MT341", "data.tokenizer", f"kind {d.kind}", hint=hint, lacks="input")
        return
    # An explicit template replaces the tokenizer's own.
    if d.chat_template is not None:
        path = user_path(d.chat_template)
        wrong = unreadable(path) or ("is a folder" if os.path.isdir(path) else None)
        if wrong is not None:
            yield Finding("MT341", TEMPLATE, wrong, each(TEMPLATE, [*names_near(path), None]))
        return
    tokenizer = user_path(d.tokenizer)
    if os.path.isfile(tokenizer) and not _has_template(tokenizer.parent):
        detail = f"{tokenizer.parent} has no {BESIDE[0]} and no chat_template in {BESIDE[1]}"
        yield Finding("MT341", TEMPLATE, detail, hint=f"{TEMPLATE}=FILE")


def _has_template(folder: Path) -> bool:
    if os.path.isfile(folder / BESIDE[0]):
        return True
    with suppress(OSError, ValueError, RecursionError):
        path = folder / BESIDE[1]
        # A device or a pipe would block, and no settings are this large.
        if kind_of(path) or path.stat().st_size > MAX_SETTINGS:
            return False
        settings = json.loads(path.read_bytes())
        return isinstance(settings, dict) and bool(settings.get("chat_template"))
    return False


@rule(
    Code(
        "MT342",
        example="model=bert_tiny data=sft data.path=chats.jsonl data.tokenizer=tokenizer.json",
    ),
    reads="model.family data.kind",
)
def chat_family(run: RunConfig) -> Iterator[Finding]:
    """Cannot learn from chats because the model is not a decoder-only transformer."""
    family = run.model.family
    if run.data.kind in CHATS and family in ("bert", "t5"):
        hint = "model=llama_tiny, or another decoder-only model"
        yield Finding("MT342", "data.kind", f"model.family is {family}", hint=hint)


@rule(
    Code(
        "MT344",
        example=(
            "data=sft data.path=chats.jsonl data.tokenizer=tokenizer.json data.eod_mask_loss=true"
        ),
    ),
    reads="data.kind data.eod_mask_loss data.packed data.fim.rate",
)
def text_only_keys(run: RunConfig) -> Iterator[Finding]:
    """Cannot use this key for chats because it applies to plain text."""
    d = run.data
    if d.kind not in CHATS:
        return
    if d.eod_mask_loss:
        off = {"data.eod_mask_loss": False}
        detail = "data.loss_on chooses what is learned, and no other text follows the end"
        yield Finding("MT344", "data.eod_mask_loss", detail, [off])
    if d.fim.rate:
        yield Finding("MT344", "data.fim.rate", "the answers of a chat are learned", [NO_MIDDLE])
    if d.kind == "prompts" and d.packed:
        detail = "each answer stands in a row of its own"
        yield Finding("MT344", "data.packed", detail, [UNPACKED])


@rule(
    Code(
        "MT346",
        help="Use data=sft for chats, and tokenize documents; keep data=text to learn JSON itself.",
        severity="warning",
        says="its first line is a chat",
    ),
    reads="data.kind data.path",
    disk=True,
)
def text_file_format(run: RunConfig) -> Iterator[Finding]:
    """Cannot learn only the text of this file because kind text reads it as it stands, with the
    braces, quotes and keys of its JSON.
    """
    d = run.data
    if d.kind != "text" or d.path is None:
        return
    found = kind_of_chats(d.path)
    if found == "sft":
        what = "a chat"
        fix = "data=sft"
    elif found == "preference":
        labelled = form_of_preferences(d.path) == "labels"
        what = "an answer with a label" if labelled else "a pair of answers"
        fix = f"data=preference objective={'kto' if labelled else 'dpo'}"
    elif is_documents(d.path):
        what = "a document in JSON"
        prefix = PurePath(d.path).stem
        # The suggestion is a command to copy, so quote the user's path for a shell.
        words = ["data", "tokenize", d.path, "--out", prefix, "--tokenizer", "TOKENIZER"]
        fix = f"{shlex.join(words)}, then data=indexed {override('data.path', prefix)}"
    else:
        return
    yield Finding("MT346", "data.path", f"its first line is {what}", hint=fix)
