"""The same runs on another release of megatron-core, in a process of its own.

Run as a module with a folder, it trains every case into `FOLDER/there`, goes on from what lies in
`FOLDER/here`, writes that again as it was read, and prints the release and the numbers of every
step as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mtrain.config.engine import release as engine
from mtrain.config.schema.mla import MLAConfig
from mtrain.config.schema.model import MoEConfig
from tests.support.forked import import_engine, run_ranks
from tests.support.patience import patient
from tests.support.runs import tiny_run, train_steps

STEPS = 20
SAVED = 16
SMALL: dict[str, Any] = {"num_layers": 2}
EXPERTS = MoEConfig(
    num_experts=4, ffn_hidden_size=64, router_load_balancing_type="aux_loss", aux_loss_coeff=0.01
)
LATENT = MLAConfig(
    q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
)

CASES: dict[str, dict[str, Any]] = {
    "dense tp2": {"ranks": 2, "tp": 2, "model": SMALL},
    "experts ep2, distributed optimizer": {
        "ranks": 2,
        "ep": 2,
        "distributed_optimizer": True,
        "model": {**SMALL, "moe": EXPERTS},
    },
    "latent attention pp2": {
        "ranks": 2,
        "pp": 2,
        "model": {**SMALL, "mla": LATENT, "num_query_groups": None},
    },
    "two predictions more": {"model": {**SMALL, "mtp_num_layers": 2}},
}
IN_HALVES = tuple(name for name, case in CASES.items() if "mtp_num_layers" not in case["model"])
"""Cases that megatron-core's hybrid model can express."""
CASES |= {
    f"{name}, hybrid": {**CASES[name], "model": {**CASES[name]["model"], "builder": "hybrid"}}
    for name in IN_HALVES
}


def trained(home: Path, name: str) -> list[tuple[float, float]]:
    """Return loss and norm of each step of a case, with checkpoints after `SAVED` steps and at the
    end.
    """
    run = tiny_run(**CASES[name])
    found = run_ranks(
        run.parallel.ranks or 1,
        lambda: train_steps(run, STEPS, save_to=home / name, save_after=SAVED),
    )
    return list(found[0])


def resumed(home: Path, name: str) -> list[tuple[float, float]]:
    """Return losses and norms after resuming, having rewritten the checkpoint to `home/again` as it
    was read.
    """
    run = tiny_run(**CASES[name])
    saved = home / name / f"step_{SAVED:08d}"

    def job() -> list[tuple[float, float]]:
        train_steps(run, 0, load_from=saved, save_to=home / "again" / name)
        return train_steps(run, STEPS - SAVED, load_from=saved)

    return list(run_ranks(run.parallel.ranks or 1, job)[0])


def in_other_release(home: Path) -> dict[str, Any]:
    """Return the output of this module in a process whose megatron-core only PYTHONPATH selects."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "tests.support.engine_runs", str(home)]
    where = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        cwd=where,
        env=without,
        capture_output=True,
        text=True,
        timeout=patient(280),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Train and resume every case on this release."""
    import_engine()
    home = Path(sys.argv[1])
    release = engine.release()
    assert release is not None
    answers = {
        name: {"trained": trained(home / "there", name), "resumed": resumed(home / "here", name)}
        for name in CASES
    }
    print(json.dumps({"release": engine.words(release), "cases": answers}))


if __name__ == "__main__":
    main()
