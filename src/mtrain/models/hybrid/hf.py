"""Hugging Face's names of the weights of hybrids: Mamba-2, Nemotron-H and Granite 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from mtrain.models.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP
from mtrain.models.hybrid.weights import FUSED, part_ends
from mtrain.models.table import (
    EXPERTS as OF_EACH_EXPERT,
)
from mtrain.models.table import QKV, VOCABULARY, Copy, Entry, Operation, Step, Table, joined


@dataclass(frozen=True)
class Fused(Entry):
    """A tensor of transformers whose rows are several tensors here, named after it."""

    parts: tuple[str, ...] = ()

    def steps(self, model: Any, **numbers: int) -> Iterator[Step]:
        """Yield one step, to all parts."""
        for step in super().steps(model, **numbers):
            (ours,) = step.ours
            yield replace(step, ours=tuple(f"{ours}.{part}" for part in self.parts))


@dataclass(frozen=True)
class ByKind(Table):
    """A table with entries by the letter of a layer's pattern; `{p}` counts pairs of layers."""

    kinds: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)

    def entries(self, model: Any) -> Iterator[Step]:
        """Yield the entries of a model's every layer, with numbers for letters."""
        for entry in self.once:
            yield from entry.steps(model)
        for i, kind in enumerate(model.hybrid.pattern):
            for entry in self.kinds[kind]:
                # A layer of Granite 4 is a mixer and an MLP, which are two layers here.
                yield from entry.steps(model, i=i, p=i // 2)


def _parts(ours: str, theirs: str) -> Fused:
    parts = next(names for end, names in FUSED.items() if ours.endswith(end))

    def split(tensors: list[Any], model: Any) -> list[Any]:
        ends = part_ends(model, parts)
        if len(tensors[0]) != ends[-1]:
            raise ValueError(f"parts have {ends[-1]} rows, and {len(tensors[0])} are there")
        return [tensors[0][a:b] for a, b in pairwise([0, *ends])]

    operation = Operation(
        f"parted into {', '.join(parts)}", split, lambda tensors, model: [joined(tensors)]
    )
    return Fused(ours, (theirs,), operation, parts)


_LAYER = "decoder.layers.{i}."
_NORMS = {
    MAMBA: "norm",
    ATTENTION: "input_layernorm",
    MLP: "pre_mlp_layernorm",
    EXPERTS: "pre_mlp_layernorm",
}


def _norm(kind: str, theirs: str) -> Entry:
    return Entry(f"{_LAYER}{_NORMS[kind]}.weight", (theirs,))


def _mixer(theirs: str) -> tuple[Entry, ...]:
    ours = f"{_LAYER}mixer."
    return (
        *(Entry(f"{ours}{name}", (f"{theirs}{name}",)) for name in ("dt_bias", "A_log", "D")),
        *(
            _parts(f"{ours}{n}", f"{theirs}{n}")
            for n in ("in_proj.weight", "conv1d.weight", "conv1d.bias")
        ),
        *(
            Entry(f"{ours}{name}.weight", (f"{theirs}{name}.weight",))
            for name in ("norm", "out_proj")
        ),
    )


def _attention(theirs: str) -> tuple[Entry, ...]:
    qkv = tuple(f"{theirs}{name}_proj.weight" for name in "qkv")
    return (
        Entry(f"{_LAYER}self_attention.linear_qkv.weight", qkv, QKV),
        Entry(f"{_LAYER}self_attention.linear_proj.weight", (f"{theirs}o_proj.weight",)),
    )


def _table(prefix: str, *, apart: bool) -> ByKind:
    """Return the table of names below `prefix`; with `apart`, those of each expert."""
    theirs = f"{prefix}.layers.{{i}}."
    mixer = f"{theirs}mixer."
    kinds: dict[str, tuple[Entry, ...]] = {
        MAMBA: _mixer(mixer),
        ATTENTION: _attention(mixer),
        MLP: _mlp(f"{_LAYER}mlp.", mixer),
        EXPERTS: (
            Entry(f"{_LAYER}mlp.router.weight", (f"{mixer}gate.weight",)),
            Entry(f"{_LAYER}mlp.router.expert_bias", (f"{mixer}gate.e_score_correction_bias",)),
            *_experts(mixer, apart),
            *_mlp(f"{_LAYER}mlp.shared_experts.", f"{mixer}shared_experts."),
        ),
    }
    norm = f"{theirs}norm.weight"
    once = (
        Entry("embedding.word_embeddings.weight", (f"{prefix}.embeddings.weight",), VOCABULARY),
        Entry("decoder.final_norm.weight", (f"{prefix}.norm_f.weight",)),
        Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
    )
    return ByKind(
        once,
        (),
        copies=(Copy("lm_head.weight", f"{prefix}.embeddings.weight"),),
        ignored=(r"mtp\..*",),
        kinds={kind: (_norm(kind, norm), *entries) for kind, entries in kinds.items()},
    )


def _mlp(ours: str, theirs: str) -> tuple[Entry, ...]:
    names = (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
    return tuple(
        Entry(f"{ours}{mine}.weight", (f"{theirs}{other}.weight",)) for mine, other in names
    )


def _experts(mixer: str, apart: bool) -> Iterator[Entry]:
    for mine, other in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
        ours = f"{_LAYER}mlp.experts.{mine}.weight{{e}}"
        if apart:
            yield Entry(ours, (f"{mixer}experts.{{e}}.{other}.weight",))
        else:
            yield Entry(ours, (f"{mixer}experts.{other}",), OF_EACH_EXPERT)


def _granite(router: str, first: str, second: str) -> ByKind:
    """Return the table of Granite 4, each of whose layers is two of mtrain's; `router`, `first` and
    `second` are those of routed experts.
    """
    theirs = "model.layers.{p}."
    experts = f"{_LAYER}mlp.experts."
    mixer = f"{theirs}input_layernorm.weight"
    mlp = f"{theirs}post_attention_layernorm.weight"
    shared = (
        (f"{theirs}shared_mlp.input_linear.weight",),
        (f"{theirs}shared_mlp.output_linear.weight",),
    )

    def dense(ours: str) -> tuple[Entry, ...]:
        return Entry(f"{ours}linear_fc1.weight", shared[0]), Entry(
            f"{ours}linear_fc2.weight", shared[1]
        )

    return ByKind(
        (
            Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
            Entry("decoder.final_norm.weight", ("model.norm.weight",)),
            Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
        ),
        (),
        copies=(Copy("lm_head.weight", "model.embed_tokens.weight"),),
        kinds={
            MAMBA: (_norm(MAMBA, mixer), *_mixer(f"{theirs}mamba.")),
            ATTENTION: (_norm(ATTENTION, mixer), *_attention(f"{theirs}self_attn.")),
            MLP: (_norm(MLP, mlp), *dense(f"{_LAYER}mlp.")),
            EXPERTS: (
                _norm(EXPERTS, mlp),
                Entry(f"{_LAYER}mlp.router.weight", (f"{theirs}block_sparse_moe.{router}",)),
                Entry(
                    f"{experts}linear_fc1.weight{{e}}",
                    (f"{theirs}block_sparse_moe.{first}",),
                    OF_EACH_EXPERT,
                ),
                Entry(
                    f"{experts}linear_fc2.weight{{e}}",
                    (f"{theirs}block_sparse_moe.{second}",),
                    OF_EACH_EXPERT,
                ),
                *dense(f"{_LAYER}mlp.shared_experts."),
            ),
        },
    )


FILES = _table("backbone", apart=True)
"""Names in files of Mamba-2 and of Nemotron-H."""
GRANITE = _granite("router.layer.weight", "input_linear.weight", "output_linear.weight")
"""Names in files of Granite 4."""
LAYERS = {
    "mamba2": _table("backbone", apart=False),
    "nemotron_h": _table("model", apart=False),
    "granitemoehybrid": _granite("router.weight", "experts.gate_up_proj", "experts.down_proj"),
}
"""`model_type` -> as transformers' own layers have them."""


def files(kind: str, model: Any) -> tuple[Table, ...]:
    """Return the possible tables of a `model_type`'s file; the first is written."""
    if kind == "granitemoehybrid":
        return GRANITE, LAYERS[kind]
    return (
        FILES,
        _table("backbone", apart=False),
        _table("model", apart=True),
        _table("model", apart=False),
    )
