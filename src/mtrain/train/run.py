"""A run on one rank, from its configuration to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from mtrain import startup, units
from mtrain.assembly.kernel_variants import use_measured
from mtrain.assembly.model import build_model
from mtrain.ckpt import local as ckpt_local
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt.folder import reading
from mtrain.ckpt.saving.process import WriterProcess
from mtrain.ckpt.store import Checkpoint
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits, same_data
from mtrain.errors import BadEnvironment, CorruptData
from mtrain.models.registry import probed
from mtrain.plan.count import adapter_parameters, parameters
from mtrain.plan.teacher import teacher_of
from mtrain.train.assemble import assemble, named_tokenizer, splits_of
from mtrain.train.hooks import optional
from mtrain.train.hooks.alerts import Alerts
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.checkpoints import Checkpoints
from mtrain.train.hooks.evaluation import Evaluation
from mtrain.train.hooks.exports import Exports
from mtrain.train.hooks.graphs import Graphs
from mtrain.train.hooks.injected import Injected
from mtrain.train.hooks.life import Life, life_of
from mtrain.train.hooks.memory import Memory, MemorySamples
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.hooks.out_of_memory import OutOfMemory
from mtrain.train.hooks.planned import Planned
from mtrain.train.hooks.profile import Profile
from mtrain.train.hooks.progress import Progress
from mtrain.train.hooks.replicas import Replicas
from mtrain.train.hooks.sample import RanksApart, Sample, end_after_run
from mtrain.train.hooks.sinks import Sinks
from mtrain.train.hooks.startup import Startup
from mtrain.train.hooks.statistics import Statistics
from mtrain.train.hooks.stragglers import Stragglers
from mtrain.train.hooks.tokenizer import KeepTokenizer
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.interruptions import StopRequest
from mtrain.train.loop.trainer import Trainer
from mtrain.train.suspects.rerun import Suspects
from mtrain.train.suspects.tracing import Tracing
from mtrain.train.teacher import same_teacher
from mtrain.world import faults
from mtrain.world.abandon import track
from mtrain.world.init import World, joined
from mtrain.world.rank_env import End, RankEnv
from mtrain.world.stacks import ERRORS
from mtrain.world.watchdog import watching

T = TypeVar("T")


@dataclass(frozen=True)
class Paths:
    """The folder that a run writes to, and the checkpoints that it begins with."""

    folder: Path
    checkpoint: Path | None = None
    weights: Path | None = None
    """The checkpoint from which a new run takes only the weights."""
    cpu_matmul: str | None = None
    """`kernels.cpu_matmul`, if it is decided together with the paths."""


def train(
    run: RunConfig,
    locate: Callable[[World], Paths],
    end: End,
    stop: StopRequest | None = None,
) -> bool:
    """Train on this rank: join the others, assemble, resume, fit, and show the result.

    `locate` returns the paths, the same on every rank; `end` ends this process where it hangs;
    `stop` are the requests to stop so far.

    Returns:
        Whether the ranks ended together. Otherwise only the text sample failed, and the process has
        to end at once: it still holds groups of ranks that are gone.

    Raises:
        MtrainError: see `joined`, `Trainer.fit` and `Checkpoint.open`.
    """
    startup.mark(startup.LIBRARIES)
    stop = stop or StopRequest()
    stop.listen(run.trainer.stop_signals)
    # before any device is initialised, and early: it starts while this rank joins the others
    writer = writer_of(run)
    try:
        with joined(run) as world:
            paths = locate(world)
            part = ckpt_local.part_of(paths.folder, paths.checkpoint, RankEnv.here().machine)
            paths = replace(paths, checkpoint=part)
            startup.mark(startup.JOINING)
            if paths.cpu_matmul is not None:
                kernels = run.kernels.model_copy(update={"cpu_matmul": paths.cpu_matmul})
                run = run.model_copy(update={"kernels": kernels})
            use_measured(run, world)
            progress = Progress(run, speaks=world.is_rank0, folder=paths.folder)
            with life_of(paths.folder, world, progress) as meter:
                splits = splits_of(run, paths.checkpoint or paths.weights)
                errors = paths.folder / ERRORS
                with watching(run, world, errors, end):
                    context = assemble(run, world, splits)
                    if run.resilience.in_process:
                        track(context.state.trained)
                        track(p for chunk in context.state.trained for p in chunk.parameters())
                    context.stop = stop
                    context.meter = meter
                    startup.mark(startup.BUILDING)
                    _begin(context, splits, paths, progress)
                    traces = run.log.on_anomaly == "trace"
                    if run.resilience.rerun != "off" or traces:
                        tracing = Tracing(context, splits, paths.folder) if traces else None
                        context.compute = Suspects(run.resilience, tracing)
                    trainer = Trainer(context, run_hooks(run, splits, paths, progress, writer))
                    _introduce(context, splits, progress)
                    trainer.fit()
                meter.done = True
                # The run is saved: a rank that hangs from here on ends without an error.
                with watching(run, world, errors, end_after_run):
                    trainer.hooks.call("after_run", context)
    except RanksApart:
        return False
    finally:
        if writer is not None:
            writer.kill()  # a failure before there was a hook that ends it
    return True


def writer_of(run: RunConfig) -> WriterProcess | None:
    """Return the process that writes the checkpoints of this rank in the background, or None."""
    config = run.checkpoint
    writes = config.async_save and (config.saves or config.local_dir is not None)
    return WriterProcess(config.barrier_timeout_s) if writes else None


def run_hooks(
    run: RunConfig,
    splits: Splits,
    paths: Paths,
    progress: Progress,
    writer: WriterProcess | None = None,
) -> list[Hook]:
    """Return the hooks of a run, in the order in which each moment calls them; `writer` saves in
    the background.
    """
    folder = paths.folder
    metrics = Metrics(folder)
    begun = paths.checkpoint
    checkpoints = Checkpoints(
        folder / CHECKPOINTS,
        progress,
        splits.describe(),
        writer,
        ckpt_local.place_of(folder, run.checkpoint.local_dir, RankEnv.here().machine),
        from_local=begun is not None and ckpt_local.holds(folder, begun),
    )
    # Whatever may end a run comes after the checkpoints, so it loses no step.
    hooks: list[Hook] = [
        KeepTokenizer(folder, splits, named_tokenizer(run, paths.checkpoint or paths.weights)),
        metrics,
        progress,
        checkpoints,
        Evaluation(metrics, progress, splits.unigram_entropy_nats),
        Life(),
        Memory(folder),
        *watchers(run, splits, folder, metrics, checkpoints),
        Startup(folder, progress),
        Planned(folder, progress),
        Sample(splits, checkpoints, paths.checkpoint, progress),
        *optional.enabled(run, folder),
    ]
    if run.log.sinks:
        hooks.append(Sinks(run, folder))
    if run.resilience.replica_check_interval is not None:
        hooks.append(Replicas(run.resilience.replica_check_interval))
    if run.resilience.straggler_interval is not None:
        hooks.append(Stragglers(run.resilience, metrics))
    # first, so that a trace has the work of no other hook
    hooks.insert(0, Profile(folder, run))
    if run.trainer.cuda_graph_impl == "transformer_engine":
        hooks.append(Graphs(run))
    if faults.armed():
        hooks.append(Injected())
    if run.checkpoint.hf_every is not None:
        # last, because it may wait for minutes once the run is over
        hooks.append(Exports(folder, progress))
    return hooks


def watchers(
    run: RunConfig, splits: Splits, folder: Path, metrics: Metrics, checkpoints: Checkpoints
) -> list[Hook]:
    """Return the hooks that raise alerts, sample memory and describe tensors, as far as `log`
    enables them, and that report a lack of memory.
    """
    found: list[Hook] = []
    see: dict[str, Any] = {}
    if run.log.alerts:
        alerts = Alerts(run, folder, metrics)
        found.append(alerts)
        see["see"] = alerts.see
    if run.log.memory_interval is not None:
        interval = run.log.memory_interval
        found.append(MemorySamples(interval, metrics, checkpoints.staging_bytes, **see))
    if run.log.statistics.interval is not None:
        found.append(Statistics(run, metrics, special=splits.special_ids, **see))
    return [*found, OutOfMemory(folder)]


def logits(run: RunConfig, checkpoint: Path, ids: Sequence[int], out: Path) -> None:
    """Save the logits of a checkpoint's model after each of `ids`, fp32 [tokens, vocabulary], as
    plain numbers; the model's family may put something among them, an image for one.

    Only on one rank.

    Raises:
        CorruptData: the checkpoint is damaged.
    """
    with joined(run) as world:
        (chunk,) = build_model(run, world, wrap=False)
        ckpt_state.load_model(Checkpoint.open(checkpoint, verify=False), [chunk])
        chunk.eval()
        ids, more, _ = probed(run.model, ids)
        with torch.no_grad():
            rows = chunk(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), None, **more)
        rows[0, :, : run.model.vocab_size].float().numpy().tofile(out)


def _begin(context: TrainContext, splits: Splits, paths: Paths, progress: Progress) -> None:
    """Load the weights that the run begins with, and begin to read its first samples."""
    if paths.checkpoint is not None:
        _resume(context, paths.checkpoint, splits, progress)
    elif paths.weights is not None:

        def load_weights(checkpoint: Checkpoint) -> None:
            ckpt_state.load_weights(checkpoint, context.state)

        _load(context, paths.weights, load_weights)
        progress.note(f"weights from {paths.weights}")
    context.begin()


def _resume(context: TrainContext, path: Path, splits: Splits, progress: Progress) -> None:
    """Restore a checkpoint's state.

    Each rank verifies what it reads; damage that one of them finds ends all of them.
    """
    run = context.run
    state = context.state

    def restore(checkpoint: Checkpoint) -> bool:
        saved = checkpoint.state.get("data")
        if saved is not None and not run.checkpoint.accept_changes:
            same_data(saved, splits.describe())
        if not run.checkpoint.accept_changes:
            same_teacher(checkpoint.state, state)
        return ckpt_state.load(checkpoint, context.world, state, seed=run.trainer.seed)

    checkpoint, restored = _load(context, path, restore)
    progress.note(f"resumed from {path}: step {state.step}, {state.consumed_samples} samples used")
    if not restored:
        why = "the ranks of this older checkpoint all drew alike"
        if checkpoint.state["grid"] != context.world.grid.sizes:
            why = "the layout changed"
        progress.note(f"{why}: random generators start from the seed and the step")


def _load(
    context: TrainContext, path: Path, restore: Callable[[Checkpoint], T]
) -> tuple[Checkpoint, T | None]:
    """Open a checkpoint and restore from it; damage that one rank finds ends all of them."""
    damage = ""
    done = None
    checkpoint = Checkpoint(path, {})
    try:
        with reading(path):
            checkpoint = ckpt_state.opened(path, context.run, context.world)
            done = restore(checkpoint)
    except (CorruptData, BadEnvironment) as error:
        damage = f"{type(error).__name__}\n{error}"
    # Over the store: a rank may wait here for longer than a collective would.
    kind, *lines = ckpt_state.meeting_of(context.world, context.run).barrier(damage).split("\n")
    if kind:
        shared = BadEnvironment(*lines) if kind == BadEnvironment.__name__ else CorruptData(*lines)
        shared.shared = True
        raise shared
    return checkpoint, done


def _introduce(context: TrainContext, splits: Splits, progress: Progress) -> None:
    """Print what is about to be trained."""
    run = context.run
    world = context.world
    samples = run.trainer.micro * world.grid.dp
    counts = sorted({size // samples for _, size in context.batch_sizes})
    batch = units.number_of(counts[-1], "micro-batch")
    if len(counts) > 1:
        batch = f"{counts[0]} to {batch}"
    trained = sum(adapter_parameters(run))
    adapters = f" that are frozen, adapters of {units.count(trained)}" if trained else ""
    progress.note(
        f"{run.model.name}: {units.count(parameters(run.model))} parameters{adapters}, {world.grid}"
        f" on {units.number_of(world.size, f'{world.device.name} rank')}, {run.precision.words},"
        f" {batch} per step"
    )
    teacher = teacher_of(run)
    if teacher is not None:
        size = units.count(parameters(teacher.model))
        progress.note(f"teacher {teacher.model.name}: {size} parameters that are frozen")
    for remark in splits.remarks():
        progress.note(remark)
    tokens = splits.describe().get("tokens")
    if tokens is not None and splits.unigram_entropy_nats is not None:
        progress.note(
            f"data: {units.count(tokens)} tokens, unigram entropy {splits.unigram_entropy_nats:.4f}"
            " nats"
        )
