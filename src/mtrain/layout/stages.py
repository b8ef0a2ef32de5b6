"""Which transformer layers each pipeline stage holds."""

from __future__ import annotations

from mtrain.config.run import RunConfig
from mtrain.config.stages import Stage, stages


def stage_layers(run: RunConfig) -> list[list[range]]:
    """Layers of each pipeline rank: one range per virtual stage, `out[pp_rank][vpp_index]`.

    Raises:
        ValueError: the layers cannot be cut as the configuration says.
    """
    return [[stage.layers for stage in held] for held in held_stages(run)]


def held_stages(run: RunConfig) -> list[list[Stage]]:
    """The stages of each pipeline rank, `out[pp_rank][vpp_index]`: with `vpp` > 1 a rank holds every pp-th stage."""
    every, p = stages(run), run.parallel
    return [[every[v * p.pp + s] for v in range(p.vpp)] for s in range(p.pp)]
