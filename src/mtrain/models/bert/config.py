"""`model.bert`: the keys of an encoder that is trained on masked tokens (BERT, Devlin et al. 2018),
and its limits.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mtrain.config.families import NO_ADAPTERS, FamilyConfig, FamilySection, Limit, absent
from mtrain.config.schema.base import Effect, Key, NonNegativeInt, Width


class BertConfig(FamilySection):
    """`model.bert`: token types, heads and special tokens of the family bert.

    A share of each sample's tokens is chosen, and predicted from both sides: 80% of them are
    replaced by the mask token, 10% by any token, 10% stay. Which ones, is drawn anew for every
    sample number.
    """

    FAMILY: ClassVar[str] = "bert"

    type_vocab_size: Annotated[Width, Key(hf="type_vocab_size")] = 2
    """Kinds of tokens that have an embedding of their own: sentence A is kind 0, sentence B kind 1.
    """
    next_sentence: bool = True
    """A pooler and a head say whether sentence B follows A, and are trained on it: a sample is two
    halves, the second in half of the samples from another place. Their mean loss is added to that
    of the masked tokens. false: neither weights nor objective.
    """
    head_activation: Annotated[Literal["gelu", "gelu_tanh"] | None, Key(effect=Effect.NUMERICS)] = (
        None
    )
    """Activation of the head for masked tokens; null: that of the MLPs, `model.activation`.

    Megatron-LM has the exact gelu in this head, also where its MLPs have the tanh form.
    """
    mask_token_id: Annotated[NonNegativeInt, Key(effect=Effect.NUMERICS)] = 103
    """The token [MASK]."""
    cls_token_id: Annotated[NonNegativeInt | None, Key(effect=Effect.NUMERICS)] = None
    """The token [CLS], with which a sample begins; null: it begins with its text."""
    sep_token_id: Annotated[NonNegativeInt | None, Key(effect=Effect.NUMERICS)] = None
    """The token [SEP], with which a sentence ends; null: nothing parts them but their kind."""
    pad_token_id: Annotated[
        NonNegativeInt | None, Key(effect=Effect.NUMERICS, hf="pad_token_id")
    ] = None
    """The token [PAD]: its embedding learns nothing from where it stands, and it is never chosen;
    null: none.
    """
    masked_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)],
        Key(effect=Effect.NUMERICS, aka="mlm_probability masked_lm_prob"),
    ] = 0.15
    """Share of a sample's tokens that is chosen and predicted."""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Return the tokens that are never chosen."""
        named = (self.mask_token_id, self.cls_token_id, self.sep_token_id, self.pad_token_id)
        return tuple(token for token in named if token is not None)

    def added(self) -> int:
        """Return the number of special tokens in a sample."""
        # [CLS] stands once, [SEP] after each sentence.
        sentences = 2 if self.next_sentence else 1
        return (self.cls_token_id is not None) + sentences * (self.sep_token_id is not None)


_NOT_BERT = "is no part of BERT"
_WHOLE = "a token of an encoder sees all others, and samples are whole windows"
LIMITS = (
    Limit(
        "model.norm_placement",
        ("post_residual", "pre"),
        "BERT has its norms on the sum with the residual stream, and Megatron's BERT before"
        " attention and MLP",
    ),
    Limit("model.normalization", ("LayerNorm",), "BERT's norms have a mean and a bias"),
    Limit("model.activation", ("gelu", "gelu_tanh"), "BERT's MLP and its head have a gelu"),
    Limit(
        "model.position_embedding_type",
        ("learned_absolute",),
        "BERT adds an embedding of each position",
    ),
    Limit("model.add_bias_linear", (True,), "every linear layer of BERT has a bias"),
    Limit(
        "model.tie_word_embeddings", (True,), "BERT's output layer shares the embedding's weights"
    ),
    *absent(None, "num_query_groups kv_channels moe mla mtp_num_layers rope_scaling", _NOT_BERT),
    *absent(None, "rope_scaling_factor window_size linear_attention mup softmax_scale", _NOT_BERT),
    *absent(None, "attn_logit_softcapping final_logit_softcapping", _NOT_BERT),
    *absent(False, "parallel_residual add_qkv_bias qk_layernorm qk_l2_norm", _NOT_BERT),
    *absent(
        False, "scale_embedding layernorm_zero_centered_gamma attention_output_gate", _NOT_BERT
    ),
    *absent("vanilla", "softmax_type", _NOT_BERT),
    NO_ADAPTERS,
    Limit(
        "parallel.cp",
        (1,),
        "the sequence of an encoder is not sharded over ranks: its first token is pooled",
    ),
    Limit("parallel.hybrid_context_parallel", (False,), _WHOLE),
    Limit("data.packed", (False,), _WHOLE),
    Limit("trainer.sample_tokens", (0,), "it continues no text"),
)

CONFIG = FamilyConfig(
    section=BertConfig,
    about="The family bert: masked tokens, token types and heads; null: another family.",
    limits=LIMITS,
)
