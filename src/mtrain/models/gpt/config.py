"""Limits of decoder-only transformers, which have no section of their own."""

from mtrain.config.families import NO_NORMS_ON_SUMS, FamilyConfig, Limit

_ONE_BY_ONE = "attention and MLP of a layer are built as layers of their own"
BUILDER: tuple[Limit, ...] = (
    Limit(
        "model.parallel_residual",
        (False,),
        f"{_ONE_BY_ONE}, and the one reads what the other has added",
    ),
    Limit(
        "model.mtp_num_layers",
        (None,),
        "layers of multi-token prediction are built behind those of a GPTModel",
        (("model.mtp_loss_scaling_factor", None), ("model.mtp_detach_heads", False)),
    ),
    Limit("model.head", (None,), "a value head stands behind the last norm of a GPTModel"),
    Limit(
        "parallel.recompute.granularity",
        ("none", "selective"),
        f"{_ONE_BY_ONE}, and no two of them are computed again together",
        tuple(
            (f"parallel.recompute.{key}", off)
            for key, off in (
                ("method", None),
                ("num_layers", None),
                ("distribute_saved_activations", False),
            )
        ),
    ),
    Limit(
        "parallel.hybrid_context_parallel",
        (False,),
        "its rotary positions are made for one group of context-parallel ranks",
        (("parallel.max_seqlen_per_dp_cp_rank", None),),
    ),
)
"""Limits of `model.builder=hybrid` in the family gpt."""

CONFIG = FamilyConfig(
    limits=(
        Limit(
            "model.position_embedding_type",
            ("rope", "learned_absolute", "none"),
            "a bias of attention by distance is of the family t5",
        ),
        NO_NORMS_ON_SUMS,
    )
)
