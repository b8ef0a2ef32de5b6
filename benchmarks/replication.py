"""The cost of copies of local checkpoints on another machine.

    python benchmarks/replication.py [--rounds 3] [--steps 60] [--out FILE]

Two launchers on this machine train one rank each, with a local checkpoint every five steps, in turn
with `checkpoint.local_replicas=1` and without. Both kinds of run save alike; only the processes
that copy differ. The result has the medians of steps, the seconds of all steps, and the bytes and
number of the copies that were made. Here the two machines share cores and the loopback network:
what a copy costs there is an upper bound of what it takes of a machine's own cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from step_overhead import circumstances

INTERVAL = 5
SKIPPED = 10
"""First steps, which are slower."""
RUN = (
    "data=mock",
    "data.seq_length=128",
    "model=llama_tiny",
    "model.num_layers=4",
    "cluster=cpu",
    "cluster.nodes=2",
    "parallel=dp2",
    "trainer.global_batch_size=4",
    "trainer.eval_iters=0",
    "trainer.eval_interval=0",
    "trainer.sample_tokens=0",
    "log.interval=1",
    "log.name=run",
    "log.progress=none",
    "checkpoint.save_interval=0",
    "checkpoint.save_final=false",
    "checkpoint.local_dir=local",
    f"checkpoint.local_interval={INTERVAL}",
)


def main() -> int:
    """Measure, and print the result; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    made: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    for _ in range(options.rounds):
        made["without"].append(trained(options.steps, ()))
        made["with"].append(trained(options.steps, ("checkpoint.local_replicas=1",)))
    medians = {
        name: statistics.median(each["step_s"] for each in runs) for name, runs in made.items()
    }
    slower = medians["with"] / medians["without"] - 1
    result = {"median_step_s": medians, "slower": slower, "runs": made, **circumstances()}
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def trained(steps: int, more: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one run on two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        words = [*RUN, f"trainer.train_iters={steps}", *more]
        place = os.environ | {"MTRAIN_MACHINES": "2", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "mtrain", *words]
        started = [
            subprocess.Popen(
                command,
                cwd=scratch,
                env=place | {"MTRAIN_MACHINE": str(number), "MASTER_PORT": port},
                stdout=subprocess.DEVNULL,
            )
            for number in range(2)
        ]
        copied: dict[str, int] = {}
        # The run deletes its local checkpoints at its end.
        while any(one.poll() is None for one in started):
            for path in Path(scratch).glob("local/*/replica_*/step_*"):
                if str(path) not in copied:
                    copied[str(path)] = sum(file.stat().st_size for file in path.glob("*"))
            with_timeout(started[0])
        assert [one.returncode for one in started] == [0, 0]
        text = (Path(scratch) / "runs/run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    kept = [one["step_s"] for one in lines if one.get("step", 0) > SKIPPED and "step_s" in one]
    return {
        "step_s": statistics.median(kept),
        "all_s": sum(kept),
        "copies": len(copied),
        "copied_bytes": sum(copied.values()),
    }


def with_timeout(process: subprocess.Popen[bytes], seconds: float = 0.2) -> None:
    """Wait a moment for the end of a process."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


if __name__ == "__main__":
    sys.exit(main())
