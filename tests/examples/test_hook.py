"""The example of a hook: a package of its own, found by its entry point."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SMALL
from tests.support.launched import Launched

EXAMPLE = ROOT / "examples/hook"
RUN = (
    *SMALL,
    "parallel=dp2",
    "trainer.global_batch_size=4",
    "trainer.train_iters=2",
    "trainer.eval_iters=1",
    "trainer.eval_interval=1",
    "checkpoint.save_interval=2",
    "optim.warmup_iters=1",
    "log.name=run",
    "log.hooks=[best_loss]",
)


def installed(home: Path, example: Path = EXAMPLE) -> Callable[[], None]:
    """Return a patch that puts the example where pip would, with its metadata, onto the path."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    site = home / "site"
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    for module in example.glob("*.py"):
        shutil.copyfile(module, site / module.name)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return lambda: sys.path.insert(0, str(site))


def best(home: Path) -> dict[str, object]:
    """Read the file that the hook wrote."""
    found: dict[str, object] = json.loads((home / "runs/run/best.json").read_text())
    return found


def losses(home: Path) -> dict[int, float]:
    """Return the validation losses by step."""
    lines = (home / "runs/run/metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["valid_loss"] for r in map(json.loads, lines) if "valid_loss" in r}


def states(home: Path, step: int) -> dict[str, object]:
    """Return the states of hooks of other packages in a checkpoint."""
    manifest = home / f"runs/run/checkpoints/step_{step:08d}/manifest.json"
    found: dict[str, object] = json.loads(manifest.read_text())["state"]["hooks"]
    del found["Alerts"]
    return found


def test_hook_trains_and_keeps_its_state(tmp_path: Path) -> None:
    patch = installed(tmp_path)
    run = Launched(*RUN, cwd=tmp_path, patch=patch)
    assert run.wait() == 0, run.said
    # a step is saved before it is evaluated: the checkpoint of step 2 knows the loss of step 1
    first = losses(tmp_path)[1]
    assert best(tmp_path) == {"loss": first, "step": 1, "checkpoint": "step_00000002"}
    assert states(tmp_path, 2) == {"best_loss": {"best": first, "step": 1}}
    words = ("resume", "runs/run", "trainer.train_iters=4", "checkpoint.accept_changes=true")
    again = Launched(*words, cwd=tmp_path, patch=patch)
    assert again.wait() == 0, again.said
    after = losses(tmp_path)
    assert after[1] == first
    expected = min(1, 3, key=lambda step: after[step])
    assert states(tmp_path, 4) == {"best_loss": {"best": after[expected], "step": expected}}


def test_hook_uninstalled_is_refused(tmp_path: Path) -> None:
    run = Launched(*RUN, cwd=tmp_path)
    assert run.wait() == 2
    assert "no hook is called best_loss" in run.said
    assert "garbage" in run.said


@pytest.mark.parametrize("broken", ["import nothing_of_that_name", "BestLoss = object"])
def test_hook_that_does_not_load_ends_run(broken: str, tmp_path: Path) -> None:
    patch = installed(tmp_path)
    (tmp_path / "site/mtrain_best_loss.py").write_text(f"{broken}\n")
    run = Launched(*RUN, cwd=tmp_path, patch=patch)
    assert run.wait() != 0
    assert "hook 'best_loss': its plug-in" in run.said
