"""Corpus rules: the files exist, are well-formed, and hold enough for the requested samples.

Training validates the same before it starts, and reads every byte afterwards.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from mtrain.config.compose.paths import names_near, user_path
from mtrain.config.disk.files import (
    PIECE,
    SKIPPED_FOLDERS,
    Bound,
    download_of,
    files_below,
    no_text,
    unreadable,
)
from mtrain.config.disk.manifest import READ_BYTES, Manifest, read_manifest
from mtrain.config.disk.token_files import (
    READ_TOKENIZER,
    TokenFiles,
    TokenizerFacts,
    split_documents,
    tokenizer_facts,
)
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.data import WEIGHTS_OF, DataConfig, read_corpora
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData
from mtrain.units import MIB

MAX_READ = 100
"""Files of a folder that are looked into; beyond them a file is taken for text."""
CHECKED_TOKENS = 1 << 20
"""Tokens at the beginning of a corpus whose ids are looked at: a hundredth of a second."""
_AGAIN = "write it again, or data.path=another"
TOO_FEW = Code(
    "MT605",
    "A split has too few tokens for one sample.",
    "Shorten data.seq_length, or give the split more.",
    example="data.limit_mib=0.0001",
)
ANOTHER_TOKENIZER = Code(
    "MT620",
    "A tokenizer, or a corpus, is not the one that the tokens belong to, as their manifest says.",
    help="Name the tokenizer that the manifest names, or tokenize the text with the other one.",
)
NO_END = Code(
    "MT608",
    "No end-of-document token is known to tell documents apart.",
    "Turn data.eod_mask_loss, data.packed and data.fim off, or name a tokenizer.",
    example="data=indexed data.path=/nowhere/corpus data.eod_mask_loss=true",
)


@rule(
    Code(
        "MT305",
        "The file or folder of text exists, can be read, and holds text.",
        help="Name a file or folder of text; data.suffixes says which files of a folder are read.",
        example="data.path=/nowhere/text",
    ),
    Code(
        "MT321",
        "No text was found among the files that were looked at; training looks at all of them.",
        severity="warning",
    ),
    TOO_FEW,
    reads=(
        "data.kind data.path data.limit_mib data.seq_length data.suffixes data.packed"
        " data.packed_by trainer.eval_iters"
    ),
    disk=True,
)
def text_existence(run: RunConfig) -> Iterator[Finding]:
    """The file or folder of text exists, is readable, and holds text for a sample of each split."""
    d = run.data
    if d.kind != "text":
        return
    path = user_path(d.path) if d.path is not None else Path(sysconfig.get_path("stdlib"))
    rule = "is empty, and a file or a folder is needed" if d.path == "" else unreadable(path)
    if rule is not None:
        near: tuple[Change, ...] = tuple({"data.path": name} for name in names_near(path))
        yield Finding("MT305", "data.path", rule, (*near, {"data.path": None}))
        return
    splits = 2 if run.trainer.eval_iters else 1
    need = splits * d.least_tokens
    limit = need if d.limit_mib is None else max(1, int(d.limit_mib * MIB))
    bound = Bound()
    try:
        size, files, rule = _text_in(path, d, min(need, limit), bound)
        size = min(size, limit) if d.limit_mib is not None else size
    except OSError as error:
        size = 0
        files = 0
        rule = f"{error.filename} cannot be read: {error.strerror}"
    if bound.spent:
        if rule is not None:
            endings = ", ".join(d.suffixes)
            rule = (
                f"none of the files that were looked at ends in {endings}; training looks at all of"
                " them"
            )
            yield Finding("MT321", "data.path", rule, ({"data.path": None},))
    elif rule is not None:
        yield Finding("MT305", "data.path", rule, ({"data.path": None},))
    elif size + files < need:
        rule = (
            f"{size} bytes of text in {files} document{'s' if files != 1 else ''} are at most"
            f" {size + files} tokens; {splits} split{'s' if splits > 1 else ''} of at least one"
            f" sample need {need}"
        )
        few = (size + files) // splits - 1
        short: tuple[Change, ...] = ({"data.seq_length": few},) if few >= 2 else ()
        if d.limit_mib is not None:
            enough = -(-1000 * need // MIB) / 1000
            short = ({"data.limit_mib": enough}, {"data.limit_mib": None}, *short)
        yield Finding("MT605", "data.seq_length", rule, (*short, {"data.path": None}))


def _text_in(path: Path, d: DataConfig, need: int, bound: Bound) -> tuple[int, int, str | None]:
    """Return the bytes and documents of text at a path, counted up to `need` bytes, and why there
    is no text.
    """
    if path.is_file():
        size = path.stat().st_size
        return size, 1 + size // PIECE, no_text(path) if size else "the file is empty"
    size = 0
    files = 0
    texts = 0
    wrong = ""
    library = d.path is None

    def wanted(name: str) -> bool:
        return name.endswith(d.suffixes) or (library and name.startswith("LICENSE"))

    for file in files_below(path, wanted, SKIPPED_FOLDERS if library else frozenset(), bound):
        files = files + 1
        held = file.stat().st_size
        if files <= MAX_READ:
            why = no_text(file) if held else "it is empty"
        else:
            why = None
        if why is None:
            size = size + held
            texts = texts + 1
        else:
            wrong = f"{file}: {why}"
        if size >= need:
            break
    if not files:
        empty = next(os.scandir(path), None) is None
        endings = ", ".join(d.suffixes) or "(no suffixes given)"
        return (
            0,
            0,
            "the folder is empty" if empty else f"the folder holds no file ending in {endings}",
        )
    return size, texts, None if texts else f"no file of it holds text; {wrong}"


@rule(
    Code(
        "MT306",
        "Both files of every indexed corpus exist and can be read.",
        help="Name the prefix of both files.",
        example="data=indexed data.path=/nowhere/corpus",
    ),
    TOO_FEW,
    Code(
        "MT611",
        "The .bin and .idx are inconsistent or invalid.",
        help=(
            "Write them again, or name the prefix of others; an index names dtype, sequences and"
            " documents."
        ),
    ),
    Code(
        "MT612",
        "Token ids are outside the model's vocabulary.",
        help="Enlarge model.vocab_size, or tokenize the text anew.",
    ),
    ANOTHER_TOKENIZER,
    reads=(
        "data.path data.blend data.validation_blend data.test_blend data.blend_weights"
        " data.validation_weights data.test_weights data.kind data.seq_length data.split"
        " data.packed data.packed_by data.order data.tokenizer trainer.eval_iters model.vocab_size"
    ),
    disk=True,
)
def indexed_file_existence(run: RunConfig) -> Iterator[Finding]:
    """Both files of every indexed corpus exist, agree, and hold tokens for the samples of each
    split.
    """
    d = run.data
    if d.kind != "indexed":
        return
    apart = d.validation_blend is not None or d.test_blend is not None
    whole: dict[str, tuple[float, ...]] = {
        "blend": (1, 0, 0),
        "validation_blend": (0, 1, 0),
        "test_blend": (0, 0, 1),
    }
    if d.blend is None and d.path is not None:
        shares = whole["blend"] if apart else d.split
        yield from _corpus(run, d.path, lambda name: {"data.path": name}, shares)
    for key in whole:
        names: tuple[str, ...] = getattr(d, key) or ()
        read = read_corpora(getattr(d, key), getattr(d, WEIGHTS_OF[key]))
        for i, prefix in enumerate(names):
            if prefix not in read:
                continue
            around = names[:i], names[i + 1 :]
            shares = whole[key] if apart else d.split
            found = list(
                _corpus(
                    run,
                    prefix,
                    lambda name, a=around, k=key: {f"data.{k}": [*a[0], name, *a[1]]},  # type: ignore[misc]
                    shares,
                )
            )
            for f in found[:1]:
                if f.path == "data.path":
                    path = f"data.{key}"
                    rule = f"{prefix}: {f.rule}"
                else:
                    path = f.path
                    rule = f.rule
                yield Finding(f.code, path, rule, f.fixes, f.severity, f.hint)
                return


def _corpus(
    run: RunConfig, text: str, renamed: Callable[[str], Change], shares: Sequence[float]
) -> Iterator[Finding]:
    """Yield the findings of the corpus at a prefix.

    `renamed` is the change that names another corpus; `shares` are those of train, validation and
    test.
    """
    if "://" in text:  # an object store, which opening it asks
        return
    base = user_path(text)
    if base.suffix in (".bin", ".idx"):
        yield Finding(
            "MT306", "data.path", f"is a prefix: without {base.suffix}", (renamed(text[:-4]),)
        )
        return
    for suffix in (".idx", ".bin"):
        path = base.with_name(base.name + suffix) if base.name else base / suffix
        rule = unreadable(path)
        if rule is None and os.path.isdir(path):
            rule = "is a folder"
        if rule is None and path.stat().st_size == 0:
            rule = "the file is empty"
        if rule is not None:
            names = [n for n in names_near(path) if n.endswith(suffix)]
            near = tuple(renamed(n[: -len(suffix)]) for n in names)
            yield Finding("MT306", "data.path", f"{path.name}: {rule}", near)
            return
    try:
        with closing(TokenFiles(base)) as corpus:
            found = list(_manifest_fits(run, base)) or _tokens_suffice(run, corpus, shares)
            yield from found
    except CorruptData as error:
        yield Finding("MT611", "data.path", str(error), hint=_AGAIN)
    except OSError as error:
        yield Finding("MT306", "data.path", f"{error.filename} cannot be read: {error.strerror}")


def _manifest_fits(run: RunConfig, base: Path) -> Iterator[Finding]:
    """Yield where a corpus's manifest contradicts its files, the model or the tokenizer; nothing
    without one.

    Raises:
        CorruptData: the manifest was altered, or describes other files.
    """
    held = read_manifest(base, READ_BYTES)
    vocab = run.model.vocab_size
    if held is None:
        return
    if wrong := held.sizes_differ(base):
        raise CorruptData(wrong)
    largest = held.count("largest_id")
    if largest >= vocab:
        rule = (
            f"{base.name}.bin: its manifest says token ids to {largest}; the vocabulary has ids 0"
            f" to {vocab - 1}"
        )
        yield Finding("MT612", "data.path", rule, ({"model.vocab_size": largest + 1},), hint=_AGAIN)
    yield from _same_tokenizer(run, held)


def _same_tokenizer(run: RunConfig, held: Manifest) -> Iterator[Finding]:
    named = run.data.tokenizer
    theirs = held.tokenizer_sha256
    if named is None or theirs is None:
        return
    path = user_path(named)
    if not os.path.isfile(path) or path.stat().st_size > READ_TOKENIZER:
        return
    ours = hashlib.sha256(path.read_bytes()).hexdigest()
    if ours != theirs:
        rule = (
            f"its sha256 is {ours[:12]}, and {held.path.name} says that {theirs[:12]} made the"
            " tokens"
        )
        hint = f"data.tokenizer=PATH of the tokenizer whose sha256 begins with {theirs[:12]}"
        yield Finding("MT620", "data.tokenizer", rule, hint=hint)


def _end_in_manifests(run: RunConfig) -> bool:
    """Return whether the manifests of all corpora agree on the token that ends documents."""
    d = run.data
    ends = set[int | None]()
    named = d.blend or ((d.path,) if d.path else ())
    for name in (*named, *(d.validation_blend or ()), *(d.test_blend or ())):
        try:
            held = read_manifest(user_path(name), READ_BYTES)
        except (CorruptData, OSError, ValueError):
            return False
        ends.add(held.eod if held is not None else None)
    return len(ends) == 1 and None not in ends


def _tokens_suffice(
    run: RunConfig, corpus: TokenFiles, shares: Sequence[float]
) -> Iterator[Finding]:
    """Yield each used split without tokens for a sample, and the first ids beyond the
    vocabulary.
    """
    d = run.data
    need = run.data.least_tokens
    vocab = run.model.vocab_size
    if sum(shares) <= 0:
        return
    if d.order == "megatron":  # its splits are cut by sequences, which opening it does
        shares = (1, 0, 0)
    used = ("train", "validation") if run.trainer.eval_iters else ("train",)
    for name, share, documents in zip(used, shares, split_documents(corpus, shares), strict=False):
        if not share:
            continue
        start = corpus.document_start(documents.start)
        held = corpus.document_start(documents.stop) - start
        if held < need:
            rule = (
                f"the {name} split of {corpus.bin.name} has {held} tokens in {len(documents)}"
                f" documents, a sample needs {need} (in all: {corpus.num_tokens} tokens in"
                f" {corpus.num_documents} documents)"
            )
            fixes: list[Change] = [{"data.seq_length": held - 1}] if held > 2 else []
            if name == "validation":
                fixes.append({"trainer.eval_iters": 0, "trainer.eval_interval": 0})
            fixes.append({"data.split": [0.9, 0.1, 0.0]})
            yield Finding("MT605", "data.seq_length", rule, tuple(fixes))
            return
        span = corpus.ids(start, min(held, CHECKED_TOKENS))
        if span is not None and (span[0] < 0 or span[1] >= vocab):
            rule = (
                f"{corpus.bin}: token ids from {span[0]} to {span[1]}; the vocabulary has ids 0 to"
                f" {vocab - 1}"
            )
            larger: tuple[Change, ...] = (
                ({"model.vocab_size": span[1] + 1},) if span[0] >= 0 else ()
            )
            yield Finding("MT612", "data.path", rule, larger, hint=_AGAIN)
            return


@rule(
    Code(
        "MT307",
        "The tokenizer that data.tokenizer names exists and can be read.",
        help="Name a tokenizer.json that exists.",
        example="data=indexed data.path=/nowhere/corpus data.tokenizer=/nowhere/tokenizer.json",
    ),
    Code(
        "MT613",
        "A file is no tokenizer.json.",
        help="Name one that Hugging Face's tokenizers wrote.",
    ),
    Code(
        "MT607",
        "The tokenizer has more ids than the model has rows.",
        help="Enlarge model.vocab_size.",
    ),
    NO_END,
    reads=(
        "data.tokenizer data.kind data.eod_mask_loss data.packed data.packed_by data.fim.rate"
        " data.path data.blend data.validation_blend data.test_blend model.vocab_size"
    ),
    disk=True,
)
def tokenizer_existence(run: RunConfig) -> Iterator[Finding]:
    """A named tokenizer exists, is valid, and has no more ids than the model."""
    d = run.data
    if d.kind == "mock" or d.tokenizer is None:
        return
    path = user_path(d.tokenizer)
    rule = unreadable(path)
    if rule is None and os.path.isdir(path):
        rule = "is a folder; the path of a tokenizer.json is needed"
        inside = path / "tokenizer.json"
        fixes: tuple[Change, ...] = (
            ({"data.tokenizer": str(inside)},) if os.path.isfile(inside) else ()
        )
    else:
        fixes = tuple({"data.tokenizer": name} for name in names_near(path))
    off: Change = {"data.tokenizer": None}
    without = (off, {**off, "trainer.sample_tokens": 0})
    if rule is not None:
        hint = ""
        if not fixes and (download := download_of(d.tokenizer, "tokenizer.json")) is not None:
            rule += "; if it is the name of a model on Hugging Face, nothing is downloaded here"
            hint = f"{download[0]}, then data.tokenizer={download[1]}/tokenizer.json"
        yield Finding("MT307", "data.tokenizer", rule, (*fixes, *without), hint=hint)
        return
    try:
        facts = tokenizer_facts(path)
    except CorruptData as error:
        yield Finding("MT613", "data.tokenizer", str(error), without)
        return
    except OSError as error:
        yield Finding("MT307", "data.tokenizer", f"cannot be read: {error.strerror}", without)
        return
    if facts is not None:
        yield from _tokenizer_fits(run, facts)


def _tokenizer_fits(run: RunConfig, facts: TokenizerFacts) -> Iterator[Finding]:
    vocab = run.model.vocab_size
    if facts.vocab_size > vocab:
        rule = (
            f"the tokenizer has ids up to {facts.vocab_size - 1}, and the model's are 0 to"
            f" {vocab - 1}"
        )
        yield Finding("MT607", "model.vocab_size", rule, ({"model.vocab_size": facts.vocab_size},))
    if facts.eod is None and run.data.kind == "indexed" and not _end_in_manifests(run):
        yield from _end_is_unknown(
            run, "the tokenizer has no end-of-document token of a name in use"
        )


@rule(
    NO_END,
    reads=(
        "data.kind data.path data.blend data.validation_blend data.test_blend data.tokenizer"
        " data.eod_mask_loss data.packed data.packed_by data.fim.rate"
    ),
    disk=True,
)
def end_of_document_id(run: RunConfig) -> Iterator[Finding]:
    """The tokenizer or the manifest states the token that ends documents of indexed data."""
    d = run.data
    wanted = d.eod_mask_loss or d.needs_document_ends or d.fim.rate
    if d.kind == "indexed" and d.tokenizer is None and wanted and not _end_in_manifests(run):
        yield from _end_is_unknown(
            run, "needs the end-of-document token, and data.tokenizer is null"
        )


def _end_is_unknown(run: RunConfig, rule: str) -> Iterator[Finding]:
    d = run.data
    off: Change = {"data.eod_mask_loss": False, "data.packed": False, "data.packed_multiple": None}
    off = {**off, "data.fim.rate": 0.0, "data.fim.ids": None, "data.fim.spm_rate": 0.5}
    hint = "data.tokenizer=PATH of a tokenizer.json that has one"
    for key, value in (
        ("eod_mask_loss", d.eod_mask_loss),
        ("packed", d.needs_document_ends),
        ("fim.rate", d.fim.rate),
    ):
        if value:
            yield Finding("MT608", f"data.{key}", rule, (off,), hint=hint)


RULES = (text_existence, indexed_file_existence, tokenizer_existence, end_of_document_id)
