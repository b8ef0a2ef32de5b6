"""Corpus rules: files exist, are well-formed, hold enough samples, and fit the tokenizer.

Training validates the same before it starts, and reads every byte afterwards.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
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
from mtrain.config.disk.token_files import (
    READ_BYTES,
    READ_TOKENIZER,
    Manifest,
    TokenFiles,
    TokenizerFacts,
    read_manifest,
    split_documents,
    tokenizer_facts,
)
from mtrain.config.resolve.model_tokenizer import (
    folder_of_the_model,
    is_from_elsewhere,
    sha256_of,
    tokenizer_of,
    unread_tokenizer,
)
from mtrain.config.rules.data import NO_MIDDLE, UNPACKED
from mtrain.config.rules.finding import Change, Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.data import WEIGHTS_OF, DataConfig, read_corpora
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData
from mtrain.units import MIB, number_of

MAX_READ = 100
"""Files of a folder that are looked into; beyond them a file is taken for text."""
CHECKED_TOKENS = 1 << 20
"""Tokens at the beginning of a corpus whose ids are looked at: a hundredth of a second."""
TOKENIZER = "data.tokenizer"
VOCAB = "model.vocab_size"
_AGAIN = "write it again, or data.path=another"


@rule(
    Code(
        "MT305",
        help="Name a file or folder of text; data.suffixes says which files of a folder are read.",
        example="data.path=/nowhere/text",
    ),
    Code(
        "MT321",
        "Cannot tell if there is text because `check` looks at some files only; training reads"
        " all.",
        severity="warning",
    ),
    "MT605",
    reads=(
        "data.kind data.path data.limit_mib data.seq_length data.suffixes data.packed"
        " data.packed_by trainer.eval_iters"
    ),
    disk=True,
)
def text_existence(run: RunConfig) -> Iterator[Finding]:
    """Cannot train on this text because the file or folder is missing, unreadable or without
    text.
    """
    d = run.data
    if d.kind != "text":
        return
    # Without a path the standard library of Python is the text: it is on every machine.
    path = user_path(d.path) if d.path is not None else Path(sysconfig.get_path("stdlib"))
    none: Change = {"data.path": None}
    detail = "the name is empty" if d.path == "" else unreadable(path)
    if detail is not None:
        fixes = each("data.path", [*names_near(path), None])
        yield Finding("MT305", "data.path", detail, fixes)
        return
    splits = 2 if run.trainer.eval_iters else 1
    need = splits * d.least_tokens
    limit = need if d.limit_mib is None else max(1, int(d.limit_mib * MIB))
    bound = Bound()
    try:
        size, files, detail = _text_in(path, d, min(need, limit), bound)
        size = min(size, limit) if d.limit_mib is not None else size
    except OSError as error:
        size = 0
        files = 0
        detail = f"{error.filename}: {error.strerror}"
    if bound.spent:
        if detail is not None:
            endings = ", ".join(d.suffixes)
            yield Finding("MT321", "data.path", f"none of these ends in {endings}", [none])
    elif detail is not None:
        yield Finding("MT305", "data.path", detail, [none])
    # A byte is at most a token, and each document ends with one more.
    elif size + files < need:
        detail = (
            f"{number_of(size, 'byte')} in {number_of(files, 'document')} are at most"
            f" {size + files} tokens; {number_of(splits, 'split')} of at least one sample need"
            f" {need}"
        )
        # The length that fits: a sample needs one token more than it predicts.
        few = (size + files) // splits - 1
        short = each("data.seq_length", [few] if few >= 2 else [])
        if d.limit_mib is not None:
            short = [*each("data.limit_mib", [-(-1000 * need // MIB) / 1000, None]), *short]
        yield Finding("MT605", "data.seq_length", detail, [*short, none])


def _text_in(path: Path, d: DataConfig, need: int, bound: Bound) -> tuple[int, int, str | None]:
    """Return the bytes and documents of text at a path, number_of up to `need` bytes, and why there
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
        files += 1
        held = file.stat().st_size
        why = None
        if files <= MAX_READ:
            why = no_text(file) if held else "it is empty"
        if why is None:
            size += held
            texts += 1
        else:
            wrong = f"{file}: {why}"
        # Stop as soon as there is enough: folders may hold millions of files.
        if size >= need:
            break
    if files:
        return size, texts, None if texts else f"no file of it holds text; {wrong}"
    if next(os.scandir(path), None) is None:
        return 0, 0, "the folder is empty"
    endings = ", ".join(d.suffixes) or "(no suffixes given)"
    return 0, 0, f"the folder holds no file ending in {endings}"


@rule(
    Code(
        "MT306",
        help="Name the prefix of both files.",
        example="data=indexed data.path=/nowhere/corpus",
    ),
    "MT605",
    Code(
        "MT611",
        "Cannot read the corpus because its .bin and .idx are inconsistent or invalid.",
        help="Write them again, or name the prefix of others.",
    ),
    "MT612",
    "MT620",
    reads=(
        "data.path data.blend data.validation_blend data.test_blend data.blend_weights"
        " data.validation_weights data.test_weights data.kind data.seq_length data.split"
        " data.packed data.packed_by data.order data.tokenizer trainer.eval_iters model.vocab_size"
    ),
    disk=True,
)
def indexed_file_existence(run: RunConfig) -> Iterator[Finding]:
    """Cannot open the corpus because one of its two files is missing or unreadable."""
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
    for key, own in whole.items():
        names: tuple[str, ...] = getattr(d, key) or ()
        read = read_corpora(getattr(d, key), getattr(d, WEIGHTS_OF[key]))
        for i, prefix in enumerate(names):
            if prefix not in read:
                continue

            def renamed(name: str, key: str = key, i: int = i) -> Change:
                others = list(getattr(d, key))
                return {f"data.{key}": [*others[:i], name, *others[i + 1 :]]}

            # One problem of one corpus: another corpus may have the same.
            for found in _corpus(run, prefix, renamed, own if apart else d.split):
                if found.path == "data.path":
                    detail = f"{prefix}: {found.detail}"
                    found = replace(found, path=f"data.{key}", detail=detail)
                yield found
                return


def _corpus(
    run: RunConfig, text: str, renamed: Callable[[str], Change], shares: Sequence[float]
) -> Iterator[Finding]:
    """Yield the findings of the corpus at a prefix.

    `renamed` is the change that names another corpus; `shares` are those of train, validation and
    test.
    """
    # Only opening it asks an object store.
    if "://" in text:
        return
    base = user_path(text)
    # A user who completes the name in a shell ends with one of the two files.
    if base.suffix in (".bin", ".idx"):
        detail = f"cannot be a prefix because it ends in {base.suffix}"
        yield Finding("MT306", "data.path", detail, [renamed(text[:-4])])
        return
    for suffix in (".idx", ".bin"):
        path = base.with_name(base.name + suffix) if base.name else base / suffix
        detail = unreadable(path) or ""
        if not detail and os.path.isdir(path):
            detail = "is a folder"
        elif not detail and path.stat().st_size == 0:
            detail = "the file is empty"
        if detail:
            near = [renamed(n.removesuffix(suffix)) for n in names_near(path) if n.endswith(suffix)]
            yield Finding("MT306", "data.path", f"{path.name}: {detail}", near)
            return
    try:
        with closing(TokenFiles(base)) as corpus:
            found = list(_manifest_fits(run, base)) or _tokens_suffice(run, corpus, shares)
            yield from found
    except CorruptData as error:
        yield Finding("MT611", "data.path", str(error), hint=_AGAIN)
    except OSError as error:
        yield Finding("MT306", "data.path", f"{error.filename}: {error.strerror}")


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
    # A manifest that describes other files must not decide about these.
    if wrong := held.sizes_differ(base):
        raise CorruptData(wrong)
    largest = held.count("largest_id")
    if largest >= vocab:
        detail = f"{base.name}.bin has ids to {largest}, the vocabulary 0 to {vocab - 1}"
        yield Finding("MT612", "data.path", detail, [{VOCAB: largest + 1}], hint=_AGAIN)
    yield from _same_tokenizer(run, held)


def _same_tokenizer(run: RunConfig, held: Manifest) -> Iterator[Finding]:
    named = run.data.tokenizer
    theirs = held.tokenizer_sha256
    if named is None or theirs is None:
        return
    path = user_path(named)
    if not os.path.isfile(path) or path.stat().st_size > READ_TOKENIZER:
        return
    ours = sha256_of(path)
    if ours != theirs:
        detail = f"its sha256 is {ours[:12]}, that in {held.path.name} {theirs[:12]}"
        hint = f"{TOKENIZER}=PATH of the tokenizer whose sha256 begins with {theirs[:12]}"
        yield Finding("MT620", TOKENIZER, detail, hint=hint)


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
    need = d.least_tokens
    vocab = run.model.vocab_size
    if sum(shares) <= 0:
        return
    # Megatron-LM's splits are cut by sequences, which opening the corpus does.
    if d.order == "megatron":
        shares = (1, 0, 0)
    # Nothing reads the split for tests during training.
    used = ("train", "validation") if run.trainer.eval_iters else ("train",)
    for name, share, documents in zip(used, shares, split_documents(corpus, shares), strict=False):
        if not share:
            continue
        start = corpus.document_start(documents.start)
        held = corpus.document_start(documents.stop) - start
        if held < need:
            detail = (
                f"the {name} split of {corpus.bin.name} has {held} tokens in {len(documents)}"
                f" documents, a sample needs {need}; in all {corpus.num_tokens} tokens in"
                f" {corpus.num_documents} documents"
            )
            fixes = each("data.seq_length", [held - 1] if held > 2 else [])
            # A run without evaluation needs no such split.
            if name == "validation":
                fixes.append({"trainer.eval_iters": 0, "trainer.eval_interval": 0})
            fixes.append({"data.split": [0.9, 0.1, 0.0]})
            yield Finding("MT605", "data.seq_length", detail, fixes)
            return
        span = corpus.ids(start, min(held, CHECKED_TOKENS))
        if span is not None and (span[0] < 0 or span[1] >= vocab):
            detail = f"{corpus.bin} has ids {span[0]} to {span[1]}, the vocabulary 0 to {vocab - 1}"
            larger = each(VOCAB, [span[1] + 1] if span[0] >= 0 else [])
            yield Finding("MT612", "data.path", detail, larger, hint=_AGAIN)
            return


@rule(
    Code(
        "MT307",
        help="Name a tokenizer.json that exists.",
        example="data=indexed data.path=/nowhere/corpus data.tokenizer=/nowhere/tokenizer.json",
    ),
    Code(
        "MT613",
        "Cannot use the tokenizer because its file is no tokenizer.json.",
        help="Name one that Hugging Face's tokenizers wrote.",
    ),
    "MT607",
    "MT608",
    reads=(
        "data.tokenizer data.kind data.eod_mask_loss data.packed data.packed_by data.fim.rate"
        " data.path data.blend data.validation_blend data.test_blend model.vocab_size"
    ),
    disk=True,
)
def tokenizer_existence(run: RunConfig) -> Iterator[Finding]:
    """Cannot use the tokenizer because its file is missing or unreadable."""
    d = run.data
    if d.kind == "mock" or d.tokenizer is None:
        return
    path = user_path(d.tokenizer)
    detail = unreadable(path)
    near: list[str] = []
    if detail is not None:
        near = names_near(path)
    elif os.path.isdir(path):
        detail = "a folder; the path of a tokenizer.json is needed"
        inside = path / "tokenizer.json"
        near = [str(inside)] if os.path.isfile(inside) else []
    off: Change = {TOKENIZER: None}
    without = [off, {**off, "trainer.sample_tokens": 0}]
    if detail is not None:
        hint = ""
        if not near and (download := download_of(d.tokenizer, "tokenizer.json")) is not None:
            detail += "; if it is the name of a model on Hugging Face, nothing is downloaded here"
            hint = f"{download[0]}, then {TOKENIZER}={download[1]}/tokenizer.json"
        fixes = [*each(TOKENIZER, near), *without]
        yield Finding("MT307", TOKENIZER, detail, fixes, hint=hint)
        return
    try:
        facts = tokenizer_facts(path)
    except CorruptData as error:
        yield Finding("MT613", TOKENIZER, str(error), without)
    except OSError as error:
        yield Finding("MT307", TOKENIZER, error.strerror or "", without)
    else:
        if facts is not None:
            yield from _tokenizer_fits(run, facts)


def _tokenizer_fits(run: RunConfig, facts: TokenizerFacts) -> Iterator[Finding]:
    vocab = run.model.vocab_size
    if facts.vocab_size > vocab:
        detail = f"ids up to {facts.vocab_size - 1}, those of the model 0 to {vocab - 1}"
        yield Finding("MT607", VOCAB, detail, [{VOCAB: facts.vocab_size}])
    if facts.eod is None and run.data.kind == "indexed" and not _end_in_manifests(run):
        yield from _end_is_unknown(run, "the tokenizer has none of a name in use")


@rule(
    "MT608",
    reads=(
        "data.kind data.path data.blend data.validation_blend data.test_blend data.tokenizer"
        " data.eod_mask_loss data.packed data.packed_by data.fim.rate"
    ),
    disk=True,
)
def end_of_document_id(run: RunConfig) -> Iterator[Finding]:
    """Require a tokenizer or manifests that name the token, where documents are separated."""
    d = run.data
    wanted = d.eod_mask_loss or d.needs_document_ends or d.fim.rate
    if d.kind == "indexed" and d.tokenizer is None and wanted and not _end_in_manifests(run):
        yield from _end_is_unknown(run, f"{TOKENIZER} is null")


def _end_is_unknown(run: RunConfig, detail: str) -> Iterator[Finding]:
    d = run.data
    off: Change = {"data.eod_mask_loss": False, **UNPACKED, **NO_MIDDLE}
    hint = f"{TOKENIZER}=PATH of a tokenizer.json that has one"
    for key, value in (
        ("eod_mask_loss", d.eod_mask_loss),
        ("packed", d.needs_document_ends),
        ("fim.rate", d.fim.rate),
    ):
        if value:
            yield Finding("MT608", f"data.{key}", detail, [off], hint=hint)


@rule(
    "MT345",
    reads=(
        "data.kind data.tokenizer data.path data.blend data.validation_blend data.test_blend"
        " data.blend_weights data.validation_weights data.test_weights checkpoint.resume"
        " checkpoint.init_from checkpoint.accept_changes"
    ),
    disk=True,
)
def own_tokenizer(run: RunConfig) -> Iterator[Finding]:
    """Require the tokenizer for whose ids the weights of the model were learned."""
    d = run.data
    folder = folder_of_the_model(run)
    if folder is None or d.kind == "mock":
        return
    own = tokenizer_of(folder)
    if own is None:
        yield from _unknown(run, folder)
        return
    # accept_changes is the explicit consent to other ids.
    if run.checkpoint.accept_changes:
        return
    try:
        if d.tokenizer is not None and os.path.isfile(named := user_path(d.tokenizer)):
            yield from _same(named, own)
        elif d.kind == "indexed":
            yield from _made_by(run, own)
    except (OSError, CorruptData):  # other rules report what is wrong with a file
        return


def _unknown(run: RunConfig, folder: Path) -> Iterator[Finding]:
    """Yield imported weights whose tokenizer is missing: no new one replaces it."""
    if run.data.tokenizer is not None or run.data.kind not in ("text", "image_text"):
        return
    unread = unread_tokenizer(folder)
    if unread is not None:
        detail = f"the model has {unread}, which is not read, and no tokenizer.json"
    elif is_from_elsewhere(folder) and not run.checkpoint.accept_changes:
        detail = f"{folder} has weights and no tokenizer.json, and one would be trained here"
    else:
        return
    yield Finding(
        "MT345", TOKENIZER, detail, hint=f"{TOKENIZER}=PATH of the model's tokenizer.json"
    )


def _same(named: Path, own: Path) -> Iterator[Finding]:
    ours = sha256_of(own)
    theirs = sha256_of(named)
    if ours != theirs:
        detail = f"its sha256 is {theirs[:12]}, that of {own} {ours[:12]}"
        yield Finding("MT345", TOKENIZER, detail, each(TOKENIZER, [str(own), None]))


def _made_by(run: RunConfig, own: Path) -> Iterator[Finding]:
    """Yield the first corpus whose manifest names another tokenizer.json."""
    d = run.data
    ours = sha256_of(own)
    keys: dict[str, tuple[str, ...]] = {}
    if d.path and d.blend is None:
        keys["data.path"] = (d.path,)
    for key, weights in WEIGHTS_OF.items():
        keys[f"data.{key}"] = tuple(read_corpora(getattr(d, key), getattr(d, weights)))
    for key, names in keys.items():
        for name in names:
            held = None if "://" in name else read_manifest(user_path(name), READ_BYTES)
            theirs = None if held is None else held.tokenizer_sha256
            if theirs not in (None, ours):
                detail = (
                    f"{name} was made by another tokenizer, {str(theirs)[:12]}; the model has"
                    f" {own}, {ours[:12]}"
                )
                yield Finding("MT345", key, detail, hint=f"text that was tokenized with {own}")
                return
