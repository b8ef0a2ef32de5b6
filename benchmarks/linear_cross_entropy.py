"""Time and peak memory of a linear layer with cross entropy in parts, against all logits at once.

    python benchmarks/linear_cross_entropy.py [--rounds 15] [--threads 2] [--out FILE]

Plain torch computes all logits at once. Each round runs forward and backward of both on the CPU, in
an order that alternates. A ratio is torch's seconds divided by those of the loss in parts (above 1:
the parts are faster), the median over the rounds with its quartiles, of wall and of CPU time.
`torch` is the faster of its two usual forms: in bf16, logits widened to fp32 or left as they are.
Peak memory is the growth of a separate process during the call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = ((1024, 384, 4096), (1024, 384, 32768))
DTYPES = ("fp32", "bf16")


def main() -> int:
    """Run the comparison and print it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.peak:
        name, dtype, *shape = options.peak
        print(peak(contenders(dtype, *map(int, shape))[name]))
        return 0
    cases = []
    for tokens, hidden, vocab in SHAPES:
        for dtype in DTYPES:
            case = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": dtype}
            cases.append(case | measured(dtype, (tokens, hidden, vocab), options.rounds))
            print(json.dumps(cases[-1]), flush=True)
    if options.out:
        from train_step import circumstances

        words = " ".join(["benchmarks/linear_cross_entropy.py", *sys.argv[1:]])
        facts = circumstances(options.threads) | {"command": f"python {words}"}
        options.out.write_text(json.dumps({"cases": cases, **facts}, indent=2) + "\n")
    return 0


def contenders(dtype: str, tokens: int, hidden: int, vocab: int) -> dict[str, Callable[[], None]]:
    """Return each way of computing the mean loss of the same numbers and its gradients."""
    import torch
    from mtrain_kernels.linear_cross_entropy.op import linear_cross_entropy
    from torch.nn import functional as F

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden).to(kind).requires_grad_()
    weight = (0.02 * torch.randn(vocab, hidden)).to(kind).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    share = torch.full((tokens,), 1 / tokens)

    def run(loss: Callable[[], Any]) -> Callable[[], None]:
        def once() -> None:
            x.grad = None
            weight.grad = None
            loss().backward()

        return once

    out = {
        "parts": run(lambda: linear_cross_entropy(x, weight, labels, share, impl="reference")[0]),
        "torch": run(lambda: F.cross_entropy(F.linear(x, weight), labels)),
    }
    if dtype == "bf16":
        out["torch in fp32"] = run(lambda: F.cross_entropy(F.linear(x, weight).float(), labels))
    return out


def measured(dtype: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Return the ratios of both clocks and the peaks of memory."""
    ways = contenders(dtype, *shape)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {c: {name: [] for name in ways} for c in clocks}
    for once in ways.values():
        once()
    for i in range(rounds):
        for name, once in list(ways.items())[:: 1 - 2 * (i % 2)]:
            begin = {c: clock() for c, clock in clocks.items()}
            once()
            for c, clock in clocks.items():
                seconds[c][name].append(clock() - begin[c])
    out: dict[str, Any] = {}
    for c, of in seconds.items():
        best = min(
            (name for name in ways if name != "parts"), key=lambda name: statistics.median(of[name])
        )
        ratios = [theirs / ours for theirs, ours in zip(of[best], of["parts"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = {name: statistics.median(values) for name, values in of.items()}
        out[c] = {
            "ratio": middle,
            "quartiles": [low, high],
            "against": best,
            "median_seconds": medians,
        }
    out["peak_mib"] = {name: _peak_of(name, dtype, shape) for name in ways}
    size = {"fp32": 4, "bf16": 2}[dtype]
    out["logits_mib"] = size * shape[0] * shape[2] / 2**20
    return out


def _peak_of(name: str, dtype: str, shape: tuple[int, int, int]) -> float:
    words = [
        sys.executable,
        __file__,
        "--threads",
        os.environ["OMP_NUM_THREADS"],
        "--peak",
        name,
        dtype,
    ]
    return float(
        subprocess.run(
            [*words, *map(str, shape)], check=True, capture_output=True, text=True
        ).stdout
    )


def peak(once: Callable[[], None]) -> float:
    """Return the MiB by which the peak of this process in the call exceeds its size before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _mib("VmRSS")
    once()
    return _mib("VmHWM") - before


def _mib(key: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    raise SystemExit(main())
