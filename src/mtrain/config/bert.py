"""`model.bert`: what an encoder that is trained on masked tokens (BERT, Devlin et al.

2018) has beside its layers.
"""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Effect, Key, NonNegativeInt, Section, Width


class BertConfig(Section):
    """`model.bert`: token types, heads and special tokens of the family bert.

    A share of each sample's tokens is chosen, and predicted from both sides: 80% of them are
    replaced by the mask token, 10% by any token, 10% stay. Which ones, is drawn anew for every
    sample number.
    """

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
        """Return tokens that are never chosen."""
        named = (self.mask_token_id, self.cls_token_id, self.sep_token_id, self.pad_token_id)
        return tuple(token for token in named if token is not None)

    def added(self) -> int:
        """Special tokens that a sample has beside its text."""
        sentences = 2 if self.next_sentence else 1
        return (self.cls_token_id is not None) + sentences * (self.sep_token_id is not None)
