"""Data rules: the keys of each kind, shares of a blend, splits, packing and marker tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePath

from mtrain.config.compose.dump import override
from mtrain.config.resolve.conditional import chunks_of_a_document
from mtrain.config.resolve.model_tokenizer import (
    folder_of_the_model,
    is_from_elsewhere,
    model_tokenizer,
)
from mtrain.config.rules.finding import DP, Change, Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.data import WEIGHTS_OF
from mtrain.config.schema.run import RunConfig

LEAST_SHARE = 1e-12
"""Smallest share in a blend: shares are stored in 64 bits, whose rounding is a ten-thousandth of
it.
"""
SPLIT = "data.split"
CURRICULUM = "data.blend_curriculum"
NO_MIDDLE: Change = {"data.fim.rate": 0.0, "data.fim.ids": None, "data.fim.spm_rate": 0.5}
UNPACKED: Change = {"data.packed": False, "data.packed_multiple": None}
NO_EVALUATION: Change = {"trainer.eval_iters": 0}
_BLEND = "data=indexed data.blend=[a,b]"
_PER_CORPUS = {
    "blend_sizes": "blend",
    "blend_max_epochs": "blend",
    "validation_weights": "validation_blend",
    "test_weights": "test_blend",
}
"""Keys with a number for each corpus of another one."""


def is_lost(share: float, total: float) -> bool:
    """Return whether a positive weight is lost in the sum of all, which messages print rounded."""
    return 0 < float(f"{share / total:.2g}") < LEAST_SHARE


@rule(
    Code(
        "MT357",
        help="Turn off data.packed_by=first_fit, or the key that needs a stream of tokens.",
        example=(
            "data=mock data.packed=true data.packed_by=first_fit data.fim.rate=0.5"
            " data.fim.ids=[1,2,3]"
        ),
    ),
    reads="data.kind data.packed data.packed_by data.order data.fim.rate",
)
def whole_documents(run: RunConfig) -> Iterator[Finding]:
    """Cannot cut samples like this because that takes a stream of tokens, and
    data.packed_by=first_fit keeps documents whole.
    """
    d = run.data
    if not d.whole_documents:
        return
    stream: Change = {
        "data.packed_by": "stream",
        "data.packed_window": 2048,
        "data.long_documents": "cut",
    }
    if d.order == "megatron":
        keyed = {"data.order": "keyed", "data.megatron_cache": None}
        yield Finding("MT357", "data.order", "samples of Megatron-LM", [keyed, stream])
    if d.fim.rate:
        detail = f"fill in the middle, rate {d.fim.rate:g}"
        yield Finding("MT357", "data.fim.rate", detail, [NO_MIDDLE, stream])


@rule(
    Code(
        "MT316",
        "Cannot read a path next to a blend because data.blend names all corpora.",
        example="data=indexed data.path=a data.blend=[a,b]",
    ),
    Code(
        "MT301",
        "Cannot read indexed data because the prefix of its .bin and .idx is not set.",
        example="data=indexed",
    ),
    Code("MT302", example="data=mock data.path=x"),
    Code(
        "MT303",
        "Cannot limit the size of this data because only kind text has a limit.",
        example="data=mock data.limit_mib=1",
    ),
    Code(
        "MT304",
        "Cannot use a tokenizer because synthetic data has no text.",
        example="data=mock data.tokenizer=x",
    ),
    reads="data.kind data.tokenizer data.limit_mib data.path data.blend",
)
def data_kind_keys(run: RunConfig) -> Iterator[Finding]:
    """Cannot read a path because data.kind=mock generates its tokens."""
    d = run.data
    no_path: Change = {"data.path": None}
    if d.kind == "indexed" and d.path is not None and d.blend is not None:
        fixes = [no_path, {"data.blend": None, "data.blend_weights": None}]
        yield Finding("MT316", "data.path", f"{len(d.blend)} corpora", fixes, unset=True)
    # The path may be named where the run starts, so `check` only warns.
    if d.kind == "indexed" and d.path is None and d.blend is None:
        yield Finding("MT301", "data.path", hint="data.path=PREFIX", lacks="input")
    if d.kind == "mock" and d.path is not None:
        hint = _kinds_that_read(d.path)
        yield Finding("MT302", "data.path", "", [no_path], hint=hint, unset=True)
    if d.kind != "text" and d.limit_mib is not None:
        detail = f"data.kind is {d.kind}"
        yield Finding("MT303", "data.limit_mib", detail, [{"data.limit_mib": None}], unset=True)
    if d.kind == "mock" and d.tokenizer is not None:
        none = {"data.tokenizer": None}
        detail = "data.kind is mock"
        yield Finding("MT304", "data.tokenizer", detail, [none], unset=True, hint="data=text")


def _kinds_that_read(path: str) -> str:
    """Return the choices of data whose files end as `path` does."""
    ending = PurePath(path).suffix.lower()
    if ending in (".jsonl", ".json"):
        return "data=sft"
    # The two files of a corpus are named by their common prefix.
    if ending in (".bin", ".idx"):
        return f"data=indexed {override('data.path', path[: -len(ending)])}"
    return "data=text" if ending else "data=text or data=indexed"


@rule(
    Code("MT317", example="data=indexed data.blend=[a,a]"),
    Code(
        "MT318",
        "Cannot blend by these weights because each corpus needs one, and rounding must not erase"
        " a share.",
        "Give a weight for each corpus; 0 leaves a corpus out.",
        example=f"{_BLEND} data.blend_weights=[1]",
    ),
    Code(
        "MT319",
        "Cannot read a corpus because its weight is 0.",
        "Give it a weight above 0, or leave it out of the blend.",
        severity="warning",
        example=f"{_BLEND} data.blend_weights=[1,0]",
    ),
    reads=(
        "data.kind data.blend data.blend_weights data.validation_blend data.validation_weights"
        " data.test_blend data.test_weights"
    ),
)
def blend_shares(run: RunConfig) -> Iterator[Finding]:
    """Cannot name a corpus twice because its weight sets its share."""
    d = run.data
    for names, weights in WEIGHTS_OF.items() if d.kind == "indexed" else ():
        corpora = getattr(d, names)
        shares = getattr(d, weights)
        if corpora is None:
            continue
        once = list(dict.fromkeys(corpora))
        if len(once) < len(corpora):
            fixes: list[Change] = [{f"data.{names}": once, f"data.{weights}": None}]
            if names == "blend":
                fixes.append({"data.blend": None, "data.blend_weights": None, "data.path": once[0]})
            detail = f"{len(corpora)} names, {len(once)} corpora"
            yield Finding("MT317", f"data.{names}", detail, fixes)
        if names == "blend" and shares is not None and len(shares) != len(corpora):
            detail = f"{len(shares)} weights for {len(corpora)} corpora"
            yield Finding("MT318", f"data.{weights}", detail, hint="a weight for each corpus")
        elif shares is not None and len(shares) == len(corpora):
            yield from _shares(f"data.{weights}", corpora, shares)


def _shares(key: str, corpora: Sequence[str], shares: Sequence[float]) -> Iterator[Finding]:
    """Yield a blend that reads no corpus, and shares that are lost in rounding."""
    # fsum: a plain sum of many shares would itself round.
    total = math.fsum(shares)
    if not total:
        hint = f"{key}=[...] with a weight above 0"
        yield Finding("MT318", key, "all weights are 0", hint=hint)
        return
    named = list(zip(corpora, shares, strict=True))
    few = {name: share / total for name, share in named if is_lost(share, total)}
    if few:
        name, least = min(few.items(), key=lambda one: one[1])
        detail = f"the share of {name} is {least:.2g}, at least {LEAST_SHARE:g}"
        hint = f"give {name} a larger weight, or 0, which leaves it out"
        yield Finding("MT318", key, detail, hint=hint)
    if out := [name for name, share in named if not share]:
        more = f" and {len(out) - 4} more" if len(out) > 4 else ""
        yield Finding("MT319", key, ", ".join(out[:4]) + more)


@rule(
    Code("MT308", example=f"{SPLIT}=[0,0,0]"),
    Code(
        "MT309",
        "Cannot evaluate because the split leaves no samples for it.",
        example=f"{SPLIT}=[1,0,0]",
    ),
    reads=f"{SPLIT} data.validation_blend data.test_blend trainer.eval_iters",
)
def split_usability(run: RunConfig) -> Iterator[Finding]:
    """Cannot train because the split has no samples for it."""
    d = run.data
    batches = run.trainer.eval_iters
    # An interval that was set makes no sense without evaluations, so offer to unset both.
    off: list[Change] = [NO_EVALUATION, {**NO_EVALUATION, "trainer.eval_interval": 0}]
    # Separate blends replace the split, which is not read then.
    if d.validation_blend is not None or d.test_blend is not None:
        if d.validation_blend is None and batches > 0:
            key = "data.validation_blend"
            detail = f"data.test_blend is set, trainer.eval_iters {batches}"
            yield Finding("MT309", key, detail, off, hint=f"{key}=[PREFIX]")
        return
    train, validation, _ = d.split
    total = sum(d.split)
    usual: Change = {SPLIT: [0.96, 0.03, 0.01]}
    if total <= 0 or train <= 0:
        yield Finding("MT308", SPLIT, f"the share of train is {train:g} of {total:g}", [usual])
    elif validation <= 0 and batches > 0:
        detail = f"the share of validation is 0, trainer.eval_iters {batches}"
        yield Finding("MT309", SPLIT, detail, [*off, usual])


@rule(
    Code("MT310", example="data.tokenizer_vocab_size=5000"),
    Code(
        "MT311",
        "Cannot use most rows of the embedding because there are few token ids.",
        severity="warning",
        example="data.tokenizer_vocab_size=400",
    ),
    reads=(
        "data.kind data.tokenizer_vocab_size data.tokenizer checkpoint.resume checkpoint.init_from "
        "checkpoint.accept_changes model.vocab_size"
    ),
    disk=True,
)
def vocabulary_fit(run: RunConfig) -> Iterator[Finding]:
    """Cannot embed every token because there are more token ids than rows of the embedding."""
    d = run.data
    vocab = run.model.vocab_size
    size = d.tokenizer_vocab_size
    key = "data.tokenizer_vocab_size"
    if d.kind != "text" or d.tokenizer is not None or model_tokenizer(run) is not None:
        return
    folder = folder_of_the_model(run)
    # No tokenizer is trained for weights that come from elsewhere.
    if folder is not None and is_from_elsewhere(folder) and not run.checkpoint.accept_changes:
        return
    fixes: list[Change] = [{key: vocab}]
    if size > vocab:
        # Weights have the vocabulary that they have.
        fixes += each("model.vocab_size", [size] if folder is None else [])
        yield Finding("MT310", key, f"ids up to {size - 1}, model.vocab_size {vocab}", fixes)
    # Half of the rows is a lot of memory and a softmax over ids that never occur.
    elif 2 * size < vocab:
        unused = 100 * (vocab - size) // vocab
        detail = f"{size} token ids, model.vocab_size {vocab}: {unused}% is never used"
        yield Finding("MT311", key, detail, fixes)


@rule(
    Code("MT312", example="data=mock trainer.sample_tokens=8"),
    "MT313",
    "MT377",
    reads="trainer.sample_tokens data.kind parallel.cp data.tokenizer model.head",
)
def sample_requirements(run: RunConfig) -> Iterator[Finding]:
    """Cannot generate text because the data has no tokenizer."""
    d = run.data
    key = "trainer.sample_tokens"
    none: Change = {key: 0}
    if not run.trainer.sample_tokens:
        return
    if d.kind == "mock" or (d.kind == "indexed" and d.tokenizer is None):
        missing = "data.kind is mock" if d.kind == "mock" else "data.tokenizer is null"
        yield Finding("MT312", key, missing, [none])
    if run.parallel.cp > 1:
        yield Finding("MT313", key, f"cp {run.parallel.cp}", [none, {"parallel.cp": 1}])
    if run.model.head:
        yield Finding("MT377", key, f"model.head is {run.model.head}", [none])


@rule(
    Code("MT314", example="parallel=cp2 data.packed=true data.packed_multiple=3"),
    Code(
        "MT315",
        "Cannot balance each sample because a packed micro-batch is one long sample.",
        example=(
            "model=mixtral_tiny data.packed=true model.moe.router_load_balancing_type=seq_aux_loss"
        ),
    ),
    reads=(
        f"data.packed data.packed_multiple data.seq_length {DP} parallel.hybrid_context_parallel"
        " parallel.sequence_parallel model.moe.router_load_balancing_type"
    ),
)
def packed_samples(run: RunConfig) -> Iterator[Finding]:
    """Cannot pad packed documents because their multiple must be whole chunks and divide a
    sample.
    """
    d = run.data
    moe = run.model.moe
    if not d.packed:
        return
    # cp and tp cut each document into chunks of equal size.
    step = chunks_of_a_document(run)
    size = d.packed_multiple or 1
    if size % step or d.length % size:
        near = [n for n in (step, 2 * step, 4 * step) if d.length % n == 0]
        key = "data.packed_multiple"
        detail = f"{size}, {step} chunks, samples of {d.length}"
        fixes = [*each(key, near), UNPACKED]
        yield Finding("MT314", key, detail, fixes, also=("parallel.cp", "parallel.tp"))
    # seq_aux_loss averages within a sample, and a packed sample is many documents.
    if moe is not None and moe.router_load_balancing_type == "seq_aux_loss":
        aux: Change = {"model.moe.router_load_balancing_type": "aux_loss"}
        yield Finding("MT315", "data.packed", "seq_aux_loss", [aux, UNPACKED])


@rule(
    Code("MT351", example=f"{_BLEND} data.blend_sizes=[1]"),
    Code(
        "MT353",
        "Cannot blend by several kinds of shares because each defines all of them.",
        example=f"{_BLEND} data.blend_weights=[1,2] data.blend_sizes=[3,4]",
    ),
    reads=(
        f"data.kind data.blend data.blend_weights data.blend_sizes {CURRICULUM}"
        " data.blend_max_epochs data.validation_blend data.validation_weights data.test_blend"
        " data.test_weights"
    ),
)
def blend_numbers(run: RunConfig) -> Iterator[Finding]:
    """Cannot match numbers with corpora because a blend needs one number per corpus."""
    d = run.data
    if d.kind != "indexed":
        return
    for key, names in _PER_CORPUS.items():
        numbers = getattr(d, key)
        corpora = getattr(d, names)
        if numbers is not None and corpora is not None and len(numbers) != len(corpora):
            detail = f"{len(numbers)} numbers for the {len(corpora)} corpora of data.{names}"
            yield Finding("MT351", f"data.{key}", detail, each(f"data.{key}", [None]))
    kinds = ("blend_weights", "blend_sizes", "blend_curriculum")
    # Each of the three keys defines all shares, so two would contradict each other.
    given = [f"data.{key}" for key in kinds if getattr(d, key) is not None]
    if d.blend is not None and len(given) > 1:
        fixes = [{key: None for key in given if key != kept} for kept in given]
        yield Finding("MT353", given[0], " and ".join(given), fixes, unset=True)


@rule(
    "MT352",
    Code("MT354", example=f"{_BLEND} {CURRICULUM}=[[5,[1,0]]]"),
    reads=f"data.kind data.blend {CURRICULUM}",
)
def blend_curriculum(run: RunConfig) -> Iterator[Finding]:
    """Cannot follow the curriculum because it needs weights for all corpora, from sample 0 on, at
    rising sample numbers.
    """
    d = run.data
    plan = d.blend_curriculum
    if d.kind != "indexed" or d.blend is None or plan is None:
        return

    def refused(detail: str, *plans: object, code: str = "MT354") -> Finding:
        return Finding(code, CURRICULUM, detail, each(CURRICULUM, plans))

    for first, weights in plan:
        total = sum(weights)
        least = min((w for w in weights if w > 0), default=0.0)
        if len(weights) != len(d.blend):
            detail = f"{len(weights)} weights from sample {first} on, for {len(d.blend)} corpora"
            yield refused(detail, None)
            return
        if not total:
            even = [[at, list(ws) if sum(ws) else [1.0] * len(ws)] for at, ws in plan]
            yield refused(f"from sample {first} on", even, None, code="MT352")
            return
        if is_lost(least, total):
            kept = [[at, [0.0 if is_lost(w, sum(ws) or 1.0) else w for w in ws]] for at, ws in plan]
            share = f"{least / total:.2g}"
            detail = (
                f"the smallest share from sample {first} on is {share}, at least {LEAST_SHARE:g}"
            )
            yield refused(detail, kept)
            return
    firsts = [first for first, _ in plan]
    if firsts[0] != 0:
        whole = [[0, list(plan[0][1])], *[[first, list(weights)] for first, weights in plan[1:]]]
        yield refused(f"begins at sample {firsts[0]}", whole, None)
    elif any(b <= a for a, b in pairwise(firsts)):
        yield refused(", ".join(map(str, firsts[:8])), None)


@rule(
    "MT355",
    Code(
        "MT356",
        "Cannot fill in the middle because the model does not predict the next token of a text.",
        example="model=bert_tiny data=mock data.fim.rate=0.5 data.fim.ids=[1,2,3]",
    ),
    reads="data.fim.rate data.fim.ids model.vocab_size model.family",
)
def middle_marks(run: RunConfig) -> Iterator[Finding]:
    """Require three different ids of the vocabulary as marks, and a model that reads them."""
    fim = run.data.fim
    vocab = run.model.vocab_size
    if not fim.rate:
        return
    # Encoders and T5 hide tokens in their own way.
    if run.model.family not in ("gpt", "hybrid"):
        detail = f"model.family is {run.model.family}"
        yield Finding("MT356", "data.fim.rate", detail, [NO_MIDDLE], unset=True)
    if fim.ids is None:
        detail = f"data.fim.rate {fim.rate:g}, no ids"
    elif len(set(fim.ids)) < 3 or max(fim.ids) >= vocab:
        detail = f"three different ids from 0 to {vocab - 1}"
    else:
        return
    hint = "data.fim.ids=[PREFIX,SUFFIX,MIDDLE]"
    also = ("model.vocab_size",) if fim.ids else ()
    yield Finding("MT355", "data.fim.ids", detail, [NO_MIDDLE], hint=hint, also=also)
