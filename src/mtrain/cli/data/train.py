"""`data train-tokenizer INPUT... --out FILE`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mtrain import strict_json
from mtrain.cli.data.arguments import needs, read_arguments
from mtrain.cli.data.tokenize import WORDS as OF_TOKENIZE
from mtrain.cli.data.tokenize import by_keys, one_of, reading_of
from mtrain.cli.named_values import Word, number, texts
from mtrain.config.compose.paths import user_path
from mtrain.errors import ConfigError, Problem, say
from mtrain.units import MIB, bytes_

USAGE = "train-tokenizer INPUT... --out tokenizer.json --vocab-size N"
WORDS = {
    "out": Word(None, user_path),
    "vocab_size": Word(
        32000, number(int, 1, 1 << 22), "a whole number of at least 1", "vocab_size=32000"
    ),
    "kind": Word(
        "bpe", one_of("bpe", "wordpiece", "unigram"), "bpe, wordpiece or unigram", "kind=bpe"
    ),
    "special": Word(
        (), texts, "a text, or a JSON list of texts", 'special="<|endoftext|>"', many=True
    ),
    "limit_mib": Word(
        1024, number(int, 1, 1 << 30), "MiB, a whole number of at least 1", "limit_mib=1024"
    ),
    **{
        name: OF_TOKENIZE[name]
        for name in (
            "key",
            "template",
            "format",
            "lines",
            "max_document",
            "lower_case",
            "ignored_keys",
        )
    },
    "max_rejects": OF_TOKENIZE["max_rejects"],
}
END = "<|endoftext|>"


def train_tokenizer(argv: Sequence[str], *, as_json: bool) -> int:
    """Train a tokenizer on documents and write its tokenizer.json; return the exit code."""
    values, inputs = read_arguments(argv, WORDS, USAGE)
    out = needs(values, "out", USAGE)
    if os.path.lexists(out):
        raise ConfigError(
            [Problem("MT622", "out", str(out), "is there", "another name", "command line")]
        )
    if not os.path.isdir(out.parent):
        rule = f"{out.parent} is no folder"
        raise ConfigError(
            [
                Problem(
                    "MT002",
                    "out",
                    str(out),
                    rule,
                    "out=FILE in an existing folder",
                    "command line",
                )
            ]
        )
    from mtrain.data.preprocess.sources import find_sources
    from mtrain.data.preprocess.train import Texts, save, train

    sources = find_sources(inputs, values["format"])
    found = Texts(sources, reading_of(values), values["limit_mib"] * MIB, values["max_rejects"])
    if not all(one and one.isprintable() for one in values["special"]):
        rule = "a special token has letters, and each can be printed"
        raise ConfigError(
            [
                Problem(
                    "MT003", "special", values["special"], rule, f"special='{END}'", "command line"
                )
            ]
        )
    special = list(values["special"]) or ([] if values["kind"] == "wordpiece" else [END])
    made = train(found, values["kind"], values["vocab_size"], special, values["lower_case"])
    save(made, out)
    size = made.get_vocab_size()
    if as_json:
        say(
            strict_json.dumps(
                {
                    "file": str(out),
                    "vocab_size": size,
                    "text": found.read,
                    "left_out": len(found.rejected),
                }
            )
        )
        return 0
    left = f", {len(found.rejected)} records left out" if found.rejected else ""
    made_of = f"{values['kind']} of {size} tokens, trained on {bytes_(found.read)} of text"
    say(f"{out}: {made_of}{left}", *by_keys(found.by))
    return 0
