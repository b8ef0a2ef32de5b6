"""The tables that say what a key feeds are those that megatron-core's configurations
are made of.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.engine import core_fields
from mtrain.config.engine.release import is_there
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP

MLA = [
    "model.mla={kv_lora_rank: 32, rope_type: yarn}",
    "model.num_query_groups=null",
    "model.kv_channels=null",
]
ARGUMENTS = [[], ["model=mixtral_tiny"], MLA, ["optim=sgd", "precision=bf16", "parallel=pp2vpp2"]]


def owners() -> dict[str, tuple[Any, dict[str, Any]]]:
    from mtrain.mcore import api

    return {
        "GPTModel": (api.GPTModel, core_fields.GPT_FIELDS),
        "DistributedDataParallelConfig": (
            api.DistributedDataParallelConfig,
            core_fields.DDP_FIELDS | core_fields.FSDP_FIELDS,
        ),
        "TorchFullyShardedDataParallelConfig": (
            api.TorchFullyShardedDataParallelConfig,
            core_fields.WRAP_FIELDS,
        ),
        "OptimizerConfig": (
            api.OptimizerConfig,
            core_fields.OPTIMIZER_FIELDS
            | {k: v for table in core_fields.OWN_FIELDS.values() for k, v in table.items()},
        ),
        "OptimizerParamScheduler": (api.OptimizerParamScheduler, core_fields.SCHEDULE_FIELDS),
    }


@pytest.mark.parametrize("argv", ARGUMENTS, ids=lambda words: " ".join(words) or "default")
def test_core_fields_built_config_holds_table_values(argv: list[str]) -> None:
    from mtrain.assembly.model import MADE, transformer_config
    from mtrain.devices import registry

    run = resolve(compose(argv).run, LAPTOP)
    built = transformer_config(run, registry.get("cpu"))
    said = core_fields.transformer_values(run)
    for name, value in said.items():
        # megatron-core puts its own default in place of some nulls, and parses the layout into an
        # object
        if value is not None and name not in MADE and name != "pipeline_model_parallel_layout":
            assert getattr(built, name) == value, name
    for name in MADE:
        assert getattr(built, name) is not None
    assert type(built).__name__ == (
        "MLATransformerConfig" if run.model.mla else "TransformerConfig"
    )


def test_core_fields_named_fields_exist() -> None:
    from mtrain.mcore import api

    known = {f.name for f in dataclasses.fields(api.MLATransformerConfig)}
    for table in (core_fields.FIELDS, core_fields.MOE_FIELDS, core_fields.MLA_FIELDS):
        assert set(filter(is_there, table)) <= known
    for owner, (kind, table) in owners().items():
        assert set(filter(is_there, table)) <= inspect.signature(kind).parameters.keys(), owner
