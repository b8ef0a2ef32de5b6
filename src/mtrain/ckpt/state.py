"""Everything of a training run that is not in the configuration: saved to disk and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from mtrain.ckpt import folder, hashes, local, retention, store
from mtrain.ckpt.contents import Contents
from mtrain.ckpt.meeting import Meeting
from mtrain.ckpt.replicas import Replicas, of_machine
from mtrain.ckpt.retention import Policy
from mtrain.ckpt.saving.background import BackgroundSaves, Job
from mtrain.config.compose.dump import run_yaml
from mtrain.config.schema.model import VALUE_HEAD
from mtrain.config.schema.run import RunConfig
from mtrain.errors import warn
from mtrain.mcore import api as mcore
from mtrain.mcore.layers import low_rank
from mtrain.mcore.layers.merging import is_adapter
from mtrain.mcore.state import optimizer_state, sharding
from mtrain.mcore.state.local_params import unwrap
from mtrain.world.generators import seed_generators
from mtrain.world.heartbeat import begin_phase
from mtrain.world.init import World
from mtrain.world.rank_env import RankEnv

HEAD = f"{VALUE_HEAD}.weight"
OTHER_BYTES = 1 << 20
"""Room for the states of generators, and for the ends of pages."""


@dataclass
class TrainState:
    """The state that a step changes: chunks, optimizer and schedule of this rank, and counters."""

    chunks: list[Any]
    optimizer: Any
    schedule: Any
    step: int = 0
    """Updates made."""
    consumed_samples: int = 0
    """Samples of the training split used so far: the data position, whatever the layout."""
    skipped_updates: int = 0
    """Updates that fp16 skipped in a row, up to the last step."""
    hooks: dict[str, Any] = field(default_factory=dict)
    """States of hooks by name, as a checkpoint had them or as the next one gets them."""
    frozen: dict[str, store.Frozen] = field(default_factory=dict)
    """The tensors that no step changes, once they were saved: by the owner of local checkpoints,
    which have files of their own, and "" for all others.
    """
    replicas: Replicas = field(default_factory=Replicas)
    """The pieces that this rank saves."""
    reference: list[Any] = field(default_factory=list)
    """Chunks of a frozen copy of the model, as it was when this objective began; empty without."""
    teacher: list[Any] = field(default_factory=list)
    """Chunks of another, frozen model that is imitated; no checkpoint has them."""
    reward_model: list[Any] = field(default_factory=list)
    """Chunks of another, frozen model that scores answers; no checkpoint has them."""
    teacher_digest: str = ""
    """A hash of the files of either; empty without."""
    scores: dict[str, torch.Tensor] = field(default_factory=dict)
    """Log-probabilities of answers by that model, by split, fp64; empty where they are computed in
    each step.
    """
    scores_known: bool = False
    sampled: int | None = None
    """Step whose weights sample the answers of the next step while this one is saved; None: no
    answers are under way.
    """
    sampled_saved: list[int] = field(default_factory=list)
    """The same of the last two saves: a resumed run needs these weights."""
    critic: TrainState | None = None
    """The critic's own chunks, optimizer and schedule; None without one."""
    critic_is_given: bool = False
    """True if the critic starts from weights of its own, and not from those of the policy."""

    @property
    def trained(self) -> list[Any]:
        """Return the chunks of every model that is trained."""
        return self.chunks + (self.critic.chunks if self.critic is not None else [])


def save(
    root: Path,
    run: RunConfig,
    world: World,
    state: TrainState,
    data_facts: dict[str, Any],
    owner: str = "",
) -> Path:
    """Commit a checkpoint of `state` together with all ranks; see `store.save`.

    `owner`: it is a local one of that run (`ckpt.local`).
    """
    begin_phase("save")
    shards, frozen = _shards(run, world, state, owner)
    facts = _facts(run, world, state, data_facts, owner)
    ranks = savers(world, run, owner)
    prune = partial(_prune, root, policy_of(run, owner))
    algorithm = hashes.ALGORITHMS[run.checkpoint.hash]
    # FSDP may hold less than a whole shard of a weight outside of a forward.
    with sharding.gathered(state.trained):
        rng = rng_tensors(world)
        text = run_yaml(run.recorded())
        path = store.save(
            root, state.step, shards, rng, facts, text, ranks, frozen, prune, algorithm
        )
    begin_phase("after save")
    return path


def reserve(saves: BackgroundSaves, run: RunConfig, world: World, state: TrainState) -> None:
    """Get the memory ready that saves of `state` in the background need; all ranks call it."""
    shards, frozen = _shards(run, world, state, "")
    own = [*shards, *(frozen.shards if frozen is not None else ())]
    tensors = [shard.tensor for shard in own if shard.primary]
    saves.reserve(sum(one.numel() * one.element_size() for one in tensors) + OTHER_BYTES)


def begin_save(
    saves: BackgroundSaves,
    root: Path,
    run: RunConfig,
    world: World,
    state: TrainState,
    data_facts: dict[str, Any],
    owner: str = "",
) -> None:
    """Begin a save of `state`, together with all ranks, that goes on in the background.

    Weights and the optimizer's state must not change before `saves.secured`. `owner`: as in `save`.
    """
    begin_phase("save")
    shards, frozen = _shards(run, world, state, owner)
    ranks = savers(world, run, owner)
    name = folder.shard_name(ranks.rank)
    manifest = {
        "step": state.step,
        "ranks": ranks.size,
        "state": _facts(run, world, state, data_facts, owner),
    }
    with sharding.gathered(state.trained):
        algorithm = hashes.ALGORITHMS[run.checkpoint.hash]
        contents = [Contents.of(name, shards, rng_tensors(world), algorithm)]
        known = None if frozen is None else frozen.known()
        if frozen is not None and known is None:
            still = folder.frozen_name(ranks.rank)
            contents.append(Contents.of(still, frozen.shards, algorithm=algorithm))
        text = run_yaml(run.recorded())
        policy = policy_of(run, owner)
        job = Job(root, state.step, tuple(contents), manifest, text, policy, known)
        saves.begin(job, ranks)
        # FSDP frees parts of weights when it leaves this block, and another thread must not call
        # the device while a graph is captured.
        captured = run.trainer.cuda_graph_impl != "none"
        if captured or run.parallel.frees_weights or run.parallel.fsdp != "none":
            saves.secured()
    begin_phase("after save")


def end_save(saves: BackgroundSaves, state: TrainState) -> Path:
    """Take note of the commit of the save that was under way, on every rank; return its path."""
    # The writer of this rank reports after its files are found: the commit may be known before.
    saves.finish()
    written = saves.written
    job = saves.done()
    frozen = state.frozen.get(job.manifest["state"].get(local.OWNER, ""))
    if frozen is not None and written:
        # The last file: the one that was written, or the one that was linked.
        frozen.index = written[-1]
        frozen.path = job.path / written[-1]["file"]["name"]
    return job.path


def policy_of(run: RunConfig, owner: str) -> Policy:
    """Return the checkpoints that a run keeps: of its local ones, the newest, and on several
    machines one more, as another machine may be lost before it has its part of the newest.
    """
    local_ones = 1 if RankEnv.here().machine is None else 2
    return Policy(keep=local_ones) if owner else Policy.of(run.checkpoint)


def _shards(
    run: RunConfig, world: World, state: TrainState, owner: str
) -> tuple[list[Any], store.Frozen | None]:
    """Return the shards that a save writes, and those that no step changes."""
    weights = [*sharding.model_shards(state.chunks), *critic_shards(state, "model")]
    still = set()
    # With adapters the model itself does not change: its file is written once and linked.
    if run.peft.kind is not None:
        still = {id(s) for s in weights if s.param is not None and not s.param.requires_grad}
    if still or state.reference or state.scores:
        kept = [*(s for s in weights if id(s) in still), *reference_shards(state)]
        state.frozen.setdefault(owner, store.Frozen(kept))
    shards = [s for s in weights if id(s) not in still]
    shards += sharding.optimizer_shards(state.chunks, state.optimizer)
    shards += critic_shards(state, "optimizer")
    if owner and RankEnv.here().machine is not None:
        return of_machine(shards, savers(world, run, owner)), state.frozen.get(owner)
    group = mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)
    return state.replicas.shared_out(shards, group, world.torch_device), state.frozen.get(owner)


def _facts(
    run: RunConfig, world: World, state: TrainState, data_facts: dict[str, Any], owner: str
) -> dict[str, Any]:
    """Return the manifest's facts about the state except tensors, the same on every rank."""
    facts = {
        "consumed_samples": state.consumed_samples,
        **_counters(world, state),
        "grid": world.grid.sizes,
        "streams": folder.STREAMS,
        "digest": run.digest(),
        "data": data_facts,
    }
    # Left out where no hook has a state: the files of such a run are those of earlier versions.
    if state.hooks:
        facts["hooks"] = state.hooks
    if state.critic is not None:
        facts[folder.CRITIC.rstrip("/")] = _counters(world, state.critic)
    if state.teacher_digest:
        facts[folder.TEACHER] = state.teacher_digest
    if state.sampled is not None:
        facts[folder.SAMPLED] = state.sampled
        state.sampled_saved = [*state.sampled_saved, state.sampled][-2:]
    if owner:
        facts[local.OWNER] = owner
        env = RankEnv.here()
        if env.machine is not None:
            facts[local.PART] = [env.machine, env.size // env.local_size]
    return facts


def _counters(world: World, state: TrainState) -> dict[str, Any]:
    """Return the counters of an optimizer and its schedule."""
    return {
        "schedule_steps": state.schedule.num_steps,
        "optimizer_step": _agreed_step(world, optimizer_state.get_step(state.optimizer)),
        "loss_scale": _loss_scale(state.optimizer),
        "skipped_updates": state.skipped_updates,
    }


def _set_counters(state: TrainState, facts: dict[str, Any]) -> None:
    optimizer_state.set_step(state.optimizer, facts["optimizer_step"])
    _set_loss_scale(state.optimizer, facts["loss_scale"])
    state.skipped_updates = facts.get("skipped_updates", 0)
    state.schedule.num_steps = facts["schedule_steps"]
    # without an increment: sets the rate of the restored step
    state.schedule.step(0)


def meeting_of(world: World, run: RunConfig) -> Meeting:
    """Return the place where the ranks of a world wait for each other while a checkpoint is
    saved or read.
    """
    return Meeting(world.store, world.rank, world.size, run.checkpoint.barrier_timeout_s)


def savers(world: World, run: RunConfig, owner: str) -> Meeting:
    """Return the place where the ranks that write or read one checkpoint wait for each other: all
    ranks; for a local one of several machines, those of this machine.
    """
    env = RankEnv.here()
    if not owner or env.machine is None:
        return meeting_of(world, run)
    here = PrefixStore(f"machine/{env.machine}", world.store)
    return Meeting(here, env.local_rank, env.local_size, run.checkpoint.barrier_timeout_s)


def opened(path: Path, run: RunConfig, world: World) -> store.Checkpoint:
    """Open a checkpoint on all ranks together; see `store.Checkpoint.open_together`."""
    owner = local.OWNER if local.is_part(path) else ""
    return store.Checkpoint.open_together(path, savers(world, run, owner))


def _prune(root: Path, policy: Policy) -> None:
    """Delete older checkpoints; where that fails, the new one is committed all the same."""
    try:
        retention.prune(root, policy)
    except OSError as error:
        warn(f"older checkpoints in {root} cannot be deleted: {error}")


def load(checkpoint: store.Checkpoint, world: World, state: TrainState, *, seed: int) -> bool:
    """Restore a checkpoint's state in this world's layout.

    Returns:
        Whether the generators were restored too. They belong to a layout: under another one they
        start from the seed and the step, so dropout differs from the uninterrupted run while
        everything else continues. The same happens on another kind of device, and with a checkpoint
        of a version whose ranks all drew the same numbers.

    Raises:
        CorruptData: a tensor is missing or has another shape.
    """
    begin_phase("load")
    if checkpoint.state.get("weights_only"):
        load_weights(checkpoint, state)
        return True
    load_model(checkpoint, state.chunks)
    # A checkpoint of another objective has no reference: this one begins here.
    if any(key.startswith(folder.REFERENCE) for key in checkpoint.manifest["tensors"]):
        checkpoint.load(reference_shards(state))
        state.scores_known = True
    else:
        begin_reference(state)
    checkpoint.load(sharding.optimizer_shards_to_fill(state.chunks, state.optimizer))
    sharding.refresh(state.chunks, state.optimizer)
    facts = checkpoint.state
    _set_counters(state, facts)
    _load_critic(checkpoint, state)
    state.step = checkpoint.step
    state.consumed_samples = facts["consumed_samples"]
    state.hooks = facts.get("hooks", {})
    state.sampled = facts.get(folder.SAMPLED)
    state.sampled_saved = [] if state.sampled is None else [state.sampled]
    if facts["grid"] == world.grid.sizes and facts.get("streams") == folder.STREAMS:
        apart = local.PART in facts
        tensors = checkpoint.rank_tensors(world.local_rank if apart else world.rank)
        # the state of another kind of device is of another size
        if len(tensors["rng/device"]) == len(world.device.rng_state()):
            set_rng_tensors(world, tensors)
            return True
    seed_generators(seed, world.coords, state.step)
    return False


def _load_critic(checkpoint: store.Checkpoint, state: TrainState) -> None:
    """Restore the critic with its optimizer; in a checkpoint of another objective, it begins."""
    critic = state.critic
    facts = checkpoint.state.get(folder.CRITIC.rstrip("/"))
    if critic is None:
        return
    if facts is None:
        begin_critic(state)
        return
    checkpoint.load(critic_shards(state, "model"))
    checkpoint.load(
        replace(shard, key=folder.CRITIC + shard.key)
        for shard in sharding.optimizer_shards_to_fill(critic.chunks, critic.optimizer)
    )
    sharding.refresh(critic.chunks, critic.optimizer)
    _set_counters(critic, facts)


def load_model(checkpoint: store.Checkpoint, chunks: list[Any]) -> None:
    """Restore only the weights. Adapters and a value head that the checkpoint lacks keep their
    initial values.
    """
    held = checkpoint.manifest["tensors"]
    shards = [s for s in sharding.model_shards(chunks) if s.key in held or s.weight != HEAD]
    # A checkpoint with some adapters must have all: one that lacks a few is damaged.
    begin = checkpoint.state.get("weights_only") or not any(map(is_adapter, held))
    checkpoint.load(
        shard for shard in shards if shard.key in held or not (begin and is_adapter(shard.key))
    )
    if not any(map(is_adapter, held)):
        low_rank.start_magnitudes(chunks)
    sharding.refresh(chunks)


def load_weights(checkpoint: store.Checkpoint, state: TrainState) -> None:
    """Restore only the weights, and update the optimizer's copies of them."""
    load_model(checkpoint, state.chunks)
    begin_reference(state)
    renew(state)
    begin_critic(state)


def reference_shards(state: TrainState) -> list[sharding.TensorShard]:
    """Return the shards of the frozen reference model on this rank, and its log-probabilities."""
    shards = [
        replace(shard, key=folder.REFERENCE + shard.weight)
        for shard in sharding.model_shards(state.reference)
    ]
    first = not dist.is_initialized() or dist.get_rank() == 0
    for part, values in state.scores.items():
        place = (len(values),), (0,), (len(values),), values
        key = f"{folder.REFERENCE}scores.{part}"
        shards.append(sharding.TensorShard(key, *place, primary=first))
    return shards


def critic_shards(state: TrainState, what: str) -> list[sharding.TensorShard]:
    """Return the shards of the critic's `model` or `optimizer` on this rank; none without one."""
    if state.critic is None:
        return []
    chunks = state.critic.chunks
    if what == "model":
        shards = sharding.model_shards(chunks)
    else:
        shards = sharding.optimizer_shards(chunks, state.critic.optimizer)
    return [replace(shard, key=folder.CRITIC + shard.key) for shard in shards]


@torch.no_grad()
def begin_critic(state: TrainState) -> None:
    """Copy the weights of the policy, as they are now, to a critic that starts from them, whose
    head stays as it was drawn.
    """
    critic = state.critic
    if critic is None or state.critic_is_given:
        return
    for chunk, other in zip(state.chunks, critic.chunks, strict=True):
        own = unwrap(chunk).state_dict()
        for name, tensor in unwrap(other).state_dict().items():
            if isinstance(tensor, torch.Tensor) and name != HEAD:
                tensor.copy_(own[name])
    renew(critic)


@torch.no_grad()
def begin_reference(state: TrainState) -> None:
    """Copy the weights and buffers of the policy, as they are now, to its frozen reference."""
    for chunk, other in zip(state.chunks, state.reference, strict=False):
        own = unwrap(chunk).state_dict()
        for name, tensor in unwrap(other).state_dict().items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(own[name])


def renew(state: TrainState) -> None:
    """Update the optimizer's copies of weights after the weights were written."""
    sharding.make_main_weights(state.chunks)
    state.optimizer.reload_model_params()
    sharding.refresh(state.chunks, state.optimizer)


def rng_tensors(world: World) -> dict[str, torch.Tensor]:
    """Return the state of every generator of this rank, as byte tensors by name."""
    tensors = {"rng/torch": torch.get_rng_state(), "rng/device": world.device.rng_state()}
    tensors |= {f"rng/tracker/{name}": value for name, value in tracker_tensors().items()}
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"
    # Tensors, not a pickle: a checkpoint never holds objects.
    tensors["rng/numpy"] = torch.tensor(
        [*(int(k) for k in keys), position, has_gauss], dtype=torch.int64
    )
    tensors["rng/numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    version, internal, gauss = random.getstate()
    assert version == 3
    tensors["rng/python"] = torch.tensor(internal, dtype=torch.int64)
    tensors["rng/python_gauss"] = torch.tensor(
        [] if gauss is None else [gauss], dtype=torch.float64
    )
    return tensors


def set_rng_tensors(world: World, tensors: dict[str, torch.Tensor]) -> None:
    """Restore every generator of this rank to the state that `rng_tensors` returned."""
    prefix = "rng/tracker/"
    states = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    set_tracker(states)
    numbers = tensors["rng/numpy"].tolist()
    cached = float(tensors["rng/numpy_gauss"][0])
    np.random.set_state(
        ("MT19937", np.array(numbers[:-2], dtype=np.uint32), numbers[-2], numbers[-1], cached)
    )
    gauss = tensors["rng/python_gauss"].tolist()
    random.setstate((3, tuple(tensors["rng/python"].tolist()), gauss[0] if gauss else None))
    world.device.set_rng_state(tensors["rng/device"])
    torch.set_rng_state(tensors["rng/torch"])


def tracker_tensors() -> dict[str, torch.Tensor]:
    """Return the state of each stream of megatron-core's tracker, as byte tensors."""
    states = mcore.get_cuda_rng_tracker().get_states()
    return {
        name: s.get_state() if isinstance(s, torch.Generator) else s for name, s in states.items()
    }


def set_tracker(states: dict[str, torch.Tensor]) -> None:
    """Restore the streams of megatron-core's tracker in place: CUDA graphs hold its generators."""
    tracker = mcore.get_cuda_rng_tracker()
    there = tracker.get_states()
    if not any(isinstance(value, torch.Generator) for value in there.values()):
        tracker.set_states(states)
        return
    for name, value in states.items():
        there[name].set_state(value)


@contextmanager
def generators_kept(world: World) -> Iterator[None]:
    """Restore every generator of this rank afterwards: draws inside do not change later ones."""
    kept = rng_tensors(world)
    try:
        yield
    finally:
        set_rng_tensors(world, kept)


def _agreed_step(world: World, step: int) -> int:
    """Return the optimizer's step over all ranks: a rank that owns no shard of any parameter does
    not know it.
    """
    value = torch.tensor([step], dtype=torch.int64, device=world.torch_device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value.item())


def _loss_scale(optimizer: Any) -> dict[str, float] | None:
    for leaf in optimizer_state.leaf_optimizers(optimizer):
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None:
            return {k: float(v) for k, v in scaler.state_dict().items()}
    return None


def _set_loss_scale(optimizer: Any, values: dict[str, float | None] | None) -> None:
    for leaf in optimizer_state.leaf_optimizers(optimizer):
        scaler = getattr(leaf, "grad_scaler", None)
        # empty: that of a run with a constant scale
        if scaler is not None and values:
            own = scaler.state_dict()
            # JSON has no infinity: the manifest has null instead
            kept = {key: float("inf") if value is None else value for key, value in values.items()}
            as_kept = {
                k: torch.full_like(v, kept[k]) if torch.is_tensor(v) else type(v)(kept[k])
                for k, v in own.items()
            }
            scaler.load_state_dict(as_kept)
