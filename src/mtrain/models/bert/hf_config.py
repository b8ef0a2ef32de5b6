"""Reader and writer of the `config.json` of BERT and Megatron's BERT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind
from mtrain.recipes.huggingface.families import COMMON
from mtrain.recipes.huggingface.readers import UNGATED_WORDS

HEADS = {"ForPreTraining": True, "ForMaskedLM": False}
"""Ends of its classes in transformers -> whether they have a next-sentence head."""
CLASSES = {"bert": "Bert", "megatron-bert": "MegatronBert"}
"""`model_type` -> begin of its classes."""
GELUS = {word: ours for word, ours in UNGATED_WORDS.items() if ours.startswith("gelu")}
"""transformers' activation of MLPs and head -> mtrain's."""
CLS = 101
SEP = 102
MASK = 103
"""Special tokens of every vocabulary that was published with the paper."""
_DROPOUT = {
    "attention_probs_dropout_prob": "model.attention_dropout",
    "hidden_dropout_prob": "model.hidden_dropout",
}
_NOT_COPIED = ("attention_dropout", "tie_word_embeddings")
"""Keys of decoders: the one has another name here, the other one value."""
_WIDTHS = (
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
)


def _encoder(f: ConfigFile) -> None:
    for theirs, ours in _DROPOUT.items():
        f.out[ours] = float(f.get(theirs))
    word = f.get("hidden_act")
    f.out["model.activation"] = GELUS.get(word, "gelu") if isinstance(word, str) else "gelu"
    f.must("hidden_act", tuple(GELUS), f"changes the numbers: there are {', '.join(GELUS)}")
    f.must(
        "position_embedding_type",
        ("absolute",),
        "changes the numbers: an embedding of each position is added",
    )
    f.must("is_decoder", (False,), "changes the numbers: a token sees those before and behind it")
    text = "changes the numbers: the output layer has the embedding's weights"
    f.must("tie_word_embeddings", (True,), text)


def _heads(f: ConfigFile) -> None:
    begin = CLASSES[f.given["model_type"]]
    classes = {f"{begin}{end}": pooled for end, pooled in HEADS.items()}
    # A file that names no class is read as the BERT of the paper, with both heads.
    names = f.get("architectures") or [f"{begin}ForPreTraining"]
    known = [name for name in names if name in classes] if isinstance(names, list) else []
    if len(known) != 1 or len(names) > 1:
        f.differs("architectures", f"there are {' and '.join(classes)}")
    f.out["model.bert.next_sentence"] = classes[known[0]] if known else True


def _special_tokens(f: ConfigFile) -> None:
    """Set the special tokens of the published vocabularies where they fit; no file names them."""
    vocab = int(f.get("vocab_size"))
    pad = f.get("pad_token_id")
    published = vocab > MASK and pad not in (CLS, SEP, MASK)
    if published:
        mask = MASK
    else:
        # A small vocabulary of its own: the last token that is not the padding.
        mask = vocab - (2 if pad == vocab - 1 else 1)
    cls, sep = (CLS, SEP) if published else (None, None)
    f.out |= {
        "model.bert.mask_token_id": mask,
        "model.bert.cls_token_id": cls,
        "model.bert.sep_token_id": sep,
    }
    shown = f"{mask}, {'none' if cls is None else cls} and {'none' if sep is None else sep}"
    f.notes.append(
        f"the file does not say which tokens are [MASK], [CLS] and [SEP]: taken as {shown}; "
        "model.bert.mask_token_id, cls_token_id and sep_token_id say others"
    )


READS = Family(
    {
        **{theirs: ours for theirs, ours in COMMON.items() if theirs not in _NOT_COPIED},
        "layer_norm_eps": "model.layernorm_epsilon",
        **_DROPOUT,
        "type_vocab_size": "model.bert.type_vocab_size",
        "pad_token_id": "model.bert.pad_token_id",
    },
    {
        "model.family": "bert",
        "model.normalization": "LayerNorm",
        "model.norm_placement": "post_residual",
        "model.add_bias_linear": True,
        "model.position_embedding_type": "learned_absolute",
        "model.tie_word_embeddings": True,
    },
    {
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "is_decoder": False,
    },
    (_encoder, _heads, _special_tokens),
    irrelevant={
        **dict.fromkeys(
            (*_WIDTHS, "pooler_type", "directionality"), "is read by no layer of this family"
        ),
        "gradient_checkpointing": "says what is computed again, not what is computed",
        "output_past": "says what a call returns or keeps, not what the model computes",
    },
)


MEGATRON_READS = replace(READS, fixed={**READS.fixed, "model.norm_placement": "pre"})


def _writes(m: ModelConfig) -> Json:
    return {
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[m.activation],
        "tie_word_embeddings": True,
    }


def _class(kind: str) -> Callable[[ModelConfig], str]:
    def named(m: ModelConfig) -> str:
        assert m.bert is not None
        end = next(end for end, pooled in HEADS.items() if pooled == m.bert.next_sentence)
        return f"{CLASSES[kind]}{end}"

    return named


KINDS = {
    "bert": Kind(READS, _writes, _class("bert")),
    "megatron-bert": Kind(MEGATRON_READS, _writes, _class("megatron-bert")),
}
