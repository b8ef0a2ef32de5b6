"""Each verb of `convert` on a run with adapters, in a process that has done nothing before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity_hf.test_convert import command, saved
from tests.parity_hf.test_peft import trained
from tests.support.commands import mtrain
from tests.support.covering import some
from tests.support.forked import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.full]
VERBS = {
    "export, merged": "export {run} {new}",
    "export, adapters": "export {run} {new} peft=0.19",
    "export, adapters of peft 0.18": "export {run} {new} peft=0.18",
    "export, half": "export {run} {new} dtype=bf16",
    "export, megatron": "export --megatron {run} {new}",
    "import": "import {base} {new} peft=dora peft.r=4",
    "import of adapters": "import {base} {new} peft=lora peft.r=4 peft.init_from={adapters}",
    "import, megatron": (
        "import --megatron {megatron} {new} recipe={recipe} peft=lora peft.r=4 data=mock"
    ),
    "inspect of a run": "inspect {run}",
    "inspect of adapters": "inspect {adapters}",
    "verify with a folder": "verify {run} {merged}",
    "verify with a checkpoint of megatron": "verify {run} {megatron}",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run with trained adapters, the folder that it began from, and the paths of its
    exports.
    """
    root = tmp_path_factory.mktemp("places")
    at = {name: root / name for name in ("base", "run", "merged", "adapters", "megatron", "recipe")}
    saved("llama 3", at["base"])
    assert command("import", at["base"], at["run"], "peft=lora", "peft.r=4") == 0
    run_ranks(1, lambda: trained(at["run"]))
    return at


@pytest.fixture(scope="module")
def exported(places: dict[str, Path]) -> dict[str, Path]:
    """Return the same with its exports."""
    assert command("export", places["run"], places["merged"]) == 0
    assert command("export", places["run"], places["adapters"], "peft=0.19") == 0
    assert command("export", "--megatron", places["run"], places["megatron"]) == 0
    return places


@pytest.mark.parametrize("verb", some(VERBS, ["export, adapters"]))
def test_convert_process_verb_works_on_adapters_first(
    verb: str, places: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = VERBS[verb]
    if any(f"{{{name}}}" in words for name in ("merged", "adapters", "megatron")):
        request.getfixturevalue("exported")
    if "{recipe}" in words:
        done = mtrain(
            "recipe",
            "import",
            str(places["base"] / "config.json"),
            "-o",
            "model.yaml",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    known = {**places, "new": tmp_path / "new", "recipe": tmp_path / "model.yaml"}
    done = mtrain("convert", *words.format(**known).split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "{new}" in words:
        assert (tmp_path / "new").is_dir()
    else:
        assert (
            "lora_a" in done.stdout
            or "lora_A" in done.stdout
            or "the same, bit by bit" in done.stdout
        )
