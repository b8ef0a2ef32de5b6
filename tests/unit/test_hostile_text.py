"""Text of files reaches a terminal as text: nothing in it moves a cursor, ends a line, or says ok
in our name.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import override, run_yaml
from mtrain.config.compose.write_paths import TAG, TAG_FILE
from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import BadEnvironment, ConfigError, CorruptData
from mtrain.launching.folder import opened, plan
from tests.support.configs import LAPTOP

HOSTILE = (
    "\x1b[2K\rok\nok FORGED\n  fix: FORGED\x00\x07\x7f\x85\x9b2J"
    "\u202eko\u200b\u2028ok FORGED\u2029\u2066\u00ad\ufeff\U000e0041"
)
RAW = re.compile(
    "[^\\S \n]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
FORGED = re.compile(r"(?m)^(ok|  fix:|note:) ?FORGED")
Shown = Callable[..., tuple[int, str]]


@pytest.fixture
def shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shown:
    """Return a function that runs a command in an empty folder and checks its output for text that
    a terminal would obey.
    """
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> tuple[int, str]:
        code = main(argv)
        text = "".join(capsys.readouterr())
        assert not RAW.search(text), (argv, RAW.search(text), text)
        assert not FORGED.search(text), (argv, text)
        assert "unexpected" not in text, text
        return code, text

    return call


def _yaml(text: str) -> str:
    """Return a quoted scalar of YAML with every odd character as an escape."""
    return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def _recipes() -> Iterator[tuple[str, str]]:
    """Yield recipes with hostile text in each string field of the schema, as a key, a choice, and
    an entry of a list.
    """
    bad = _yaml(HOSTILE)
    for path, field in schema_keys().items():
        if "str" in str(field.annotation):
            value = f"[{bad}]" if "tuple" in str(field.annotation) else bad
            *sections, last = path.split(".")
            opening = "".join(f"{{{section}: " for section in sections)
            yield path, f"{opening}{{{last}: {value}}}{'}' * len(sections)}"
    yield "title", f"recipe: {{title: {bad}, hardware: {bad}}}\ntrainer: {{sample_prompt: {bad}}}\n"
    yield "number", f"optim: {{lr: {bad}}}\n"
    yield "key", f"{bad}: 1\n"
    yield "inner key", f"optim: {{{bad}: {bad}}}\n"
    yield "section", f"{bad}: {{{bad}: 1}}\n"
    yield "choice", f"defaults: [override /model: {bad}]\n"
    yield "group", f"defaults: [{bad}: llama_tiny]\n"
    yield "entry", f"defaults: [{bad}]\n"
    yield (
        "reference",
        f"optim: {{lr: '${{x}}', name: {bad}}}\ndata: {{path: {_yaml('${' + HOSTILE + '}')}}}\n",
    )
    yield "table", f"cluster: {{peak_tflops: {{{bad}: 1}}}}\n"
    yield "tag", "optim: !<\x1b[2K> x\n"
    yield "raw", f"# {HOSTILE}\noptim: {{lr: 1e-3}}\n"
    yield "comment", "# x\rok FORGED\noptim: {lr: 1e-3}\n"
    yield "broken", "optim: {lr: \rok FORGED ]\n"


VERBS = (
    ["check", "recipe=r.yaml"],
    ["check", "--json", "recipe=r.yaml"],
    ["check", "-m", "recipe=r.yaml", "trainer.seed=1,2"],
    ["show", "recipe=r.yaml"],
    ["show", "--resolved", "recipe=r.yaml"],
    ["check", "run=r.yaml"],
    ["explain", "trainer.sample_prompt", "recipe=r.yaml"],
    ["explain", "cluster.name", "recipe=r.yaml"],
    ["recipe", "show", "r.yaml"],
    ["recipe", "diff", "r.yaml", "llama/tiny_cpu"],
    ["recipe", "lock", "r.yaml"],
    ["recipe", "verify", "r.yaml"],
    ["recipe", "export", "--megatron", "r.yaml"],
    ["recipe", "import", "r.yaml"],
)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("kind", "text"), list(_recipes()), ids=lambda value: value if len(value) < 40 else ""
)
def test_hostile_text_verbs_print_no_terminal_escape(
    shown: Shown, tmp_path: Path, kind: str, text: str
) -> None:
    (tmp_path / "r.yaml").write_text(text, newline="")
    for argv in VERBS:
        shown(*argv)


def test_hostile_text_file_names_are_shown_escaped(shown: Shown, tmp_path: Path) -> None:
    name = "x\x1b[2K\rok\nok FORGED\u202e"
    (tmp_path / f"{name}.yaml").write_text("optim: {lr: 1e-3, eps: 2.0e-8}\n")
    (tmp_path / f"{name}.sh").write_text("--num-layers 2\n")
    for argv in (
        ["check", f"recipe={name}.yaml"],
        ["show", f"recipe={name}.yaml"],
        ["explain", "optim.eps", f"recipe={name}.yaml"],
        ["recipe", "lock", f"{name}.yaml", "-o", f"{name}.lock.yaml"],
        ["recipe", "verify", f"{name}.lock.yaml"],
        ["recipe", "verify", f"{name}.yaml"],
        ["recipe", "diff", f"{name}.yaml", f"{name}.yaml"],
        ["recipe", "new", f"{name}_2.yaml"],
        ["recipe", "new", f"{name}_2.yaml"],
        ["recipe", "import", f"{name}.sh"],
        ["recipe", name],
        ["check", f"recipe={name}.yml"],
        ["check", f"{name}=1"],
        ["check", name],
        [name],
        [f"--{name}"],
        ["check", f"model={name}"],
        ["check", f"optim.lr={name}"],
        ["check", "-m", f"trainer.sample_prompt='{name}',b"],
        ["explain", name],
        ["resume", name],
        ["generate", name],
    ):
        shown(*argv)


def test_hostile_text_damaged_file_is_one_line(shown: Shown, tmp_path: Path) -> None:
    name = "run\nok FORGED\x1b[2J"
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").write_text("{")
    (tmp_path / "r.yaml").write_text(f"checkpoint: {{resume: {_yaml(name)}}}")
    code, text = shown("check", "recipe=r.yaml")
    assert code == 4
    assert len(text.splitlines()) == 1
    assert str(CorruptData(f"{name}: {HOSTILE}")).count("\n") == 0
    assert str(BadEnvironment(name, "  fix: another")).splitlines()[1:] == ["  fix: another"]


def test_hostile_text_export_keeps_escapes_of_script(shown: Shown, tmp_path: Path) -> None:
    value = "a'\\" + HOSTILE.replace("\0", "")
    (tmp_path / "r.yaml").write_text(f"data: {{kind: indexed, path: {_yaml(value)}}}\n")
    code, text = shown("recipe", "export", "--megatron", "r.yaml")
    assert code == 0
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "script.sh").write_text(text)
    told = subprocess.run(
        ["bash", "script.sh"], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True
    )
    assert f"\n{value}\n" in told.stdout.decode()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("log: {runs_dir: /tmp/elsewhere}", "log.runs_dir=runs"),
        ("log: {runs_dir: ../elsewhere}", "log.runs_dir=runs"),
        ("log: {runs_dir: '~/elsewhere'}", "log.runs_dir=runs"),
        ("log: {runs_dir: link/elsewhere}", "log.runs_dir=runs"),
        ("data: {cache_dir: /tmp/elsewhere}", "'data.cache_dir=\"~/.cache/mtrain\"'"),
        ("data: {cache_dir: '${recipe.title}'}\nrecipe: {title: /tmp/elsewhere}", ""),
        ("checkpoint: {resume: /tmp/elsewhere}", "checkpoint.resume=null"),
    ],
)
@pytest.mark.parametrize("base", ["recipe", "run"])
def test_hostile_text_file_cannot_leave_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fix: str, base: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "link").symlink_to(tmp_path)
    (here / "r.yaml").write_text(text)
    words = [f"{base}=r.yaml"]
    if base == "run":
        whole = json.loads(json.dumps(compose([]).run.to_dict()))
        for group, keys in _parsed(here / "r.yaml").items():
            whole[group] |= keys
        (here / "r.yaml").write_text(json.dumps(whole))
    with pytest.raises(ConfigError) as caught:
        compose(words)
    (problem,) = caught.value.problems
    assert problem.code == "MT019"
    assert fix in problem.fix
    compose([*words, *shlex.split(override(problem.path, problem.value))])


def _parsed(file: Path) -> dict[str, dict[str, object]]:
    from mtrain.config.compose.yaml_reader import load

    return load(file).values


def test_hostile_text_own_places_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    elsewhere = tmp_path / "elsewhere"
    home = elsewhere / "runs/x"
    for folder in (here, home / "checkpoints/step_00000001", elsewhere / "cache"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / "r.yaml").write_text("log: {runs_dir: mine/runs}\ndata: {cache_dir: ./cache}\n")
    compose(["recipe=r.yaml"])
    (elsewhere / "cache" / TAG_FILE).write_text(TAG)
    said = [f"log.runs_dir={elsewhere}/runs", f"data.cache_dir={elsewhere}/cache"]
    text = run_yaml(resolve(compose(said).run, LAPTOP))
    for folder in (home, home / "checkpoints/step_00000001"):
        (folder / "run.yaml").write_text(text)
        compose([f"run={folder}/run.yaml"])
    shutil.copy(home / "run.yaml", here / "run.yaml")
    with pytest.raises(ConfigError, match=r"MT019.*log\.runs_dir"):
        compose(["run=run.yaml"])


def test_hostile_text_symlinked_run_folder_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "runs").mkdir()
    run = resolve(compose(["log.name=x"]).run, LAPTOP)
    os.symlink(precious, "runs/x")
    with pytest.raises(ConfigError, match=r"MT501.*is a symbolic link"):
        plan(run)
    assert list(precious.iterdir()) == []
    for name in (".lock", "metrics.jsonl", "checkpoints", "run.yaml", "errors"):
        shutil.rmtree("runs")
        Path("runs/x").mkdir(parents=True)
        os.symlink(precious / "file", f"runs/x/{name}")
        with pytest.raises(ConfigError, match="MT501"), opened(run, plan(run), []):
            pass
        assert list(precious.iterdir()) == [], name
