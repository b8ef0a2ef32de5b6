"""The overhead of a step of mtrain over a bare loop around megatron-core's objects, on one model.

    python benchmarks/step_overhead.py [--pairs 60] [--out FILE] [OVERRIDES ...]

Both train in this process, on one rank with one thread, from the same weights and samples, in turn
and in an order that alternates. Ratios are of medians, in CPU seconds (which a busy machine
disturbs least) and in wall seconds; the quartiles of the ratio of neighbouring steps show the
noise. mtrain's step is a complete one: it reads samples, runs forward, backward and update, reports
over all ranks, and calls all hooks of a training run.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEFAULTS = [
    "model=llama_tiny",
    "parallel=single",
    "data=mock",
    "data.seq_length=256",
    "trainer.global_batch_size=2",
]


def main() -> int:
    """Run the comparison and print it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60, help="steps of each")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_args()
    result = measured(DEFAULTS + options.overrides, options.pairs)
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measured(words: list[str], pairs: int) -> dict[str, Any]:
    """Return the median seconds of a step of each, and their ratio."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry

    os.environ["OMP_NUM_THREADS"] = "1"
    adapter.install(registry.get("cpu"))
    from mtrain.world.init import joined

    run = load(words).run
    with joined(run) as world, tempfile.TemporaryDirectory() as folder:
        ours, stop = mtrain_step(run, world, Path(folder))
        bare = bare_step(run, world)
        losses = [(ours(), bare()) for _ in range(5)]
        assert all(abs(a - b) < 1e-6 * abs(b) for a, b in losses), (
            f"they train differently: {losses}"
        )
        clocks = {"cpu": time.process_time, "wall": time.perf_counter}
        seconds: dict[str, dict[str, list[float]]] = {c: {"mtrain": [], "bare": []} for c in clocks}
        for i in range(pairs):
            for name, step in sorted({"mtrain": ours, "bare": bare}.items(), reverse=i % 2 == 0):
                begin = {c: clock() for c, clock in clocks.items()}
                step()
                for c, clock in clocks.items():
                    seconds[c][name].append(clock() - begin[c])
        stop()
    return {
        **{c: compared(values) for c, values in seconds.items()},
        "pairs": pairs,
        **circumstances(),
    }


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, their ratio, and the quartiles of the ratio of neighbouring steps."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["mtrain"], seconds["bare"], strict=True)]
    return {
        "ratio_of_medians": medians["mtrain"] / medians["bare"],
        "quartiles_of_neighbours": statistics.quantiles(ratios, n=4),
        "median_seconds": medians,
    }


def mtrain_step(
    run: Any, world: Any, folder: Path
) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return one step of a training run with its hooks, and the function that ends the run."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import HookList
    from mtrain.train.hooks.evaluation import Evaluation
    from mtrain.train.hooks.metrics import Metrics
    from mtrain.train.hooks.progress import Progress
    from mtrain.train.loop.step import train_step
    from mtrain.train.loop.trainer import check_finite, report_step

    parts = assemble(run, world, splits_of(run))
    log = run.log.model_copy(update={"progress": "none"})
    progress = Progress(run.model_copy(update={"log": log}), speaks=True)
    metrics = Metrics(folder)
    chain = [metrics, progress, Evaluation(metrics, progress)]
    parts.hooks = HookList(chain)
    parts.hooks.call("start", parts)
    parts.meter.loaded(0)

    def step() -> float:
        result = train_step(parts, stop_requested=False)
        parts.meter.stepped(result.step, parts.prefetcher.waited_s)
        check_finite(result)
        report_step(parts, result)
        return result.loss

    return step, lambda: metrics.finish(parts)


def bare_step(run: Any, world: Any) -> Callable[[], float]:
    """Return the shortest loop around megatron-core's objects that trains the same model on the
    same samples.
    """
    from mtrain.assembly.model import build_model
    from mtrain.assembly.optim import build_optimizer, build_schedule
    from mtrain.data import open_splits, prepare
    from mtrain.mcore import api

    chunks = build_model(run, world)
    optimizer = build_optimizer(run, chunks)
    schedule = build_schedule(run, optimizer)
    config = chunks[0].config
    model = chunks[0]
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = api.finalize_model_grads
    samples = open_splits(
        run.data, run.model.vocab_size, run.trainer.seed, prepare(run.data), ("train",)
    ).train
    schedule_of_steps = api.get_forward_backward_func()
    batch = run.trainer.batch
    micro = run.trainer.micro
    seq = run.data.seq_length
    used = 0

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        import torch

        tokens, labels, positions, mask = next(iterator)

        def loss(total: Any) -> Any:
            count = mask.sum()
            return total, count.int(), {"loss": torch.stack([total.detach(), count])}

        return chunk(tokens, positions, None, labels=labels, loss_mask=mask), loss

    def step() -> float:
        import numpy as np
        import torch

        nonlocal used
        windows = torch.from_numpy(samples.batch(np.arange(used, used + batch)))
        used += batch
        positions = torch.arange(seq).expand(micro, seq).contiguous()
        mask = torch.ones(micro, seq)
        batches = [
            (part[:, :-1].contiguous(), part[:, 1:].contiguous(), positions, mask)
            for part in windows.split(micro)
        ]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule_of_steps(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=seq,
            micro_batch_size=micro,
            forward_only=False,
        )
        schedule.step(1)
        optimizer.step()
        total, count = torch.stack([r["loss"].double() for r in reports]).sum(0).tolist()
        return total / count

    return step


def circumstances() -> dict[str, Any]:
    """Return the device, versions, commit and command of the measurement."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": "0.16.1",
    }
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "device": f"cpu, {torch.get_num_threads()} threads",
        "versions": versions,
        "commit": commit,
        "command": "python " + " ".join(words),
    }


if __name__ == "__main__":
    raise SystemExit(main())
