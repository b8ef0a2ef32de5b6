"""Hugging Face's names of the weights of hybrids: Mamba-2 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from mtrain.config.hybrid import ATTENTION, EXPERTS, MAMBA, MLP
from mtrain.models.hybrid.weights import FUSED, part_ends
from mtrain.models.table import (
    EXPERTS as OF_EACH_EXPERT,
)
from mtrain.models.table import QKV, VOCABULARY, Copy, Entry, Operation, Step, Table, joined


@dataclass(frozen=True)
class Fused(Entry):
    """A tensor of theirs whose rows are several tensors of ours, which have a name behind its own."""

    parts: tuple[str, ...] = ()

    def steps(self, model: Any, **numbers: int) -> Iterator[Step]:
        """One, to all parts."""
        for step in super().steps(model, **numbers):
            (ours,) = step.ours
            yield replace(step, ours=tuple(f"{ours}.{part}" for part in self.parts))


@dataclass(frozen=True)
class ByKind(Table):
    """A table with entries of each layer by the letter that a pattern has for it."""

    kinds: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)

    def entries(self, model: Any) -> Iterator[Step]:
        """The entries of a model's every layer, with numbers for letters."""
        for entry in self.once:
            yield from entry.steps(model)
        for i, kind in enumerate(model.hybrid.pattern):
            for entry in self.kinds[kind]:
                yield from entry.steps(model, i=i)


def _parts(ours: str, theirs: str) -> Fused:
    parts = next(names for end, names in FUSED.items() if ours.endswith(end))

    def split(tensors: list[Any], model: Any) -> list[Any]:
        ends = part_ends(model, parts)
        if len(tensors[0]) != ends[-1]:
            raise ValueError(f"parts have {ends[-1]} rows, and {len(tensors[0])} are there")
        return [tensors[0][a:b] for a, b in pairwise([0, *ends])]

    operation = Operation(f"parted into {', '.join(parts)}", split, lambda tensors, model: [joined(tensors)])
    return Fused(ours, (theirs,), operation, parts)


_LAYER = "decoder.layers.{i}."


def _table(prefix: str, *, apart: bool) -> ByKind:
    """Names below `prefix`; with `apart`, those of each expert."""
    theirs = f"{prefix}.layers.{{i}}."
    mixer, ours = f"{theirs}mixer.", f"{_LAYER}mixer."
    norms = {MAMBA: "norm", ATTENTION: "input_layernorm", MLP: "pre_mlp_layernorm", EXPERTS: "pre_mlp_layernorm"}
    qkv = tuple(f"{mixer}{name}_proj.weight" for name in "qkv")
    kinds: dict[str, tuple[Entry, ...]] = {
        MAMBA: (
            *(Entry(f"{ours}{name}", (f"{mixer}{name}",)) for name in ("dt_bias", "A_log", "D")),
            *(_parts(f"{ours}{n}", f"{mixer}{n}") for n in ("in_proj.weight", "conv1d.weight", "conv1d.bias")),
            *(Entry(f"{ours}{name}.weight", (f"{mixer}{name}.weight",)) for name in ("norm", "out_proj")),
        ),
        ATTENTION: (
            Entry(f"{_LAYER}self_attention.linear_qkv.weight", qkv, QKV),
            Entry(f"{_LAYER}self_attention.linear_proj.weight", (f"{mixer}o_proj.weight",)),
        ),
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
        kinds={k: (Entry(f"{_LAYER}{norms[k]}.weight", (norm,)), *entries) for k, entries in kinds.items()},
    )


def _mlp(ours: str, theirs: str) -> tuple[Entry, ...]:
    names = (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
    return tuple(Entry(f"{ours}{mine}.weight", (f"{theirs}{other}.weight",)) for mine, other in names)


def _experts(mixer: str, apart: bool) -> Iterator[Entry]:
    for mine, other in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
        ours = f"{_LAYER}mlp.experts.{mine}.weight{{e}}"
        if apart:
            yield Entry(ours, (f"{mixer}experts.{{e}}.{other}.weight",))
        else:
            yield Entry(ours, (f"{mixer}experts.{other}",), OF_EACH_EXPERT)


FILES = _table("backbone", apart=True)
"""As files have them, of Mamba-2 and of Nemotron-H."""
LAYERS = {"mamba2": _table("backbone", apart=False), "nemotron_h": _table("model", apart=False)}
"""`model_type` -> as transformers' own layers have them."""


def files(kind: str, model: Any) -> tuple[Table, ...]:
    """The tables that a file of a `model_type` may follow; the first is the one that is written."""
    return FILES, _table("backbone", apart=False), _table("model", apart=True), _table("model", apart=False)
