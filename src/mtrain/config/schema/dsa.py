"""`model.dsa`: DeepSeek sparse attention. Keys carry megatron-core's names, without `dsa_`."""

from typing import Annotated

from mtrain.config.schema.base import SAME, Effect, Flag, Key, NonNegativeFloat, Section, Width


class SparseAttentionConfig(Section):
    """`model.dsa`: MLA in which each query attends to keys that an indexer chooses (DeepSeek-V3.2),
    in every layer, or at a D in the pattern of a hybrid. The score of a key is the sum over the
    indexer's heads of w ReLU(q k), with queries from MLA's latent ones and keys and weights from
    the hidden states. The indexer learns from a loss of its own, whose gradient does not reach its
    inputs.
    """

    core_prefix = "dsa_"

    indexer_n_heads: Annotated[
        Width, Key(feeds=SAME, flag=Flag(SAME, always=True), hf="index_n_heads")
    ] = 64
    """Heads of the indexer, which share one key."""
    indexer_head_dim: Annotated[
        Width, Key(feeds=SAME, flag=Flag(SAME, always=True), hf="index_head_dim", unit="channels")
    ] = 128
    """The width of such a head; the first model.mla.qk_pos_emb_head_dim channels have rotary
    positions.
    """
    indexer_topk: Annotated[
        Width,
        Key(
            feeds=SAME,
            effect=Effect.NUMERICS,
            flag=Flag(SAME, always=True),
            hf="index_topk",
            unit="tokens",
        ),
    ] = 2048
    """The number of keys that a query attends to; its own may be one. A query with fewer
    predecessors sees all.
    """
    indexer_loss_coeff: Annotated[
        NonNegativeFloat,
        Key(feeds=SAME, effect=Effect.NUMERICS, flag=Flag(SAME, absent=0.0, always=True)),
    ] = 1.0
    """The weight of the indexer's loss: for each token and layer the divergence of the softmax of
    its scores from the attention of all heads. Nothing else trains it; 0: nothing does.
    """
    indexer_use_sparse_loss: Annotated[bool, Key(feeds=SAME, effect=Effect.NUMERICS, flag=SAME)] = (
        False
    )
    """Restriction of that loss to the chosen keys; false: it covers all visible keys, as in a first
    stage of training.
    """
