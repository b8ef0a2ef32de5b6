"""Tokens per second of generation with a KV cache and without it.

    python benchmarks/generate.py [--prompt 8] [--tokens 512] [--threads 2] [--rows 1 8] [--out
    FILE] [OVERRIDES ...]

Both continue a prompt by the most likely token, on one rank, with one model of random weights, and
their tokens are compared. Without a cache, only one row is measured. A busy machine disturbs CPU
seconds least; with several threads they include waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from train_step import MODEL, circumstances

WORDS = [
    "model=llama_tiny",
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    "parallel=single",
    "data=mock",
    "data.seq_length=1024",
    "precision=fp32",
]
AGAIN = "no cache, 1 row"


def main() -> int:
    """Measure, print, and write the result to a file if one is named; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8], help="prompts that are computed together"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    overridden = {word.partition("=")[0] for word in options.overrides}
    words = [word for word in WORDS if word.partition("=")[0] not in overridden]
    words += options.overrides
    result = measured(words, options.prompt, options.tokens, options.rows, options.threads)
    result |= circumstances(options.threads)
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measured(
    words: list[str], prompted: int, tokens: int, rows: list[int], threads: int
) -> dict[str, Any]:
    """Return tokens per second of each, and the ratio for one prompt."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry
    from mtrain.launching import matmul

    adapter.install(registry.get("cpu"))
    import torch

    from mtrain.assembly.model import build_model
    from mtrain.plan.count import parameters
    from mtrain.train.generate.request import Sampling
    from mtrain.train.generate.sampler import Sampler
    from mtrain.world.init import joined

    run = matmul.chosen(load(words).run)
    prompt = [(i * i * 37 + 11) % 4096 for i in range(prompted)]
    greedy = Sampling(tokens, temperature=0)
    with joined(run) as world:
        torch.set_num_threads(threads)
        chunks = build_model(run, world, wrap=False)
        with torch.no_grad():
            for parameter in (p for chunk in chunks for p in chunk.parameters() if p.ndim > 1):
                parameter.mul_(8)  # logits that are apart, so that rounding decides nothing
        kept, again = (Sampler(run, world, chunks, cache=cache) for cache in (True, False))
        assert not kept.obstacle_to(prompted + tokens), kept.obstacle_to(prompted + tokens)
        clocks = {"wall": time.perf_counter, "cpu": time.process_time}
        rates: dict[str, dict[str, float]] = {clock: {} for clock in clocks}
        texts = dict[str, list[int]]()
        for name, sampler, count in [
            *((f"cache, {n} rows", kept, n) for n in rows),
            (AGAIN, again, 1),
        ]:
            sampler.continued([prompt] * count, Sampling(4, temperature=0))
            begin = {clock: read() for clock, read in clocks.items()}
            found = sampler.continued([prompt] * count, greedy)
            for clock, read in clocks.items():
                rates[clock][name] = count * tokens / (read() - begin[clock])
            assert found is not None
            texts[name] = found[0].ids
    return {
        "model": f"{run.model.name}, {parameters(run.model)} parameters, {run.precision.dtype}",
        "tokens": {"prompt": prompted, "added": tokens},
        "kernels.cpu_matmul": run.kernels.cpu_matmul,
        "tokens_a_second": {
            clock: {name: round(rate, 1) for name, rate in r.items()} for clock, r in rates.items()
        },
        "ratio_to_no_cache": {
            clock: {name: round(rate / r[AGAIN], 1) for name, rate in r.items()}
            for clock, r in rates.items()
        },
        "same_tokens": all(text == texts[AGAIN] for text in texts.values()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
