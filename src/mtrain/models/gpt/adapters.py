"""Weights of low-rank adapters, among those of the layers that they adapt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.parts import parts_of
from mtrain.models.weights import Weight, expert_tensors


def adapted(weights: Iterable[Weight], run: RunConfig) -> Iterator[Weight]:
    """Yield the weights of a stage, frozen, and those of the adapters of a layer behind its own;
    MTP layers have none.
    """
    for layer, group in groupby(weights, lambda weight: weight.name.rpartition(".")[0]):
        own = [replace(weight, frozen=True) for weight in group]
        yield from own
        if layer.startswith("mtp."):
            continue
        if own[0].kind == "experts":
            yield from _of_experts(layer, own, run) if "experts" in (run.peft.target or ()) else ()
        elif parts := parts_of(layer, run):
            yield from _of_layer(layer, own[0], parts, run.peft)


def _of_layer(name: str, weight: Weight, parts: int, peft: PeftConfig) -> Iterator[Weight]:
    """Yield `lora_a`, split as the columns of the weight are, and `lora_b` and magnitudes, split as
    its rows.
    """
    rows, columns = weight.shape
    # Row-parallel layers are split by their inputs: A is split with them, and each rank has all of
    # B.
    by_columns = name.endswith(("linear_proj", "linear_fc2", "out_proj"))
    own = Weight(
        f"{name}.lora_a",
        (parts * (peft.r or 0), columns),
        "adapters",
        whole=weight.whole or not by_columns,
    )
    b = replace(
        own, name=f"{name}.lora_b", shape=(rows, peft.r or 0), whole=weight.whole or by_columns
    )
    yield from (own, b)
    if peft.kind == "dora":
        yield replace(b, name=f"{name}.magnitude", shape=(rows,))


def _of_experts(name: str, own: list[Weight], run: RunConfig) -> Iterator[Weight]:
    """Yield the adapters of each expert; a factor that is not split with the weight is split along
    the hidden size.
    """
    ranks = expert_tensors(run.parallel)
    r = run.peft.r or 0
    for number, weight in enumerate(w for w in own if len(w.shape) == 2):
        rows, columns = weight.shape
        # Expert-tensor ranks split fc1 by outputs and fc2 by inputs; the other factor is split
        # along the hidden size, so that none is held twice.
        columns, rows = (
            (columns // ranks, rows) if name.endswith("linear_fc1") else (columns, rows // ranks)
        )
        for part, shape in (("lora_a", (r, columns)), ("lora_b", (rows, r))):
            yield Weight(f"{name}.{part}{number}", shape, "adapters", expert=weight.expert)
