"""Random small configurations near the border between what can be trained and what cannot.

Values come from the schema, so a new key is drawn as soon as it is there; only keys whose value
decides how large or how slow a model is have a table here.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.conditional import CONDITIONAL
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import Problem, show
from tests.support.configs import LAPTOP, errors, first_fix

MAX_REPAIRS = 12
BASE: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    },
    "data": {"kind": "mock", "seq_length": 16, "split": [1.0, 0.0, 0.0]},
    "trainer": {"train_iters": 4, "global_batch_size": 8, "eval_iters": 0, "sample_tokens": 0},
    "cluster": {"device": "cpu"},
}
MOE: dict[str, Any] = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16},
    **{"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (1.0, 2.0, 4.0, 8.0)},
}
OWN: dict[str, Any] = {"mask_token_id": 99}
BERT: dict[str, Any] = {
    **{"model.family": "bert", "model.bert": OWN, "model.num_query_groups": None},
    **{
        "model.normalization": "LayerNorm",
        "model.norm_placement": "post_residual",
        "model.activation": "gelu",
    },
    **{"model.add_bias_linear": True, "model.tie_word_embeddings": True},
    "model.position_embedding_type": "learned_absolute",
}
FAMILIES: tuple[dict[str, Any], ...] = (
    {},
    {"model.moe": MOE},
    {"model.moe": {**MOE, "router_score_function": "sigmoid", "router_enable_expert_bias": True}},
    {"model.moe": {**MOE, "router_load_balancing_type": "sinkhorn", "aux_loss_coeff": 0.0}},
    {"model.moe": {**MOE, "num_experts": 8, "router_num_groups": 4, "router_group_topk": 2}},
    {"model.mla": MLA, "model.num_query_groups": None},
    {
        "model.mla": {**MLA, "rope_type": "yarn", "q_lora_rank": 8},
        "model.num_query_groups": None,
        "model.moe": MOE,
    },
    {"model.normalization": "LayerNorm", "model.activation": "gelu", "model.add_bias_linear": True},
    {
        "model.rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    {"model.rope_scaling": LONGROPE},
    BERT,
)
SIZES: dict[str, tuple[Any, ...]] = {
    "parallel.tp": (1, 1, 2, 2, 3, 4, 8),
    "parallel.pp": (1, 1, 2, 2, 3, 4),
    "parallel.vpp": (1, 1, 2, 3),
    "parallel.cp": (1, 1, 2, 2, 3, 4),
    "parallel.ep": (1, 2, 2, 3, 4),
    "parallel.etp": (None, 1, 2, 4),
    "parallel.ranks": (None, None, 1, 2, 3, 4, 6, 8),
    "parallel.hsdp_replicas": (1, 2, 3),
    "parallel.hierarchical_cp_sizes": (None, (2, 2), (1, 4), (4, 2)),
    "parallel.max_seqlen_per_dp_cp_rank": (None, 1, 8, 16, 1 << 40),
    "parallel.pipeline_layout": (
        None,
        "Et|tL",
        "Ett|ttL",
        "E|tt|L",
        "Et||tL",
        "Ett|tL",
        "EtmL|t",
        "Et|t|t|tL",
        "",
    ),
    "parallel.layers_per_stage": (
        None,
        (1, 1),
        (1, 3),
        (2, 2),
        (4,),
        (0, 2),
        (1, 1, 1, 1),
        (-1, 3),
        (),
    ),
    "model.num_layers": (1, 2, 2, 3, 4, 6),
    "model.hidden_size": (1, 31, 32, 48, 64),
    "model.ffn_hidden_size": (1, 47, 48, 64),
    "model.num_attention_heads": (1, 2, 3, 4, 8, 31),
    "model.num_query_groups": (None, 1, 2, 3, 4, 5),
    "model.kv_channels": (None, 1, 2, 7, 8, 16),
    "model.vocab_size": (1, 2, 100, 129, 300),
    "model.max_position_embeddings": (1, 16, 17, 64, 10**9),
    "model.window_size": (None, 2, 5, 16, 10**9),
    "model.mtp_num_layers": (None, 1, 2),
    "model.rope_scaling.short_factor": (None, (1.0, 1.1, 1.2, 1.3), (1.0,)),
    "model.rope_scaling.long_factor": (None, (1.0, 2.0, 4.0, 8.0), ()),
    "model.moe.num_experts": (1, 2, 3, 4, 8),
    "model.moe.router_topk": (1, 2, 3, 4, 10**9),
    "model.moe.ffn_hidden_size": (1, 23, 24),
    "model.moe.shared_expert_intermediate_size": (None, 1, 23, 24),
    "model.moe.expert_capacity_factor": (None, 0.01, 0.5, 1.0, 4.0, 100.0),
    "model.bert.mask_token_id": (0, 1, 99, 10**9),
    "model.bert.cls_token_id": (None, 0, 99),
    "model.bert.sep_token_id": (None, 0, 98),
    "model.bert.pad_token_id": (None, 0, 98),
    "model.bert.type_vocab_size": (1, 2, 3),
    "model.bert.masked_share": (0.01, 0.15, 0.99),
    "model.mla.q_lora_rank": (None, 1, 8),
    "model.mla.kv_lora_rank": (1, 8),
    "model.mla.qk_head_dim": (1, 7, 8),
    "model.mla.qk_pos_emb_head_dim": (1, 2, 4, 7),
    "model.mla.original_max_position_embeddings": (None, 1, 3, 64, 4096),
    "model.mla.v_head_dim": (1, 7, 8),
    "data.seq_length": (2, 3, 12, 15, 16, 24, 32, 64),
    "data.packed_multiple": (None, 1, 2, 3, 4, 16),
    "data.prefetch": (0, 1, 2, 64),
    "data.fim.ids": (None, (1, 2, 3), (0, 98, 99), (1, 1, 2), (1, 2, 10**9)),
    "trainer.global_batch_size": (1, 2, 3, 4, 8, 8, 12, 16),
    "trainer.micro_batch_size": (None, None, 1, 2, 3, 4),
    "trainer.train_iters": (1, 2, 4, 100, 10**12),
    "trainer.rampup_batch_size": (
        None,
        (4, 4, 100),
        (2, 2, 1),
        (3, 2, 50),
        (8, 8, 10),
        (16, 4, 10),
    ),
    "trainer.batch_size_schedule": (
        None,
        ((4, 100), (8, 200)),
        ((3, 100),),
        ((8, 1),),
        ((16, 10), (2, 10)),
    ),
    "optim.lr": (1e-5, 1e-3, 0.5),
}
LEFT_ALONE = (
    "launch.",
    "log.",
    "checkpoint.",
    "resilience.",
    "rollout.",
    "cluster.",
    "recipe.",
    "trainer.eval",
    "trainer.sample",
    "trainer.profile_",
    "trainer.seed",
    "trainer.join_timeout_s",
    "trainer.soft_timeout_s",
    "trainer.timeout_s",
    "model.name",
    "model.family",
    "model.published",
    "model.hybrid.",  # other layers: test_hybrid has its layouts
    "data.kind",
    "data.path",
    "data.tokenizer",
    "data.suffixes",
    "data.limit_mib",
    "data.cache_dir",
    "data.order",
    "data.megatron_cache",
    "data.chat_template",
    "data.ignored_keys",
    "objective.",
    "model.head",  # it comes with an objective
    "peft.init_from",
    "data.validation_",
    "data.test_",
    "data.remote_cache_gib",
    "data.split",
    "data.blend",
)
"""Keys that no step depends on, or that must not change if a step is to run here."""
AXES = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "ranks",
    "sequence_parallel",
    "distributed_optimizer",
    "fsdp",
)


@dataclass(frozen=True)
class Drawn:
    """One configuration with its differences from the base."""

    raw: UnresolvedRun

    @property
    def words(self) -> str:
        """Return the differences from the base as overrides; `moe`, `mla`, `bert` stand for their
        sections.
        """
        m = self.raw.model
        sections = {
            "model.moe": m.moe and MOE,
            "model.mla": m.mla and MLA,
            "model.bert": m.bert and OWN,
        }
        base = apply(UnresolvedRun.model_validate(BASE), sections).flat()
        there = [name.removeprefix("model.") for name, section in sections.items() if section]
        changed = [
            f"{k}={show(v)}".replace(" ", "")
            for k, v in self.raw.flat().items()
            if base.get(k) != v
        ]
        return " ".join([*there, *changed])


def keys() -> dict[str, tuple[Any, ...]]:
    """Return every key that is drawn with its values; keys of a nullable section apply only if it
    is set.
    """
    fields = {k: f for k, f in schema_keys().items() if not k.startswith(LEFT_ALONE)}
    return {
        key: SIZES.get(key) or tuple(dict.fromkeys(values_of(field)))
        for key, field in fields.items()
    }


def values_of(field: FieldInfo) -> Iterator[Any]:
    """Yield values of a field at its edges by its type; no values for an unknown type."""
    bounds: dict[str, Any] = {}
    for item in field.metadata:
        bounds |= {
            n: getattr(item, n)
            for n in ("ge", "gt", "le", "lt")
            if getattr(item, n, None) is not None
        }
    yield from _of(field.annotation, bounds)


def _of(annotation: Any, bounds: dict[str, Any]) -> Iterator[Any]:
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Annotated:
        parts = [part for item in inside[1:] for part in (item, *getattr(item, "metadata", ()))]
        more = {
            n: getattr(p, n)
            for p in parts
            for n in ("ge", "gt", "le", "lt")
            if getattr(p, n, None) is not None
        }
        yield from _of(inside[0], {**bounds, **more})
    elif origin in (Union, types.UnionType):
        for part in inside:
            yield from _of(part, bounds)
    elif origin is Literal:
        yield from inside
    elif origin is tuple and get_origin(inside[0]) is Literal:  # a set of words
        yield from ((word,) for word in get_args(inside[0]))
        yield tuple(get_args(inside[0])[:2])
    elif annotation is type(None):
        yield None
    elif annotation is bool:
        yield from (False, True)
    elif annotation is int:
        low = bounds.get("ge", bounds.get("gt", -1) + 1)
        yield from (n for n in (low, low + 1, 3, 10, 10**9) if low <= n <= bounds.get("le", n))
    elif annotation is float:
        low = bounds.get("ge", bounds.get("gt", 0))
        high = bounds.get("le", bounds.get("lt", 1e9))
        inner = [low + (high - low) * share for share in (1e-9, 0.1, 0.5)] + [1e-6, 0.01, 0.3, 1.0]
        yield from (v for v in inner if low < v < high)
        yield from ([low] if "ge" in bounds else [])
        yield from ([high] if "le" in bounds else [])


def draw(rng: random.Random, max_ranks: int) -> Drawn:
    """Return one configuration of at most `max_ranks` ranks that the schema accepts: half are valid
    as far as `check` says, the others are a valid one with one or two keys changed to anything.
    """
    table = keys()
    while True:
        raw = _repaired(_scattered(rng, table, max_ranks))
        if raw is None:
            continue
        for _ in range(rng.choice((0, 1, 2, 4))):
            raw = _changed(raw, rng, table)
        # else that one rule would speak in most refusals
        raw = _quiet(raw) if rng.random() < 0.8 else raw
        ranks = _ranks(raw)
        if ranks is not None and ranks <= max_ranks:
            return Drawn(raw)


def _scattered(
    rng: random.Random, table: dict[str, tuple[Any, ...]], max_ranks: int
) -> UnresolvedRun:
    raw = apply(UnresolvedRun.model_validate(BASE), rng.choice(FAMILIES))
    layout = [f"parallel.{axis}" for axis in AXES]
    for key in [
        *rng.sample(layout, rng.randint(1, 6)),
        *rng.sample(sorted(table), rng.randint(2, 10)),
    ]:
        before = raw
        raw = _with(raw, key, rng.choice(table[key]))
        if (_ranks(raw) or 1) > max_ranks:
            raw = before
    return raw


def _changed(
    raw: UnresolvedRun, rng: random.Random, table: dict[str, tuple[Any, ...]]
) -> UnresolvedRun:
    """Return `raw` with one key of its sections set to any value."""
    while True:
        key = rng.choice(sorted(table))
        changed = _with(raw, key, rng.choice(table[key]))
        if changed != raw:
            return changed


def _with(raw: UnresolvedRun, key: str, value: Any) -> UnresolvedRun:
    """Return `raw` with a key set, or unchanged if the section is null or the schema refuses."""
    try:
        return apply(raw, {key: value})
    except (ValidationError, TypeError, KeyError):
        return raw


def _repaired(raw: UnresolvedRun) -> UnresolvedRun | None:
    """Return `raw` with first fixes applied until `check` accepts it; None if that takes
    too many.
    """
    found: list[Problem] = errors(raw)
    for _ in range(MAX_REPAIRS):
        if not found:
            return raw
        fixable = next((p for p in found if p.fix), None)
        if fixable is None:
            return None
        raw = apply(raw, first_fix(fixable))
        found = errors(raw)
    return None


def _quiet(raw: UnresolvedRun) -> UnresolvedRun:
    """Return `raw` with every key without effect switched off."""
    for key in CONDITIONAL:
        if key.value(raw) != key.off and not key.active(raw):
            raw = _with(raw, key.path, key.off)
    return raw


def _ranks(raw: UnresolvedRun) -> int | None:
    """Return the number of ranks that a configuration would start on this machine."""
    return resolve(raw, LAPTOP).parallel.ranks
