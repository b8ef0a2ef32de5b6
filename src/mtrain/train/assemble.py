"""A run on one rank, from its configuration to its end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from mtrain import units
from mtrain.assembly.kernel_variants import use_measured
from mtrain.assembly.model import build_model
from mtrain.assembly.optim import build_optimizer, build_schedule
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt.state import TrainState
from mtrain.ckpt.store import Checkpoint
from mtrain.config.compose.paths import CHECKPOINTS, user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits, open_splits, prepare_for_model, same_data
from mtrain.data.batch import GlobalBatches
from mtrain.data.chats.template import FILES as CHAT_FILES
from mtrain.data.chats.template import TEMPLATE_FILE
from mtrain.data.samples.evaluated import evaluation_samples
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import BadEnvironment, CorruptData, MtrainError, warn
from mtrain.mcore.adapter.ahead import stay_on_device
from mtrain.mcore.state.sharding import gathered
from mtrain.models.registry import family_of, imported, probed
from mtrain.plan.count import adapter_parameters, parameters
from mtrain.train.generate.sampler import Sampler
from mtrain.train.generate.texts import encoded
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.checkpoints import Checkpoints
from mtrain.train.hooks.evaluation import Evaluation
from mtrain.train.hooks.graphs import Graphs
from mtrain.train.hooks.memory import Memory
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.hooks.planned import Planned
from mtrain.train.hooks.profile import Profile
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.dynamic import run_documents
from mtrain.train.loop.interruptions import StopRequest
from mtrain.train.loop.step import TrainContext
from mtrain.train.loop.trainer import Trainer, reason
from mtrain.world.init import World, joined
from mtrain.world.rank_env import End
from mtrain.world.stacks import ERRORS
from mtrain.world.watchdog import watching

TOKENIZER_FILE = "tokenizer.json"
STOPPED = "stopped on request"
T = TypeVar("T")


@dataclass(frozen=True)
class Paths:
    """Where a run writes, and what it goes on from."""

    folder: Path
    checkpoint: Path | None = None
    weights: Path | None = None
    """The checkpoint whose weights alone a new run begins with."""
    cpu_matmul: str | None = None
    """`kernels.cpu_matmul`, where it is decided together with them."""


class Apart(Exception):
    """A rank of a finished run failed alone, so the ranks can no longer end together; nothing is
    lost by it.
    """


def train(run: RunConfig, locate: Callable[[World], Paths], end: End) -> bool:
    """Train on this rank: join the others, build, resume, fit, and show what came out.

    `locate` says where to write and what to resume from, the same on every rank; `end` ends this
    process where it hangs.

    Returns:
        Whether the ranks ended together. Otherwise only the text sample failed, and the process is
        to end at once: it still holds groups of ranks that are gone.

    Raises:
        MtrainError: see `joined`, `Trainer.fit` and `Checkpoint.open`.
    """
    stop = StopRequest()
    stop.listen(run.trainer.stop_signals)
    try:
        with joined(run) as world:
            paths = locate(world)
            if paths.cpu_matmul is not None:
                run = run.model_copy(
                    update={
                        "kernels": run.kernels.model_copy(update={"cpu_matmul": paths.cpu_matmul})
                    }
                )
            use_measured(run, world)
            splits = splits_of(run, paths.checkpoint or paths.weights)
            if world.is_rank0:
                _keep_tokenizer(
                    splits, paths.folder, named_tokenizer(run, paths.checkpoint or paths.weights)
                )
            errors = paths.folder / ERRORS
            with watching(run, world, errors, end):
                context = assemble(run, world, splits)
                context.stop = stop
                progress = Progress(run, speaks=world.is_rank0)
                checkpoint = _run(context, splits, paths, progress)
            with watching(run, world, errors, _end_of_sample):
                _show_sample(context, splits, checkpoint, progress)
    except Apart:
        return False
    return True


def _run(context: TrainContext, splits: Splits, paths: Paths, progress: Progress) -> Path | None:
    """Resume and fit; returns the checkpoint that holds the weights as they are now, if
    one does.
    """
    run = context.run
    if paths.checkpoint is not None:
        _resume(context, paths.checkpoint, splits, progress)
    elif paths.weights is not None:
        _load(
            context,
            paths.weights,
            lambda checkpoint: ckpt_state.load_weights(checkpoint, context.state),
        )
        progress.note(f"weights from {paths.weights}")
    context.begin()
    plan = Planned(paths.folder, progress)
    metrics = Metrics(paths.folder, plan.beside)
    evaluation = Evaluation(metrics, progress)
    checkpoints = Checkpoints(paths.folder / CHECKPOINTS, progress, splits.describe())
    # a step's line comes before its checkpoint, so that no resumed run misses it; what may end a
    # run comes after
    chain: list[Hook] = [
        metrics,
        progress,
        checkpoints,
        evaluation,
        Memory(paths.folder),
        plan,
    ]
    if run.trainer.profile_step:
        chain.insert(0, Profile(paths.folder, run.trainer.profile_step, run.trainer.profile_ranks))
    if run.trainer.cuda_graph_impl == "transformer_engine":
        chain.append(Graphs(run))
    _introduce(context, splits, progress)
    begun_at = context.state.step
    Trainer(context, chain).fit()
    evaluated = evaluation.last
    comparable = family_of(run.model).tokens_alone(run.model)
    entropy = splits.unigram_entropy_nats if comparable else None
    if evaluated is not None and evaluated[0] == context.state.step and entropy is not None:
        loss = evaluated[1]
        side = "below" if loss < entropy else "not below"
        progress.note(
            f"final validation loss {loss:.4f} nats, {side} the corpus' unigram entropy"
            f" {entropy:.4f}"
        )
    if checkpoints.saved_step != context.state.step:
        return None
    return checkpoints.path or (paths.checkpoint if context.state.step == begun_at else None)


def splits_of(run: RunConfig, checkpoint: Path | None = None) -> Splits:
    """Return the train, validation and test samples of a run; tokenizes a text corpus where no
    launcher did it before, with the tokenizer of the model in `checkpoint`.
    """
    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    own = model_tokenizer(run, checkpoint)
    accept = run.checkpoint.accept_changes
    corpus = prepare_for_model(run.data, own, accept_changes=accept)
    return open_splits(run.data, run.model.vocab_size, run.trainer.seed, corpus, need, asked(run))


def named_tokenizer(run: RunConfig, checkpoint: Path | None = None) -> Path | None:
    """Return the tokenizer.json that a configuration names, else that of the model in `checkpoint`;
    None: one is trained.
    """
    return user_path(run.data.tokenizer) if run.data.tokenizer else model_tokenizer(run, checkpoint)


def assemble(run: RunConfig, world: World, splits: Splits, *, drawn: bool = True) -> TrainContext:
    """Model, optimizer, schedule and data of this rank, at step 0; weights have values if they are
    `drawn`.
    """
    chunks = build_model(run, world, drawn=drawn)
    optimizer = build_optimizer(run, chunks)
    configure_schedule_hooks(run, chunks, optimizer)
    if world.device.runs_ahead:
        stay_on_device(chunks[0].config)
    state = TrainState(chunks, optimizer, build_schedule(run, optimizer))
    train_data = batches(run, world, splits, "train")
    valid_data = None
    if run.trainer.eval_iters and splits.validation is not None:
        valid_data = batches(
            run, world, splits, "validation", run.trainer.eval_iters * run.trainer.batch
        )
    dynamic = run.parallel.hybrid_context_parallel
    return TrainContext(
        run, world, state, train_data, valid_data, run_documents if dynamic else None
    )


def batches(
    run: RunConfig, world: World, splits: Splits, part: str, limit: int | None = None
) -> GlobalBatches:
    """This rank's share of the steps over the `train` samples, or over the first `limit` ones of
    `validation`, as the model's family learns from them. What is evaluated is averaged over tokens,
    and each sample counts once.
    """
    collator = imported(family_of(run.model).collator)(run, splits, part)
    # dynamic context parallelism deals documents out after they are read
    share = (0, 1) if run.parallel.hybrid_context_parallel else (world.coords["dp"], world.grid.dp)
    average = run.trainer.loss_average if part == "train" else "token"
    micro = run.trainer.micro
    balanced = run.data.packed and run.data.packing_scheduler == "dp_balanced"
    # an evaluation is of the next token
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


def logits(run: RunConfig, checkpoint: Path, ids: Sequence[int], out: Path) -> None:
    """Save the logits of a checkpoint's model after each of `ids`, fp32 [tokens, vocabulary], as
    plain numbers; the model's family may put something among them, an image for one.

    On one rank alone.

    Raises:
        CorruptData: the checkpoint is not what was written.
    """
    with joined(run) as world:
        (chunk,) = build_model(run, world, wrap=False)
        ckpt_state.load_model(Checkpoint.open(checkpoint, verify=False), [chunk])
        chunk.eval()
        ids, more, _ = probed(run.model, ids)
        with torch.no_grad():
            found = chunk(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), None, **more)
        found[0, :, : run.model.vocab_size].float().numpy().tofile(out)


def _resume(context: TrainContext, path: Path, splits: Splits, progress: Progress) -> None:
    """Put a checkpoint's state back.

    Each rank verifies what it reads; what one finds damaged ends all of them.
    """

    def put_back(checkpoint: Checkpoint) -> bool:
        saved = checkpoint.state.get("data")
        if saved is not None and not context.run.checkpoint.accept_changes:
            same_data(saved, splits.describe())
        return ckpt_state.load(
            checkpoint, context.world, context.state, seed=context.run.trainer.seed
        )

    checkpoint, restored = _load(context, path, put_back)
    progress.note(
        f"resumed from {path}: step {context.state.step}, "
        f"{context.state.consumed_samples} samples used"
    )
    if not restored:
        moved = checkpoint.state["grid"] != context.world.grid.sizes
        why = "the layout changed" if moved else "the ranks of this older checkpoint all drew alike"
        progress.note(f"{why}: random generators start from the seed and the step")


def _load(
    context: TrainContext, path: Path, put_back: Callable[[Checkpoint], T]
) -> tuple[Checkpoint, T | None]:
    """Open a checkpoint and put back what is asked for; damage that one rank finds ends all of
    them.
    """
    damage = ""
    done = None
    checkpoint = Checkpoint(path, {})
    try:
        checkpoint = ckpt_state.opened(path, context.run, context.world)
        done = put_back(checkpoint)
    except (CorruptData, BadEnvironment) as found:
        damage = f"{type(found).__name__}\n{found}"
    # over the store: a rank may wait for longer than a collective would
    kind, *lines = ckpt_state.meeting_of(context.world, context.run).barrier(damage).split("\n")
    if kind:
        error = BadEnvironment(*lines) if kind == BadEnvironment.__name__ else CorruptData(*lines)
        error.shared = True
        raise error
    return checkpoint, done


def _keep_tokenizer(splits: Splits, folder: Path, named: Path | None) -> None:
    """Put the tokenizer, and what its folder says of chats and of its tokens, beside what it is
    needed to read: the corpus may be gone when text is generated. `named` is the tokenizer that was
    asked for, of which a corpus in the cache has a copy.
    """
    if splits.tokenizer is not None:
        beside = named or splits.tokenizer
        try:
            _forget_another(splits.tokenizer, folder)
            for name in (TOKENIZER_FILE, *CHAT_FILES):
                source = beside.with_name(name) if name != TOKENIZER_FILE else splits.tokenizer
                if name == TEMPLATE_FILE and splits.corpus.template is not None:
                    source = splits.corpus.template
                if name == TOKENIZER_FILE or source.is_file():
                    draft = folder / f".{name}"
                    shutil.copyfile(source, draft)
                    draft.replace(folder / name)
        except OSError as error:
            warn(
                f"{folder / TOKENIZER_FILE} cannot be written ({error.strerror}): generate will not"
                " find it"
            )


def _forget_another(tokenizer: Path, folder: Path) -> None:
    """Remove what a folder has beside another tokenizer than this one."""
    held = folder / TOKENIZER_FILE
    if held.is_file() and held.read_bytes() != tokenizer.read_bytes():
        for name in CHAT_FILES:
            (folder / name).unlink(missing_ok=True)


def _introduce(context: TrainContext, splits: Splits, progress: Progress) -> None:
    run = context.run
    world = context.world
    counts = sorted(
        {size // (run.trainer.micro * world.grid.dp) for _, size in context.batch_sizes}
    )
    batch = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    trained = sum(adapter_parameters(run))
    adapters = f" that are frozen, adapters of {units.count(trained)}" if trained else ""
    progress.note(
        f"{run.model.name}: {units.count(parameters(run.model))} parameters{adapters}, {world.grid}"
        f" on {world.size} {world.device.name} ranks, {run.precision.words}, {batch} micro-batches"
        " per step"
    )
    for remark in splits.remarks():
        progress.note(remark)
    tokens = splits.describe().get("tokens")
    if tokens is not None and splits.unigram_entropy_nats is not None:
        progress.note(
            f"data: {units.count(tokens)} tokens, unigram entropy {splits.unigram_entropy_nats:.4f}"
            " nats"
        )


def _show_sample(
    context: TrainContext, splits: Splits, checkpoint: Path | None, progress: Progress
) -> None:
    """Let the model write from the checkpoint that was saved.

    The run is finished and saved: a failure is a warning, and a stop ends the text.

    Raises:
        Apart: this rank failed where others wait for it.
    """
    run = context.run
    world = context.world
    chunks = context.state.chunks
    if not run.trainer.sample_tokens or splits.tokenizer is None or not family_of(run.model).writes:
        return
    try:
        with gathered(chunks):
            sampler = Sampler(run, world, chunks)
            problem = ""
            ids: list[int] = []
            try:
                ids = encoded(Tokenizer(splits.tokenizer), run.trainer.sample_prompt)
                if context.stop_requested:
                    problem = STOPPED
            except Exception as error:
                problem = reason(error) or "it is not known why"
            found = None
            problem = world.first_problem(problem)
            if not problem and sampler.context and checkpoint is not None:
                try:
                    ckpt_state.load_model(ckpt_state.opened(checkpoint, run, world), chunks)
                except Exception as error:
                    problem = reason(error) or "it is not known why"
                problem = world.first_problem(problem)
            if not problem:
                stop = partial(getattr, context, "stop_requested")
                found = sampler.generate(ids, run.trainer.sample_tokens, temperature=0.8, stop=stop)
    except Exception as error:
        with suppress(
            RuntimeError
        ):  # torch's errors of a store: it ended with a rank that has said why
            if world.store.add("sample failed", 1) == 1:
                _warn_of_sample(f"rank {world.rank}: {reason(error)}")
        raise Apart from error
    if not world.is_rank0:
        return
    if problem and problem != STOPPED:
        _warn_of_sample(problem)
    elif found is None:
        progress.note(f"{STOPPED}: the run is finished, its sample is left out")
    else:
        if checkpoint is not None:
            source = checkpoint.name
        else:
            source = "the trained weights, which were not saved"
        try:
            progress.note(f"sample from {source}:\n{Tokenizer(splits.tokenizer).decode(found)}")
        except Exception as error:  # the file of the tokenizer may be gone
            _warn_of_sample(reason(error))


def _warn_of_sample(why: str) -> None:
    warn(f"no text sample: {why}; the run itself is finished")


def _end_of_sample(error: MtrainError, speaks: bool) -> None:
    """End a process, from any thread, that hangs in the sample of a finished run."""
    if speaks:
        os.write(2, f"warning: no text sample: {error}; the run itself is finished\n".encode())
    os._exit(0)
