"""The transformer layers of each pipeline stage."""

from __future__ import annotations

from mtrain.config.resolve.stages import Stage, stages
from mtrain.config.schema.run import RunConfig


def embedding_stages(run: RunConfig) -> list[int]:
    """Return the pipeline ranks that share the gradient of the word embedding, in order.

    In megatron-core these are the first and the last. If multi-token prediction is in between, its
    rank looks words up, and the last takes part only if its output layer is tied to the embedding.
    """
    p = run.parallel
    predicting = p.pp - 1
    if p.pipeline_layout is not None:  # elsewhere MTP layers are in the last stage
        predicting = next(
            (i % p.pp for i, stage in enumerate(stages(run)) if stage.mtp), predicting
        )
    last = {p.pp - 1} if run.model.tie_word_embeddings or predicting == p.pp - 1 else set()
    return sorted({0, predicting} | last)


def held_stages(run: RunConfig) -> list[list[Stage]]:
    """Return the stages of each pipeline rank, `out[pp_rank][vpp_index]`: with `vpp` > 1 a rank
    holds every pp-th stage.
    """
    every = stages(run)
    p = run.parallel
    return [[every[v * p.pp + s] for v in range(p.vpp)] for s in range(p.pp)]
