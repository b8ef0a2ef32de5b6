"""The cost of checkpoints that are written in the background, in one run and next to other ways.

    python benchmarks/save.py [--saves 20] [--rounds 5] [--disk FOLDER] [--ram FOLDER] [--out FILE]

`run` trains a model with 20 saves, without any, and with saves that it waits for, each in a process
of its own: the time that a save blocks the loop next to the time of its write and to a copy of its
bytes in memory, steps during a write next to other steps, the peak of memory (proportional set
size of the rank and its writer), and whether losses and weights are equal. `rates` writes the same
tensors in turn, on a disk and on a RAM file system, next to a plain write and fsync of as many
bytes, in memory also next to `torch.distributed.checkpoint.save`. Rates are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from step_overhead import circumstances

MODEL = [
    "model=llama_tiny",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=2816",
    "model.num_layers=4",
    "model.num_attention_heads=8",
    "model.num_query_groups=8",
    "parallel=single",
    "data=mock",
    "data.seq_length=128",
    "trainer.global_batch_size=1",
    "trainer.eval_iters=0",
    "log.progress=none",
    "checkpoint.save_final=false",
    "checkpoint.keep=1",
]
STEPS_BETWEEN = 4
MODES = {"never": None, "waits": "false", "background": "true"}


def main() -> int:
    """Measure, and print the result; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=20, help="saves of the run")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each way to write")
    parser.add_argument("--disk", type=Path, default=Path("runs"), help="a folder on a disk")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="one in memory")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--mode", choices=[*MODES, "rates"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        job = rates if options.mode == "rates" else trained
        print(json.dumps(job(options)))
        return 0
    modes = {mode: in_process(options, mode) for mode in (*MODES, "rates")}
    result = {"run": summary(modes), "rates": modes["rates"], **circumstances()}
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def in_process(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Return what another process measures."""
    words = [sys.executable, __file__, "--mode", mode, "--saves", str(options.saves)]
    words += ["--rounds", str(options.rounds), "--disk", str(options.disk)]
    done = subprocess.run(
        [*words, "--ram", str(options.ram)], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(modes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison of the three runs."""
    saved = modes["background"]
    never = modes["never"]
    blocked = statistics.median(saved["blocked_s"])
    written = statistics.median(saved["written_s"])
    mib = saved["bytes"] / 2**20
    added = (saved["peak_bytes"] - never["peak_bytes"]) / 2**20
    during = statistics.median(saved["steps_during_s"])
    between = statistics.median(saved["steps_between_s"])
    return {
        "saves": len(saved["blocked_s"]),
        "mib_of_a_save": mib,
        "blocked_ms": {
            "median": 1e3 * blocked,
            "largest": 1e3 * max(saved["blocked_s"]),
            "first": 1e3 * saved["blocked_s"][0],
        },
        "blocked_ms_without_background": 1e3 * statistics.median(modes["waits"]["blocked_s"]),
        "written_s": written,
        "blocked_share_of_write": blocked / written,
        "copy_ms": 1e3 * saved["copy_s"],
        "blocked_over_copy": blocked / saved["copy_s"],
        "step_ms": {"during_a_write": 1e3 * during, "otherwise": 1e3 * between},
        "slowdown_of_steps": during / between - 1,
        "peak_mib_added": added,
        "peak_mib_added_beyond_copies": added - mib,
        "losses_equal": saved["losses"] == never["losses"] == modes["waits"]["losses"],
        "weights_equal": saved["weights"] == never["weights"] == modes["waits"]["weights"],
    }


def ready(words: list[str]) -> Any:
    """Return a run, in an environment with one thread."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry

    os.environ["OMP_NUM_THREADS"] = "1"
    adapter.install(registry.get("cpu"))
    return load(words).run


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Return times, losses and weights of a run in one mode."""
    way = MODES[options.mode]
    every = 0 if way is None else STEPS_BETWEEN
    steps = STEPS_BETWEEN * options.saves + STEPS_BETWEEN - 1
    more = [f"checkpoint.save_interval={every}", f"trainer.train_iters={steps}"]
    run = ready([*MODEL, *more, f"checkpoint.async_save={way or 'false'}"])
    from mtrain.ckpt.hashes import hash_bytes
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import Hook
    from mtrain.train.hooks.checkpoints import Checkpoints
    from mtrain.train.hooks.progress import Progress
    from mtrain.train.loop.trainer import Trainer
    from mtrain.world.init import joined

    losses: list[float] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    written: list[float] = []

    class Watched(Checkpoints):
        """The hook that saves, with a clock."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.blocks: list[float] = []
            self.begun_at = 0.0

        def _save(self, context: Any, *, last: bool = False) -> None:
            if self.saves is not None and self.saves.pending is not None:
                self._settle(context)
            begin = time.perf_counter()
            super()._save(context, last=last)
            self.blocks.append(time.perf_counter() - begin)

        def before_update(self, context: Any) -> None:
            begin = time.perf_counter()
            unsecured = self.unsecured
            super().before_update(context)
            if unsecured:
                self.blocks[-1] += time.perf_counter() - begin

        def _committed(self, context: Any, saves: Any) -> None:
            written.append(saves.seconds)
            super()._committed(context, saves)

    class Steps(Hook):
        def after_step(self, context: Any, result: Any) -> None:
            losses.append(result.loss)
            during = hook.saves is not None and hook.saves.pending is not None
            seconds[during].append(result.seconds["step"])

    with tempfile.TemporaryDirectory(dir=made(options.disk)) as folder, joined(run) as world:
        context = assemble(run, world, splits_of(run))
        hook = Watched(Path(folder), Progress(run, speaks=False), {})
        with peak() as most:
            Trainer(context, [Steps(), hook]).fit()
        tensors = [p.detach() for chunk in context.state.chunks for p in chunk.parameters()]
        hashed = [hash_bytes(t.reshape(-1).numpy()) for t in tensors]
        copy_s, size = copied(context)
    return {
        "blocked_s": hook.blocks,
        "written_s": written,
        "steps_during_s": seconds[True],
        "steps_between_s": seconds[False],
        "peak_bytes": most(),
        "copy_s": copy_s,
        "bytes": size,
        "losses": losses,
        "weights": hashed,
    }


def tensors_of(context: Any) -> list[Any]:
    """Return the tensors of a checkpoint."""
    from mtrain.mcore.state import sharding

    state = context.state
    shards = sharding.model_shards(state.chunks)
    shards += sharding.optimizer_shards(state.chunks, state.optimizer)
    return [shard for shard in shards if shard.primary]


def copied(context: Any) -> tuple[float, int]:
    """Return the median seconds of a copy of all tensors to such memory, and its size."""
    import torch

    tensors = [shard.tensor.detach() for shard in tensors_of(context)]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        found.append(time.perf_counter() - begin)
    return statistics.median(found), sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def peak() -> Iterator[Callable[[], int]]:
    """Sample the memory of this process and its children; the value is the function that returns
    the most bytes.
    """
    over = threading.Event()
    most = [0]

    def sample() -> None:
        while not over.wait(0.1):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            total = sum(map(pss, ["self", *children]))
            most[0] = max(most[0], total)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        thread.join()


def pss(process: str) -> int:
    """Return the proportional set size of a process in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def rates(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of each way to write, in MiB per second."""
    run = ready([*MODEL, "trainer.train_iters=1"])
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.world.init import joined

    found: dict[str, list[float]] = {}
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        shards = tensors_of(context)
        mib = sum(s.tensor.numel() * s.tensor.element_size() for s in shards) / 2**20
        ways: dict[str, dict[str, Any]] = {
            "disk": {"ours": ours(context, world), "write and fsync": plain(shards)},
            "ram": {
                "ours": ours(context, world),
                "dcp.save": dcp(shards),
                "write": plain(shards),
            },
        }
        places = {"disk": made(options.disk), "ram": made(options.ram)}
        for round_ in range(options.rounds + 1):
            for place, named in ways.items():
                for name, way in sorted(named.items(), reverse=round_ % 2 == 0):
                    with tempfile.TemporaryDirectory(dir=places[place]) as folder:
                        seconds = way(Path(folder) / "out")
                    if round_:  # the first one warms caches and processes up
                        found.setdefault(f"{place}: {name}", []).append(mib / seconds)
        for named in ways.values():
            named["ours"](None)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "mib": mib,
        "mib_per_s": medians,
        "rounds": found,
        "of_write_and_fsync": medians["disk: ours"] / medians["disk: write and fsync"],
        "over_dcp": medians["ram: ours"] / medians["ram: dcp.save"],
        "of_write_in_memory": medians["ram: ours"] / medians["ram: write"],
    }


def ours(context: Any, world: Any) -> Callable[[Path | None], float]:
    """Return the function that saves in the background and waits for the commit."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt.saving.background import BackgroundSaves, Limits

    limits = Limits(None, lambda: 1 << 40, 0, 600.0)
    ranks = ckpt_state.meeting_of(world, context.run)
    saves = BackgroundSaves(ranks, world.device, 0, limits)

    def save(folder: Path | None) -> float:
        if folder is None:
            saves.close()
            return 0.0
        begin = time.perf_counter()
        ckpt_state.begin_save(saves, folder, context.run, world, context.state, {})
        saves.finish()
        assert not saves.problem, saves.problem
        seconds = time.perf_counter() - begin
        saves.done()
        return seconds

    return save


def plain(shards: list[Any]) -> Callable[[Path], float]:
    """Return the function that writes the bytes to a file and waits for the disk."""
    data = [memoryview(s.tensor.detach().contiguous().reshape(-1).numpy()) for s in shards]

    def write(path: Path) -> float:
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for part in data:
                left = part.cast("B")
                while len(left):
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        return time.perf_counter() - begin

    return write


def dcp(shards: list[Any]) -> Callable[[Path], float]:
    """Return the function that saves with torch's distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    # Layers share a key, so each tensor gets a name of its own.
    state = {f"{n}/{shard.key}": shard.tensor.detach() for n, shard in enumerate(shards)}

    def save(path: Path) -> float:
        begin = time.perf_counter()
        dcp.save(state, checkpoint_id=path)
        seconds = time.perf_counter() - begin
        shutil.rmtree(path)
        return seconds

    return save


def made(folder: Path) -> Path:
    """Return a folder that exists."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
