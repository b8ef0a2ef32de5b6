"""`rehearse`: the layout of a run on this machine, including a save and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.ckpt import folder as ckpt_folder
from mtrain.cli.prove import FAULT
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import say
from mtrain.launching import local
from mtrain.launching.prove import shrunk
from mtrain.launching.signals import scratch_folder
from mtrain.layout.grid import RankGrid
from mtrain.loading.configuration import load, say_replaced
from mtrain.plan.count import parameters
from mtrain.plan.shrink import differences
from mtrain.units import count

STEPS = 6
SAVED = 3


def run(words: list[str]) -> int:
    """Train what `words` describe, shrunk; save, resume, compare the ends; return the exit code."""
    loaded = load(words)
    say_replaced(loaded)
    full = loaded.run
    small = shrunk(full, words, STEPS, "bf16" if full.precision.dtype == "bf16" else "fp32")
    grid = RankGrid.of(small)
    asked = "" if full.precision.quantized is None else f", in place of {full.precision.words}"
    device = "" if facts_of(small.cluster.device).on_host else f"{small.cluster.device} "
    say(f"{full.model.name}: {grid} on {grid.world} {device}ranks, {small.precision.words}{asked}")
    say(
        f"shrunk to {count(parameters(small.model))} parameters:"
        f" {'; '.join(differences(full, small))}"
    )
    with scratch_folder("mtrain-rehearse-") as scratch:
        whole = local.launch(_in(small, scratch, "whole"), words) / CHECKPOINTS
        saved = whole / ckpt_folder.folder_name(SAVED)
        resumed = (
            local.launch(_in(small, scratch, "resumed", resume=str(saved)), words) / CHECKPOINTS
        )
        equal = _ends(whole) == _ends(resumed)
        # An export reads the checkpoint as a user of the weights would, tensor by tensor.
        exported = _export(whole, scratch / "exported")
    missing = parameters(small.model) - exported
    say(f"exported {count(exported)} parameters as whole tensors")
    if missing:
        say(
            f"NOT equal: the model has {parameters(small.model)} parameters, {exported} were"
            " exported"
        )
        return FAULT
    if equal:
        say(
            f"rehearsed: {STEPS} steps; the run resumed from step {SAVED} ends bitwise where the"
            " whole one ends"
        )
    else:
        say(f"NOT equal: the run resumed from step {SAVED} ends elsewhere than the whole one")
    return 0 if equal else FAULT


def _export(checkpoints: Path, out: Path) -> int:
    """Export the last checkpoint; the number of parameters that can be read back."""
    local.install_reader()
    from mtrain.ckpt.export import export, read
    from mtrain.ckpt.store import Checkpoint

    export(Checkpoint.open(checkpoints / ckpt_folder.folder_name(STEPS)), out)
    return sum(
        tensor.numel()
        for key, tensor in read(out)
        # A router also has buffers, such as the bias of balancing: they are no parameters.
        if ".router." not in key or key.endswith(".weight")
    )


def _in(run: RunConfig, folder: Path, name: str, **checkpoint: Any) -> RunConfig:
    saving = {
        "save_interval": SAVED,
        "save_minutes": None,
        "save_final": True,
        "keep": None,
        **checkpoint,
    }
    return run.model_copy(
        update={
            "log": run.log.model_copy(
                update={"runs_dir": str(folder), "name": name, "interval": 1}
            ),
            "checkpoint": run.checkpoint.model_copy(update=saving),
        }
    )


def _ends(root: Path) -> dict[str, str]:
    """Return hashes of everything saved after the last step, by rank."""
    manifest = ckpt_folder.read_manifest(root / ckpt_folder.folder_name(STEPS), verify=True)
    return {
        name: facts["header_sha256"]
        for name, facts in manifest["files"].items()
        # The file of the run names its own folder, which differs.
        if "header_sha256" in facts
    }
