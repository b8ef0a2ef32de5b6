"""`model.dsa`: DeepSeek sparse attention. Keys carry megatron-core's names, without `dsa_`."""

from typing import Annotated

from mtrain.config.schema.base import Effect, Flag, Key, NonNegativeFloat, Section, Width


class SparseAttentionConfig(Section):
    """`model.dsa`: MLA in which each query attends to keys that an indexer chooses (DeepSeek-V3.2),
    in every layer, or at a D in the pattern of a hybrid. The score of a key is the sum over the
    indexer's heads of w ReLU(q k), with queries from MLA's latent ones and keys and weights from
    the hidden states. The indexer learns from a loss of its own, whose gradient does not reach its
    inputs.
    """

    indexer_n_heads: Annotated[
        Width,
        Key(
            feeds="dsa_indexer_n_heads",
            flag=Flag("--dsa-indexer-n-heads", always=True),
            hf="index_n_heads",
        ),
    ] = 64
    """Heads of the indexer, which share one key."""
    indexer_head_dim: Annotated[
        Width,
        Key(
            feeds="dsa_indexer_head_dim",
            flag=Flag("--dsa-indexer-head-dim", always=True),
            hf="index_head_dim",
            unit="channels",
        ),
    ] = 128
    """The width of such a head; the first model.mla.qk_pos_emb_head_dim channels have rotary
    positions.
    """
    indexer_topk: Annotated[
        Width,
        Key(
            feeds="dsa_indexer_topk",
            effect=Effect.NUMERICS,
            flag=Flag("--dsa-indexer-topk", always=True),
            hf="index_topk",
            unit="tokens",
        ),
    ] = 2048
    """The number of keys that a query attends to; its own may be one. A query with fewer
    predecessors sees all.
    """
    indexer_loss_coeff: Annotated[
        NonNegativeFloat,
        Key(
            feeds="dsa_indexer_loss_coeff",
            effect=Effect.NUMERICS,
            flag=Flag("--dsa-indexer-loss-coeff", absent=0.0, always=True),
        ),
    ] = 1.0
    """The weight of the indexer's loss: for each token and layer the divergence of the softmax of
    its scores from the attention of all heads. Nothing else trains it; 0: nothing does.
    """
    indexer_use_sparse_loss: Annotated[
        bool,
        Key(
            feeds="dsa_indexer_use_sparse_loss",
            effect=Effect.NUMERICS,
            flag="--dsa-indexer-use-sparse-loss",
        ),
    ] = False
    """Restriction of that loss to the chosen keys; false: it covers all visible keys, as in a first
    stage of training.
    """
