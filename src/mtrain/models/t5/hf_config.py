"""Reading and writing a Hugging Face `config.json` of T5."""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.models.t5.config import T5Config, decoder_layers
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind, tables_of
from mtrain.recipes.huggingface.readers import GATED_WORDS, UNGATED_WORDS

_UNGATED = {**UNGATED_WORDS, "relu": "relu"}
_SHIPPED_VOCABULARY = 32128
_ITS_FIRST_SENTINEL = 32099
"""First sentinel of T5's tokenizer: 32,000 pieces, 100 sentinels and 28 unused ids."""


def _block(f: ConfigFile) -> None:
    """Read activation, decoder, dropout and ids, of which transformers derives some."""
    _activation(f)
    layers = f.get("num_layers")
    decoder = f.get("num_decoder_layers")
    f.out["model.t5.decoder_layers"] = None if decoder == layers else decoder
    dropout = float(f.get("dropout_rate", 0.0))
    f.out |= {"model.hidden_dropout": dropout, "model.attention_dropout": dropout}
    # T5's decoder begins with the padding.
    start = f.get("decoder_start_token_id", f.get("pad_token_id", 0))
    end = f.get("eos_token_id", 1)
    f.read.add("pad_token_id")
    f.out |= {
        "model.t5.start_id": start,
        "model.t5.end_id": end[0] if isinstance(end, list) and end else end,
    }
    words = f.get("vocab_size")
    if words == _SHIPPED_VOCABULARY:
        f.out["model.t5.first_sentinel"] = _ITS_FIRST_SENTINEL
    # The default of 100 sentinels would be most of a small vocabulary.
    if words < 2 * T5Config.model_fields["sentinels"].default:
        f.out["model.t5.sentinels"] = max(1, words // 2)
    f.out["model.t5.initializer_factor"] = float(f.get("initializer_factor"))


def _activation(f: ConfigFile) -> None:
    said = f.get("feed_forward_proj")
    words = said.split("-") if isinstance(said, str) else [""]
    implied = "gelu_new" if said == "gated-gelu" else words[-1], words[0] == "gated"
    meant = f.get("dense_act_fn", implied[0]), bool(f.get("is_gated_act", implied[1]))
    known = GATED_WORDS if implied[1] else _UNGATED
    whole = len(words) == 1 + implied[1]
    if meant == implied and whole and implied[0] in known:
        f.out["model.activation"] = known[implied[0]]
        return
    f.out["model.activation"] = "relu"
    if meant == implied:
        text = f"there are {', '.join(known)}"
    else:
        text = "dense_act_fn and is_gated_act say something else"
    f.differs("feed_forward_proj", f"{text}")


def _ends(f: ConfigFile) -> None:
    """Read whether embeddings are tied and logits scaled: transformers scales unless a file says
    untied.

    A file of transformers 5 declares them tied in any case; its weights decide.
    """
    tied = f.get("tie_word_embeddings") is not False
    scaled = bool(f.get("scale_decoder_outputs", tied))
    f.out |= {"model.tie_word_embeddings": tied, "model.t5.scale_logits": scaled or not tied}
    if scaled and not tied:
        text = "changes the numbers: logits of an output layer of its own are not scaled"
        f.refuse("scale_decoder_outputs", "not supported", text)


_READS = Family.of(tables_of(__file__), more=(_block, _ends))


def _writes(m: ModelConfig) -> Json:
    """Return the keys of T5's `config.json` for a model, without those that are copied.

    Raises:
        ValueError: T5 cannot be so.
    """
    t = m.t5
    if t is None or m.softmax_scale != 1.0:
        raise ValueError("it is no T5, or its attention is scaled")
    if m.hidden_dropout != m.attention_dropout:
        raise ValueError("T5 has one rate of dropout")
    names: dict[str, Any] = {ours: theirs for theirs, ours in reversed(_UNGATED.items())}
    names |= {ours: f"gated-{theirs}" for theirs, ours in reversed(GATED_WORDS.items())}
    # Several words mean the same function; these are those of published files.
    names |= {"relu": "relu", "geglu_tanh": "gated-gelu", "gelu_tanh": "gelu_new"}
    if m.activation == "geglu":
        raise ValueError("gated-gelu is the tanh form there")
    tied = {} if not m.tie_word_embeddings or t.scale_logits else {"scale_decoder_outputs": False}
    return {
        "d_kv": m.head_dim,
        "num_decoder_layers": decoder_layers(m),
        "feed_forward_proj": names[m.activation],
        "dropout_rate": m.hidden_dropout,
        "initializer_factor": t.initializer_factor,
        "tie_word_embeddings": m.tie_word_embeddings,
        **tied,
        "is_encoder_decoder": True,
        "decoder_start_token_id": t.start_id,
        "pad_token_id": t.start_id,
        "eos_token_id": t.end_id,
    }


KINDS = {"t5": Kind(_READS, _writes, lambda model: "T5ForConditionalGeneration")}
