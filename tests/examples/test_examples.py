"""Each directory of examples/ runs as its README describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.commands import ROOT, command, environment, metrics

EXAMPLES = ROOT / "examples"
TRAINING = (
    "data=mock",
    "data.seq_length=32",
    "model.num_layers=2",
    "trainer.train_iters=2",
    "trainer.eval_iters=0",
    "log.name=run",
)
"""Overrides with which the default model trains for two steps."""


def installed(example: Path, folder: Path) -> dict[str, str]:
    """Return an environment in which an example is installed, by files in `folder`."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = [str(folder), str(example), os.environ.get("PYTHONPATH", "")]
    return environment() | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run(*argv: str, cwd: Path, env: dict[str, str]) -> str:
    """Run a command of mtrain; return what it prints, after it ended with 0."""
    done = subprocess.run(
        command(*argv), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_examples_have_a_listed_page_each() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    listed = (EXAMPLES / "README.md").read_text()
    for name in folders:
        assert f"| `{name}` |" in listed
        assert (EXAMPLES / name / "README.md").is_file()


def test_examples_config_folder_trains_its_recipe(tmp_path: Path) -> None:
    folder = str(EXAMPLES / "config_folder/conf")
    words = ("--config-dir", folder, "recipe=go", "+experiment=fast", "log.name=run")
    run(*words, cwd=tmp_path, env=environment())
    steps = metrics(tmp_path / "runs/run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]


@pytest.mark.full
def test_examples_model_family_keeps_its_embedding(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    env = installed(EXAMPLES / "model_family", packages)
    words = ("model.family=frozen_embedding", "parallel=single", "checkpoint.save_interval=1")
    run(*TRAINING, *words, cwd=tmp_path, env=env)
    before, after = (
        load_file(tmp_path / f"runs/run/checkpoints/step_{step:08d}/rank_00000.safetensors")
        for step in (1, 2)
    )
    weights = {name for name in after if name.startswith("model")}
    same = {name for name in weights if np.array_equal(before[name], after[name])}
    assert len(weights) > 10
    assert same == {name for name in weights if "word_embeddings" in name}


def test_examples_model_family_plans_less_state(tmp_path: Path) -> None:
    env = installed(EXAMPLES / "model_family", tmp_path)
    plans = {}
    for family in ("gpt", "frozen_embedding"):
        words = ("plan", f"model.family={family}", "data=mock", "parallel=single", "--json")
        plans[family] = json.loads(run(*words, cwd=tmp_path, env=env))
    assert plans["frozen_embedding"]["parameters"]["frozen"] == 4096 * 256
    stages = {family: plan["memory"]["stages"][0]["parts"] for family, plan in plans.items()}
    for part in ("gradients", "optimizer"):
        assert stages["frozen_embedding"][part] < stages["gpt"][part]


def test_examples_family_with_new_part_is_counted(tmp_path: Path) -> None:
    env = installed(EXAMPLES / "model_family", tmp_path)
    totals = {}
    for model in ("llama_tiny", "ngram_tiny"):
        words = ("plan", f"model={model}", "data=mock", "parallel=single", "--json")
        totals[model] = json.loads(run(*words, cwd=tmp_path, env=env))["parameters"]["total"]
    assert totals["ngram_tiny"] - totals["llama_tiny"] == 2 * 16384 * 256


@pytest.mark.full
def test_examples_family_with_new_part_is_proven(tmp_path: Path) -> None:
    env = installed(EXAMPLES / "model_family", tmp_path)
    output = run("prove", "model=ngram_tiny", "data=mock", "parallel=tp2sp", cwd=tmp_path, env=env)
    assert "proven: the layout computes what one rank computes" in output


@pytest.mark.full
def test_examples_device_trains_two_ranks(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    env = installed(EXAMPLES / "device", packages)
    words = (*TRAINING, "cluster.device=host", "parallel=tp2")
    assert "host" in run("check", *words, cwd=tmp_path, env=env)
    output = run(*words, cwd=tmp_path, env=env)
    assert "2 host ranks" in output
    assert len(metrics(tmp_path / "runs/run")) == 2


def test_examples_notebook_runs_to_its_last_cell(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook/plan_layouts.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "clear the outputs before you commit"
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    paths = [str(ROOT / "src"), str(ROOT / "kernels")]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "does not fit" in done.stdout
    assert "pp2 is the fastest of those that fit" in done.stdout
