"""Calibration of a cluster on one model on this CPU, and the plan's error on other shapes and
layouts.

    python benchmarks/plan_calibrate.py [--rounds 3] [--steps 4] [--out FILE]

Two ranks with one thread each train every configuration in turn, a few steps in each of several
rounds, so that other work on the machine affects all of them. The step times of one model fit the
rates of the machine, as `plan --calibrate` does; the plan then predicts other widths, depths,
lengths and layouts. Medians are compared, and so are the fastest steps. Other work makes ranks wait
for each other, which no rate describes: measure on an idle machine. The load is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMON = "cluster=cpu data=mock trainer.deterministic=false model=llama_tiny"
ONE = "model.num_layers=4 model.hidden_size=256 model.ffn_hidden_size=704"
CALIBRATED = {
    "tp2": (
        f"{ONE} parallel=tp2 data.seq_length=256 trainer.micro_batch_size=1"
        " trainer.global_batch_size=2"
    ),
    "tp2, short": (
        f"{ONE} parallel=tp2 data.seq_length=64 trainer.micro_batch_size=1"
        " trainer.global_batch_size=4"
    ),
    "tp2, long": (
        f"{ONE} parallel=tp2 data.seq_length=512 trainer.micro_batch_size=1"
        " trainer.global_batch_size=2"
    ),
    "pp2": (
        f"{ONE} parallel=pp2 data.seq_length=256 trainer.micro_batch_size=1"
        " trainer.global_batch_size=4"
    ),
    "dp2": (
        f"{ONE} parallel=dp2 data.seq_length=256 trainer.micro_batch_size=2"
        " trainer.global_batch_size=4"
    ),
    "dp2, large": (
        f"{ONE} parallel=dp2 data.seq_length=256 trainer.micro_batch_size=4"
        " trainer.global_batch_size=16"
    ),
    "dp2, short": (
        f"{ONE} parallel=dp2 data.seq_length=32 trainer.micro_batch_size=1"
        " trainer.global_batch_size=8"
    ),
}
"""Layouts of one model, on which the rates are fitted."""
PREDICTED = {
    "wider, tp2": (
        "model.num_layers=3 model.hidden_size=512 model.ffn_hidden_size=1408 parallel=tp2"
        " data.seq_length=256 trainer.micro_batch_size=1 trainer.global_batch_size=2"
    ),
    "deeper, pp2": (
        "model.num_layers=8 model.hidden_size=192 model.ffn_hidden_size=512 parallel=pp2"
        " data.seq_length=256 trainer.micro_batch_size=1 trainer.global_batch_size=4"
    ),
    "other width, dp2": (
        "model.num_layers=6 model.hidden_size=384 model.ffn_hidden_size=1024 parallel=dp2"
        " data.seq_length=128 trainer.micro_batch_size=2 trainer.global_batch_size=8"
    ),
    "longer, tp2": (
        "model.num_layers=5 model.hidden_size=320 model.ffn_hidden_size=896 parallel=tp2"
        " data.seq_length=512 trainer.micro_batch_size=1 trainer.global_batch_size=2"
    ),
    "wide and short, pp2": (
        "model.num_layers=4 model.hidden_size=512 model.ffn_hidden_size=1024 parallel=pp2"
        " data.seq_length=128 trainer.micro_batch_size=2 trainer.global_batch_size=12"
    ),
}
"""Other shapes and layouts, which the plan predicts."""
KERNELS = "kernels"
SIDE = 768
"""Rows and columns of the matrices of a product."""
COPIED = 64 << 20
"""Bytes of a copy, more than caches hold."""
REPEATED = 5
"""Times that a product and a copy run in a turn."""
WARM = 1
"""Steps of each turn that are not counted."""
BOUND = 0.15


def worker(rounds: int, steps: int, out: Path) -> None:
    """Run all configurations in turn as one of the two ranks; the first rank writes the seconds.

    Each turn is a process of its own, so that the threads of its process groups end with it.
    """
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get("cpu"))
    # imported once, before processes are forked
    import mtrain.train.assemble
    import mtrain.train.loop.step  # noqa: F401

    every = CALIBRATED | PREDICTED
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in [*every, KERNELS]}
    for number in range(rounds):
        for name in seconds:
            seconds[name] += apart(name, every.get(name), steps, out.with_name(f"{number}-{name}"))
        if os.environ["RANK"] == "0":
            out.write_text(json.dumps(seconds))


def apart(name: str, words: str | None, steps: int, store: Path) -> list[dict[str, float]]:
    """Run a turn in a process of its own, and return what it sends.

    The result is read before the join, as the process may wait for its reader.
    """
    from multiprocessing import get_context

    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=turn, args=(words, steps, store, send))
    process.start()
    send.close()  # else `recv` would wait for ever for a process that died
    try:
        found: list[dict[str, float]] = receive.recv()
    except EOFError:
        found = []
    process.join()
    if process.exitcode or not found:
        raise SystemExit(f"{name}: a rank failed")
    return found


def turn(words: str | None, steps: int, store: Path, send: Any) -> None:
    """Send the seconds of steps of a configuration, or of kernels without `words`.

    The process groups end with this process.
    """
    import torch.distributed as dist

    from mtrain.api import load
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    dist.init_process_group("gloo", f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
    if words is None:
        send.send([kernels()])
        return
    run = load(f"{COMMON} {words}".split(), to_run=False).run
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        parts.begin()
        results = [train_step(parts, stop_requested=False) for _ in range(WARM + steps)]
        parts.close()
    send.send([result.seconds for result in results[WARM:]])


def kernels() -> dict[str, float]:
    """Return the seconds of a product and of a copy, which all ranks run at the same time."""
    import torch
    import torch.distributed as dist

    one, other = torch.randn(2, SIDE, SIDE)
    source, target = torch.zeros(2, COPIED // 4)
    found = {}
    for name, call in {
        "product": lambda: one @ other,
        "copy": lambda: target.copy_(source),
    }.items():
        call()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPEATED):
            call()
        found[name] = (time.perf_counter() - start) / REPEATED
    return found


def measured(rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Return seconds of every step by phase."""
    with tempfile.TemporaryDirectory() as folder:
        port = 20000 + os.getpid() % 10000
        out = Path(folder) / "seconds.json"
        env = os.environ | {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [
            sys.executable,
            __file__,
            "--worker",
            str(out),
            f"--rounds={rounds}",
            f"--steps={steps}",
        ]
        ranks = [
            subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        failed = ranks[0].wait()
        if failed:
            ranks[1].kill()
        if ranks[1].wait() or failed:
            raise SystemExit("a rank failed")
        found: dict[str, list[dict[str, float]]] = json.loads(out.read_text())
        return found


def compared(
    seconds: dict[str, list[dict[str, float]]], of_steps: Callable[[list[float]], float]
) -> dict[str, Any]:
    """Return the fit on one model, and its predictions for the others.

    `of_steps` reduces the seconds of steps to one figure, such as the median.
    """
    from mtrain.api import load
    from mtrain.plan.time import step_time
    from mtrain.plan.time.calibrate import Measured, Rates, fitted

    def of(name: str, words: str) -> Measured:
        run = load(f"{COMMON} {words}".split(), environment={}, to_run=False).run
        steps, updates = ([step[key] for step in seconds[name]] for key in ("step", "optimizer"))
        return Measured(run, of_steps(steps), of_steps(updates))

    every = {name: of(name, words) for name, words in (CALIBRATED | PREDICTED).items()}
    product, copy = (
        of_steps([turn[key] for turn in seconds[KERNELS]]) for key in ("product", "copy")
    )
    rates = Rates("fp32", 2 * SIDE**3 / product, 2 * COPIED / copy)
    fit = fitted([every[name] for name in CALIBRATED], every["tp2"].run.cluster, [rates])
    rows = []
    for name, one in every.items():
        planned = step_time(one.run.model_copy(update={"cluster": fit.cluster})).seconds
        steps = [step["step"] for step in seconds[name]]
        rows.append(
            {
                "name": name,
                "calibrated": name in CALIBRATED,
                "measured_s": one.step_s,
                "quartiles_s": statistics.quantiles(steps, n=4),
                "planned_s": planned,
                "error": planned / one.step_s - 1,
            }
        )
    worst = max(abs(row["error"]) for row in rows if not row["calibrated"])
    alone = {"products_tflops": rates.products / 1e12, "copy_gbps": rates.memory / 1e9}
    cluster = fit.cluster.model_dump(mode="json", exclude_none=True)
    return {"kernels": alone, "rates": cluster, "rows": rows, "worst": worst}


def printed(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'medians':24} {'measured':>10} {'planned':>10} {'':7}  fastest")
    for row, fastest in zip(result["rows"], result["fastest"]["rows"], strict=True):
        kind = "fitted" if row["calibrated"] else "predicted"
        times = f"{row['measured_s'] * 1e3:7.1f} ms {row['planned_s'] * 1e3:7.1f} ms"
        print(f"{row['name']:24} {times} {row['error']:+7.1%} {fastest['error']:+9.1%}  {kind}")
    worst = result["worst"]
    fastest = result["fastest"]["worst"]
    print(
        f"worst of those predicted {worst:.1%}, to be at most {BOUND:.0%}; of the fastest steps"
        f" {fastest:.1%}"
    )
    print(
        "load of the machine {:.1f} before and {:.1f} after, on {} cores".format(
            *result["load"], os.cpu_count()
        )
    )


def main() -> int:
    """Measure, fit, predict and print; return 1 if a prediction is further off than the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of every configuration")
    parser.add_argument("--steps", type=int, default=4, help="steps that count in a turn")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.rounds, options.steps, options.worker)
        return 0
    load = [os.getloadavg()[0]]
    seconds = measured(options.rounds, options.steps)
    result = compared(seconds, statistics.median) | {"fastest": compared(seconds, min)}
    result |= {
        "load": [*load, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    printed(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["worst"] > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
