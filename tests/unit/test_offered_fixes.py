"""Suggestions for a wrong input: the intended value, which the key accepts, and never an invented
one.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.cli.main import main, parse
from mtrain.config.compose import paths
from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, Problem
from tests.support.configs import LAPTOP
from tests.support.tables import tables

TABLES = tables("offered_fixes")

COMMANDS = {
    "parallel=TP2": "parallel=tp2",
    "parallel=Tp2Pp2": "parallel=tp2pp2",
    "parallel=tp-2": "parallel=tp2",
    "parallel=tp_2_pp_2": "parallel=tp2pp2",
    "parallel=tр2": "parallel=tp2",
    "parallel=4": "parallel=tp4 or parallel=pp4 or parallel=dp4 or parallel=single",
    "parallel=3": "parallel=dp3 or parallel=single",
    "parallel=none": "parallel=default",
    "parallel=x": "python launch.py choices parallel, for all of them",
    "parallel=[tp2,pp2]": "parallel=tp2",
    "parallel={tp: 2}": "parallel.tp=2",
    "model=null": "model=llama_tiny",
    "model=": "model=llama_tiny",
    "model=./mine.yaml": "recipe=./mine.yaml",
    "model=conf/model/llama_tiny.yaml": "model=llama_tiny",
    "model=LLAMA_TINY": "model=llama_tiny",
    "model=llama-tiny": "model=llama_tiny",
    "model=ⅼlama_tiny": "model=llama_tiny",
    "model=[nope,llama_tiny]": "model=llama_tiny",
    "cluster=mybox": "python launch.py choices cluster, for all of them",
    "cluster=H100X8": "cluster=h100x8",
    "precision=BF16": "precision=bf16",
    "optim=AdamW": "optim=adamw",
    "optim={lr: 2e-3}": "optim.lr=0.002",
    "data=zzz": f"{program()} choices data, for all of them",
    "Optim.LR=1e-3": "optim.lr=0.001",
    "OPTIM.lr=1e-3": "optim.lr=0.001",
    "Optim=muon": "optim=muon",
    "weight-decay=0.2": "optim.weight_decay=0.2",
    "optim.weight-decay=0.2": "optim.weight_decay=0.2",
    "оptim.lr=1e-3": "optim.lr=0.001",
    "оptim=muon": "optim=muon",
    "ｏｐｔｉｍ.lr=1e-3": "optim.lr=0.001",
    "--tensor-model-parallel-size=4": "parallel.tp=4",
    "--lr=1e-3": "optim.lr=0.001",
    "--bf16=true": "precision.dtype=bf16",
    "optim.lr=3e-4f": "optim.lr=0.0003",
    "optim.lr=0,001": "optim.lr=0.001",
    "optim.weight_decay=10%": "optim.weight_decay=0.1",
    "trainer.train_iters=10k": "trainer.train_iters=10000",
    "trainer.train_iters=1.5K": "trainer.train_iters=1500",
    "trainer.train_iters=1M": "trainer.train_iters=1000000",
    "trainer.train_iters='1,000'": "trainer.train_iters=1000",
    "trainer.train_iters=1e3": "trainer.train_iters=1000",
    "trainer.train_iters=10.4": "trainer.train_iters=10",
    "trainer.train_iters=[20]": "trainer.train_iters=20",
    "trainer.train_iters=fast": "",
    "trainer.timeout_s=10m": "trainer.timeout_s=600",
    "cluster.device_memory_gib=80GB": "cluster.device_memory_gib=80",
    "data.seq_length=1k": "data.seq_length=1024 or data.seq_length=1000",
    "model.seq_length=512": "data.seq_length=512",
    "model.seq_length=4096": "data.seq_length=4096 model.max_position_embeddings=4096",
    "model.hidden_size=1e300": "model.hidden_size=256",
    "model.hidden_size=9223372036854775808": "model.hidden_size=256",
    "model.num_layers=true": "model.num_layers=4",
    "parallel.sequence_parallel='True'": "parallel.sequence_parallel=true",
    "parallel.sequence_parallel=on": "parallel.sequence_parallel=true",
    "parallel.distributed_optimizer=0": "parallel.distributed_optimizer=false",
    "optim.clip_grad=None": "optim.clip_grad=null",
    "optim.lr=0": "",
    "checkpoint.save_minutes=0": "",
    "trainer.train_iters=99999999999999999999": "",
    f"trainer.train_iters={10**400}": "",  # no float is as large
    "trainer.eval_interval=none": "trainer.eval_interval=null",
    "data.suffixes=.py": "data.suffixes=[.py]",
    "optim.name=ADAMW": "optim.name=adamw",
    "kernels.norm=none": "kernels.norm=null",
    "llama3_8b": "model=llama3_8b",
    "llama3_8B": "model=llama3_8b",
    "lama3_8b": "model=llama3_8b",
    "tp2pp2": "parallel=tp2pp2",
    "llama3/8b_h100x8": "recipe=llama3/8b_h100x8",
    "mine.yaml": "recipe=mine.yaml",
    "optim.lr:2e-3": "optim.lr=0.002",
    "model:llama_tiny": "model=llama_tiny",
    "zzz": "leave it out",
    "recipe=/dev/null": "name an existing file",
    "recipe=dangling": "name an existing file",
    "recipe=dangling.yaml": "python launch.py recipe list, for all of them",
    "recipe=pip": "python launch.py recipe list, for all of them",
    "data.limit_mib=1e-9": "data.limit_mib=0.001",
    "optim.lr=((": "",
    "parallel.recompute={granularity:": "",
    "trainer.sample_prompt=a)": "'trainer.sample_prompt=\"a)\"'",
    "+optim.beta1=0.8": "optim.beta1=0.8",
}
"""Argument -> what is offered for it."""
FILES = TABLES["files"]
"""A recipe -> what is offered for its first problem."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a working folder with a recipe and files that are no recipes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("trainer: {seed: 7}\n")
    (tmp_path / "my.yaml").write_text("num_layers: 7\n")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")


def validated(*argv: str) -> list[Problem]:
    try:
        call = parse(["check", *argv])
        load(call.words, LAPTOP, {})
    except ConfigError as error:
        return list(error.problems)
    return []


def is_setting(fix: str) -> bool:
    return all(
        "=" in word and " " not in word.partition("=")[0]
        for word in shlex.split(fix.replace("`", ""))
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("argument", "fix"), COMMANDS.items())
def test_fixes_for_argument_are_meant_and_pass(argument: str, fix: str) -> None:
    (problem,) = validated(argument)
    assert problem.fix == fix
    for one in fix.split(" or ") if is_setting(fix.split(" or ")[0]) else ():
        assert validated(*shlex.split(one)) == [], one


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("text", "fix"), FILES.items())
def test_fixes_for_file_are_meant_and_pass(tmp_path: Path, text: str, fix: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    problems = validated("recipe=r.yaml")
    assert problems[0].fix == fix
    if is_setting(fix):
        assert validated(*shlex.split(fix)) == []
        after = validated("recipe=r.yaml", *shlex.split(fix))
        first = (problems[0].code, problems[0].path)
        assert first not in [(p.code, p.path) for p in after if p.code != "MT012"]
    elif fix.startswith("write `"):
        group = text.partition(":")[0]
        keys = re.findall("`([a-z_]+: [^`]+)`", fix)
        (tmp_path / "r.yaml").write_text(f"{group}: {{{', '.join(keys)}}}\n")
        assert validated("recipe=r.yaml") == []


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--tensor-model-parallel-size", "4"], "parallel.tp=4"),
        (["--lr", "3e-4", "parallel=tp2"], "optim.lr=0.0003"),
        (["--bf16"], "precision.dtype=bf16"),
        (["--jsno"], "--json"),
        (["data.kind=gpt"], "data.kind=indexed"),
        (["data.kind=indx"], "data.kind=indexed"),
        (["chek"], "check"),
        (["сheck"], "check"),
        (["CHECK", "model=llama_tiny"], "check"),
        (["llama3_8b"], "model=llama3_8b"),
        (["llama3/8b_h100x8"], "recipe=llama3/8b_h100x8"),
        (["explain", "MT999"], "explain MT706"),
        (["explain", "mt0131"], "explain MT131"),
        (["explain", "Optim.LR"], "explain optim.lr"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_fixes_name_intended_verb_flag_or_word(
    capsys: pytest.CaptureFixture[str], argv: list[str], fix: str
) -> None:
    assert main(argv) == 2
    assert f" Use {fix}.\n" in capsys.readouterr().err


THEIRS = re.compile(
    "mismatched|extraneous|token recognition|no viable|Could not|did not find|found"
    " (char|unknown|unexp)|Input should|should"
    " (be|have)|pydantic|omegaconf|hydra|yaml\\.|LexerNoViable|mapping values|not allowed in"
    " this|Extra inputs",
    re.IGNORECASE,
)
WORDS = "(( )) [1 {a {a:1 a] 'x \"x ${ ${} $x a(b) range( x=y a,b) ! ^ ` \\ # a;b &"
TORN = [f"optim.lr={text}" for text in WORDS.split()]
BROKEN = TABLES["broken"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", [*TORN, *BROKEN])
def test_fixes_hide_parser_messages(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    found = validated(text) if text in TORN else validated("recipe=r.yaml")
    assert found
    shown = "\n".join(p.rule for p in found)
    assert not THEIRS.search(shown), shown


def test_fixes_group_file_naming_missing_one_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    shutil.copytree(paths.conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(paths, "conf_dir", lambda: tmp_path / "conf")
    (tmp_path / "conf/optim/mine.yaml").write_text("defaults: [nowhere]\nlr: 1e-3\n")
    (problem,) = validated("optim=mine")
    assert "optim/nowhere is listed, and there is no such file" in problem.rule
    assert not THEIRS.search(problem.rule)
