"""Every field of megatron-core's configurations has a key or a reason, and only one of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from mtrain.config.engine import core_fields, release, unmapped
from mtrain.config.engine.field_versions import FIELD_VERSIONS, is_there
from mtrain.config.messages.fields_page import fed


def declared() -> dict[str, set[str]]:
    """Owner -> its fields; a subclass has those that it adds, or gives a meaning of its own."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from mtrain.mcore import api

    def fields(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    def arguments(kind: Any) -> set[str]:
        return set(inspect.signature(kind.__init__).parameters) - {"self"}

    latent = fields(api.MLATransformerConfig) - fields(api.TransformerConfig)
    spread = fields(api.TorchFullyShardedDataParallelConfig) - fields(
        api.DistributedDataParallelConfig
    )
    return {
        unmapped.TRANSFORMER: fields(api.TransformerConfig),
        unmapped.LATENT: latent,
        unmapped.GPT: arguments(api.GPTModel),
        unmapped.DDP: fields(api.DistributedDataParallelConfig),
        unmapped.FSDP2: spread,
        unmapped.OPTIMIZER: fields(api.OptimizerConfig),
        unmapped.SCHEDULER: arguments(api.OptimizerParamScheduler),
        unmapped.DATA: fields(GPTDatasetConfig),
    }


def tabled() -> Iterator[str]:
    """Every field that a table sets."""
    for owner, tables in (
        (
            unmapped.TRANSFORMER,
            (
                core_fields.FIELDS,
                core_fields.MOE_FIELDS,
                core_fields.LINEAR_FIELDS,
                core_fields.HYBRID_FIELDS,
                core_fields.DSA_FIELDS,
            ),
        ),
        (unmapped.LATENT, (core_fields.MLA_FIELDS,)),
        (unmapped.GPT, (core_fields.GPT_FIELDS,)),
        (unmapped.DDP, (core_fields.DDP_FIELDS, core_fields.FSDP_FIELDS)),
        (unmapped.OPTIMIZER, (core_fields.OPTIMIZER_FIELDS,)),
        (unmapped.SCHEDULER, (core_fields.SCHEDULE_FIELDS,)),
    ):
        yield from {f"{owner}.{name}" for table in tables for name in table}


def fed_fields() -> set[str]:
    return {field for fields in fed().values() for field in fields}


@pytest.mark.parametrize("owner", unmapped.OWNERS)
def test_engine_fields_are_fed_or_explained_once(owner: str) -> None:
    with_key = {f for f in fed_fields() if f.startswith(f"{owner}.")}
    reasons = {
        f
        for f in unmapped.UNMAPPED.keys() | unmapped.FIXED_IN_TABLES.keys()
        if f.startswith(f"{owner}.")
    }
    there = {f"{owner}.{name}" for name in declared()[owner]}
    assert not with_key & reasons, "a key feeds it now: take it out of config/engine/unmapped.py"
    assert not there - with_key - reasons, (
        "new in megatron-core, or in no table: give it a key or a reason in unmapped.py"
    )
    expected = {f for f in with_key | reasons if is_there(f.partition(".")[2])}
    assert not expected - there, (
        "this release has no such field: say in field_versions.py which have it"
    )


def test_engine_fields_of_other_releases_are_absent() -> None:
    migrated = {"TransformerConfig.cuda_graph_scope"}  # with a warning
    there = {f"{owner}.{name}" for owner, names in declared().items() for name in names}
    elsewhere = {f for f, versions in FIELD_VERSIONS.items() if release.release() not in versions}
    assert not elsewhere & there - migrated


def test_engine_fields_set_without_key_state_reason() -> None:
    set_anyway = set(tabled()) - fed_fields() - {f"{unmapped.LATENT}.multi_latent_attention"}
    assert set_anyway == set(unmapped.FIXED_IN_TABLES)
    assert not unmapped.UNMAPPED.keys() & set(tabled()), (
        "a table sets it: its reason stands in FIXED_IN_TABLES"
    )


def test_engine_fields_reasons_are_unique() -> None:
    names = [
        f"{unmapped.TRANSFORMER}.{n}"
        for _, _, names in unmapped._TRANSFORMER
        for n in names.split()
    ]
    names += [f"{owner}.{n}" for owner, _, _, names in unmapped._OTHERS for n in names.split()]
    assert len(names) == len(set(names))
