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
from mtrain.config.disk.files import kind_of, records_of, unreadable
from mtrain.config.disk.first_record import is_documents, kind_of_chats
from mtrain.config.resolve.defaults import CHATS
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

BESIDE = ("chat_template.jinja", "tokenizer_config.json")
"""Files next to a tokenizer.json that hold a template."""
MAX_SETTINGS = 16 << 20


@rule(
    Code(
        "MT340",
        "The file of chats exists and ends in .jsonl.",
        "Name a file with a chat a line.",
        example="data=sft data.path=/nowhere/chats.jsonl data.tokenizer=/nowhere/tokenizer.json",
    ),
    reads="data.kind data.path",
    disk=True,
)
def chat_file_existence(run: RunConfig) -> Iterator[Finding]:
    """The file of chats exists."""
    d = run.data
    if d.kind not in CHATS:
        return
    if d.path is None:
        rule = f"kind {d.kind} reads a .jsonl file with a chat a line, and data.path is null"
        yield Finding("MT340", "data.path", rule, hint="data.path=FILE.jsonl", lacks="input")
        return
    path = user_path(d.path)
    if d.path:
        found, rule = records_of(path, "what the chats are")
    else:
        found = None
        rule = "is empty, and a file is needed"
    if found is None:
        near: tuple[Change, ...] = tuple({"data.path": name} for name in names_near(path))
        yield Finding("MT340", "data.path", rule, near)
    elif found.stat().st_size == 0:
        yield Finding("MT340", "data.path", f"{found} is empty", hint="data.path=FILE.jsonl")


@rule(
    Code(
        "MT341",
        "Chats are written by a tokenizer and its chat template.",
        "Name a tokenizer.json with its tokenizer_config.json in the same folder, or"
        " data.chat_template.",
        example="data=sft data.path=/nowhere/chats.jsonl",
    ),
    reads="data.kind data.tokenizer data.chat_template",
    disk=True,
)
def chat_template_existence(run: RunConfig) -> Iterator[Finding]:
    """Chats need a tokenizer with a chat template."""
    d = run.data
    if d.kind not in CHATS:
        return
    if d.tokenizer is None:
        rule = f"kind {d.kind} is written by a tokenizer, and data.tokenizer is null"
        hint = "data.tokenizer=PATH of a tokenizer.json, or checkpoint.init_from=HF_DIR"
        yield Finding("MT341", "data.tokenizer", rule, hint=hint, lacks="input")
    elif d.chat_template is not None:
        path = user_path(d.chat_template)
        wrong = unreadable(path) or ("is a folder" if os.path.isdir(path) else None)
        if wrong is not None:
            near: tuple[Change, ...] = tuple(
                {"data.chat_template": name} for name in names_near(path)
            )
            yield Finding(
                "MT341", "data.chat_template", wrong, (*near, {"data.chat_template": None})
            )
    elif os.path.isfile(user_path(d.tokenizer)) and not _has_template(
        user_path(d.tokenizer).parent
    ):
        rule = (
            f"{user_path(d.tokenizer).parent} has no {BESIDE[0]} and no chat_template in"
            f" {BESIDE[1]}"
        )
        yield Finding("MT341", "data.chat_template", rule, hint="data.chat_template=FILE")


def _has_template(folder: Path) -> bool:
    if os.path.isfile(folder / BESIDE[0]):
        return True
    with suppress(OSError, ValueError, RecursionError):
        path = folder / BESIDE[1]
        if kind_of(path) or path.stat().st_size > MAX_SETTINGS:
            return False
        settings = json.loads(path.read_bytes())
        return isinstance(settings, dict) and bool(settings.get("chat_template"))
    return False


@rule(
    Code(
        "MT342",
        "Only decoder-only transformers learn from chats.",
        example="model=bert_tiny data=sft data.path=chats.jsonl data.tokenizer=tokenizer.json",
    ),
    reads="model.family data.kind",
)
def chat_family(run: RunConfig) -> Iterator[Finding]:
    """Only decoder-only transformers learn from chats."""
    family = run.model.family
    kind = run.data.kind
    if kind in CHATS and family in ("bert", "t5"):
        rule = f"a model of the family {family} learns nothing from chats"
        yield Finding("MT342", "data.kind", rule, hint="a decoder-only model, as model=llama_tiny")


@rule(
    Code(
        "MT343",
        "No loss learns from pairs of answers yet: preference data is prepared and previewed, and"
        " not trained on.",
        "Preview it with `data preview`; train on the chosen answers as data=sft.",
        example="data.kind=preference data.path=pairs.jsonl data.tokenizer=tokenizer.json",
    ),
    reads="data.kind",
)
def preference_pairs(run: RunConfig) -> Iterator[Finding]:
    """No loss learns from pairs of answers yet."""
    if run.data.kind == "preference":
        rule = (
            "pairs of a chosen and a rejected answer are prepared and previewed; no loss learns"
            " from them yet"
        )
        yield Finding("MT343", "data.kind", rule, hint="data=sft with the chosen answers as chats")


@rule(
    Code(
        "MT344",
        "A key that only text has is not set for chats.",
        example=(
            "data=sft data.path=chats.jsonl data.tokenizer=tokenizer.json data.eod_mask_loss=true"
        ),
    ),
    reads="data.kind data.eod_mask_loss data.packed data.fim.rate",
)
def text_only_keys(run: RunConfig) -> Iterator[Finding]:
    """Chats keep their own ends and their order, and pairs are not packed."""
    d = run.data
    if d.kind not in CHATS:
        return
    if d.eod_mask_loss:
        rule = "data.loss_on says what of a chat is learned, and no other text follows its end"
        yield Finding("MT344", "data.eod_mask_loss", rule, ({"data.eod_mask_loss": False},))
    if d.fim.rate:
        none: Change = {"data.fim.rate": 0.0, "data.fim.ids": None, "data.fim.spm_rate": 0.5}
        yield Finding(
            "MT344",
            "data.fim.rate",
            "the middle of a chat is not moved: its answers are learned",
            (none,),
        )
    if d.kind == "preference" and d.packed:
        off: Change = {"data.packed": False, "data.packed_multiple": None}
        yield Finding(
            "MT344", "data.packed", "the chats of a pair stand each in a row of its own", (off,)
        )


@rule(
    Code(
        "MT346",
        "Records are read as what they are: kind text learns a file as it stands, JSON and all.",
        "Say data=sft for chats, and tokenize documents; data=text stays where the JSON itself is"
        " meant.",
        severity="warning",
        says=(
            "its first line is a chat, and kind text learns it as it stands: braces, quotes and"
            " names of keys"
        ),
    ),
    reads="data.kind data.path",
    disk=True,
)
def text_file_format(run: RunConfig) -> Iterator[Finding]:
    """A file that begins with a chat or a JSON document is not read as plain text."""
    d = run.data
    if d.kind != "text" or d.path is None:
        return
    found = kind_of_chats(d.path)
    if found == "sft":
        what = "a chat"
        fix = "data=sft"
    elif found == "preference":
        what = "a pair of answers"
        fix = "data=sft with the chosen answers as chats"
    elif is_documents(d.path):
        what = "a document in JSON"
        prefix = PurePath(d.path).stem
        tokenize = shlex.join(
            ["data", "tokenize", d.path, "--out", prefix, "--tokenizer", "TOKENIZER"]
        )
        fix = f"{tokenize}, then data=indexed {override('data.path', prefix)}"
    else:
        return
    rule = (
        f"its first line is {what}, and kind text learns it as it stands: braces, quotes and names"
        " of keys"
    )
    yield Finding("MT346", "data.path", rule, hint=fix)


RULES = (
    chat_file_existence,
    chat_template_existence,
    chat_family,
    preference_pairs,
    text_only_keys,
    text_file_format,
)
