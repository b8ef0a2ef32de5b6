"""Text after prompts, from the model of a checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from mtrain import strict_json
from mtrain.assembly.model import build_model, build_reference
from mtrain.ckpt import state as ckpt_state
from mtrain.config.schema.run import RunConfig
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.train.generate.request import Request
from mtrain.train.generate.sampler import Sampler
from mtrain.train.generate.texts import continued, encoded
from mtrain.world.init import World, joined


def write(
    run: RunConfig, checkpoint: Path, tokenizer: Path, request: Request, output: Path
) -> None:
    """Continue each prompt with the model of a checkpoint, in the layout of `run`; rank 0 writes
    the fields of `Texts` to `output`, as JSON.

    Raises:
        CorruptData: the checkpoint or the tokenizer is not as it was written.
    """
    with joined(run) as world:
        chunks = restored(run, world, checkpoint)
        sampler = Sampler(run, world, chunks, cache=request.cache, captures=True)
        begin = time.perf_counter()
        known = Tokenizer(tokenizer)
        texts = [asdict(one) for one in continued(sampler, known, request)]
        seconds = time.perf_counter() - begin
        longest = max(len(encoded(known, prompt)) for prompt in request.prompts)
        why = "cache=false"
        if request.cache:
            why = sampler.obstacle_to(longest + request.sampling.tokens)
        if world.is_rank0:
            facts = {
                "texts": texts,
                "seconds": seconds,
                "no_cache": why,
                "no_graph": "" if why else sampler.graph_obstacle(),
                "steady_tokens_per_s": sampler.steady_tokens_per_s(),
            }
            output.write_text(strict_json.dumps(facts), encoding="utf-8")


def restored(run: RunConfig, world: World, checkpoint: Path) -> list[object]:
    """Return this rank's chunks of the model of a checkpoint, to run forward only."""
    chunks = build_model(run, world, wrap=False)
    ckpt_state.load_model(ckpt_state.opened(checkpoint, run, world), chunks)
    return chunks


def restored_reference(run: RunConfig, world: World, checkpoint: Path) -> list[object]:
    """Return this rank's chunks of the frozen reference of a checkpoint; empty if the run has none.

    Raises:
        CorruptData: the checkpoint has no reference.
    """
    if not run.objective.copies:
        return []
    state = ckpt_state.TrainState([], None, None, reference=build_reference(run, world))
    ckpt_state.opened(checkpoint, run, world).load(ckpt_state.reference_shards(state))
    return state.reference
