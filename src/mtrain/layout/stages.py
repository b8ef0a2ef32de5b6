"""Which transformer layers each pipeline stage holds."""

from __future__ import annotations

from mtrain.config.run import RunConfig


def stage_layers(run: RunConfig) -> list[list[range]]:
    """Layers of each pipeline rank: one range per virtual stage, `out[pp_rank][vpp_index]`.

    Stages are equal; with `vpp` > 1 a rank holds every pp-th block of layers.
    """
    p = run.parallel
    blocks = p.pp * p.vpp
    size, rest = divmod(run.model.num_layers, blocks)
    if rest:
        raise ValueError(f"{run.model.num_layers} layers do not divide into {blocks} stages")
    return [[range((v * p.pp + s) * size, (v * p.pp + s + 1) * size) for v in range(p.vpp)] for s in range(p.pp)]
