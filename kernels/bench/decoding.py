"""Tokens per second of one request, and of several, with captured steps, with steps that Python
issues, and with the host between tokens; all three draw the same tokens.

    python kernels/bench/decoding.py [--tokens 256] [--rows 1] [--least RATE] [OVERRIDES ...]

The weights are random, times a factor that keeps logits apart. Exits with 1 if tokens differ, if
the device captures and nothing was captured, or if captured steps are slower than `--least` tokens
per second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

WORDS = ("model=llama_tiny", "parallel=single", "data=mock", "data.seq_length=1024")
PROMPT = 8
LIVELY = 8.0


def main() -> int:
    """Measure, print a line of JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1, help="prompts that are computed together")
    parser.add_argument("--least", type=float, default=0.0, help="captured tokens per second")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_args()
    own = {word.partition("=")[0] for word in options.overrides}
    words = [word for word in WORDS if word.partition("=")[0] not in own]
    found = measured([*words, *options.overrides], options.tokens, options.rows)
    print(json.dumps(found))
    wrong = [key for key in ("drawn alike", "captured") if found[key] is False]
    slow = found["captured"] and found["tokens_per_s"]["captured"] < options.least
    if slow:
        wrong.append(f"captured steps are slower than {options.least:g} tokens/s")
    if not wrong:
        print("captured as issued" if found["captured"] else "no capture here")
    return 1 if wrong else 0


def measured(words: list[str], tokens: int, rows: int) -> dict[str, Any]:
    """Return the rates of each way over all rows, without compilation and captures."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry
    from mtrain.launching import matmul

    run = matmul.chosen(load(words).run)
    adapter.install(registry.get(run.cluster.device))
    from mtrain.assembly.model import build_model
    from mtrain.train.generate.request import Sampling
    from mtrain.train.generate.sampler import Sampler
    from mtrain.world.init import joined

    prompts = [[(i * i * 37 + 11 + row) % 4096 for i in range(PROMPT)] for row in range(rows)]
    rates: dict[str, float] = {}
    texts: dict[str, list[list[int]]] = {}
    with joined(run) as world, torch.no_grad():
        chunks = build_model(run, world, wrap=False)
        for parameter in (p for chunk in chunks for p in chunk.parameters() if p.ndim > 1):
            parameter.mul_(LIVELY)
        ways = {
            "captured": Sampler(run, world, chunks, captures=True),
            "issued": Sampler(run, world, chunks),
            "each token": Sampler(run, world, chunks, blocks=False),
        }
        begin = time.perf_counter()
        for name, sampler in ways.items():
            for sampling in (Sampling(tokens, 0.8, top_k=50, seed=1), Sampling(tokens, 0)):
                drawn = sampler.continued(prompts, sampling)
                first_s = time.perf_counter() - begin
                begin = time.perf_counter()
                again = sampler.continued(prompts, sampling)
                took_s = time.perf_counter() - begin
                assert drawn is not None
                assert drawn == again
            texts[name] = [text.ids for text in drawn]
            rates[name] = round(rows * tokens / took_s, 1)
        obstacle = ways["captured"].graph_obstacle()
        captures = world.device.captured is not None
    return {
        "model": run.model.name,
        "rows": rows,
        "tokens_per_s": rates,
        "last first call, s": round(first_s, 2),
        "drawn alike": texts["captured"] == texts["issued"],
        "alike with the host between tokens": texts["captured"] == texts["each token"],
        "captured": (not obstacle) if captures else None,
        "why not": obstacle,
    }


if __name__ == "__main__":
    sys.exit(main())
