"""A model's shape as a `config.json`, written only if it reads back as the same model."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import choices_of_group
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.delta import section
from mtrain.recipes.huggingface.config_file import Json
from mtrain.recipes.huggingface.importer import KINDS, import_config
from mtrain.recipes.imported import Imported

TRAINING = frozenset(
    re.findall(
        r"[\w.]+",
        """
        mtp_detach_heads name builder head mask_padded_vocab attention_dropout hidden_dropout
        init_method_std embedding_init_method_std mtp_num_layers mtp_loss_scaling_factor
        moe.aux_loss_coeff moe.z_loss_coeff moe.router_load_balancing_type
        moe.router_bias_update_rate moe.router_padding_for_quantization moe.input_jitter_eps
        moe.token_dispatcher_type moe.flex_dispatcher_backend moe.shared_expert_overlap
        moe.pad_alltoall moe.alltoall_capacity_factor bert.masked_share bert.mask_token_id
        bert.cls_token_id bert.sep_token_id t5.noise_density t5.mean_noise_span_length
        t5.sentinels t5.first_sentinel t5.start_id t5.end_id t5.encoder_length t5.decoder_length
        t5.initializer_factor llava.freeze hybrid.chunk_size dsa.indexer_loss_coeff
        dsa.indexer_use_sparse_loss
        """,
    )
)
"""Keys of `model` that do not change a trained model's forward pass, or that no file has."""
UNREAD = 1 << 30
"""The number of differences of a `model_type` that has no file for the model."""
PRESENT = {"not supported", "unknown", "unreadable", "secret"}
"""Reasons of keys that were not imported and may change the model's computation."""
STORED = ("quantization_config", "torch_dtype", "dtype")
"""Keys about the format of stored weights, which a conversion reads from the weights."""


def differing(imported: Imported) -> list[str]:
    """Return the keys of a `config.json` that our model does not follow."""
    unplaced = [
        u for u in imported.unplaced if u.why in PRESENT and u.flag.partition(".")[0] not in STORED
    ]
    return [f"{u.flag} = {u.value}: {u.text}" for u in unplaced]


def same_model(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return the keys in which two models compute different results."""
    left = _meanings(a)
    right = _meanings(b)
    keys = {
        k
        for k in left.keys() | right.keys()
        if k not in TRAINING and not k.startswith("published.")
    }
    return sorted(k for k in keys if left.get(k) != right.get(k))


def _meanings(model: ModelConfig) -> dict[str, Any]:
    # null in these keys means a value that follows from other keys
    return _flat(model.model_dump(mode="json")) | {
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        "window_size": _narrow(model),
        "bert.head_activation": _head(model),
    }


def _narrow(model: ModelConfig) -> int | None:
    """Return the window if it matters: it hides some token, or has its own rotary base."""
    # a window as wide as the longest sample hides nothing
    wide = model.window_size is None or model.window_size >= model.max_position_embeddings
    return None if wide and not model.rotary_base_local else model.window_size


def _head(model: ModelConfig) -> str | None:
    """Return the activation of BERT's head for masked tokens; None in other families."""
    return None if model.bert is None else model.bert.head_activation or model.activation


def shipped(model: ModelConfig) -> str | None:
    """Return the shipped choice of `model` that computes the same."""
    for name in choices_of_group("model"):
        known: Any = section("model", name)
        if not same_model(known, model):
            return name
    return None


def config_json(
    model: ModelConfig, dtype: str, kind: str | None = None, tokens: Mapping[str, Any] = {}
) -> Json:
    """Return the `config.json` of a model for `kind`, or for the first `model_type` that is the
    same model.

    `dtype` is the torch name of the weights' dtype; `tokens` are ids such as `eos_token_id`.

    Raises:
        ConfigError: no known `model_type` computes the same; names the differences of each.
    """
    # the first `model_type` that computes the same is the answer, so that their order matters
    of_family = [one for one, known in KINDS.items() if known.family == model.family]
    kinds: Iterable[str] = of_family if kind is None else (kind,)
    reasons = list[tuple[int, str]]()
    for one in kinds:
        if one not in KINDS:
            rule = (
                f"cannot write a config.json because models of type {one!r} are not written (those"
                f" are: {', '.join(KINDS)})"
            )
            raise ConfigError([Problem("MT703", "", None, rule, "")])
        if KINDS[one].family != model.family:
            why = f"model.family is {model.family}, and not {KINDS[one].family}"
            reasons.append((UNREAD, f"{one}: {why}"))
            continue
        try:
            # a writer may be wrong about a model; only a file that reads back as the same model
            # counts
            body = _body(model, one)
            imported = _read_again({"architectures": [KINDS[one].architecture(model)], **body})
        except ConfigError as error:
            reasons.append((UNREAD, f"{one}: {error.problems[0].detail}"))
            continue
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            reasons.append((UNREAD, f"{one}: {error}"))
            continue
        # a resolved model has values where the file's has null
        known = resolve(imported.run, Machine.here()).model
        differences = [
            *differing(imported),
            *(same_model(model, imported.run.model) and same_model(model, known)),
        ]
        if not differences:
            return {
                "architectures": [KINDS[one].architecture(model)],
                **body,
                "torch_dtype": dtype,
                **tokens,
            }
        reasons.append((len(differences), f"{one}: {', '.join(differences[:4])}"))
    nearest = "; ".join(why for _, why in sorted(reasons, key=lambda reason: reason[0])[:6])
    rule = (
        "cannot write a config.json because no model of transformers computes what this one does"
        f" ({nearest})"
    )
    fix = "use `export`, which writes weights under mtrain's own names"
    raise ConfigError([Problem("MT703", "", None, rule, fix)])


def _read_again(body: Json) -> Imported:
    with tempfile.TemporaryDirectory(prefix="mtrain-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(body))
        return import_config(file)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            out[f"{prefix}{key}"] = value
    return out


def _body(model: ModelConfig, kind: str) -> Json:
    known = KINDS[kind]
    out: Json = {"model_type": kind}
    for theirs, ours in known.reads.keys.items():
        out[theirs] = attrgetter(ours.removeprefix("model."))(model)
    # null means another number in some classes of transformers
    if "num_key_value_heads" in out:
        out["num_key_value_heads"] = model.query_groups
    if "head_dim" in out:
        out["head_dim"] = model.head_dim
    # the default of some classes is an id beyond a small vocabulary
    return {"pad_token_id": None, **out, **known.writes(model)}
