"""Conversion of synthetic weights, by `convert import` and `export`, against the speed of the disk.

    python benchmarks/convert.py --model llama32_1b --out benchmarks/results/convert_cpu.json

A raw write of as many bytes through the page cache is the baseline. Each round has wall and CPU
seconds, rates as a share of the raw one, and the peak memory of each command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from mtrain.ckpt.new_file import Writer
from mtrain.config.compose.composer import compose
from mtrain.recipes.huggingface.exporter import config_json

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
BLOCK = np.random.default_rng(0).integers(0, 0x3C00, 1 << 22, dtype=np.uint16)
"""Numbers in bf16 between 0 and 0.0078."""


def make(model: str, out: Path) -> int:
    """Write a folder of a shipped model with made-up weights in bf16; return its bytes."""
    from mtrain.config.resolve.resolution import Machine, resolve
    from mtrain.convert.boxes import model_boxes
    from mtrain.convert.huggingface.model import tables
    from mtrain.convert.match import export_match, shapes_of_theirs

    run = resolve(
        compose([f"model={model}", "data=mock"]).run, Machine(cpu_cores=64, memory_bytes=1 << 50)
    )
    body = config_json(run.model, "bfloat16")
    table = tables(str(body["model_type"]), run.model)[0]
    ours = model_boxes(run)
    shapes = {
        n: s
        for step in export_match(table, run.model, ours).steps
        for n, s in shapes_of_theirs(step, run.model, ours).items()
    }
    out.mkdir()
    (out / "config.json").write_text(json.dumps(body))
    total = 0
    with Writer(out / "model.safetensors", shapes) as writer:
        for name, shape in shapes.items():
            data = np.resize(BLOCK, int(np.prod(shape))).tobytes()
            writer.write(name, "BF16", shape, memoryview(data))
            total += len(data)
        writer.close({"format": "pt"})
    return total


def raw(path: Path, size: int) -> tuple[float, float]:
    """Write `size` bytes to a file and wait for the disk; return wall and CPU seconds."""
    block = BLOCK.tobytes()
    begin = time.perf_counter()
    before = time.process_time()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    used = time.process_time() - before
    path.unlink()
    return seconds, used


def command(*words: object) -> tuple[float, float, float]:
    """Run a conversion; return wall and CPU seconds, and MiB of its largest process."""
    begin = time.perf_counter()
    done = subprocess.Popen(
        [sys.executable, str(LAUNCH), "convert", *map(str, words)], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(done.pid, 0)
    assert status == 0, "the conversion failed"
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    """Measure, print each round, and write the rounds to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama32_1b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where to write; a temporary folder if not given"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="convert-", dir=args.folder))
    rows = []
    try:
        # in another process: the kernel counts the peak of this one as that of its children
        with ProcessPoolExecutor(1) as other:
            size = other.submit(make, args.model, home / "theirs").result()
        start = command("inspect", home / "theirs")[0]
        for number in range(args.rounds):
            seconds, used = raw(home / "raw", size)
            row: dict[str, float] = {"raw_s": seconds, "raw_cpu_s": used, "start_s": start}
            for verb, words in (
                ("import", (home / "theirs", home / f"run{number}", "data=mock", "precision=bf16")),
                ("export", (home / f"run{number}", home / f"again{number}")),
            ):
                took, used, memory = command(verb, *words)
                row |= {f"{verb}_s": took, f"{verb}_cpu_s": used, f"{verb}_mib": memory}
                row[f"{verb}_of_raw"] = seconds / took
            for folder in (home / f"run{number}", home / f"again{number}"):
                shutil.rmtree(folder)
            rows.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if args.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        facts = {
            "model": args.model,
            "bytes": size,
            "commit": commit,
            "processor": platform.processor() or platform.machine(),
        }
        args.out.write_text(
            json.dumps({**facts, "command": " ".join(sys.argv), "rounds": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
