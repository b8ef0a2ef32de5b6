"""Data rules: the requirements of each kind, and token ids within the embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from mtrain.config.compose.dump import override
from mtrain.config.resolve.conditional import chunks_of_a_document
from mtrain.config.resolve.model_tokenizer import (
    folder_of_the_model,
    is_from_elsewhere,
    model_tokenizer,
)
from mtrain.config.rules.finding import DP, Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.data import WEIGHTS_OF
from mtrain.config.schema.run import RunConfig

LEAST_SHARE = 1e-12
"""Of a blend. Shares are kept in 64 bits, whose rounding is a ten-thousandth of it."""


def is_lost(share: float, total: float) -> bool:
    """Return whether a positive weight is lost in the sum of all, which messages print rounded."""
    return 0 < float(f"{share / total:.2g}") < LEAST_SHARE


@rule(
    Code(
        "MT316",
        "Indexed data is read from one path or from a blend, not from both.",
        example="data=indexed data.path=a data.blend=[a,b]",
    ),
    Code("MT301", "Indexed data needs the prefix of its .bin and .idx.", example="data=indexed"),
    Code("MT302", "Synthetic data reads no path.", example="data=mock data.path=x"),
    Code(
        "MT303",
        "Only data of kind text can be limited in size.",
        example="data=mock data.limit_mib=1",
    ),
    Code(
        "MT304",
        "Synthetic data has no text, and reads no tokenizer.",
        example="data=mock data.tokenizer=x",
    ),
    reads="data.kind data.tokenizer data.limit_mib data.path data.blend",
)
def data_kind_keys(run: RunConfig) -> Iterator[Finding]:
    """A key that the chosen kind of data does not read is an error."""
    d = run.data
    if d.kind == "indexed" and d.path is not None and d.blend is not None:
        rule = "data.blend names the corpora that are read, and data.path would have no effect"
        yield Finding(
            "MT316",
            "data.path",
            rule,
            ({"data.path": None}, {"data.blend": None, "data.blend_weights": None}),
            unset=True,
        )
    if d.kind == "indexed" and d.path is None and d.blend is None:
        rule = "kind indexed reads PREFIX.bin and PREFIX.idx, and data.path is null"
        yield Finding("MT301", "data.path", rule, hint="data.path=PREFIX", lacks="input")
    if d.kind == "mock" and d.path is not None:
        rule = "kind mock makes its tokens up and reads no path"
        yield Finding(
            "MT302",
            "data.path",
            rule,
            ({"data.path": None},),
            hint=_kinds_that_read(d.path),
            unset=True,
        )
    if d.kind != "text" and d.limit_mib is not None:
        rule = f"limits how much text is read, and data.kind is {d.kind}"
        yield Finding("MT303", "data.limit_mib", rule, ({"data.limit_mib": None},), unset=True)
    if d.kind == "mock" and d.tokenizer is not None:
        rule = "kind mock has no text, and the tokenizer no effect"
        none = {"data.tokenizer": None}
        yield Finding("MT304", "data.tokenizer", rule, (none,), unset=True, hint="data=text")


def _kinds_that_read(path: str) -> str:
    """Return the choices of data whose files end as `path` does."""
    ending = PurePath(path).suffix.lower()
    if ending in (".jsonl", ".json"):
        return "data=sft"
    if ending in (".bin", ".idx"):
        return f"data=indexed {override('data.path', path[: -len(ending)])}"
    return "data=text" if ending else "data=text or data=indexed"


@rule(
    Code(
        "MT317", "Every corpus of a blend is named once.", example="data=indexed data.blend=[a,a]"
    ),
    Code(
        "MT318",
        "Every corpus of a blend has a share of its own, and some corpus is read.",
        "Give a weight for each corpus; 0 leaves a corpus out.",
        example="data=indexed data.blend=[a,b] data.blend_weights=[1]",
    ),
    Code(
        "MT319",
        "A corpus of a blend that has a weight of 0 is not read.",
        "Give it a weight above 0, or leave it out of the blend.",
        severity="warning",
        example="data=indexed data.blend=[a,b] data.blend_weights=[1,0]",
    ),
    reads=(
        "data.kind data.blend data.blend_weights data.validation_blend data.validation_weights"
        " data.test_blend data.test_weights"
    ),
)
def blend_shares(run: RunConfig) -> Iterator[Finding]:
    """A blend names every corpus once, with a share of its own."""
    d = run.data
    for names, weights in WEIGHTS_OF.items() if d.kind == "indexed" else ():
        corpora = getattr(d, names)
        shares = getattr(d, weights)
        if corpora is None:
            continue
        if len(set(corpora)) < len(corpora):
            rule = "a corpus is named twice; its share is its weight"
            yield Finding("MT317", f"data.{names}", rule, _once(names, weights, corpora))
        if names == "blend" and shares is not None and len(shares) != len(corpora):
            rule = f"{len(shares)} weights for {len(corpora)} corpora"
            yield Finding("MT318", f"data.{weights}", rule, hint="a weight for each corpus")
        elif shares is not None and len(shares) == len(corpora):
            yield from _shares(weights, corpora, shares)


def _shares(weights: str, corpora: Sequence[str], shares: Sequence[float]) -> Iterator[Finding]:
    """Yield a blend that reads no corpus, and shares that are lost in rounding."""
    total = math.fsum(shares)
    key = f"data.{weights}"
    if not total:
        rule = "all weights are 0, so that no corpus is read"
        yield Finding("MT318", key, rule, hint=f"{key}=[...], of which one is above 0")
        return
    few = {
        name: share / total
        for name, share in zip(corpora, shares, strict=True)
        if is_lost(share, total)
    }
    if few:
        name, least = min(few.items(), key=lambda one: one[1])
        rule = (
            f"the share of {name} is {least:.2g} of all, and {LEAST_SHARE:g} is the least that can"
            " be kept"
        )
        yield Finding(
            "MT318", key, rule, hint=f"give {name} a larger weight, or 0, which leaves it out"
        )
    if out := [name for name, share in zip(corpora, shares, strict=True) if not share]:
        if len(out) == 1:
            rule = "has a weight of 0 and is not read"
        else:
            rule = "have a weight of 0 and are not read"
        yield Finding("MT319", key, f"{_listed(out)} {rule}")


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _once(names: str, weights: str, corpora: Sequence[str]) -> tuple[Change, ...]:
    """Return changes that name each corpus once, or a single corpus as a path."""
    each: Change = {f"data.{names}": list(dict.fromkeys(corpora)), f"data.{weights}": None}
    alone: Change = {"data.blend": None, "data.blend_weights": None, "data.path": corpora[0]}
    return (each, alone) if names == "blend" else (each,)


@rule(
    Code("MT308", "There is something to train on.", example="data.split=[0,0,0]"),
    Code(
        "MT309",
        "Evaluation has samples to validate on.",
        example="data.split=[1,0,0]",
    ),
    reads="data.split data.validation_blend data.test_blend trainer.eval_iters",
)
def split_usability(run: RunConfig) -> Iterator[Finding]:
    """The split has data to train on, and to validate on if evaluation is requested."""
    d = run.data
    if d.validation_blend is not None or d.test_blend is not None:
        if d.validation_blend is None and run.trainer.eval_iters > 0:
            rule = (
                f"data.test_blend is set, and trainer.eval_iters asks for {run.trainer.eval_iters}"
                " batches of it"
            )
            off: Change = {"trainer.eval_iters": 0}
            both: Change = {**off, "trainer.eval_interval": 0}
            yield Finding(
                "MT309",
                "data.validation_blend",
                rule,
                (off, both),
                hint="data.validation_blend=[PREFIX]",
            )
        return
    train, validation, _ = d.split
    total = sum(d.split)
    usual: Change = {"data.split": [0.96, 0.03, 0.01]}
    if total <= 0 or train <= 0:
        rule = f"the share of train is {train:g} of {total:g}: nothing to train on"
        yield Finding("MT308", "data.split", rule, (usual,))
    elif validation <= 0 and run.trainer.eval_iters > 0:
        rule = (
            "the share of validation is 0, and trainer.eval_iters asks for"
            f" {run.trainer.eval_iters} batches of it"
        )
        none: Change = {"trainer.eval_iters": 0}
        fixes: tuple[Change, ...] = (none, {**none, "trainer.eval_interval": 0}, usual)
        yield Finding("MT309", "data.split", rule, fixes)


@rule(
    Code(
        "MT310",
        "Every token id has a row in the embedding.",
        example="data.tokenizer_vocab_size=5000",
    ),
    Code(
        "MT311",
        "Most rows of the embedding are used.",
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
    """The embedding has a row for every id of a trained tokenizer, and few unused rows."""
    d = run.data
    vocab = run.model.vocab_size
    size = d.tokenizer_vocab_size
    if d.kind != "text" or d.tokenizer is not None or model_tokenizer(run) is not None:
        return
    folder = folder_of_the_model(run)
    if folder is not None and is_from_elsewhere(folder) and not run.checkpoint.accept_changes:
        return  # no tokenizer is trained for these weights
    if size > vocab:
        rule = f"token ids up to {size - 1}, and model.vocab_size is {vocab}"
        fixes: tuple[Change, ...] = ({"data.tokenizer_vocab_size": vocab},)
        if folder is None:  # weights have the vocabulary that they have
            fixes += ({"model.vocab_size": size},)
        yield Finding("MT310", "data.tokenizer_vocab_size", rule, fixes)
    elif 2 * size < vocab:
        unused = 100 * (vocab - size) // vocab
        rule = (
            f"{size} token ids for model.vocab_size {vocab}: {unused}% of the embedding is never"
            " used"
        )
        larger: Change = {"data.tokenizer_vocab_size": vocab}
        yield Finding("MT311", "data.tokenizer_vocab_size", rule, (larger,))


@rule(
    Code("MT312", "Generated text needs a tokenizer.", example="data=mock trainer.sample_tokens=8"),
    Code(
        "MT313",
        "Text is generated with whole sequences on a rank.",
        example="parallel=cp2 trainer.sample_tokens=8",
    ),
    reads="trainer.sample_tokens data.kind parallel.cp data.tokenizer",
)
def sample_requirements(run: RunConfig) -> Iterator[Finding]:
    """Generated text needs a tokenizer, and the whole sequence on one rank."""
    t = run.trainer
    d = run.data
    if not t.sample_tokens:
        return
    none: Change = {"trainer.sample_tokens": 0}
    if d.kind == "mock" or (d.kind == "indexed" and d.tokenizer is None):
        missing = "data.kind mock has none" if d.kind == "mock" else "data.tokenizer is null"
        yield Finding(
            "MT312",
            "trainer.sample_tokens",
            f"generating text needs a tokenizer, and {missing}",
            (none,),
        )
    if run.parallel.cp > 1:
        rule = f"text is generated with whole sequences on a rank, and cp is {run.parallel.cp}"
        yield Finding("MT313", "trainer.sample_tokens", rule, (none, {"parallel.cp": 1}))


@rule(
    Code(
        "MT314",
        "The length of a packed document is a multiple of its chunks, and divides a sample.",
        example="parallel=cp2 data.packed=true data.packed_multiple=3",
    ),
    Code(
        "MT315",
        "A balancing loss of each sample is not defined for packed samples.",
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
    """Packing cuts and pads documents one by one, which excludes some keys."""
    d = run.data
    _p = run.parallel
    m = run.model
    if not d.packed:
        return
    off: Change = {"data.packed": False, "data.packed_multiple": None}
    step = chunks_of_a_document(run)
    size = d.packed_multiple or 1
    if size % step or d.length % size:
        near = [n for n in (step, 2 * step, 4 * step) if d.length % n == 0]
        rule = (
            f"{size} must be a multiple of the {step} chunks of a document and divide samples of"
            f" {d.length}"
        )
        fixes: tuple[Change, ...] = tuple({"data.packed_multiple": n} for n in near)
        yield Finding(
            "MT314",
            "data.packed_multiple",
            rule,
            (*fixes, off),
            also=("parallel.cp", "parallel.tp"),
        )
    if m.moe is not None and m.moe.router_load_balancing_type == "seq_aux_loss":
        rule = "seq_aux_loss balances each sample, and a packed micro-batch is one long sample"
        aux: Change = {"model.moe.router_load_balancing_type": "aux_loss"}
        yield Finding("MT315", "data.packed", rule, (aux, off))


@rule(
    Code(
        "MT357",
        "Whole documents are read in an order of their own, each as it stands.",
        "Turn off data.packed_by=first_fit, or what needs a stream of tokens.",
        example=(
            "data=mock data.packed=true data.packed_by=first_fit data.fim.rate=0.5"
            " data.fim.ids=[1,2,3]"
        ),
    ),
    reads="data.kind data.packed data.packed_by data.order data.fim.rate",
)
def whole_documents(run: RunConfig) -> Iterator[Finding]:
    """Megatron's sample order and fill-in-the-middle need a stream of tokens."""
    d = run.data
    if not d.whole_documents:
        return
    stream: Change = {
        "data.packed_by": "stream",
        "data.packed_window": 2048,
        "data.long_documents": "cut",
    }
    if d.order == "megatron":
        rule = (
            "Megatron-LM cuts samples from a stream of tokens, and data.packed_by=first_fit keeps"
            " documents whole"
        )
        yield Finding(
            "MT357",
            "data.order",
            rule,
            ({"data.order": "keyed", "data.megatron_cache": None}, stream),
        )
    if d.fim.rate:
        rule = (
            "the middle is moved in samples of a stream of tokens, and data.packed_by=first_fit"
            " keeps documents whole"
        )
        none: Change = {"data.fim.rate": 0.0, "data.fim.ids": None, "data.fim.spm_rate": 0.5}
        yield Finding("MT357", "data.fim.rate", rule, (none, stream))


RULES = (
    whole_documents,
    data_kind_keys,
    blend_shares,
    split_usability,
    vocabulary_fit,
    sample_requirements,
    packed_samples,
)
