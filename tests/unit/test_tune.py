"""The search for a layout: it finds the best one, keeps the values that are set, and its choice is
written down.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.cli.tune import left_of, overrides, tuned
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from mtrain.models.registry import family_of
from mtrain.plan.rank import worst_stage
from mtrain.plan.states import rank_states
from mtrain.plan.time import step, step_time
from mtrain.plan.time.report import no_time, time_report
from mtrain.plan.tune import choose
from mtrain.plan.tune.choose import search
from mtrain.plan.tune.costs import EXPERTS, FROZEN, Costs, state_of
from mtrain.plan.tune.search import Found, Task
from mtrain.plan.tune.space import AXES, Change, Space, balanced, changed
from tests.support.configs import LAPTOP
from tests.support.covering import some
from tests.support.tables import tables

TABLES = tables("tune")

FEW = "model=llama32_1b cluster=h100 data.seq_length=4096"
ONE_B = f"{FEW} cluster.devices_per_node=4 trainer.global_batch_size=16"
H100 = ("cluster=h100", "precision=bf16", "optim=adamw")
PLAIN = {
    "optim.cpu_offload": 0.0,
    "parallel.fsdp": "none",
    "parallel.cp": 1,
    "trainer.micro_batch_size": 1,
}


@cache
def found(
    words: str, said: tuple[tuple[str, Any], ...] = (), number: int = 3
) -> tuple[Found, Task]:
    return search(compose(words.split()).run, dict(said), LAPTOP, None, number)


def every(task: Task, space: Space, axis: int, run: Any, change: Mapping[str, Any]) -> list[float]:
    """Return the seconds of all layouts that fit and keep the rules, each planned in full."""
    if axis == len(AXES):
        layout = task.planned(change)
        return [layout.seconds] if layout is not None and layout.memory.peak <= task.room() else []
    out: list[float] = []
    for more in space.options(tuple(AXES)[axis], run):
        out += every(task, space, axis + 1, changed(run, more), {**change, **more})
    return out


@pytest.mark.sampled(9)
@pytest.mark.parametrize("memory", [80.0, 14.0])
def test_tune_best_is_best_of_all(memory: float) -> None:
    words = f"{ONE_B} cluster.device_memory_gib={memory} parallel.vpp=1"
    said = tuple({**PLAIN, "parallel.vpp": 1, "parallel.distributed_optimizer": True}.items())
    got, task = found(words, said)
    run = task.resolve(task.raw)
    space = Space(run, dict(said), Costs(run).ends)
    times = every(task, space, 0, space.run, {})
    assert len(times) > 10
    assert got.best[0].seconds == min(times)
    assert [layout.seconds for layout in got.best] == sorted(layout.seconds for layout in got.best)


def test_tune_layout_of_small_model_needs_few_plans() -> None:
    """Hold the seconds between steps in every bound: without them 29 layouts would be planned."""
    assert found("model=llama_tiny cluster=gb200x4", number=1)[0].planned < 20


def fitting(
    words: str, said: Mapping[str, Any]
) -> Iterator[tuple[Costs, RunConfig, tuple[Change, ...]]]:
    """Yield pipelines of a search, with all ways to recompute."""
    task = found(words, tuple(said.items()), 1)[1]
    run = task.resolve(task.raw)
    space = Space(run, dict(said), Costs(run).ends)
    costs = Costs(run)
    runs = [run]
    for axis in ("shards", "context", "micro", "pipeline"):
        runs = [changed(one, more) for one in runs for more in space.options(axis, one)]
        runs = [one for one in runs if not space.broken(axis, one)]
    for one in runs:
        yield costs, one, tuple(space.options("recompute", one))


BOUNDED = {
    "experts": (
        "model=deepseek_v2_lite cluster=h100 data.seq_length=4096 trainer.global_batch_size=16",
        {"parallel.tp": 1, "parallel.cp": 1, "trainer.micro_batch_size": 1},
    ),
    "blocks": (
        ONE_B,
        {"parallel.recompute.granularity": "full", "parallel.recompute.method": "block",
         "parallel.recompute.num_layers": 1, "trainer.micro_batch_size": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_tune_no_layout_beats_its_bounds(name: str) -> None:
    """Bound a layout before its stages and its state are chosen: with a bound above its cost, the
    best would be discarded.
    """
    words, said = BOUNDED[name]
    seen = 0
    for costs, run, ways in fitting(words, said):
        p = run.parallel
        first = costs.flow(run)
        even = costs.even(run, p.pp)
        bound = even.seconds + even.micro * (p.pp - 1) / p.vpp
        sharded = [changed(run, {"parallel.fsdp": kind}) for kind in ("none", "fsdp2")]
        for way in ways:
            flow = costs.flow(changed(run, way))
            assert costs.ideal(run) <= flow.seconds * (1 + 1e-9)
            assert bound <= flow.seconds * (1 + 1e-9)
            assert all(a <= b for a, b in zip(even.least, flow.weights, strict=True))
            for state in sharded:
                whole = costs.seconds(changed(state, way)) * (1 + 1e-9)
                assert bound + costs.once(state, even) <= whole
                assert first.seconds + costs.once(state, first) <= whole
            seen += 1
    assert seen > 10


def test_tune_too_high_bound_loses_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        **PLAIN,
        **BOUNDED["blocks"][1],
        "parallel.vpp": 1,
        "parallel.distributed_optimizer": True,
    }
    # a fast host, so that recomputation takes the device's time
    words = f"{ONE_B} cluster.reached={{host:10}}"
    best = found(words, tuple(said.items()), 4)[0].best
    assert best[-1].words.startswith("tp2pp2")
    # as if every layer was computed again
    monkeypatch.setattr(Costs, "_without_blocks", Costs.pieces)
    wrong = search(compose(words.split()).run, said, LAPTOP, None, 4)[0].best
    assert wrong[-1].words.startswith("pp4")
    assert wrong[-1].seconds > 1.05 * best[-1].seconds


def test_tune_is_deterministic() -> None:
    first = [layout.change for layout in found(ONE_B)[0].best]
    again = search(compose(ONE_B.split()).run, {}, LAPTOP, None, 3)[0]
    assert [layout.change for layout in again.best] == first


def test_tune_more_memory_is_never_slower() -> None:
    times = []
    for memory in (8.0, 12.0, 20.0, 80.0):
        got, task = found(
            f"{ONE_B} cluster.device_memory_gib={memory}", (("trainer.micro_batch_size", 1),), 1
        )
        times.append(got.best[0].seconds)
        assert got.best[0].memory.peak <= task.room()
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_tune_keeps_set_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ONE_B.split(), "parallel.tp=2", "trainer.micro_batch_size=2", "--json"]
    assert main(["tune", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kept"] == {"parallel.tp": 2, "trainer.micro_batch_size": 2}
    assert all(layout["keys"]["parallel.tp"] == 2 for layout in report["layouts"])
    assert all(layout["keys"]["trainer.micro_batch_size"] == 2 for layout in report["layouts"])
    assert [layout["seconds"] for layout in report["layouts"]] == sorted(
        row["seconds"] for row in report["layouts"]
    )


def test_tune_page_explains_and_file_is_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["tune", *ONE_B.split(), "--out", str(file)]) == 0
    out = capsys.readouterr().out
    assert " 1  the fastest that fits: " in out
    assert " slower" in out
    assert f"wrote {file}" in out
    best = found(ONE_B)[0].best[0]
    loaded = load([*ONE_B.split(), f"parallel={file}"], LAPTOP, {}, to_run=False)
    assert not [problem for problem in loaded.warnings if problem.code == "MT146"]
    assert loaded.run.parallel == best.run.parallel
    assert loaded.run.trainer == best.run.trainer


def test_tune_unwritable_file_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtrain.cli.tune.tuned", lambda words: pytest.fail("it was searched"))
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    names = {
        **{
            "mine": "is there already",
            "dangling.yaml": "is there already",
            "mine.yaml/x": "Not a directory",
        },
        **{
            "away/mine.yaml": "No such file or directory",
            f"{'x' * 300}.yaml": "File name too long",
        },
    }
    for name, why in names.items():
        assert main(["tune", *ONE_B.split(), "--out", str(tmp_path / name)]) == (
            2 if "already" in why else 3
        )
        assert why in capsys.readouterr().err
    monkeypatch.setattr("os.open", _refuses)  # a folder of somebody else
    assert main(["tune", *ONE_B.split(), "--out", str(tmp_path / "own")]) == 3
    assert (
        f"{tmp_path / 'own.yaml'} cannot be written: Permission denied" in capsys.readouterr().err
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dangling.yaml", "mine.yaml"]


def _refuses(path: object, *_: object, **__: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


RECIPES = {
    "recompute": (
        "trainer: {micro_batch_size: 16}\nparallel: {recompute: {granularity: selective, modules:"
        " [mlp]}}\n"
    ),
    "stages": "parallel: {pp: 2, layers_per_stage: [9, 7], overlap_grad_reduce: false}\n",
    "ends": (
        "parallel: {pp: 2, account_for_embedding_in_pipeline_split: true, "
        "account_for_loss_in_pipeline_split: true, ranks: 4}\n"
    ),
    "layout": "parallel: {pp: 2, pipeline_layout: 'Et*8|t*8L'}\n",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RECIPES)
def test_tune_recipe_comment_equals_result(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "recipe: {title: t, purpose: p, hardware: h, source: s, verified: no}\n" + RECIPES[name]
    )
    words = ["recipe=r.yaml", *ONE_B.split()]
    assert main(["tune", *words, "--out", "mine.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = tuned(words)[0].best[0].run
    typed = next(line for line in lines if line.startswith("the first: ")).partition("launch.py ")[
        2
    ]
    taken = next(line for line in lines if line.startswith("wrote mine.yaml: ")).partition(": ")[2]
    for more in (shlex.split(typed), [*words, *shlex.split(taken)]):
        run = load(more, LAPTOP, {}, to_run=False).run
        assert run.parallel == best.parallel
        assert run.trainer == best.trainer
        assert run.optim == best.optim


def test_tune_one_device() -> None:
    words = ONE_B.replace("devices_per_node=4", "devices_per_node=1")
    best = found(words, (), 1)[0].best[0]
    assert best.run.parallel.ranks == best.run.parallel.tp == best.run.parallel.pp == 1


def test_tune_records_resolved_auto(tmp_path: Path) -> None:
    words = [*ONE_B.split(), "parallel=auto", "parallel.pp=2"]
    loaded = load(words, LAPTOP, {}, to_run=False)
    p = loaded.run.parallel
    assert not p.auto
    assert p.pp == 2
    assert loaded.origins["parallel.tp"] == "chosen by tune for cluster h100"
    assert loaded.origins["parallel.pp"] == "command line"
    file = tmp_path / "run.yaml"
    file.write_text(run_yaml(loaded.run))
    again = load([f"run={file}"], LAPTOP, {}, to_run=False)
    assert again.run.digest() == loaded.run.digest()
    assert again.run.parallel == p


def test_tune_offloaded_main_weights_stay_on_device() -> None:
    """Keep them on the device: otherwise layouts that do not fit are planned one after the other; a
    state that FSDP shards is never offloaded.
    """
    words = f"model=llama3_8b parallel=dp8 parallel.distributed_optimizer=true {' '.join(H100)}"
    here, away = (
        load([*words.split(), f"optim.cpu_offload={part}"], LAPTOP, {}, to_run=False).run
        for part in (0.0, 1.0)
    )
    assert state_of(here).other - state_of(away).other == (4 + 4) / 8
    offered = list(Space(away, {}, (1.0, 1.0)).options("state", away))
    assert {change["parallel.fsdp"] for change in offered if change["optim.cpu_offload"]} == {
        "none"
    }


SHARED = {
    "tied": "model=gemma_tiny parallel=single",
    "tied pp": "model=gemma_tiny parallel=pp2",
    "mtp": "model=glm45_tiny parallel=single",
    "several": "model=glm45_tiny parallel=pp2 model.mtp_num_layers=3",
    "repeated": (
        "model=glm45_tiny parallel=pp2 model.mtp_num_layers=3 model.mtp_use_repeated_layer=true"
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_tune_counts_shared_weights_once(name: str) -> None:
    """Count them once: otherwise layouts that fit seem too large, with an output layer of several
    losses or a tied table.
    """
    words = (
        f"{SHARED[name]} cluster=h100 data=mock trainer.global_batch_size=256"
        " trainer.micro_batch_size=1"
    )
    run = load(words.split(), LAPTOP, {}, to_run=False).run
    costs = Costs(run)
    counted = sum(costs._on_ranks(run, costs._held(run))[:, EXPERTS:].sum(1))
    even = sum(costs.even(run, run.parallel.pp).ranks[0][1:]) * run.parallel.pp
    held = sum(sum(rank_states(run, stage).numbers.values()) for stage in range(run.parallel.pp))
    assert counted == pytest.approx(held, rel=0.01)
    assert even == pytest.approx(held, rel=0.01)


ADAPTED = {
    "llama": "model=llama3_8b parallel=tp2pp2 peft=lora",
    "dora, several layers at once": (
        "model=llama32_1b parallel=tp2 peft=dora parallel.recompute.granularity=full "
        "parallel.recompute.num_layers=2"
    ),
    "experts": "model=mixtral_8x7b parallel=ep4pp2 peft=lora",
    "hybrid": "model=nemotron_h_8b parallel=tp2 peft=lora peft.target=[qkv,in_proj,out_proj,fc1]",
}


@pytest.mark.parametrize("name", ADAPTED)
def test_tune_counts_adapters_as_plan(name: str) -> None:
    words = (
        f"{ADAPTED[name]} cluster=h100 data=mock trainer.global_batch_size=256"
        " trainer.micro_batch_size=1"
    )
    run = load(words.split(), LAPTOP, {}, to_run=False).run
    costs = Costs(run)
    counted = costs._on_ranks(run, costs._held(run))[:, EXPERTS:FROZEN].sum()
    states = (rank_states(run, stage) for stage in range(run.parallel.pp))
    assert counted == sum(
        weight.numel for state in states for weight in state.weights if not weight.frozen
    )


def test_tune_no_fit_names_nearest_and_remedies() -> None:
    words = (
        "model=llama3_8b parallel=auto cluster=h100 cluster.devices_per_node=1"
        " optim.cpu_offload=1.0"
    )
    words += " data.seq_length=2048 cluster.device_memory_gib=40.0 trainer.global_batch_size=64"
    with pytest.raises(ConfigError) as error:
        load(words.split(), LAPTOP, {}, to_run=False)
    (problem,) = error.value.problems
    assert problem.code == "MT257"
    assert "the smallest, " in problem.rule
    assert problem.fix in {f"cluster.nodes={n}" for n in (2, 4, 8)}
    load([*words.split(), problem.fix], LAPTOP, {}, to_run=False)


def test_tune_without_device_facts_states_what_is_missing() -> None:
    loaded = load(["parallel=auto"], LAPTOP, {}, to_run=False)
    assert loaded.run.parallel.ranks == 1
    assert "no time is known" in loaded.origins["parallel.auto"]
    with pytest.raises(ConfigError) as error:
        tuned(["parallel.tp=1"])
    (problem,) = error.value.problems
    assert problem.code == "MT256"
    assert (
        "of 1 rank on local is not known without cluster.peak_tflops.fp32, cluster.memory_gbps"
        in problem.rule
    )
    assert "plan --calibrate RUN" in problem.fix


def test_tune_family_without_operations_is_plainest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*ONE_B.split(), "parallel.tp=2"]
    silent = replace(family_of(load(words, LAPTOP, {}, to_run=False).run.model), stage=None)
    for module in (choose, step):
        monkeypatch.setattr(module, "family_of", lambda model: silent)
    with pytest.raises(ConfigError) as error:
        tuned(words)
    assert [problem.code for problem in error.value.problems] == ["MT254"]
    loaded = load([*words, "parallel=auto"], LAPTOP, {}, to_run=False)
    assert loaded.run.parallel.tp == 2
    assert (
        loaded.origins["parallel.auto"]
        == "the plainest layout: gpt does not say what its layers compute"
    )
    said = time_report(loaded.run, 0)
    assert not said["missing"]
    assert no_time(said) == "not known: the family gpt does not say what its layers compute"


@pytest.mark.parametrize("model", ["bert_large", "t5_base"])
def test_tune_adapters_of_an_encoder_are_a_problem(model: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([f"model={model}", "cluster=h100x8", "peft=lora"], LAPTOP, {}, to_run=False)
    assert "MT248" in {problem.code for problem in error.value.problems}


def test_tune_batch_keeps_own_reason() -> None:
    words = [
        "model=llama32_1b",
        "cluster=h100",
        "data.seq_length=4096",
        "cluster.devices_per_node=1",
    ]
    auto, said = (
        load([*words, f"parallel={way}"], LAPTOP, {}, to_run=False).origins
        for way in ("auto", "single")
    )
    assert auto["trainer.global_batch_size"] == said["trainer.global_batch_size"]
    assert auto["parallel.auto"] == "answered by tune"


def test_tune_unrelated_rule_is_reported_unchanged() -> None:
    with pytest.raises(ConfigError) as error:
        load(
            [
                *ONE_B.split(),
                "parallel=auto",
                "trainer.train_iters=80",
                "trainer.profile_step=1000",
            ],
            LAPTOP,
            {},
            to_run=False,
        )
    assert [problem.code for problem in error.value.problems if problem.severity == "error"] == [
        "MT134"
    ]


def test_tune_family_rule_is_reported_unchanged() -> None:
    words = (
        "model=bert_large cluster=h100x8 parallel=auto data=mock data.packed=true"
        " trainer.global_batch_size=64"
    )
    with pytest.raises(ConfigError) as error:
        load(words.split(), LAPTOP, {}, to_run=False)
    (problem,) = [problem for problem in error.value.problems if problem.severity == "error"]
    assert problem.path == "data.packed"
    assert problem.fix == "data.packed=false"


def test_tune_too_small_cluster_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int] = []

    def seen(raw: RunConfig, said: Mapping[str, Any], *more: Any) -> tuple[Found, Task]:
        searched.append(raw.cluster.nodes)
        return search(raw, said, *more)

    monkeypatch.setattr(choose, "search", seen)
    words = (
        "model=llama3_8b parallel=auto parallel.tp=1 cluster=h100 cluster.devices_per_node=1"
        " data=mock"
    )
    words += " data.seq_length=1024 cluster.device_memory_gib=19.0 trainer.global_batch_size=64"
    with pytest.raises(ConfigError) as error:
        load(words.split(), LAPTOP, {}, to_run=False)
    assert searched == [1, 8]
    assert error.value.problems[0].fix == "cluster.nodes=8"


TASKS = TABLES["tasks"]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(TASKS, ["four devices", "lora"]))
def test_tune_printed_layouts_are_valid_and_planned(
    name: str,
) -> None:
    words = TASKS[name]
    got, task = tuned(words.split())
    for layout in got.best:
        loaded = load(
            [*left_of(words.split()), *shlex.split(overrides(layout, task, words.split()))],
            LAPTOP,
            {},
            to_run=False,
        )
        assert not [problem for problem in loaded.warnings if problem.code == "MT146"]
        assert loaded.run.parallel == layout.run.parallel
        assert worst_stage(loaded.run).peak == layout.memory.peak
        assert step_time(loaded.run).seconds == layout.time.seconds


def test_tune_experts_shard_over_equal_ranks() -> None:
    words = "model=mixtral_8x7b cluster=h100 parallel=ep8 parallel.fsdp=fsdp2 data=mock"
    states = worst_stage(load(words.split(), LAPTOP, {}, to_run=False).run).states
    experts = sum(weight.numel for weight in states.weights if weight.expert)
    assert states.weight_bytes > 2 * experts, "each of 8 ranks has experts of its own"


@pytest.mark.parametrize(
    ("batch", "sizes"), [(15, [15, 5, 3, 1]), (16, [16, 8, 4, 2, 1]), (96, [16, 8, 4, 2, 1])]
)
def test_tune_micro_batch_divides_and_bounds_tokens(batch: int, sizes: list[int]) -> None:
    words = [*FEW.split(), "cluster.devices_per_node=2", f"trainer.global_batch_size={batch}"]
    run = load(words, LAPTOP, {}, to_run=False).run
    options = Space(run, {}).options("micro", run)
    assert [change["trainer.micro_batch_size"] for change in options] == sizes


def test_tune_balances_uneven_stages() -> None:
    sizes = balanced(126, 8, 8, 0.0, 1.0)
    assert sum(sizes) == 126
    held = [sum(sizes[rank::8]) for rank in range(8)]
    assert max(held) == 16
    assert held[-1] == 15
