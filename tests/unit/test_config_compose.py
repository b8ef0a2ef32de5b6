"""Composition: precedence, origins, and what is refused before and by Hydra."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.messages.keys import field_of, foreign, schema_keys
from mtrain.errors import MAX_PROBLEMS, ConfigError, Problem
from tests.support.configs import within_a_second
from tests.support.tables import tables

TABLES = tables("config_compose")


def problems(*argv: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(argv)
    return list(caught.value.problems)


def only(*argv: str) -> Problem:
    found = problems(*argv)
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "recipe: {title: t}\ndefaults:\n  - override /model: llama32_1b\n  - override /precision:"
        " bf16\noptim:\n  lr: 3e-4\n  min_lr: 1e-5\nmodel:\n  num_layers: 6\n"
    )
    return file


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(run_yaml(compose(["optim.lr=0.007", "model=gpt_1.7b", "parallel=tp2pp2"]).run))
    return file


def line_of(file: Path, text: str) -> int:
    return file.read_text().splitlines().index(text) + 1


def test_compose_group_file_over_default_names_its_line() -> None:
    composed = compose([])
    file = paths.conf_dir() / "model/llama_tiny.yaml"
    assert (
        composed.origins["model.hidden_size"]
        == f"conf/model/llama_tiny.yaml:{line_of(file, 'hidden_size: 256')}"
    )
    assert composed.origins["trainer.seed"] == "default"
    layout = compose(["parallel=tp4"])
    assert (layout.run.parallel.tp, layout.origins["parallel.tp"]) == (4, "command line")


def test_compose_recipe_over_group_files(recipe: Path) -> None:
    composed = compose([f"recipe={recipe}"])
    assert (composed.run.model.name, composed.run.model.num_layers) == ("llama32_1b", 6)
    assert composed.run.precision.dtype == "bf16"
    assert composed.run.optim.lr == 3e-4
    assert composed.origins["optim.lr"] == f"{recipe}:6"
    assert composed.origins["model.num_layers"] == f"{recipe}:9"
    assert composed.origins["model.hidden_size"].startswith("conf/model/llama32_1b.yaml:")
    assert composed.run.recipe.title == "t"


def test_compose_command_line_over_recipe(recipe: Path) -> None:
    composed = compose([f"recipe={recipe}", "precision=fp32", "optim.lr=0.5", "model.num_layers=2"])
    assert composed.run.precision.dtype == "fp32"
    assert (composed.run.optim.lr, composed.run.optim.min_lr) == (0.5, 1e-5)
    assert composed.origins["optim.lr"] == composed.origins["model.num_layers"] == "command line"


def test_compose_model_choice_replaces_recipe_model(
    recipe: Path,
) -> None:
    composed = compose([f"recipe={recipe}", "model=llama_tiny"])
    assert (composed.run.model.name, composed.run.model.num_layers) == ("llama_tiny", 4)
    assert composed.run.optim.lr == 3e-4
    (warning,) = composed.warnings
    assert (warning.code, warning.path, warning.severity) == ("MT020", "model", "warning")
    assert "model.num_layers=6" in warning.rule


def test_compose_argument_order_keeps_precedence(recipe: Path) -> None:
    for words in (["optim.lr=0.5", f"recipe={recipe}"], [f"recipe={recipe}", "optim.lr=0.5"]):
        assert compose(words).run.optim.lr == 0.5


@pytest.mark.parametrize(
    "argv",
    [
        ["optim.lr=1e-3", "optim.lr=2e-3"],
        ["optim.lr=1e-3", "trainer.seed=1", "optim.lr=1e-3"],
        ["model=llama_tiny", "model=llama3_8b"],
        ["recipe=llama/tiny_cpu", "recipe=deepseek/tiny_cpu"],
        ["run=a.yaml", "run=b.yaml"],
        ["model.moe.router_topk=2", "model.moe=null"],
        ["model.moe=null", "model.moe.router_topk=2"],
        ["model.moe.router_topk=2", "model.moe={}"],
        ["optim.muon={momentum: 0.9}", "optim.muon.momentum=0.8"],
        ["optim.muon.momentum=0.8", "optim.muon={num_ns_steps: 3, momentum: 0.9}"],
        ["parallel=tp2", "parallel=tp2"],
    ],
    ids=" ".join,
)
def test_compose_key_set_twice_shows_both(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(argv)
    (problem,) = (p for p in caught.value.problems if p.code == "MT004")
    assert f"as {argv[0]} and as {argv[-1]};" in problem.rule


@pytest.mark.parametrize(
    "argv",
    [
        ["model=llama3_8b", "model.num_layers=2", "model.vocab_size=512"],
        ["optim.muon={momentum: 0.9}", "optim.muon.num_ns_steps=3"],
        ["parallel=tp2", "parallel.pp=2", "parallel.sequence_parallel=true"],
        ["parallel=dp", "parallel.tp=2"],
        ["parallel=tp3", "parallel.tp=2"],
        ["recipe=llama/tiny_cpu", "model=deepseek_tiny"],
        ["recipe=llama/tiny_cpu", "recipe.title=mine"],
    ],
    ids=" ".join,
)
def test_compose_value_over_choice_is_no_repetition(argv: list[str]) -> None:
    compose(argv)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# nothing\n", "null\n", "~", "{}", "---\n", "--- # nothing\n...\n"]
)
@pytest.mark.parametrize("base", ["recipe", "run"])
def test_compose_empty_file_is_refused(tmp_path: Path, text: str, base: str) -> None:
    (tmp_path / "nothing.yaml").write_text(text)
    with pytest.raises(ConfigError, match="the file is empty"):
        compose([f"{base}={tmp_path / 'nothing.yaml'}"])


def test_compose_run_file_is_base_and_names_lines(run_file: Path) -> None:
    composed = compose([f"run={run_file}"])
    assert composed.run == compose(["optim.lr=0.007", "model=gpt_1.7b", "parallel=tp2pp2"]).run
    assert composed.origins["optim.lr"] == f"{run_file}:{line_of(run_file, '  lr: 0.007')}"
    assert "default" not in composed.origins.values()


def test_compose_values_and_choices_over_run_file(run_file: Path) -> None:
    composed = compose([f"run={run_file}", "optim.lr=0.1", "model=llama_tiny"])
    assert composed.run.optim.lr == 0.1
    assert composed.run.model == compose([]).run.model, "a choice replaces the whole group"
    assert composed.run.parallel.pp == 2, "groups that are not chosen stay"
    assert composed.choices == {"model": "llama_tiny"}
    assert composed.origins["model.hidden_size"].startswith("conf/model/llama_tiny.yaml:")


def test_compose_quoted_run_file_path_is_unquoted(run_file: Path) -> None:
    assert compose([f"run='{run_file}'"]).run.optim.lr == 0.007


def test_compose_nested_defaults_keep_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    conf = tmp_path / "conf"
    shutil.copytree(paths.conf_dir(), conf)
    (conf / "model/wide.yaml").write_text(
        "defaults:\n  - llama_tiny\n  - _self_\n\nhidden_size: 512\n"
    )
    monkeypatch.setattr(paths, "conf_dir", lambda: conf)
    composed = compose(["model=wide"])
    assert (composed.run.model.hidden_size, composed.run.model.num_layers) == (512, 4)
    assert composed.origins["model.hidden_size"] == "conf/model/wide.yaml:5"
    assert composed.origins["model.num_layers"] == "conf/model/llama_tiny.yaml:3"


def test_compose_broken_group_file_has_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    conf = tmp_path / "conf"
    shutil.copytree(paths.conf_dir(), conf)
    (conf / "optim/adamw.yaml").write_text("lr: 1\nlr: 2\n")
    monkeypatch.setattr(paths, "conf_dir", lambda: conf)
    problem = only()
    assert (problem.code, problem.source) == ("MT004", "conf/optim/adamw.yaml:2")


def test_compose_reports_every_problem() -> None:
    found = problems(
        "model=llma3_8b",
        "optim.lr=foo",
        "num_hidden_layers=2",
        "+a=3",
        "trainer.train_iters=0",
        "precision.dtype=bf61",
        "data.seq_length=64.5",
        "model.moe.num_expert=3",
    )
    codes = {(p.code, p.path) for p in found}
    assert {
        ("MT011", "model"),
        ("MT013", "optim.lr"),
        ("MT012", "num_hidden_layers"),
        ("MT014", "trainer.train_iters"),
        ("MT014", "precision.dtype"),
        ("MT013", "data.seq_length"),
        ("MT012", "model.moe.num_expert"),
    } <= codes
    assert all(p.source == "command line" for p in found)


@pytest.mark.parametrize(("argument", "word"), TABLES["refused_forms"])
def test_compose_unsupported_hydra_forms_are_refused(argument: str, word: str) -> None:
    problem = only(argument)
    assert problem.code == "MT010"
    assert word in problem.rule
    assert problem.source == "command line"


def test_compose_comma_is_fixed_by_brackets_or_quotes() -> None:
    assert only("data.split=0.9,0.05,0.05").fix == "data.split=[0.9,0.05,0.05]"
    assert compose([only("data.split=0.9,0.05,0.05").fix]).run.data.split == (0.9, 0.05, 0.05)
    fix = only("trainer.sample_prompt=a,b").fix
    assert compose(shlex.split(fix)).run.trainer.sample_prompt == "a,b"


@pytest.mark.parametrize(
    ("choice", "near"), [("llma3_8b", "llama3_8b"), ("llama3-8b", "llama3_8b"), ("qwen", "qwen")]
)
def test_compose_unknown_choice_lists_near_and_all(choice: str, near: str) -> None:
    problem = only(f"model={choice}")
    assert problem.code == "MT011"
    assert near in problem.fix.split(" or ")[0]
    assert "`python launch.py choices model` lists" in problem.rule
    assert "auto, default, dp, single" in only("parallel=nothing").rule


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("tensor_model_parallel_size", "parallel.tp"),
        ("model.num_key_value_heads", "model.num_query_groups"),
        ("model.intermediate_size", "model.ffn_hidden_size"),
        ("rms_norm_eps", "model.layernorm_epsilon"),
        ("model.hiden_size", "model.hidden_size"),
        ("lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("parallel.train_iters", "trainer.train_iters"),
        ("model.moe.num_expertz", "model.moe.num_experts"),
        ("log.statistic.interval", "log.statistics.interval"),
    ],
)
def test_compose_unknown_key_suggests_ours(key: str, ours: str) -> None:
    found = [p for p in problems(f"{key}=2") if p.code == "MT012"]
    assert [p.path for p in found] == [key]
    assert found[0].fix.startswith(f"{ours}=2")


def test_compose_derived_number_names_its_sources() -> None:
    assert "ranks / (tp * pp * cp)" in only("parallel.dp=4").rule


def test_compose_foreign_names_lead_to_existing_keys() -> None:
    assert len(foreign()) >= 140
    assert set(foreign().values()) <= set(schema_keys())
    assert all(field_of(f"model.{name}") is None for name in foreign())
    assert foreign()["moe_router_topk"] == "model.moe.router_topk"  # a field of megatron-core
    assert foreign()["expert_model_parallel_size"] == "parallel.ep"  # a flag
    assert foreign()["n_embd"] == foreign()["d_model"] == "model.hidden_size"


@pytest.mark.parametrize(("argument", "code", "fix"), TABLES["accepted_values"])
def test_compose_refused_value_lists_accepted(argument: str, code: str, fix: str) -> None:
    problem = only(argument)
    assert (problem.code, problem.fix) == (code, fix)


def test_compose_begun_section_must_be_complete() -> None:
    found = problems("model.moe.router_topk=1")
    assert {p.path for p in found} == {"model.moe.num_experts", "model.moe.ffn_hidden_size"}
    assert {p.code for p in found} == {"MT015"}


def test_compose_mapping_merges_into_section() -> None:
    run = compose(
        ["model.moe={num_experts: 4, ffn_hidden_size: 64}", "model.moe.router_topk=1"]
    ).run
    assert run.model.moe is not None
    assert (run.model.moe.num_experts, run.model.moe.router_topk) == (4, 1)


def test_compose_reference_is_followed() -> None:
    run = compose(["optim.decay_iters=${trainer.train_iters}", "trainer.train_iters=77"]).run
    assert run.optim.decay_iters == 77


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ("data.path=${oc.env:HOME}", "resolvers never run"),
        ("data.path=${oc.decode:x}", "resolvers never run"),
        ("data.path=${.kind}", "resolvers never run"),
        ("data.path=${data.path}", "circle"),
        ("data.path=${nothing.here}", "names no key"),
    ],
)
def test_compose_other_interpolation_is_refused_once(argument: str, word: str) -> None:
    problem = only(argument)
    assert problem.code == "MT007"
    assert word in problem.rule


def test_compose_multiplying_references_are_bounded() -> None:
    keys = [
        "data.path",
        "data.tokenizer",
        "data.cache_dir",
        "log.runs_dir",
        "checkpoint.resume",
        "cluster.name",
    ]
    argv = [f"{a}='" + ("${" + b + "}") * 8 + "'" for a, b in itertools.pairwise(keys)]
    assert any("100 references" in p.rule for p in problems(*argv))


def _mapping(group: str, lines: Sequence[str]) -> str:
    return f"{group}:\n" + "\n".join(f"  {line}" for line in lines)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"k{i}: 1" for i in range(1900)),
        _mapping("trainer", [f"train_iter{i}: 1" for i in range(1900)]),
        "cluster: {peak_tflops: {" + ", ".join(f"f{i}: 1" for i in range(1900)) + "}}",
        "data: {suffixes: [" + "1, " * 9900 + "]}",
        _mapping("trainer", [f"k{i}: ${{trainer.k{i + 1}}}" for i in range(1900)]),
        f"log: {{name: '{'a' * 500_000}'}}\n"
        + _mapping("trainer", [f"k{i}: '{'${log.name}' * 30}'" for i in range(1200)]),
    ],
    ids=[
        "unknown groups",
        "unknown keys",
        "unknown words of a table",
        "items",
        "references",
        "large references",
    ],
)
def test_compose_thousands_of_problems_take_a_second(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with within_a_second(), pytest.raises(ConfigError) as caught:
        load([f"recipe={tmp_path / 'r.yaml'}"])
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert caught.value.problems[-1].code == "MT005"


@pytest.mark.parametrize(
    "argv",
    [
        [f"trainer.train_iter{i}=1" for i in range(5000)],
        [f"word{i}" for i in range(1000)],
        ["data.suffixes=" + "[a," * 1300] * 3,
        ["data.suffixes=[" + "a," * 2000 + "a]"] * 20,
    ],
    ids=["keys", "words", "nesting", "length"],
)
def test_compose_any_command_line_takes_a_second(argv: list[str]) -> None:
    with within_a_second(), pytest.raises(ConfigError):
        load(argv)


def test_compose_recipe_and_run_file_exclude_each_other(recipe: Path, run_file: Path) -> None:
    assert "only one" in only(f"recipe={recipe}", f"run={run_file}").rule


def test_compose_missing_run_file_names_near_ones(run_file: Path) -> None:
    problem = next(
        p for p in problems(f"run={run_file.with_name('runn.yaml')}") if p.code == "MT002"
    )
    assert str(run_file) in problem.fix


def test_compose_origins_cover_leaves_exactly() -> None:
    composed = compose(["cluster=h100x8", "model=mixtral_tiny"])
    assert set(composed.origins) == set(composed.run.flat())
    assert composed.origins["cluster.peak_tflops.bf16"].startswith("conf/cluster/h100.yaml:")
    assert composed.origins["cluster.nodes"].startswith("conf/cluster/h100x8.yaml:")
    assert composed.origins["model.moe.num_experts"].startswith("conf/model/mixtral_tiny.yaml:")
