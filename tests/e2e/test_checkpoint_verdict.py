"""The verdict on a checkpoint is what ends the run that resumes it: exit code and codes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import SMALL
from tests.support.covering import some
from tests.support.launched import light, mtrain

STEP = "runs/a/checkpoints/step_00000002"
SHARD = f"{STEP}/rank_00000.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps."""
    home = tmp_path_factory.mktemp("trained")
    words = ("log.name=a", "trainer.train_iters=2", "parallel=tp2", "checkpoint.save_interval=1")
    done = mtrain(*SMALL, *words, "trainer.global_batch_size=8", cwd=home)
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Path:
    """Return the same in a folder of its own."""
    return Path(shutil.copytree(trained, tmp_path / "home"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        pytest.param(("verdict", "runs/a"), 0, "the same layout, bitwise", id="verdict"),
        pytest.param(("list", "runs/a"), 0, "complete", id="list"),
        pytest.param(("inspect", STEP), 0, "optim/exp_avg/", id="inspect"),
        pytest.param(("verify", "runs/a"), 0, "as it was written", id="verify"),
        pytest.param(("prune", "runs/a", "--dry-run", "keep=1"), 0, "would be", id="prune"),
        pytest.param(("copy", "runs/a", "copied"), 0, "read back", id="copy"),
    ],
)
def test_verdict_and_other_words_answer(
    words: tuple[str, ...], code: int, says: str, home: Path
) -> None:
    done = light("checkpoint", *words, cwd=home)
    assert done.returncode == code, done.stderr
    assert says in done.stdout


IMPOSSIBLE: dict[str, tuple[str, ...]] = {
    "layers": ("model.num_layers=3",),
    "hidden": ("model.hidden_size=128",),
    "ffn": ("model.ffn_hidden_size=352",),
    "heads": ("model.num_attention_heads=4",),
    "groups": ("model.num_query_groups=8",),
    "channels": ("model.kv_channels=64",),
    "vocabulary": ("model.vocab_size=8192",),
    "padded vocabulary": ("model.vocab_size=4000",),
    "unmasked padding": ("model.mask_padded_vocab=false",),
    "tied": ("model.tie_word_embeddings=true",),
    "layer norm": ("model.normalization=LayerNorm",),
    "placement": ("model.norm_placement=pre_and_post",),
    "bias": ("model.add_bias_linear=true",),
    "qkv bias": ("model.add_qkv_bias=true",),
    "qk norm": ("model.qk_layernorm=true",),
    "activation": ("model.activation=gelu",),
    "positions": ("model.position_embedding_type=learned_absolute",),
    "rope base": ("model.rotary_base=500000",),
    "window": ("model.window_size=8",),
    "gate": ("model.attention_output_gate=true",),
    "mtp": ("model.mtp_num_layers=1",),
    "experts": ("model.moe.num_experts=4", "model.moe.ffn_hidden_size=64"),
    "adapters": ("peft=lora",),
    "another model": ("model=qwen3_0.6b",),
    "sgd": ("optim.name=sgd",),
    "lion": ("optim.name=lion",),
    "muon": ("optim.name=muon",),
    "bf16": ("precision.dtype=bf16",),
    "fp16": ("precision.dtype=fp16",),
    "bf16 accepted": ("precision.dtype=bf16", "checkpoint.accept_changes=true"),
    "model accepted": ("model.num_layers=3", "checkpoint.accept_changes=true"),
    "rate": ("optim.lr=0.5",),
    "least rate": ("optim.min_lr=1e-5",),
    "schedule": ("optim.schedule=constant",),
    "warmup": ("optim.warmup_iters=2",),
    "decay": ("optim.weight_decay=0.5",),
    "beta1": ("optim.beta1=0.5",),
    "beta2": ("optim.beta2=0.5",),
    "eps": ("optim.eps=1e-3",),
    "clip": ("optim.clip_grad=0.1",),
    "seed": ("trainer.seed=7",),
    "batch": ("trainer.global_batch_size=16",),
    "longer": ("trainer.train_iters=9",),
    "sequence": ("data.seq_length=64",),
    "dropout": ("model.hidden_dropout=0.1",),
    "layout": ("parallel.tp=3",),
    "layout and seed": ("parallel.tp=3", "trainer.seed=7"),
    "stages": ("parallel.pp=5", "parallel.ranks=10"),
    "experts of none": ("parallel.ep=2",),
    "three keys": ("model.num_layers=3", "optim.lr=0.5", "trainer.seed=7"),
    "unknown key": ("optim.learning=1",),
    "unknown value": ("optim.schedule=cosin",),
}


OF_CHECKPOINTS = {"MT503", "MT504", "MT512"}


def codes(text: str) -> list[str]:
    return sorted(re.findall(r"^error\[(MT\d+)\]", text, re.MULTILINE))


@pytest.mark.parametrize("name", some(IMPOSSIBLE, ["three keys", "layout"]))
def test_verdict_is_the_refusal_of_the_run(name: str, trained: Path) -> None:
    words = IMPOSSIBLE[name]
    said = light("checkpoint", "verdict", "runs/a", *words, "--json", cwd=trained)
    body = json.loads(said.stdout)
    run = light("resume", "runs/a", *words, cwd=trained)
    assert body["outcome"] == "impossible", (said.stdout, run.stderr)
    assert said.returncode == run.returncode == 2, run.stderr
    found = sorted(p["code"] for p in body["problems"] if p["severity"] == "error")
    # A run that breaks a rule ends before it looks at its checkpoint; the verdict says both.
    of_rules = [code for code in found if code not in OF_CHECKPOINTS]
    assert codes(run.stderr) == (of_rules or found)


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def _swap(home: Path) -> None:
    a = home / SHARD
    b = a.with_name("rank_00001.safetensors")
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def _mix(home: Path) -> None:
    shutil.copy(home / SHARD.replace("02/", "01/"), home / SHARD)


def _make_newer(home: Path) -> None:
    file = home / STEP / "manifest.json"
    file.write_text(re.sub(r'"format":\d', '"format":9', file.read_text()))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda home: os.truncate(home / SHARD, 4096),
    "missing shard": lambda home: (home / SHARD).unlink(),
    "header": lambda home: _flip(home / SHARD, 64),
    "swapped": _swap,
    "mixed steps": _mix,
    "newer format": _make_newer,
    "cut manifest": lambda home: os.truncate(home / STEP / "manifest.json", 900),
    "altered manifest": lambda home: _flip(home / STEP / "manifest.json", 40),
    "altered run.yaml": lambda home: _flip(home / STEP / "run.yaml", 40),
    "missing run.yaml": lambda home: (home / STEP / "run.yaml").unlink(),
}


@pytest.mark.parametrize("name", some(DAMAGE, ["mixed steps"]))
def test_verdict_damage_is_what_ends_the_run(name: str, home: Path) -> None:
    DAMAGE[name](home)
    said = light("checkpoint", "verdict", STEP, "--json", cwd=home)
    words = (
        f"run={home}/runs/a/run.yaml",
        f"checkpoint.resume={STEP}",
        f"log.runs_dir={home}/runs",
    )
    run = light(*words, cwd=home)
    body = json.loads(said.stdout)
    assert body["outcome"] == "impossible"
    assert said.returncode == run.returncode == 4, run.stderr
    assert {problem["code"] for problem in body["problems"]} == {"MT513"}
    assert len(body["problems"]) == len(run.stderr.splitlines())
    for problem, line in zip(body["problems"], run.stderr.splitlines(), strict=True):
        assert line in problem["rule"]


@pytest.mark.parametrize(
    ("words", "outcome", "bitwise"),
    [
        ((), "same", True),
        pytest.param(("parallel=pp2",), "resharded", False, marks=pytest.mark.full),
        pytest.param(
            ("trainer.seed=7", "checkpoint.accept_changes=true"),
            "same",
            False,
            marks=pytest.mark.full,
        ),
    ],
    ids=["same", "resharded", "accepted"],
)
def test_verdict_possible_run_continues(
    words: tuple[str, ...], outcome: str, bitwise: bool, home: Path
) -> None:
    said = light("checkpoint", "verdict", "runs/a", *words, "--json", cwd=home)
    body = json.loads(said.stdout)
    assert (body["outcome"], body["bitwise"]) == (outcome, bitwise)
    run = mtrain("resume", "runs/a", *words, cwd=home)
    assert run.returncode == said.returncode == 0, run.stderr
    assert ("random generators start from the seed" in run.stdout) == bool(body["resets"])
