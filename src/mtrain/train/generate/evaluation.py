"""The loss of a checkpoint's model on a validation split."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain import strict_json
from mtrain.ckpt.state import TrainState
from mtrain.config.resolve.batches import asked
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.run import RunConfig
from mtrain.data import PromptSamples, Splits, validation_of
from mtrain.data.batch import GlobalBatches
from mtrain.data.samples.mock import MockSamples
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, say_page
from mtrain.models.registry import family_of
from mtrain.plan.teacher import has_reward_model
from mtrain.train.assemble import batches, grouped
from mtrain.train.generate.write import restored, restored_reference
from mtrain.train.hooks.evaluation import answers_line
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.dynamic import run_documents
from mtrain.train.loop.step import summed
from mtrain.train.rollouts.feed import RolloutFeed
from mtrain.train.rollouts.scores import build_reward_model
from mtrain.world.init import World, joined


@dataclass(frozen=True)
class Measured:
    """Cross entropy over some samples, the same whatever the layout."""

    loss: float
    """Nats per token; the loss of a pair if the objective is of pairs."""
    perplexity: float | None
    """None, as are the bits, where the loss is more than a cross entropy of tokens."""
    bits_per_token: float | None
    bits_per_byte: float | None
    """Per byte of the text that the tokens stand for; None without a tokenizer."""
    tokens: int
    """Predictions that count."""
    bytes: int | None
    samples: int
    seconds: float
    accuracy: float | None
    """`reward_accuracy`: the share of pairs, or of answers with labels, that are judged rightly;
    None without answers.
    """


def evaluate(
    run: RunConfig, checkpoint: Path, tokenizer: Path | None, limit: int | None, as_json: bool
) -> None:
    """Print the loss of a checkpoint's model on the validation split of `run`'s data, in its
    layout.

    Raises:
        ConfigError: the data has another tokenizer than the model, or no validation split.
        CorruptData: the checkpoint, the data or the tokenizer is damaged.
    """
    if run.objective.pairs and run.objective.reference == "precomputed":
        rule = "cannot score other answers than those of the run, whose reference is not kept"
        fix = "the valid_ metrics of the run"
        raise ConfigError.of("MT333", "objective.reference", "precomputed", rule, fix)
    if run.data.kind == "prompts" and not run.objective.judges:
        fix = "objective=grpo rewards=[exact], or data=text data.path=CORPUS"
        why = f"objective.name is {run.objective.name}"
        raise ConfigError.of("MT399", "data.kind", "prompts", why, fix)
    if run.objective.distils:
        # A student by itself is measured as any model is, by the text.
        run = run.model_copy(update={"objective": ObjectiveConfig()})
    with joined(run) as world:
        splits = validation_of(
            run.data, run.model.vocab_size, run.trainer.seed, tokenizer, asked(run)
        )
        chunks = restored(run, world, checkpoint)
        if isinstance(splits.validation, PromptSamples):
            means = judged(run, world, chunks, splits, limit)
            if world.is_rank0:
                words = f"{answers_line(means)} in {means['seconds']:.1f} s"
                say_page(strict_json.dumps(means, indent=2) if as_json else words)
            return
        reference = restored_reference(run, world, checkpoint)
        result = measured(run, world, chunks, splits, tokenizer, limit, reference)
        if world.is_rank0:
            say_page(strict_json.dumps(vars(result), indent=2) if as_json else _page(result))


def judged(
    run: RunConfig, world: World, chunks: list[Any], splits: Splits, limit: int | None
) -> dict[str, float]:
    """Return the metrics of answers to the validation split, at most `limit`, sampled by the model
    itself.
    """
    assert isinstance(splits.validation, PromptSamples)
    begin = time.perf_counter()
    grouped(run, splits)
    run = run.model_copy(update={"rollout": run.rollout.model_copy(update={"engine": "local"})})
    state = TrainState(chunks, None, None)
    if has_reward_model(run):
        state.reward_model, _ = build_reward_model(run, world)
    data = batches(run, world, splits, "validation")
    context = TrainContext(run, world, state, data, None)
    context.tokenizer = splits.tokenizer
    with closing(RolloutFeed(context)) as feed:
        found = feed.evaluated(splits.validation, limit or len(splits.validation))
    return {**found, "seconds": time.perf_counter() - begin}


def measured(
    run: RunConfig,
    world: World,
    chunks: list[object],
    splits: Splits,
    tokenizer: Path | None,
    limit: int | None,
    reference: Sequence[object] = (),
) -> Measured:
    """Return the loss over the first `limit` samples of the validation split, or all; of
    synthetic tokens, over as many as the run evaluates.
    """
    assert splits.validation is not None
    begin = time.perf_counter()
    whole = len(splits.validation)
    if isinstance(splits.validation, MockSamples):
        # Synthetic samples never end: as many as an evaluation of the run has.
        whole = max(1, run.trainer.eval_iters) * run.trainer.batch
    dynamic = run.parallel.hybrid_context_parallel
    data = batches(run, world, splits, "validation", whole if limit is None else min(limit, whole))
    state = TrainState(chunks, None, None, reference=list(reference))
    context = TrainContext(run, world, state, data, data, run_documents if dynamic else None)
    iters = data.steps
    means = summed(context, data, iters)
    assert means is not None  # only a request to stop returns None, and none is heeded here
    loss = means["loss"]
    tokens = int(means["tokens"])
    text_bytes = None
    if tokenizer is not None and run.data.kind != "mock":
        text_bytes = _bytes(world, data, iters, Tokenizer(tokenizer), alone=dynamic)
    plain = family_of(run.model).tokens_alone(run.model) and not run.objective.pairs
    return Measured(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)) if plain else None,
        bits_per_token=loss / math.log(2) if plain else None,
        bits_per_byte=loss * tokens / math.log(2) / text_bytes if text_bytes and plain else None,
        tokens=tokens,
        bytes=text_bytes,
        samples=data.counted,
        seconds=time.perf_counter() - begin,
        accuracy=means.get("reward_accuracy"),
    )


def _bytes(
    world: World, data: GlobalBatches, iters: int, tokenizer: Tokenizer, *, alone: bool
) -> int:
    """Return the bytes of the predicted text: of the labels whose loss counts, over all
    data-parallel ranks.
    """
    total = torch.zeros(1, dtype=torch.int64, device=world.torch_device)
    if not any(world.coords[axis] for axis in ("tp", "cp", "pp", *(("dp",) if alone else ()))):
        # Count ids first: a table of bytes per id makes one product of it.
        counts = np.zeros(max(tokenizer.vocab_size, 1), np.int64)
        for i in range(iters):
            for batch in data.microbatches(i * data.global_batch_size):
                labels = batch["labels"][batch["loss_mask"] > 0].numpy()
                counts += np.bincount(labels[labels < len(counts)], minlength=len(counts))
        total += int(counts @ tokenizer.byte_counts)
    dist.all_reduce(total)
    return int(total)


def _page(result: Measured) -> str:
    # no tokenizer, or tokens that stand for no bytes
    if result.bits_per_byte is None:
        per_byte = ""
    else:
        per_byte = f", {result.bits_per_byte:.4f} bits per byte of {result.bytes}"
    first = f"loss {result.loss:.4f} nats per token"
    if result.accuracy is not None:
        first = f"loss {result.loss:.4f}, accuracy {result.accuracy:.1%}"
    if result.perplexity is not None:
        first += (
            f", perplexity {result.perplexity:.2f}\n{result.bits_per_token:.4f} bits per"
            f" token{per_byte}"
        )
    return (
        f"{first}\n"
        f"{result.tokens} tokens of {result.samples} samples in {result.seconds:.1f} s, "
        f"{result.tokens / result.seconds:.0f} tokens/s"
    )
