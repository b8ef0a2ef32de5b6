"""The verdict on a checkpoint: what it says of layouts, and every reason for which it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.ckpt import folder
from mtrain.cli.checkpoint.verdict import answered, page, report
from mtrain.config.compose.dump import override
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, MtrainError
from mtrain.launching import folder as run_folder
from mtrain.launching.verdict.figures import reading
from mtrain.launching.verdict.judge import Judgement, judge
from tests.support.commands import command, environment
from tests.support.configs import LAPTOP, MOE, tiny, within_a_second
from tests.support.saved import committed, manifest_of, sign

NARROW = {
    "model__hidden_size": 64,
    "model__ffn_hidden_size": 128,
    "model__vocab_size": 300,
    "trainer__train_iters": 20,
    "optim__schedule": "constant",
    "data__kind": "mock",
    "data__seq_length": 32,
}
SOURCE = Path("saved/run.yaml")


def run_of(**changes: Any) -> RunConfig:
    return resolve(tiny(**(NARROW | changes)), LAPTOP)


def judged(new: RunConfig, old: RunConfig, **state: Any) -> Judgement:
    return judge(new, old, manifest_of(old, **state), source=SOURCE)


def codes(found: Judgement) -> list[tuple[str, str]]:
    return [(problem.code, problem.path) for problem in found.problems]


def test_verdict_same_layout_changes_nothing() -> None:
    run = run_of(parallel__tp=2)
    found = judged(run, run)
    read = reading(run, manifest_of(run))
    assert found == Judgement()
    assert read.resharded == ()
    assert read.tensors == 27


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({"parallel__ranks": 2}, 0),
        ({"parallel__pp": 2}, 0),
        ({"parallel__tp": 2}, 18),
        ({"parallel__ranks": 4, "parallel__distributed_optimizer": True}, 4),
    ],
)
def test_verdict_other_layout_names_cut_tensors(changes: dict[str, Any], anew: int) -> None:
    old = run_of()
    new = run_of(**changes)
    found = judged(new, old)
    read = reading(new, manifest_of(old))
    assert found.possible
    assert [reset.partition(":")[0] for reset in found.resets] == ["RNG state"]
    assert "another order" in found.numbers[0]
    assert len(read.resharded) == anew, read.resharded
    assert len(read.by_rank) == new.parallel.ranks


def test_verdict_bytes_are_those_of_a_rank() -> None:
    old = run_of()
    held = manifest_of(old)["tensors"]
    one = reading(old, manifest_of(old)).by_rank
    assert one == {0: sum(4 * _numbers(entry["shape"]) for entry in held.values())}
    half = reading(run_of(parallel__tp=2), manifest_of(old)).by_rank
    norms = sum(4 * _numbers(e["shape"]) for name, e in held.items() if "norm" in name)
    assert half == dict.fromkeys((0, 1), (one[0] + norms) // 2)


def _numbers(shape: list[int]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


WRONG: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "layers": ({"model__num_layers": 2}, [("MT503", "model.num_layers")]),
    "width": ({"model__ffn_hidden_size": 192}, [("MT503", "model.ffn_hidden_size")]),
    "heads": ({"model__num_query_groups": 8}, [("MT503", "model.num_query_groups")]),
    "vocabulary": ({"model__vocab_size": 200}, [("MT503", "model.vocab_size")]),
    "padding": ({"model__mask_padded_vocab": False}, [("MT504", "model.mask_padded_vocab")]),
    "tied": ({"model__tie_word_embeddings": True}, [("MT503", "model.tie_word_embeddings")]),
    "norm": ({"model__normalization": "LayerNorm"}, [("MT503", "model.normalization")]),
    "bias": ({"model__add_bias_linear": True}, [("MT503", "model.add_bias_linear")]),
    "optimizer": ({"optim__name": "sgd"}, [("MT503", "optim.name")]),
    "format": ({"precision__dtype": "bf16"}, [("MT503", "precision.dtype")]),
    "adapters": ({"peft__kind": "lora"}, [("MT503", "peft.kind")]),
    "rate": ({"optim__lr": 0.5}, [("MT504", "optim.lr")]),
    "decay": ({"optim__weight_decay": 0.5}, [("MT504", "optim.weight_decay")]),
    "seed": ({"trainer__seed": 7}, [("MT504", "trainer.seed")]),
    "batch": ({"trainer__global_batch_size": 32}, [("MT504", "trainer.global_batch_size")]),
    "length": ({"data__seq_length": 64}, [("MT504", "data.seq_length")]),
    "dropout": ({"model__hidden_dropout": 0.1}, [("MT504", "model.hidden_dropout")]),
    "objective": ({"objective__name": "label_smoothing"}, [("MT504", "objective.name")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_verdict_refuses_another_run(name: str) -> None:
    changes, expected = WRONG[name]
    found = codes(judged(run_of(**changes), run_of()))
    assert set(expected) <= set(found)
    # what follows from the key may differ as well, and nothing else
    assert {code for code, _ in found} <= {"MT503", "MT504"}


def test_verdict_names_every_problem_at_once() -> None:
    found = codes(judged(run_of(model__num_layers=2, optim__lr=0.5, trainer__seed=7), run_of()))
    assert {("MT503", "model.num_layers"), ("MT504", "optim.lr"), ("MT504", "trainer.seed")} <= {
        *found
    }


def test_verdict_accepted_changes_change_numbers() -> None:
    found = judged(run_of(optim__lr=0.5, checkpoint__accept_changes=True), run_of())
    assert found.possible
    assert any(line.startswith("optim.lr: ") for line in found.numbers)


def test_verdict_lacking_state_is_named() -> None:
    run = run_of()
    manifest = manifest_of(run)
    lost = [name for name in manifest["tensors"] if name.startswith("optim/exp_avg_sq/")]
    for name in lost:
        del manifest["tensors"][name]
    shaped = "model/decoder.final_layernorm.weight"
    manifest["tensors"][shaped]["shape"] = [63]
    found = judge(run, run, manifest, source=SOURCE)
    assert [problem.code for problem in found.problems] == ["MT512", "MT512"]
    assert f"lacks {len(lost)} of 27 tensors: {lost[0]}" in found.problems[0].detail
    assert f"{shaped} [63] there, [64] here" in found.problems[1].detail


def test_verdict_weights_only_needs_no_optimizer() -> None:
    run = run_of()
    manifest = manifest_of(run, weights_only=True)
    manifest["tensors"] = {
        name: entry for name, entry in manifest["tensors"].items() if name.startswith("model/")
    }
    found = judge(run_of(optim__lr=0.5), run, manifest, source=SOURCE)
    assert found.possible
    assert "optimizer state" in found.resets[0]
    assert reading(run, manifest).tensors == 9


def test_verdict_loss_scale_starts_anew_from_constant() -> None:
    run = run_of(precision__dtype="fp16")
    assert "loss scale" in judged(run, run, loss_scale={}).resets[0]
    assert judged(run, run, loss_scale={"scale": 2.0}).resets == ()


def test_verdict_older_streams_reset_generators() -> None:
    run = run_of()
    assert "all drew alike" in judged(run, run, streams=None).resets[0]


EXPERTS = {"model__moe": MOE | {"ffn_hidden_size": 64}}


def test_verdict_experts_move_to_their_ranks() -> None:
    old = run_of(**EXPERTS)
    new = run_of(**EXPERTS, parallel__ep=2, parallel__ranks=2)
    read = reading(new, manifest_of(old))
    assert read.resharded == ()
    sizes = reading(old, manifest_of(old)).by_rank, read.by_rank
    assert sizes[1][0] == sizes[1][1] < sizes[0][0]


def test_verdict_family_without_regions_says_so() -> None:
    run = run_of(parallel__ranks=2, optim__name="muon", kernels__optimizer="reference")
    read = reading(run, {"tensors": {}, "state": {}})
    assert read.by_rank == {}
    assert "whole matrices" in read.unknown


# What a user does to a checkpoint -> a file or a word of the error.


def _edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        manifest = json.loads((path / folder.MANIFEST).read_text())
        change(manifest)
        sign(path, manifest)

    return edit


def _drop_piece(manifest: dict[str, Any]) -> None:
    name = next(name for name, one in manifest["tensors"].items() if len(one["pieces"]) > 1)
    del manifest["tensors"][name]["pieces"][0]


def _from_another_step(path: Path) -> None:
    other = committed(run_of(parallel__ranks=2), path.parent / "other", 2)
    shard = other / "rank_00000.safetensors"
    content = bytearray(shard.read_bytes())
    # as a shard of another step has it: the same size, other hashes
    place = content.index(b'"entries') + 60
    content[place] ^= 1
    (path / shard.name).write_bytes(bytes(content))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
    "a cut manifest": (
        lambda path: (path / "manifest.json").write_bytes(
            (path / "manifest.json").read_bytes()[:-9]
        ),
        "manifest.json",
    ),
    "an altered manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"step":1', '"step":2')
        ),
        "its own hash",
    ),
    "a newer format": (_edited(lambda m: m.update(format=99)), "format 1, 2, 3, 4, but of 99"),
    "no tensors": (_edited(lambda m: m.pop("tensors")), "lacks tensors"),
    "a tensor of text": (
        _edited(lambda m: m["tensors"].update(x="text")),
        "x is not described as a tensor",
    ),
    "a missing shard": (lambda path: (path / "rank_00001.safetensors").unlink(), "rank_00001"),
    "a cut shard": (
        lambda path: (path / "rank_00001.safetensors").write_bytes(
            (path / "rank_00001.safetensors").read_bytes()[:-1]
        ),
        "rank_00001",
    ),
    "a shard of another step": (_from_another_step, "rank_00000"),
    "a missing piece": (_edited(_drop_piece), "cover"),
    "an altered run.yaml": (
        lambda path: (path / "run.yaml").write_text(
            (path / "run.yaml").read_text().replace("hidden_size: 64", "hidden_size: 65")
        ),
        "run.yaml",
    ),
    "a missing run.yaml": (lambda path: (path / "run.yaml").unlink(), "run.yaml"),
    "a name outside": (
        _edited(lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0"}})),
        "no plain file name",
    ),
    "a null byte": (
        _edited(lambda m: m["files"].update({"a\0b": {"bytes": 1, "sha256": "0"}})),
        "no plain file name",
    ),
    "a file without facts": (
        _edited(lambda m: m["files"].update({"run.yaml": {}})),
        "run.yaml that can be compared",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verdict_damage_is_what_a_run_refuses(name: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[name]
    run = run_of(parallel__ranks=2, parallel__distributed_optimizer=True)
    home = tmp_path / "runs/a"
    path = committed(run, home / "checkpoints")
    (home / "run.yaml").write_text((path / "run.yaml").read_text())
    damage(path)
    with pytest.raises(CorruptData) as caught:
        run_folder.plan(run.model_copy(update={"checkpoint": _resume(run, path)}))
    assert words in str(caught.value), str(caught.value)
    if folder.is_checkpoint(path):
        answer = answered([str(path)])
        assert answer.exit_code == CorruptData.exit_code
        assert {problem.code for problem in answer.problems} == {"MT513"}
        said = [problem.detail for problem in answer.problems]
        assert said == str(caught.value).splitlines()


def _resume(run: RunConfig, path: Path) -> Any:
    return run.checkpoint.model_copy(update={"resume": str(path)})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder with a checkpoint of one rank."""
    monkeypatch.chdir(tmp_path)
    run = run_of()
    path = committed(run, tmp_path / "runs/a/checkpoints")
    (tmp_path / "runs/a/run.yaml").write_text((path / "run.yaml").read_text())
    return tmp_path / "runs/a"


REFUSED = (
    ("model.num_layers=2",),
    ("optim.lr=0.5", "trainer.seed=7"),
    ("parallel.ranks=2", "data.seq_length=64"),
    ("precision.dtype=bf16", "checkpoint.accept_changes=true"),
    ("model.vocab_size=200", "checkpoint.accept_changes=true"),
)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_verdict_predicts_the_refusal_of_a_run(words: tuple[str, ...], home: Path) -> None:
    from mtrain.api import load

    answer = answered([str(home), *words])
    argv = [f"run={home}/run.yaml", override("checkpoint.resume", str(home)), *words]
    with pytest.raises(MtrainError) as caught:
        run_folder.plan(load(argv, LAPTOP, {}).run)
    assert isinstance(caught.value, ConfigError)
    errors = [p for p in answer.problems if p.severity == "error"]
    assert {(p.code, p.path) for p in errors} == {(p.code, p.path) for p in caught.value.problems}
    assert answer.exit_code == caught.value.exit_code == 2
    assert report(answer)["outcome"] == "impossible"
    assert "impossible" in next(page(answer))


def test_verdict_rules_and_checkpoint_are_reported_together(home: Path) -> None:
    answer = answered([str(home), "parallel.tp=3", "trainer.seed=7"])
    found = {problem.code for problem in answer.problems}
    assert {"MT101", "MT504"} <= found


def test_verdict_another_configuration_is_compared(home: Path) -> None:
    answer = answered([str(home), "recipe=llama3/8b_h100x8"])
    assert "model.num_layers" in {problem.path for problem in answer.problems}


def test_verdict_needs_a_checkpoint(home: Path) -> None:
    for words in ([], ["optim.lr=1"], ["runs/b"]):
        with pytest.raises(ConfigError):
            answered(words)


def test_verdict_of_large_world_answers_in_time() -> None:
    run = resolve(
        tiny(
            model__num_layers=96,
            parallel__ranks=1024,
            parallel__tp=4,
            parallel__pp=8,
            parallel__distributed_optimizer=True,
            trainer__global_batch_size=256,
            trainer__micro_batch_size=1,
            cluster__devices_per_node=8,
            cluster__nodes=128,
        ),
        LAPTOP,
    )
    one = run_of(model__num_layers=96)
    manifest = manifest_of(one)
    with within_a_second():
        read = reading(run, manifest)
    assert {0, 1023} <= read.by_rank.keys()


def test_verdict_imports_no_torch(home: Path) -> None:
    words = command("checkpoint", "verdict", str(home), "parallel=tp2", "--json")
    probe = (
        "import sys, runpy; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *words[1:]],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"
    assert json.loads(done.stdout)["outcome"] == "resharded"
