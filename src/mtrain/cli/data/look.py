"""`data inspect`, `data verify`, `data stats`: what a corpus is, and whether it is what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.cli.data.tokenize import WORDS as OF_TOKENIZE
from mtrain.cli.data.tokenize import spec_of
from mtrain.cli.named_values import OFF, ON, read_arguments, whole
from mtrain.cli.output import refusal
from mtrain.config.disk.token_files import Manifest, path_of
from mtrain.errors import say
from mtrain.units import bytes_, count

TOKENIZER = {
    name: OF_TOKENIZE[name]
    for name in (
        "tokenizer",
        "kind",
        "merges",
        "lower_case",
        "special",
        "eod_token",
        "pattern",
        "special_tokens",
        "num_special_tokens",
    )
}
BAR = 40


def inspect(words: Sequence[str], *, as_json: bool) -> int:
    """Print counts and lengths of a corpus, or one document of it."""
    usage = "inspect PREFIX [--doc N] [--tokenizer PATH]"
    known = {**TOKENIZER, "doc": whole(None, 0, 1 << 62, "0")}
    values, (prefix,) = read_arguments(words, known, usage, most=1)
    from mtrain.data.preprocess.derive import open_prefix
    from mtrain.data.preprocess.inspect import described

    one = open_prefix(prefix)
    if values["doc"] is not None:
        return _document(one, values, as_json)
    found = described(one.dataset)
    if as_json:
        say(strict_json.dumps(found))
        return 0
    say(
        f"{prefix}: {found['documents']} documents in {found['sequences']} sequences,"
        f" {found['tokens']} tokens ({found['dtype']}, {bytes_(found['bytes'])}); longest document"
        f" {found['longest_document']}"
    )
    if one.held is not None:
        tokenizer = one.held.body["tokenizer"]
        say(f"tokenizer {_files(tokenizer)} {tokenizer['sha256'][:12]}, end {one.held.eod}")
    most = max((row["documents"] for row in found["lengths"]), default=1) or 1
    for row in found["lengths"]:
        span = f"{row['from']}" if row["from"] == row["to"] else f"{row['from']} to {row['to']}"
        say(
            f"  {span:>20} tokens  {row['documents']:>12} "
            f" {'#' * round(BAR * row['documents'] / most)}".rstrip()
        )
    return 0


def _files(tokenizer: Mapping[str, Any]) -> str:
    """Return the names of the tokenizer's files in a manifest."""
    found = tokenizer.get("files")
    return ", ".join(map(str, found)) if isinstance(found, list) and found else "unknown"


def _document(one: Any, values: Mapping[str, Any], as_json: bool) -> int:
    from mtrain.data.preprocess.inspect import document, tokens_as_text

    index = values["doc"]
    sequences = document(one.dataset, index)
    encoder = _loaded(values)
    theirs = one.held.body["tokenizer"]["sha256"] if one.held is not None else ""
    # Another tokenizer would show readable text that the corpus never had.
    if encoder is not None and theirs not in ("", encoder.spec.sha256):
        rule = f"tokens were made with {theirs[:12]}, and this is {encoder.spec.sha256[:12]}"
        fix = f"tokenizer=PATH of {_files(one.held.body['tokenizer'])}"
        raise refusal(rule, fix, "MT620", "tokenizer", encoder.file)
    if as_json:
        lists = [ids.tolist() for ids in sequences]
        text = None if encoder is None else encoder.decode([i for ids in lists for i in ids])
        say(strict_json.dumps({"doc": index, "sequences": lists, "text": text}))
        return 0
    total = sum(map(len, sequences))
    say(
        f"document {index} of {one.dataset.num_documents}: {total} tokens in {len(sequences)}"
        " sequences"
    )
    for i, ids in enumerate(sequences):
        say(f"[{i}] {tokens_as_text(ids.tolist(), encoder)}")
    if encoder is None and total:
        say("tokenizer=PATH shows them as text")
    return 0


def _loaded(values: Mapping[str, Any]) -> Any:
    """Return the tokenizer that is named; None: none is."""
    from mtrain.data.preprocess.tokenizers import load

    if values["tokenizer"] is None:
        return None
    return load(spec_of({**values, "vocab_size": None}))


def verify(words: Sequence[str], *, as_json: bool) -> int:
    """Read every byte of corpora; return exit code 4 for a damaged one."""
    known = {
        "vocab_size": whole(None, 1, 1 << 31, "32000"),
        "manifest": ON,
        "write": OFF,
        **TOKENIZER,
    }
    values, prefixes = read_arguments(words, known, "verify PREFIX...")
    encoder = _loaded(values)
    from mtrain.data.preprocess.derive import open_prefix
    from mtrain.data.preprocess.inspect import verify as verify_
    from mtrain.data.preprocess.inspect import write_manifest

    # A tokenizer of the command line bounds the ids where no number is given.
    limit = values["vocab_size"] or (encoder.vocab_size if encoder is not None else None)
    for prefix in prefixes:
        one = open_prefix(prefix)
        dataset = one.dataset
        held = one.held
        # There is nothing to compare with yet: the scan makes the hashes that the new manifest
        # gets.
        bare = held is None and values["write"]
        scanned = verify_(dataset, held, limit, hashed=values["manifest"] and not bare)
        if bare:
            write_manifest(dataset, scanned, encoder)
        if as_json:
            body = {
                "prefix": str(prefix),
                "hashed": held is not None,
                "largest_id": scanned.largest,
                "documents": dataset.num_documents,
                "tokens": dataset.num_tokens,
            }
            say(strict_json.dumps(body))
            continue
        against = "adds up; there is no manifest with hashes"
        if held is not None:
            against = "as its manifest says, byte for byte"
        elif bare:
            against = f"adds up; {path_of(prefix).name} has its hashes now"
        say(
            f"{prefix}: {dataset.num_documents} documents, {dataset.num_tokens} tokens, ids to"
            f" {scanned.largest}: {against}"
        )
    return 0


def stats(words: Sequence[str], *, as_json: bool) -> int:
    """Print tokens, fertility and unknown bytes of each file that corpora were made of."""
    values, prefixes = read_arguments(words, {"files": ON}, "stats PREFIX...")
    from mtrain.data.preprocess.derive import open_prefix

    rows = [
        row
        for prefix in prefixes
        for row in _rows(prefix, open_prefix(prefix).held, files=values["files"])
    ]
    if as_json:
        say(strict_json.dumps(rows))
        return 0
    say(
        f"{'documents':>10} {'tokens':>9} {'share':>6} {'text':>10} {'bytes/token':>11}"
        f" {'tokens/word':>11} {'unknown':>8}"
    )
    for row in rows:
        say(_line(row))
    return 0


def _rows(prefix: Path, held: Manifest | None, *, files: bool) -> list[dict[str, Any]]:
    if held is None:
        rule = "the corpus has no manifest with the counts of each file"
        raise refusal(rule, "a corpus that `data tokenize` made", "MT623", "prefix", str(prefix))
    total = held.count("tokens")
    inputs = held.body["inputs"]
    out = [_row(one["file"], one, total) for one in inputs] if files and len(inputs) > 1 else []
    names = {name for one in inputs for name, value in one.items() if type(value) is int}
    whole = {
        name: sum(one.get(name, 0) for one in inputs)
        for name in names
        if all(name in one for one in inputs)
    }
    return [*out, _row(str(prefix), whole, total)]


def _row(name: str, counts: Mapping[str, Any], total: int) -> dict[str, Any]:
    def ratio(a: str, b: str) -> float | None:
        return counts[a] / counts[b] if a in counts and counts.get(b) else None

    return {
        "name": name,
        "documents": counts.get("documents", 0),
        "tokens": counts.get("tokens", 0),
        "share": counts.get("tokens", 0) / total if total else 0.0,
        "text_bytes": counts.get("text_bytes"),
        "bytes_per_token": ratio("text_bytes", "tokens"),
        "fertility": ratio("tokens", "words"),
        "unknown_share": ratio("unknown_bytes", "text_bytes"),
        "rejected": counts.get("rejected", 0),
    }


def _line(row: Mapping[str, Any]) -> str:
    text = bytes_(row["text_bytes"]) if row["text_bytes"] is not None else "-"
    ratios = " ".join(
        f"{'-':>11}" if row[name] is None else f"{row[name]:>11.3f}"
        for name in ("bytes_per_token", "fertility")
    )
    share_unknown = row["unknown_share"]
    unknown = f"{'-':>8}" if share_unknown is None else f"{100 * share_unknown:>7.3f}%"
    left = f"  {row['rejected']} left out" if row["rejected"] else ""
    share = f"{100 * row['share']:>5.1f}%"
    counts = f"{count(row['documents']):>10} {count(row['tokens']):>9} {share} {text:>10}"
    return f"{counts} {ratios} {unknown}  {row['name']}{left}"
