"""Assembly of a run on one rank: model, optimizer, schedule and data at step 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtrain.assembly.model import build_model, build_reference
from mtrain.assembly.optim import build_optimizer, build_schedule
from mtrain.ckpt.state import TrainState, begin_reference
from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.config.schema.run import RunConfig
from mtrain.data import PromptSamples, Splits, open_splits, prepare_for_model
from mtrain.data.batch import GlobalBatches, evaluation_samples
from mtrain.mcore.adapter.ahead import stay_on_device
from mtrain.models.registry import family_of, imported
from mtrain.plan.teacher import has_reward_model
from mtrain.train.critic_model import build_critic
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.dynamic import run_documents
from mtrain.train.precomputed import prepare
from mtrain.train.rollouts.feed import RolloutFeed, answered
from mtrain.train.rollouts.scores import build_reward_model
from mtrain.train.teacher import build_teacher, digest_of, read_instead
from mtrain.world.init import World


def splits_of(run: RunConfig, checkpoint: Path | None = None) -> Splits:
    """Return the train, validation and test samples of a run; tokenizes a text corpus where no
    launcher did it before, with the tokenizer of the model in `checkpoint`.
    """
    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    own = model_tokenizer(run, checkpoint)
    accept = run.checkpoint.accept_changes
    corpus = prepare_for_model(run.data, own, accept_changes=accept)
    splits = open_splits(run.data, run.model.vocab_size, run.trainer.seed, corpus, need, asked(run))
    grouped(run, splits)
    return splits


def grouped(run: RunConfig, splits: Splits) -> None:
    """Tell prompts how many answers each gets.

    Raises ConfigError if a prompt and an answer may not fit in a sample.
    """
    for samples in (splits.train, splits.validation):
        if isinstance(samples, PromptSamples):
            samples.group = run.objective.whole
            samples.require_room(run.rollout.tokens(run.data.length))


def named_tokenizer(run: RunConfig, checkpoint: Path | None = None) -> Path | None:
    """Return the tokenizer.json that a configuration names, else that of the model in `checkpoint`;
    None: the corpus trains one.
    """
    return user_path(run.data.tokenizer) if run.data.tokenizer else model_tokenizer(run, checkpoint)


def assemble(run: RunConfig, world: World, splits: Splits, *, drawn: bool = True) -> TrainContext:
    """Return model, optimizer, schedule and data of this rank, at step 0; unless `drawn`, weights
    have no values.
    """
    chunks = build_model(run, world, drawn=drawn)
    optimizer = build_optimizer(run, chunks)
    configure_schedule_hooks(run, chunks, optimizer)
    if world.device.runs_ahead:
        stay_on_device(chunks[0].config)
    state = TrainState(chunks, optimizer, build_schedule(run, optimizer))
    if run.objective.copies:
        state.reference = build_reference(run, world)
        begin_reference(state)
    if run.objective.taught_live:
        state.teacher = build_teacher(run, world, drawn=drawn)
        state.teacher_digest = digest_of(run)
    if has_reward_model(run):
        state.reward_model, state.teacher_digest = build_reward_model(run, world, drawn=drawn)
    train_data = batches(run, world, splits, "train")
    valid_data = None
    # An evaluation needs answers, too: it has no batches of its own.
    evaluates = run.trainer.eval_iters and not run.objective.rolls
    if evaluates and splits.validation is not None:
        limit = run.trainer.eval_iters * run.trainer.batch
        valid_data = batches(run, world, splits, "validation", limit)
    if run.objective.teacher_file is not None:
        parts = {"train": train_data, "validation": valid_data}
        state.teacher_digest = read_instead(run, splits, parts)
    schedule = run_documents if run.parallel.hybrid_context_parallel else None
    context = TrainContext(run, world, state, train_data, valid_data, schedule)
    critic = build_critic(context, drawn=drawn)
    if critic is not None:
        configure_schedule_hooks(run, critic.state.chunks, critic.state.optimizer)
        if world.device.runs_ahead:
            stay_on_device(critic.state.chunks[0].config)
        context.critic = critic
        state.critic = critic.state
        state.critic_is_given = run.objective.critic is not None
    if isinstance(splits.train, PromptSamples):
        context.tokenizer = splits.tokenizer
        context.feed = RolloutFeed
        judges = run.objective.judges and run.trainer.eval_iters
        if judges and isinstance(splits.validation, PromptSamples):
            wanted = run.trainer.eval_iters * run.trainer.batch
            context.valid_answers = partial(answered, splits.validation, wanted)
    if run.objective.reference == "precomputed" and run.objective.refers:
        context.prepare = prepare
        for part, data in (("train", train_data), ("validation", valid_data)):
            if data is not None:
                size = len(data.samples)
                state.scores[part] = torch.zeros(size, dtype=torch.float64)
    return context


def batches(
    run: RunConfig, world: World, splits: Splits, part: str, limit: int | None = None
) -> GlobalBatches:
    """Return this rank's share of the steps over the `train` samples, or over the first `limit`
    samples of `validation`, as the model's family learns from them.

    An evaluation is averaged over tokens, and each sample counts once.
    """
    collator = imported(family_of(run.model).collator)(run, splits, part)
    share = (world.coords["dp"], world.grid.dp)
    # Dynamic context parallelism distributes documents after every rank has read all of them.
    if run.parallel.hybrid_context_parallel:
        share = (0, 1)
    average: str = run.trainer.loss_average if part == "train" else "token"
    if run.objective.rolls:
        average = "token"  # the collator has weighed them
    if run.objective.pairs:
        average = "pair" if run.objective.contrasts else "answer"
    micro = run.trainer.micro
    balanced = run.data.packed and run.data.packing_scheduler == "dp_balanced"
    # An evaluation is of the next token only.
    depths = (run.model.mtp_num_layers or 0) if part == "train" else 0
    samples = getattr(splits, part)
    size = run.trainer.batch
    samples = samples if limit is None else evaluation_samples(samples, limit)
    return GlobalBatches(samples, size, micro, *share, collator, limit, average, balanced, depths)


def configure_schedule_hooks(run: RunConfig, chunks: list[Any], optimizer: Any) -> None:
    """Tell megatron-core's schedules how to scale the loss, and when to start and finish reducing
    gradients.
    """
    from mtrain.mcore import api as mcore

    config = chunks[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = mcore.finalize_model_grads
    # megatron-core's FSDP learns from it which micro-batch is the last; without sharded gradients
    # it must not
    sharded = run.parallel.fsdp == "megatron" and run.parallel.fsdp_sharding != "optim"
    if run.parallel.overlap_grad_reduce or sharded:
        config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
        if len(chunks) > 1:
            config.grad_sync_func = [c.start_grad_sync for c in chunks]
    if run.parallel.overlap_param_gather and len(chunks) > 1:
        config.param_sync_func = [c.start_param_sync for c in chunks]
