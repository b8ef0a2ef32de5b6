"""Every field of megatron-core's configurations has a key or a reason, and only one of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from mtrain.config.engine import core_fields, release
from mtrain.config.engine import release as field_facts
from mtrain.config.engine.release import FIELD_VERSIONS, is_there
from mtrain.config.messages.fields_page import fed


def declared() -> dict[str, set[str]]:
    """Return the fields of each owner; a subclass has those that it adds, or gives a meaning of its
    own.
    """
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
        field_facts.TRANSFORMER: fields(api.TransformerConfig),
        field_facts.LATENT: latent,
        field_facts.GPT: arguments(api.GPTModel),
        field_facts.DDP: fields(api.DistributedDataParallelConfig),
        field_facts.FSDP2: spread,
        field_facts.OPTIMIZER: fields(api.OptimizerConfig),
        field_facts.SCHEDULER: arguments(api.OptimizerParamScheduler),
        field_facts.DATA: fields(GPTDatasetConfig),
    }


def tabled() -> Iterator[str]:
    """Yield every field that a table sets."""
    for owner, tables in (
        (
            field_facts.TRANSFORMER,
            (
                core_fields.FIELDS,
                core_fields.MOE_FIELDS,
                core_fields.LINEAR_FIELDS,
                core_fields.HYBRID_FIELDS,
                core_fields.DSA_FIELDS,
            ),
        ),
        (field_facts.LATENT, (core_fields.MLA_FIELDS,)),
        (field_facts.GPT, (core_fields.GPT_FIELDS,)),
        (field_facts.DDP, (core_fields.DDP_FIELDS, core_fields.FSDP_FIELDS)),
        (field_facts.OPTIMIZER, (core_fields.OPTIMIZER_FIELDS,)),
        (field_facts.SCHEDULER, (core_fields.SCHEDULE_FIELDS,)),
    ):
        yield from {f"{owner}.{name}" for table in tables for name in table}


def fed_fields() -> set[str]:
    return {field for fields in fed().values() for field in fields}


@pytest.mark.parametrize("owner", field_facts.OWNERS)
def test_engine_fields_are_fed_or_explained_once(owner: str) -> None:
    with_key = {f for f in fed_fields() if f.startswith(f"{owner}.")}
    reasons = {
        f
        for f in field_facts.UNMAPPED.keys() | field_facts.FIXED_IN_TABLES.keys()
        if f.startswith(f"{owner}.")
    }
    there = {f"{owner}.{name}" for name in declared()[owner]}
    assert not with_key & reasons, "a key feeds it now: take it out of config/engine/fields.json"
    assert not there - with_key - reasons, (
        "new in megatron-core, or in no table: give it a key or a reason in fields.json"
    )
    expected = {f for f in with_key | reasons if is_there(f.partition(".")[2])}
    assert not expected - there, (
        "this release has no such field: say in config/engine/fields.json which have it"
    )


def test_engine_fields_of_other_releases_are_absent() -> None:
    migrated = {"TransformerConfig.cuda_graph_scope"}  # with a warning
    there = {f"{owner}.{name}" for owner, names in declared().items() for name in names}
    elsewhere = {f for f, versions in FIELD_VERSIONS.items() if release.release() not in versions}
    assert not elsewhere & there - migrated


def test_engine_fields_set_without_key_state_reason() -> None:
    set_anyway = set(tabled()) - fed_fields() - {f"{field_facts.LATENT}.multi_latent_attention"}
    assert set_anyway == set(field_facts.FIXED_IN_TABLES)
    assert not field_facts.UNMAPPED.keys() & set(tabled()), (
        "a table sets it: its reason stands in FIXED_IN_TABLES"
    )


def test_engine_fields_reasons_are_unique() -> None:
    names = [
        f"{owner}.{name}"
        for owner, groups in field_facts._FACTS["unmapped"].items()
        for group in groups
        for name in group["fields"]
    ]
    assert len(names) == len(set(names))
