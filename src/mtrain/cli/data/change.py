"""`data merge`, `data split`, `data sample`, `data dedup`: corpora made of documents of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain import strict_json
from mtrain.cli.data.arguments import needs, read_arguments
from mtrain.cli.data.tokenize import one_of, prefix_of
from mtrain.cli.named_values import Word, number, yes
from mtrain.config.compose.paths import user_path
from mtrain.errors import ConfigError, Problem, say
from mtrain.units import count

if TYPE_CHECKING:
    import numpy as np

OUT = {
    "out": Word(None, user_path),
    "overwrite": Word(False, yes, "true or false", "overwrite=true"),
}
WHOLE = number(int, 0, 1 << 62)
NAMES = ("train", "validation", "test")


def shares(text: str) -> tuple[float, ...]:
    """Return two or more numbers of at least 0, which are not all 0."""
    found = json.loads(text if text.startswith("[") else f"[{text}]")
    if (
        len(found) < 2
        or not all(type(one) in (int, float) and 0 <= one < 1e300 for one in found)
        or sum(found) <= 0
    ):
        raise ValueError(text)
    return tuple(map(float, found))


def merge(argv: Sequence[str], *, as_json: bool) -> int:
    """Join corpora of one tokenizer, one behind the other."""
    usage = "merge PREFIX... --out PREFIX"
    values, prefixes = read_arguments(argv, OUT, usage)
    out = prefix_of(needs(values, "out", usage))
    from mtrain.data.preprocess.derive import all_documents, open_prefix, write

    parts = [(one, all_documents(one)) for one in map(open_prefix, prefixes)]
    _said(out, write(out, parts, {"by": "merge"}, overwrite=values["overwrite"]), as_json)
    return 0


def split(argv: Sequence[str], *, as_json: bool) -> int:
    """Cut a corpus into several, by tokens in its order, or by documents drawn with a seed."""
    usage = "split PREFIX --out PREFIX --shares 0.98,0.01,0.01"
    more = {
        "shares": Word(None, shares, "numbers of at least 0, not all 0", "shares=0.98,0.01,0.01"),
        "seed": Word(None, WHOLE, "a whole number of at least 0", "seed=0"),
    }
    values, (prefix,) = read_arguments(argv, {**OUT, **more}, usage, most=1)
    out = prefix_of(needs(values, "out", usage))
    wanted = needs(values, "shares", usage)
    from mtrain.data.preprocess.build import refuse_existing
    from mtrain.data.preprocess.derive import documents_of_shares, open_prefix, write

    one = open_prefix(prefix)
    names = (
        NAMES[: len(wanted)] if len(wanted) <= len(NAMES) else tuple(map(str, range(len(wanted))))
    )
    places = [out.with_name(f"{out.name}-{name}") for name in names]
    for place in places:
        refuse_existing(place, values["overwrite"])
    how = {"by": "split", "shares": list(wanted), "seed": values["seed"]}
    for place, documents in zip(
        places, documents_of_shares(one, wanted, values["seed"]), strict=True
    ):
        if len(documents):
            _said(
                place, write(place, [(one, documents)], how, overwrite=values["overwrite"]), as_json
            )
    return 0


def sample(argv: Sequence[str], *, as_json: bool) -> int:
    """Draw documents of a corpus without repetition; they keep their order."""
    usage = "sample PREFIX --out PREFIX --documents N"
    more = {
        "documents": Word(
            None, number(int, 1, 1 << 62), "a whole number of at least 1", "documents=1000"
        ),
        "tokens": Word(
            None, number(int, 1, 1 << 62), "a whole number of at least 1", "tokens=1000000"
        ),
        "share": Word(
            None, number(float, 0, 1, above=True), "a number above 0, and at most 1", "share=0.1"
        ),
        "seed": Word(0, WHOLE, "a whole number of at least 0", "seed=0"),
    }
    values, (prefix,) = read_arguments(argv, {**OUT, **more}, usage, most=1)
    out = prefix_of(needs(values, "out", usage))
    from mtrain.data.preprocess.derive import document_lengths, draw_documents, open_prefix, write

    one = open_prefix(prefix)
    many = _how_many(values)
    name, wanted = next(iter(many.items()))
    if name == "share":
        many = {"tokens": int(wanted * one.dataset.num_tokens)}
    documents = draw_documents(one, values["seed"], many.get("documents"), many.get("tokens"))
    lengths = document_lengths(one)
    if not len(documents):
        held = f"there are {len(lengths)} documents with {one.dataset.num_tokens} tokens"
        least = int(lengths.min()) if len(lengths) else 0
        if len(lengths):
            rule = f"{held}, and the shortest has {least}"
        else:
            rule = "the corpus has no document"
        fix = f"tokens={least}, or documents=1" if len(lengths) else "a corpus with documents"
        raise ConfigError([Problem("MT605", name, wanted, rule, fix, "command line")])
    how = {"by": "sample", "seed": values["seed"], **many}
    _said(out, write(out, [(one, documents)], how, overwrite=values["overwrite"]), as_json)
    if not as_json and (less := _less(lengths, documents, many)):
        say(less)
    return 0


def _less(lengths: np.ndarray, documents: np.ndarray, many: Mapping[str, int]) -> str:
    """Return why a sample has less than requested; empty if it is complete."""
    import numpy as np

    if "documents" in many:
        asked = many["documents"]
        return (
            f"{asked} documents were asked for, and these are all" if len(documents) < asked else ""
        )
    missing = many["tokens"] - int(lengths[documents].sum())
    if not missing:
        return ""
    left_out = np.delete(lengths, documents)
    left_out = left_out[left_out > 0]
    if len(left_out):
        why = f"the shortest document left out has {int(left_out.min())}"
    else:
        why = "these are all documents"
    return f"{missing} tokens fewer than the {many['tokens']} that were asked for: {why}"


def _how_many(values: Mapping[str, Any]) -> dict[str, Any]:
    said = {
        name: values[name] for name in ("documents", "tokens", "share") if values[name] is not None
    }
    if len(said) != 1:
        rule = "one of documents=, tokens= and share= says how many"
        raise ConfigError(
            [Problem("MT002", "documents", None, rule, "documents=1000", "command line")]
        )
    return said


def dedup(argv: Sequence[str], *, as_json: bool) -> int:
    """Leave out documents that repeat an earlier one, to the token or nearly."""
    usage = "dedup PREFIX --out PREFIX [--method minhash]"
    more = {
        "method": Word("exact", one_of("exact", "minhash"), "exact or minhash", "method=minhash"),
        "threshold": Word(
            0.8, number(float, 0, 1, above=True), "a number above 0, and at most 1", "threshold=0.8"
        ),
        "ngram": Word(5, number(int, 1, 1024), "a whole number from 1 to 1024", "ngram=5"),
        "permutations": Word(
            128, number(int, 2, 4096), "a whole number from 2 to 4096", "permutations=128"
        ),
    }
    values, (prefix,) = read_arguments(argv, {**OUT, **more}, usage, most=1)
    out = prefix_of(needs(values, "out", usage))
    from mtrain.data.preprocess import derive as repeated
    from mtrain.data.preprocess.build import refuse_existing
    from mtrain.data.preprocess.derive import open_prefix, write
    from mtrain.data.preprocess.journal import disk
    from mtrain.data.preprocess.sources import REMOVED

    refuse_existing(out, values["overwrite"])
    one = open_prefix(prefix)
    end = one.held.eod if one.held is not None else None
    how: dict[str, Any] = {"by": "dedup", "method": values["method"]}
    if values["method"] == "exact":
        twice = repeated.exact_duplicates(one.dataset, end)
    else:
        chosen = {name: values[name] for name in ("threshold", "ngram", "permutations")}
        twice = repeated.near_duplicates(one.dataset, end, **chosen)
        how |= chosen
    documents = repeated.remaining_documents(one.dataset.num_documents, twice)
    made = write(out, [(one, documents)], how, overwrite=values["overwrite"])
    lines = [strict_json.dumps({"document": i, "repeats": first}) for i, first in twice]
    with disk(out):
        out.with_name(out.name + REMOVED).write_text("".join(f"{line}\n" for line in lines))
    _said(out, made, as_json)
    if not as_json:
        say(f"{len(twice)} documents left out, with what they repeat: {out}{REMOVED}")
    return 0


def _said(out: Path, made: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        say(strict_json.dumps({"prefix": str(out), **made}))
    else:
        say(f"{out}: {count(made['documents'])} documents, {count(made['tokens'])} tokens")
