"""The contents of each pipeline stage, from any of the keys that split the layers, and the pattern
of a hybrid model that equals a decoder-only transformer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import ATTENTION, DELTA, EXPERTS, LATENT, MLP, SPARSE

MAX_STAGES = 4096
MAX_TEXT = 2000
GRAMMAR = (
    "a layout is one word for each stage with | between them: E embedding, t layer, m multi-token"
    " prediction, L loss; x*3 and (tt|)*29 repeat, as in Et*3|(tt|)*29,m|L"
)

_REPEATED = (re.compile(r"\(([^()]*)\)\*([0-9]{1,4})"), re.compile(r"([EtmL|])\*([0-9]{1,4})"))


@dataclass(frozen=True)
class Stage:
    """One pipeline stage or virtual stage."""

    layers: range
    """Transformer layers, counted from 0."""
    embedding: bool = False
    mtp: int = 0
    """Layers of multi-token prediction; one stage has all of them."""
    loss: bool = False
    """Final norm, output layer and loss."""

    @property
    def empty(self) -> bool:
        """Return whether the stage has nothing to compute."""
        return not (self.layers or self.embedding or self.mtp or self.loss)

    def words(self) -> list[str]:
        """Return megatron-core's names of the stage's contents, in order."""
        held = ["embedding"] * self.embedding + ["decoder"] * len(self.layers)
        return held + ["mtp"] * self.mtp + ["loss"] * self.loss


def parse_pipeline_layout(text: str) -> list[Stage]:
    """Return the stages of a layout such as `Et*3|(tt|)*29,m|L`, in the order of the model.

    The grammar is that of Megatron-LM's `--pipeline-model-parallel-layout`; commas have no meaning.

    Raises:
        ValueError: a part is unreadable, missing or out of place.
    """
    words = _unrolled(text).split("|")
    if len(words) > MAX_STAGES:
        raise ValueError(f"{len(words)} stages; at most {MAX_STAGES} can be written")
    whole = "".join(words)
    for letter, name in (("E", "embedding"), ("L", "loss")):
        if whole.count(letter) != 1:
            raise ValueError(
                f"{letter} ({name}) stands {whole.count(letter)} times, and must stand once;"
                f" {GRAMMAR}"
            )
    if not words[0].startswith("E") or not words[-1].endswith("L"):
        raise ValueError("E must be the first of the first stage and L the last of the last")
    if "t" in whole[whole.find("m") :] and "m" in whole:
        raise ValueError("a layer t follows an m: multi-token prediction follows the last layer")
    if sum("m" in word for word in words) > 1:
        raise ValueError("all m must be in one stage")
    ends = list(accumulate(word.count("t") for word in words))
    starts = [0, *ends]
    return [
        Stage(range(a, b), "E" in word, word.count("m"), "L" in word)
        for word, a, b in zip(words, starts, ends, strict=False)
    ]


def _unrolled(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ValueError(f"{len(text)} letters; at most {MAX_TEXT} are read")
    text = "".join(text.split()).replace(",", "")
    for pattern in _REPEATED:
        # The length is bounded before anything is repeated: (t|)*9999 twice would fill the memory.
        size = len(pattern.sub("", text)) + sum(
            len(m[1]) * int(m[2]) for m in pattern.finditer(text)
        )
        if size > 20 * MAX_STAGES:
            raise ValueError(
                f"repeats make {size} letters of it; at most {20 * MAX_STAGES} are read"
            )
        text = pattern.sub(lambda m: m[1] * int(m[2]), text)
    unknown = re.search(r"[^EtmL|]", text)
    if unknown:
        raise ValueError(f"cannot read {unknown.group()!r}; {GRAMMAR}")
    return text


def uneven(run: RunConfig) -> bool:
    """Return whether a key splits the layers unevenly."""
    p = run.parallel
    accounted = p.account_for_embedding_in_pipeline_split or p.account_for_loss_in_pipeline_split
    return p.pipeline_layout is not None or p.layers_per_stage is not None or accounted


def stages(run: RunConfig) -> list[Stage]:
    """Return the pp * vpp stages in the order of the model; stage i is on pipeline rank i % pp.

    Raises:
        ValueError: the keys do not fit the model or each other.
    """
    p = run.parallel
    model = run.model
    blocks = p.pp * p.vpp
    if blocks > MAX_STAGES:
        raise ValueError(
            f"pp {p.pp} * vpp {p.vpp} = {blocks} stages; at most {MAX_STAGES} can be unequal"
        )
    if p.pipeline_layout is not None:
        return _as_asked(run, parse_pipeline_layout(p.pipeline_layout), blocks)
    if p.layers_per_stage is not None:
        sizes = list(p.layers_per_stage)
        if len(sizes) != blocks:
            raise ValueError(f"{len(sizes)} sizes for pp {p.pp} * vpp {p.vpp} = {blocks} stages")
        if (least := min(sizes)) < 0:
            rule = (
                f"stage {sizes.index(least)} (counted from 0) would hold {least} layers, and none"
                " holds fewer than 0"
            )
            raise ValueError(rule)
        if sum(sizes) != model.num_layers:
            raise ValueError(f"{sum(sizes)} layers in all, and the model has {model.num_layers}")
    else:
        more = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
        size, rest = divmod(model.num_layers + sum(more), blocks)
        if rest or size - sum(more if blocks == 1 else more[:1]) < 0:
            raise ValueError(
                f"{model.num_layers + sum(more)} layers do not divide into {blocks} stages"
            )
        sizes = [size] * blocks
        sizes[0] -= more[0]
        sizes[-1] -= more[1]
    ends = list(accumulate(sizes))
    last = blocks - 1
    mtp = model.mtp_num_layers or 0
    return [
        Stage(range(end - size, end), i == 0, mtp if i == last else 0, i == last)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def _as_asked(run: RunConfig, found: list[Stage], blocks: int) -> list[Stage]:
    p = run.parallel
    model = run.model
    layers = sum(len(s.layers) for s in found)
    mtp = sum(s.mtp for s in found)
    if len(found) != blocks:
        raise ValueError(f"{len(found)} stages are written, and pp {p.pp} * vpp {p.vpp} = {blocks}")
    if layers != model.num_layers:
        raise ValueError(f"{layers} layers t are written, and the model has {model.num_layers}")
    if mtp != (model.mtp_num_layers or 0):
        raise ValueError(f"{mtp} m are written, and model.mtp_num_layers is {model.mtp_num_layers}")
    return found


# The letters of one layer of such a transformer: attention, then MLP or experts.
OF_A_BLOCK = 2


def pattern(model: ModelConfig) -> str:
    """Return the letters of all layers."""
    dense = model.num_layers if model.moe is None else model.moe.first_dense_layers
    if model.mla is None:
        softmax = ATTENTION
    else:
        softmax = LATENT if model.dsa is None else SPARSE
    return "".join(
        (DELTA if model.is_linear(index) else softmax) + (MLP if index < dense else EXPERTS)
        for index in range(model.num_layers)
    )


def letters(layers: range) -> range:
    """Return the letters of some of the layers."""
    return range(OF_A_BLOCK * layers.start, OF_A_BLOCK * layers.stop)
