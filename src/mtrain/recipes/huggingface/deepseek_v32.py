"""`config.json` of DeepSeek-V3.2: that of DeepSeek-V3, with an indexer."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json
from mtrain.recipes.huggingface.families import FAMILIES
from mtrain.recipes.huggingface.writers import WRITERS

_V3 = FAMILIES["deepseek_v3"]
INDEXER = {
    "index_n_heads": "model.dsa.indexer_n_heads",
    "index_head_dim": "model.dsa.indexer_head_dim",
    "index_topk": "model.dsa.indexer_topk",
}


def _layers(file: ConfigFile) -> None:
    """Refuse layers without an indexer, and dense MLPs that do not come first."""
    dense = min(int(file.get("first_k_dense_replace")), file.layers)
    kinds = {
        "layer_types": ["indexed_attention"] * file.layers,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (file.layers - dense),
    }
    for key, usual in kinds.items():
        file.must(
            key,
            (usual, None),
            "changes the numbers: every layer has an indexer, and dense MLPs come first",
        )
    if file.get("q_lora_rank") is None:
        file.refuse(
            "q_lora_rank", "not supported", "changes the numbers: an indexer reads latent queries"
        )


READS = Family(
    {**_V3.keys, **INDEXER},
    _V3.fixed,
    {
        **_V3.absent,
        "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 0,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    (*_V3.more, _layers),
    _V3.aliases,
    _V3.irrelevant,
)


def writes(model: ModelConfig) -> Json:
    """Return the keys of the file beyond the copied ones."""
    if model.dsa is None:
        raise ValueError("there is no sparse attention")
    return WRITERS["deepseek_v3"](model)
