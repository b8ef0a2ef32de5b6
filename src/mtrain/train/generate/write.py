"""Text after prompts, from the model of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from mtrain import strict_json
from mtrain.assembly.model import build_model
from mtrain.ckpt import state as ckpt_state
from mtrain.config.schema.run import RunConfig
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import say_page
from mtrain.train.generate.request import Request
from mtrain.train.generate.sampler import Sampler
from mtrain.train.generate.texts import Written, continued, encoded
from mtrain.world.init import World, joined


def write(run: RunConfig, checkpoint: Path, tokenizer: Path, request: Request) -> None:
    """Print the text that the model of a checkpoint writes after each prompt, in the layout of
    `run`.

    Raises:
        CorruptData: the checkpoint or the tokenizer is not what was written.
    """
    with joined(run) as world:
        sampler = Sampler(run, world, restored(run, world, checkpoint), cache=request.cache)
        begin = time.perf_counter()
        known = Tokenizer(tokenizer)
        written = continued(sampler, known, request)
        seconds = time.perf_counter() - begin
        # The longest text decides whether a cache could be used.
        longest = (
            max(len(encoded(known, prompt)) for prompt in request.prompts) + request.sampling.tokens
        )
        if world.is_rank0:
            _print(
                written,
                seconds,
                sampler.obstacle_to(longest) if request.cache else "cache=false",
                request,
            )


def restored(run: RunConfig, world: World, checkpoint: Path) -> list[object]:
    """Return this rank's chunks of the model of a checkpoint, to run forward only."""
    chunks = build_model(run, world, wrap=False)
    ckpt_state.load_model(ckpt_state.opened(checkpoint, run, world), chunks)
    return chunks


def _print(written: Sequence[Written], seconds: float, why: str, request: Request) -> None:
    """Print texts and speed; `why` there was no cache of keys and values, if there was none."""
    tokens = sum(one.tokens for one in written)
    rate = tokens / seconds
    if request.as_json:
        texts = [vars(one) for one in written]
        speed = {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": rate,
            "no_cache": why or None,
        }
        say_page(strict_json.dumps({"texts": texts, **speed}, indent=2))
        return
    for i, one in enumerate(written):
        head = "" if len(written) == 1 else f"[{i + 1}] "
        say_page(head + (one.prompt if request.with_prompt else "") + one.text)
    # to stderr: stdout has the text only
    if why:
        say_page(f"note: nothing is kept of what was read: {why}", error=True)
    say_page(f"{tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s", error=True)
