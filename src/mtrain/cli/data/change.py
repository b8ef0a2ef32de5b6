"""`data merge`, `data split`, `data sample`, `data dedup`: corpora made of documents of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain import strict_json
from mtrain.cli.data.tokenize import prefix_of
from mtrain.cli.named_values import OFF, Word, number, one_of, read_arguments, required, whole
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import user_path
from mtrain.errors import say
from mtrain.units import count

if TYPE_CHECKING:
    import numpy as np

OUT = {"out": Word(None, user_path), "overwrite": OFF}
MOST = 1 << 62
ABOVE_0 = "a number above 0, and at most 1"
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


def merge(words: Sequence[str], *, as_json: bool) -> int:
    """Join corpora of one tokenizer, one after the other."""
    usage = "merge PREFIX... --out PREFIX"
    values, prefixes = read_arguments(words, OUT, usage)
    out = prefix_of(required(values, "out", usage))
    from mtrain.data.preprocess.derive import all_documents, open_prefix, write

    parts = [(one, all_documents(one)) for one in map(open_prefix, prefixes)]
    _report(out, write(out, parts, {"by": "merge"}, overwrite=values["overwrite"]), as_json)
    return 0


def split(words: Sequence[str], *, as_json: bool) -> int:
    """Cut a corpus into several, by tokens in its order, or by documents drawn with a seed."""
    usage = "split PREFIX --out PREFIX --shares 0.98,0.01,0.01"
    more = {
        "shares": Word(None, shares, "numbers of at least 0, not all 0", "0.98,0.01,0.01"),
        "seed": whole(None, 0, MOST, "0"),
    }
    values, (prefix,) = read_arguments(words, {**OUT, **more}, usage, most=1)
    out = prefix_of(required(values, "out", usage))
    wanted = required(values, "shares", usage)
    from mtrain.data.preprocess.build import refuse_existing
    from mtrain.data.preprocess.derive import documents_of_shares, open_prefix, write

    one = open_prefix(prefix)
    names = NAMES if len(wanted) <= len(NAMES) else range(len(wanted))
    places = [out.with_name(f"{out.name}-{name}") for name in names[: len(wanted)]]
    # All names are checked first: a corpus in the way must not show after hours of writing.
    for place in places:
        refuse_existing(place, values["overwrite"])
    how = {"by": "split", "shares": list(wanted), "seed": values["seed"]}
    for place, documents in zip(
        places, documents_of_shares(one, wanted, values["seed"]), strict=True
    ):
        if len(documents):
            made = write(place, [(one, documents)], how, overwrite=values["overwrite"])
            _report(place, made, as_json)
    return 0


def sample(words: Sequence[str], *, as_json: bool) -> int:
    """Draw documents of a corpus without repetition; they keep their order."""
    usage = "sample PREFIX --out PREFIX --documents N"
    more = {
        "documents": whole(None, 1, MOST, "1000"),
        "tokens": whole(None, 1, MOST, "1000000"),
        "share": Word(None, number(float, 0, 1, above=True), ABOVE_0, "0.1"),
        "seed": whole(0, 0, MOST, "0"),
    }
    values, (prefix,) = read_arguments(words, {**OUT, **more}, usage, most=1)
    out = prefix_of(required(values, "out", usage))
    from mtrain.data.preprocess.derive import document_lengths, draw_documents, open_prefix, write

    one = open_prefix(prefix)
    many = _how_many(values)
    name, wanted = next(iter(many.items()))
    # A share is of tokens, not of documents.
    if name == "share":
        many = {"tokens": int(wanted * one.dataset.num_tokens)}
    documents = draw_documents(one, values["seed"], many.get("documents"), many.get("tokens"))
    lengths = document_lengths(one)
    if not len(documents):
        rule = "cannot draw a document because the corpus has none"
        fix = "a corpus with documents"
        if len(lengths):
            least = int(lengths.min())
            held = f"there are {len(lengths)} documents with {one.dataset.num_tokens} tokens"
            rule = f"cannot draw a document because {held}, and the shortest has {least}"
            fix = f"tokens={least}, or documents=1"
        raise refusal(rule, fix, "MT605", name, wanted)
    how = {"by": "sample", "seed": values["seed"], **many}
    _report(out, write(out, [(one, documents)], how, overwrite=values["overwrite"]), as_json)
    if not as_json and (less := _less(lengths, documents, many)):
        say(less)
    return 0


def _less(lengths: np.ndarray, documents: np.ndarray, many: Mapping[str, int]) -> str:
    """Return why a sample has less than requested; empty if it is complete."""
    import numpy as np

    if "documents" in many:
        few = len(documents) < many["documents"]
        return f"{many['documents']} documents were asked for, and these are all" if few else ""
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
    names = ("documents", "tokens", "share")
    given = {name: values[name] for name in names if values[name] is not None}
    if len(given) != 1:
        rule = (
            "cannot draw documents because exactly one of documents=, tokens= and share= must be"
            " set"
        )
        raise refusal(rule, "documents=1000", "MT002", "documents")
    return given


def dedup(words: Sequence[str], *, as_json: bool) -> int:
    """Leave out documents that repeat an earlier one, to the token or nearly."""
    usage = "dedup PREFIX --out PREFIX [--method minhash]"
    more = {
        "method": Word("exact", one_of("exact", "minhash"), "exact or minhash", "minhash"),
        "threshold": Word(0.8, number(float, 0, 1, above=True), ABOVE_0, "0.8"),
        "ngram": whole(5, 1, 1024, "5", "a whole number from 1 to 1024"),
        "permutations": whole(128, 2, 4096, "128", "a whole number from 2 to 4096"),
    }
    values, (prefix,) = read_arguments(words, {**OUT, **more}, usage, most=1)
    out = prefix_of(required(values, "out", usage))
    from mtrain.data.preprocess import derive as repeated
    from mtrain.data.preprocess.build import refuse_existing
    from mtrain.data.preprocess.derive import open_prefix, write
    from mtrain.data.preprocess.journal import disk
    from mtrain.data.preprocess.sources import REMOVED

    refuse_existing(out, values["overwrite"])
    one = open_prefix(prefix)
    # Every document ends with this token: documents are compared without it.
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
    _report(out, made, as_json)
    if not as_json:
        say(f"{len(twice)} documents left out, with what they repeat: {out}{REMOVED}")
    return 0


def _report(out: Path, made: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        say(strict_json.dumps({"prefix": str(out), **made}))
    else:
        say(f"{out}: {count(made['documents'])} documents, {count(made['tokens'])} tokens")
