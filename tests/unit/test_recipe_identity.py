"""`export` and `import` are one table read in both directions: what goes out comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group, recipes_dir
from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.recipes.delta import unequal
from mtrain.recipes.imported import MARK
from mtrain.recipes.megatron.exporter import export_script
from mtrain.recipes.megatron.importer import import_texts
from mtrain.recipes.megatron.table import flags_of, table
from tests.support.configs import LAPTOP
from tests.support.covering import some_recipes
from tests.support.strategies import runs
from tests.support.tables import tables

TABLES = tables("recipe_identity")

RECIPES = [
    file.relative_to(recipes_dir()).with_suffix("").as_posix()
    for file in recipes_dir().rglob("*.yaml")
]
LOSSY = {
    "checkpoint.save_interval",
    "checkpoint.save_final",
    "data.kind",
    "trainer.sample_tokens",
    "checkpoint.keep",
    "kernels.gradient_accumulation_fusion",
}
"""Keys with a flag, or a habit of Megatron-LM, that says only a part of them."""


def resolved(*argv: str) -> RunConfig:
    return resolve(compose(argv).run, LAPTOP)


def back(text: str) -> UnresolvedRun:
    return import_texts([(text, "export.sh")], "imported").run


def marked(text: str) -> list[str]:
    return [
        line[len(MARK) :].partition("=")[0] for line in text.splitlines() if line.startswith(MARK)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", some_recipes(RECIPES))
def test_identity_shared_recipe_round_trips(name: str) -> None:
    run = resolved(f"recipe={name}")
    assert resolve(back(export_script(run)), LAPTOP).digest() == run.digest()


@pytest.mark.sampled(12)  # sizes of one family say the same flags
@pytest.mark.parametrize("model", choices_of_group("model"))
def test_identity_model_round_trips_through_flags(model: str) -> None:
    run = resolved(f"model={model}", "cluster=h100x64", "precision=bf16", "data=mock")
    text = export_script(run)
    assert resolve(back(text), LAPTOP).digest() == run.digest()
    without_flag = {key for key in schema_keys() if key not in flags_of()}
    left = {
        key
        for key in marked(text)
        if key not in without_flag and not key.startswith("cluster.peak_tflops")
    }
    if run.model.activation in (
        "geglu_tanh",
        "relu",
    ):  # Megatron-LM has no flag for a gate of gelu, and for relu
        left.discard("model.activation")
    assert left <= LOSSY, "a key that has a flag was not said by it"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    TABLES["words"],
)
def test_identity_alternative_flags_round_trip(words: str) -> None:
    run = resolved(*words.split())
    assert unequal(resolve(back(export_script(run)), LAPTOP), run) == []


@pytest.mark.full
@settings(
    max_examples=30,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(runs())
@example(UnresolvedRun.model_validate(compose([]).run.to_dict() | {"recipe": {}}))
def test_identity_random_config_round_trips(run: UnresolvedRun) -> None:
    run = _with_derived(run)
    text = export_script(run)
    assert unequal(_with_ranks(back(text), run), run) == [], text


@pytest.mark.parametrize("masked", [True, False])
def test_identity_export_names_differing_losses(masked: bool) -> None:
    words = (
        "model.vocab_size=4000",
        "data.tokenizer_vocab_size=4000",
        f"model.mask_padded_vocab={masked}".lower(),
    )
    text = export_script(resolved(*words))
    assert ("Megatron-LM has it in the softmax" in text) is masked
    assert ("model.mask_padded_vocab" in marked(text)) is masked
    assert "softmax" not in export_script(resolved(words[2])), "4096 ids need no padding"


def test_identity_export_names_differing_optimizer() -> None:
    text = export_script(resolved("optim=lion"))
    assert "# Megatron-LM has no lion: this command trains adam" in text
    assert back(text).optim.name == "lion"
    assert not any(
        "Megatron-LM has no" in export_script(resolved(f"optim={name}"))
        for name in ("adamw", "muon")
    )


def test_identity_dynamic_cp_has_own_flags() -> None:
    words = ("parallel=dp2", "parallel.hybrid_context_parallel=true", "data.packed=true")
    text = export_script(resolved(*words, "parallel.max_seqlen_per_dp_cp_rank=200"))
    assert "--hybrid-context-parallel" in text
    assert "--max-seqlen-per-dp-cp-rank 200" in text
    assert not any(key.startswith("parallel.") for key in marked(text))


def _with_derived(run: UnresolvedRun) -> RunConfig:
    """Set what every resolved run has and this one leaves open; kernels may be chosen later."""
    found = run.flat()
    missing = {
        path: value
        for path, value in resolved().flat().items()
        if value is not None and found.get(path, 0) is None and not path.startswith("kernels.")
    }
    return RunConfig.model_validate(apply(run, missing).to_dict())


def _with_ranks(run: UnresolvedRun, wanted: UnresolvedRun) -> UnresolvedRun:
    """Set ranks that follow from the machines, which the import leaves null."""
    per_node = run.cluster.devices_per_node
    if (
        run.parallel.ranks is None
        and per_node is not None
        and wanted.parallel.ranks == run.cluster.nodes * per_node
    ):
        whole = run.parallel.model_copy(update={"ranks": wanted.parallel.ranks})
        return run.model_copy(update={"parallel": whole})
    return run


def test_identity_export_is_deterministic() -> None:
    run = resolved("recipe=mixtral/8x7b_h100x64")
    assert export_script(run) == export_script(run)


def test_identity_flags_and_keys_are_claimed_once() -> None:
    for kind in ("flags", "keys"):
        names = [name for entry in table() for name in getattr(entry, kind)]
        assert sorted(names) == sorted(set(names))


def test_identity_table_keys_are_in_schema() -> None:
    sections = {"model.mla", "model.linear_attention", "model.dsa", "model.mup"}
    assert {key for entry in table() for key in entry.keys} - sections <= schema_keys().keys()
