"""What Megatron-LM calls the parts of a model in the arguments that it keeps in a checkpoint.

Needs no torch: the arguments in `common.pt` are read as data, and no class that it names is more
than its name.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.convert import pickled
from mtrain.convert.megatron_compared import arguments_said, unflagged_said
from mtrain.convert.pickled import Mapped, Record
from mtrain.convert.plain_file import open_plain, read_plain
from mtrain.convert.torch_dist import Chunk

COMMON = "common.pt"
MAX_COMMON_BYTES = 64 << 20
MOST_ITEMS = 1 << 14
"""Of a list among the arguments: one item for each layer."""
_SAME_NAME = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
    ),
    *(
        "position_embedding_type",
        "add_bias_linear",
        "add_qkv_bias",
        "normalization",
        "padded_vocab_size",
    ),
    *("rotary_base", "rotary_percent", "vocab_size", "qk_layernorm", "mtp_num_layers"),
)


class _Every:
    """Whatever a pickle names: none of it is run, and only plain values are looked at."""

    def __contains__(self, name: object) -> bool:
        return True


def read_arguments(folder: Path, common: Chunk | None = None) -> dict[str, Any]:
    """Return the plain values among the arguments that a checkpoint keeps; empty where it keeps
    none that can be read.

    They are in `common.pt`, or since megatron-core 0.19 among the objects of the checkpoint:
    `common` says where.
    """
    try:
        data = _saved(folder, common)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (info,) = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                return {}
            top = pickled.read(archive.read(info), _Every(), str(kept_in(folder, common)))
    except Exception:  # of whatever zipfile makes of what it is given
        return {}
    kept = _texts(top[0] if isinstance(top, list) and top else top).get("args")
    found = (
        _texts(kept.state) if isinstance(kept, Record) and kept.name == "argparse.Namespace" else {}
    )
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_ITEMS and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def kept_in(folder: Path, common: Chunk | None = None) -> Path:
    """Return the file that has a checkpoint's arguments: `common.pt` where there is one, as
    megatron-core reads it.
    """
    return folder / COMMON if common is None or (folder / COMMON).exists() else common.path


def _saved(folder: Path, common: Chunk | None) -> bytes:
    file = kept_in(folder, common)
    if common is None or file.name == COMMON:
        return read_plain(file, MAX_COMMON_BYTES)
    with open_plain(file) as opened:
        opened.seek(common.start)
        return opened.read(min(common.length, MAX_COMMON_BYTES))


def _texts(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapped):
        return {key: of for key, of in value.pairs if isinstance(key, str)}
    return {}


def arguments_of(run: RunConfig) -> dict[str, Any]:
    """What Megatron-LM compares with its own arguments, or takes with --use-checkpoint-args."""
    m = run.model
    moe = m.moe
    words: dict[str, Any] = {name: getattr(m, name) for name in _SAME_NAME}
    words |= {
        "seq_length": run.data.seq_length,
        "num_query_groups": m.query_groups,
        "group_query_attention": m.query_groups != m.num_attention_heads,
        "kv_channels": m.head_dim,
        "norm_epsilon": m.layernorm_epsilon,
        "swiglu": m.activation == "swiglu",
        "untie_embeddings_and_output_weights": not m.tie_word_embeddings,
        "multi_latent_attention": m.mla is not None,
        "add_position_embedding": True,
        "num_experts": moe.num_experts if moe else None,
        "moe_ffn_hidden_size": moe.ffn_hidden_size if moe else None,
        "moe_router_topk": moe.router_topk if moe else None,
        "moe_grouped_gemm": moe is not None,
        "moe_layer_freq": [int(i >= moe.first_dense_layers) for i in range(m.num_layers)]
        if moe
        else 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }
    if moe and not moe.first_dense_layers:
        words["moe_layer_freq"] = 1
    return arguments_said(run) | words | unflagged_said(run)
