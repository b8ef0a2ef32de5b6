"""A folder of `peft`: `adapter_config.json` and `adapter_model.safetensors`, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any

from torch import Tensor

from mtrain import strict_json
from mtrain.ckpt.hashes import hash_bytes
from mtrain.ckpt.new_file import Writer
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, adapter_boxes, model_boxes
from mtrain.convert.certificate import Record
from mtrain.convert.exporter import Weights
from mtrain.convert.huggingface.folder import ADAPTER_CONFIG as CONFIG
from mtrain.convert.huggingface.folder import ADAPTERS as TENSORS
from mtrain.convert.huggingface.folder import SWAPPED, pickle_refused
from mtrain.convert.huggingface.reader import load
from mtrain.convert.peft.adapters import (
    AdapterMismatch,
    PeftAdapters,
    adapter_shapes,
    from_peft,
    to_peft,
)
from mtrain.convert.plain_file import read_plain
from mtrain.convert.raw_arrays import FLOATS, as_tensor, buffer_of, converted, of_tensor
from mtrain.convert.safetensors_file import read_header
from mtrain.errors import ConfigError, CorruptData, Problem, show
from mtrain.mcore.layers.merging import Whole, names_beside
from mtrain.models.table import Table

NOT_ADAPTED = ".mixer.out_proj"
"""End of the name of a layer of Mamba-2 and Nemotron-H that `peft` refuses."""
PICKLE = "adapter_model.bin"
MAX_CONFIG_BYTES = 16 << 20
MOST_RANK = 1 << 40


def write_adapters(
    weights: Weights, table: Table, out: Path, version: str, base: str | None
) -> Record:
    """Write the adapters of a checkpoint into the folder `out`, in the form of a version of `peft`.

    `table` has the names of transformers' layers; `base` is the folder of the model that they are
    for.

    Raises:
        ConfigError: the run has no adapters, or `peft` has none of this kind.
        CorruptData: the checkpoint cannot be read.
    """
    record = Record()
    held = {name: weights.adapter_of(name, record) for name in weights.ours}
    own = {name: adapter for name, adapter in held.items() if adapter is not None}
    if not own:
        rule = f"{weights.checkpoint.path} has no adapters"
        raise ConfigError(
            [Problem("MT521", "", None, rule, "convert export without peft=", "command line")]
        )
    made = to_peft(table, weights.model, own, swapped=version == SWAPPED)
    peft = weights.run.peft
    if last := next((name for name in made.modules if name.endswith(NOT_ADAPTED)), None):
        rule = f"`peft` adapts no {last} of this kind of model: its kernels read only the weight"
        raise ConfigError(
            [Problem("MT521", "", None, rule, "convert export without peft=: a merged model")]
        )
    if made.parameters and (peft.kind != "lora" or peft.dropout):
        feature = f"peft.kind={peft.kind}" if peft.kind != "lora" else "peft.dropout"
        rule = f"`peft` adapts {made.parameters[0]} as a parameter, which knows no {feature}"
        raise ConfigError(
            [Problem("MT521", "", None, rule, "convert export without peft=: a merged model")]
        )
    with Writer(out / TENSORS, made.tensors) as writer:
        for name, tensor in made.tensors.items():
            words, held_in = of_tensor(tensor)
            dtype = weights.dtype or held_in
            words = converted(words, held_in, dtype)
            data = buffer_of(words)
            writer.write(name, dtype, words.shape, data)
            record.target[name] = (dtype, words.shape, hash_bytes(data))
        writer.close({"format": "pt"})
    body = _config(peft, made, version, base)
    (out / CONFIG).write_text(strict_json.dumps(body, indent=2, sort_keys=True) + "\n")
    return record


def _config(peft: PeftConfig, made: PeftAdapters, version: str, base: str | None) -> dict[str, Any]:
    assert peft.alpha is not None
    assert peft.r is not None
    # `peft` writes whole numbers without a point
    alpha = int(peft.alpha) if peft.alpha == int(peft.alpha) else peft.alpha
    return {
        "peft_type": "LORA",
        "peft_version": version,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": peft.r,
        "lora_alpha": alpha,
        "lora_dropout": peft.dropout,
        "use_dora": peft.kind == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": made.transposed,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": made.modules or None,
        "target_parameters": made.parameters or None,
        "rank_pattern": dict(made.ranks),
        "alpha_pattern": {name: alpha * (rank // peft.r) for name, rank in made.ranks.items()},
    }


def read_adapters(
    folder: Path, run: RunConfig, table: Table
) -> tuple[dict[str, Box], dict[str, Any]]:
    """Return the adapters of a run, and a `peft` folder's tensors for them, by mtrain's names.

    Raises:
        ConfigError: they are of another kind than the run's, key by key.
        CorruptData: a file is missing, damaged, or holds other tensors.
    """
    body = read_config(folder)
    _refuse_others(folder, body, run.peft)
    if not (folder / TENSORS).is_file() and (folder / PICKLE).exists():
        raise pickle_refused(folder / PICKLE, "peft")
    held = read_header(folder / TENSORS)
    odd = next((name for name, tensor in held.items() if tensor.dtype not in FLOATS), None)
    if odd is not None:
        raise CorruptData(
            f"{folder / TENSORS}: {odd[:200]} has numbers of kind {held[odd].dtype}, which is no"
            " weight's"
        )
    adapters = adapter_boxes(run)
    shapes = {name: tensor.shape for name, tensor in (model_boxes(run) | adapters).items()}
    wanted = adapter_shapes(shapes)
    try:
        tensors = {name: as_tensor(load(tensor), tensor.dtype) for name, tensor in held.items()}
        found = from_peft(table, run.model, wanted, tensors, swapped=_is_swapped(body))
    except AdapterMismatch as error:
        raise CorruptData(
            f"{folder / TENSORS} does not fit the adapters of this run: {error}"
        ) from None
    return adapters, dict(_named(found))


def _named(found: Mapping[str, Whole]) -> Iterator[tuple[str, Tensor]]:
    for weight, adapter in found.items():
        names = names_beside(weight)
        assert names is not None
        yield from (
            (name, t.contiguous()) for name, t in zip(names, adapter, strict=True) if t is not None
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return an `adapter_config.json`, as data.

    Raises:
        CorruptData: the file is missing or not a JSON object.
    """
    file = folder / CONFIG
    try:
        body = json.loads(read_plain(file, MAX_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{file} cannot be read: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise CorruptData(f"{file} is no JSON object")
    return body


def _is_swapped(body: Mapping[str, Any]) -> bool:
    """Return whether adapters of experts are in the unversioned form until 0.18."""
    # a development version has a hash after @
    version = str(body.get("peft_version") or "0.17").partition("@")[0].split(".")
    # a word such as 0rc1 counts as 0
    numbers = [int(word[:6]) if word.isdecimal() else 0 for word in [*version, "0", "0"][:2]]
    return numbers < [0, 19]


def _refuse_others(folder: Path, body: Mapping[str, Any], peft: PeftConfig) -> None:
    """Raise `ConfigError` for adapters that compute something else than a `peft` section."""
    wrong = [*_differing(body, peft), *_beyond(body, peft)]
    if wrong:
        source = str(folder / CONFIG)
        raise ConfigError(
            Problem("MT521", path, getattr(peft, path.partition(".")[2]), rule, fix, source)
            for path, rule, fix in wrong
        )


def _differing(body: Mapping[str, Any], peft: PeftConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that differ: the key, the sentence, the remedy."""
    dora = peft.kind == "dora"
    rank = body.get("r", 8)
    alpha = body.get("lora_alpha", 8)
    for key, theirs, ours, path, fix in (
        ("peft_type", body.get("peft_type"), "LORA", "peft.kind", "adapters of LoRA or DoRA"),
        ("r", rank, peft.r, "peft.r", f"peft.r={_shown(rank)}"),
        ("lora_alpha", alpha, peft.alpha, "peft.alpha", f"peft.alpha={_shown(alpha)}"),
        (
            "use_dora",
            bool(body.get("use_dora")),
            dora,
            "peft.kind",
            "peft=lora" if dora else "peft=dora",
        ),
    ):
        if theirs != ours:
            yield path, f"its {key} is {_shown(theirs)}, and here it would be {_shown(ours)}", fix


def _beyond(body: Mapping[str, Any], peft: PeftConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the features of adapters that mtrain does not support."""
    others = "adapters of plain LoRA or DoRA, or a model that they were merged into"
    for key, plain in _PLAIN.items():
        # false, an empty list and null all turn a feature off
        if (body.get(key) or None) not in (None, *plain):
            yield "peft.kind", f"its {key} is {_shown(body[key])}, which is not known here", others
    start = body.get("init_lora_weights")
    # some starts, such as pissa, subtract the adapter from the weights
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
        rule = (
            f"its init_lora_weights is {_shown(start)}, which has changed the model's own weights"
        )
        yield "peft.kind", rule, others
    ranks, alphas = (body.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        yield "peft.r", "its rank_pattern and alpha_pattern are no objects", others
        return
    for key in sorted({*ranks, *alphas}):
        rank = ranks.get(key, peft.r)
        alpha = alphas.get(key, peft.alpha)
        sizes = [
            float(n) for n in (rank, alpha) if isinstance(n, int | float) and abs(n) < MOST_RANK
        ]
        # another rank with the same ratio of alpha has the same scale
        if len(sizes) < 2 or not isclose(sizes[1], sizes[0] * peft.scale):
            yield (
                "peft.alpha",
                f"its {key[:80]} has rank {_shown(rank)} and alpha {_shown(alpha)}",
                others,
            )
            return


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return show(value)[:80]


_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_rslora": (),
    "lora_bias": (),
    "modules_to_save": (),
    "layer_replication": (),
    "use_qalora": (),
    "use_bdlora": (),
    "arrow_config": (),
    "kasa_config": (),
    "velora_config": (),
    "alora_invocation_tokens": (),
    "trainable_token_indices": (),
}
"""Keys of LoRA in `peft` -> the values that they may have if set."""
