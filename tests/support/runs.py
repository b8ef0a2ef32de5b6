"""Small runs: configurations, and jobs for `run_ranks` that train them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mtrain.config.engine.kernels import OPERATIONS, update_obstacle
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.data import UnresolvedData
from mtrain.config.schema.kernels import KernelsConfig
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.optim import UnresolvedOptim
from mtrain.config.schema.parallel import UnresolvedParallel
from mtrain.config.schema.precision import UnresolvedPrecision
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.config.schema.trainer import UnresolvedTrainer
from tests.support.forked import run_ranks

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


SCHEDULE: dict[str, Any] = {"lr": 1e-3, "warmup_iters": 5}
PLAIN: dict[str, Any] = {op.name: "reference" for op in OPERATIONS if op.name != "optimizer"}


def tiny_run(
    *,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    dtype: str = "fp32",
    optim: dict[str, Any] | None = None,
    kernel: Any = None,
    **parallel: Any,
) -> RunConfig:
    """Return a resolved run of a tiny Llama on synthetic tokens; keyword arguments are keys of
    `parallel`.

    `kernel` is `kernels.optimizer`.
    """
    degrees = UnresolvedParallel(**({"ranks": 1} | parallel))
    optimizer = UnresolvedOptim(**(SCHEDULE | (optim or {})))
    batch = {"train_iters": 20, "global_batch_size": 8, "micro_batch_size": 2, "eval_iters": 0}
    run = UnresolvedRun(
        model=ModelConfig(**(TINY | (model or {}))),
        parallel=degrees,
        precision=UnresolvedPrecision(dtype=dtype),  # type: ignore[arg-type]
        data=UnresolvedData(kind="mock", seq_length=32),
        optim=optimizer,
        cluster=ClusterConfig(device="cpu", devices_per_node=degrees.ranks),
        kernels=KernelsConfig(**PLAIN, optimizer=kernel or "torch"),
        trainer=UnresolvedTrainer(**(batch | (trainer or {}))),
    )
    resolved = resolve(run, Machine(cpu_cores=1, memory_bytes=0))
    if kernel is None and update_obstacle("torch", resolved) is not None:
        kernels = resolved.kernels.model_copy(update={"optimizer": "reference"})
        return resolved.model_copy(update={"kernels": kernels})
    return resolved


def train_steps(
    run: RunConfig,
    steps: int,
    *,
    save_to: Path | None = None,
    load_from: Path | None = None,
    save_after: int | None = None,
    gradients_to: Path | None = None,
    flip_gradient_on: int | None = None,
) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; a job for `run_ranks`.

    `save_to` gets a checkpoint after the last step, and one after `save_after` steps; `load_from`
    is resumed before the first; `gradients_to` gets the whole gradient of the first step before
    clipping; `flip_gradient_on` is a rank that negates one of its gradients in every step: a fault
    for tests to find.
    """
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        if load_from is not None:
            ckpt_state.load(Checkpoint.open(load_from), world, parts.state, seed=run.trainer.seed)
        if flip_gradient_on == world.rank:
            _flip(parts)
        if gradients_to is not None:
            record_gradients(parts, gradients_to)
        results = []
        for made in range(steps + 1):
            if made:
                results.append(train_step(parts, stop_requested=False))
            if save_to is not None and made == save_after:
                ckpt_state.save(save_to, run, world, parts.state, {})
        if save_to is not None:
            ckpt_state.save(save_to, run, world, parts.state, {})
        return [(r.loss, r.grad_norm) for r in results]


_TRAINED: dict[tuple[str, int], list[tuple[float, float]]] = {}


def trained(run: RunConfig, steps: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of `run` on ranks of its own; trained once for all
    tests of a process.
    """
    key = run.model_dump_json(), steps
    if key not in _TRAINED:
        values = run_ranks(run.parallel.ranks or 1, train_steps, run, steps)
        assert all(v == values[0] for v in values), "ranks report different numbers"
        _TRAINED[key] = values[0]
    return _TRAINED[key]


class Uninterrupted:
    """Runs that save after `first` of `steps` steps and at their end; each trains once for several
    tests.
    """

    def __init__(self, home: Path, first: int, steps: int) -> None:
        self.home = home
        self.first = first
        self.steps = steps
        self._known: dict[str, tuple[list[tuple[float, float]], Path, Path]] = {}

    def __call__(self, name: str, run: RunConfig) -> tuple[list[tuple[float, float]], Path, Path]:
        """Return loss and norm of each step, the checkpoint after `first` steps, and the
        last one.
        """
        if name not in self._known:
            folder = self.home / str(len(self._known))

            def job() -> list[tuple[float, float]]:
                return train_steps(run, self.steps, save_to=folder, save_after=self.first)

            values = run_ranks(run.parallel.ranks or 1, job)
            assert all(v == values[0] for v in values), "ranks report different numbers"
            self._known[name] = (
                values[0],
                folder / f"step_{self.first:08d}",
                folder / f"step_{self.steps:08d}",
            )
        return self._known[name]


def _flip(parts: Any) -> None:
    finalize = parts.state.chunks[0].config.finalize_model_grads_func

    def faulty(chunks: Any, *args: Any, **kwargs: Any) -> Any:
        weight = next(p for n, p in chunks[0].named_parameters() if "linear_proj.weight" in n)
        weight.main_grad.neg_()
        return finalize(chunks, *args, **kwargs)

    parts.state.chunks[0].config.finalize_model_grads_func = faulty


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint put together from its pieces, by key."""
    from mtrain.train.verify import prove

    return prove.whole_tensors(checkpoint)


def rank_tensors(checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """Return the tensors that only one rank saved: its random generators."""
    from mtrain.ckpt.store import Checkpoint

    opened = Checkpoint.open(checkpoint)
    return [opened.rank_tensors(rank) for rank in range(opened.manifest["ranks"])]


def held_alike(run: RunConfig) -> dict[str, float]:
    """Run two steps on a rank; return the sum of each parameter that all tensor-parallel ranks hold
    whole.
    """
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        for _ in range(2):
            train_step(parts, stop_requested=False)
        named = unwrap(parts.state.chunks[0]).named_parameters()
        whole = {name: p for name, p in named if not getattr(p, "tensor_model_parallel", False)}
        return {name: float(p.detach().double().sum()) for name, p in whole.items()}


def train_on_given(
    run: RunConfig, folder: Path, steps: int, *, spoil: Callable[[Any], None] | None = None
) -> None:
    """Train steps whose gradients depend only on weight, place and step, and save a checkpoint; a
    job for `run_ranks`.

    `spoil` changes the optimizer of rank 1 before each update: a fault for tests to find.
    """
    from mtrain.ckpt import state as ckpt_state
    from mtrain.mcore.state import sharding
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        optimizer = parts.state.optimizer
        step = optimizer.step

        def given() -> Any:
            for shard in sharding.gradient_shards(parts.state.chunks, optimizer):
                seed = sum(map(ord, shard.key)) + parts.state.step
                whole = torch.randn(
                    shard.global_shape, generator=torch.Generator().manual_seed(seed)
                )
                box = whole[
                    tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
                ]
                if shard.flat is None:
                    flat = box.reshape(-1)
                else:
                    flat = box.reshape(-1)[shard.flat[0] : shard.flat[1]]
                shard.tensor.copy_(flat.view(shard.tensor.shape))
            if spoil is not None and world.rank == 1:
                spoil(optimizer)
            return step()

        optimizer.step = given
        for _ in range(steps):
            train_step(parts, stop_requested=False)
        ckpt_state.save(folder, run, world, parts.state, {})
