"""The same run, small enough for a laptop: layout, stages, experts per rank and schedule stay;
widths do not.
"""

from __future__ import annotations

import re
from typing import Any

from mtrain.config.engine.kernels import ON_CPU, OPERATIONS, lacks
from mtrain.config.machine.devices import CPU
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.batches import NO_RAMP
from mtrain.config.resolve.batches import stages as batch_stages
from mtrain.config.resolve.resolution import Machine, resolve, smallest_world
from mtrain.config.resolve.stages import Stage, stages
from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.objective import DRAWN, ObjectiveConfig
from mtrain.config.schema.optim import OptimConfig
from mtrain.config.schema.optimizer import Rotated
from mtrain.config.schema.parallel import ParallelConfig, RecomputeConfig
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.models.rank import Rank
from mtrain.models.registry import family_of
from mtrain.plan.states import matrices, update_of

EQUAL_STAGES: dict[str, Any] = {"pipeline_layout": None, "layers_per_stage": None}
_FORMATS = ("precision.dtype", "precision.fp8", "precision.fp4")
# About the size of a gradient's elements in a small model. soap divides by moments: a smaller
# epsilon would enlarge differences of rounding.
SMOOTH_EPS = 1e-2
# soap renews its bases at least so often, in steps: the run is short and should do so, too.
BASES_EVERY = 2
_NUMBERS = re.compile(r"\.\d+\.")
MACHINE = Machine(cpu_cores=1, memory_bytes=0)
NOT_SAVED = ("save_minutes", "local_dir", "local_interval", "remote", "resume")


def shrink(
    run: RunConfig,
    *,
    steps: int,
    dtype: str = "fp32",
    max_ranks: int = 16,
    interpreted: bool = False,
) -> RunConfig:
    """Return `run` with the same layout, on synthetic tokens on a CPU.

    Of its data-parallel ranks the fewest stay that the layout allows, and a second one where all
    fit in `max_ranks`. A layout that needs more has its degrees halved, the largest first, until it
    fits.

    Layers become one or two per (virtual) stage, heads and key/value heads the fewest that keep how
    they are sharded, experts at most two per rank; a micro-batch has one sample, or two where
    experts are balanced sequence by sequence. Everything that decides which code runs stays as it
    was: norm, activation, biases, positions, windows, sinks, tying, routing, recomputation,
    optimizer, schedule. Products in 8 or 4 bits do not: see `in_eight_bits`; nor does a small
    `optim.eps` of soap: see `_state`. Kernels are the portable ones; where Triton is `interpreted`,
    its own stay.
    """
    run = run.on_any_device()
    p = _fitting(run.parallel, max_ranks)
    deep = stages(run)
    # Stages that were written by hand belong to the larger pipeline.
    if p.pp * p.vpp < len(deep):
        p = p.model_copy(update=EQUAL_STAGES)
        deep = []
    seq = 2 * p.cp * p.tp * -(-32 // (2 * p.cp * p.tp))
    # Documents of different lengths need room in a sample.
    if p.hybrid_context_parallel or (run.objective.pairs and run.data.packed):
        seq *= 4
        p = p.model_copy(update={"max_seqlen_per_dp_cp_rank": None})
    taken = _taken_in_turn(run.parallel, p)
    balanced = run.trainer.micro > 1 and balances_sequences(run)
    rows = 2 if balanced or run.objective.answers else 1
    smallest = p.dp * taken * rows
    batch = smallest * max(1, 4 // taken)
    group = {"microbatch_group_size_per_vp_stage": taken if taken > p.pp else None}
    p = p.model_copy(update={**group, "recompute": _one_layer_groups(p.recompute)})
    family = family_of(run.model)
    layers, p = _depth(p, deep, family.fewest_layers(run.model))
    values: dict[str, Any] = {
        "model": family.shrink(run.model, p, layers=layers, seq_length=seq),
        "parallel": p,
        "precision": run.precision.unquantized(dtype),
        "data": _tokens(run.data, seq),
        "optim": _optimizer(run, steps, dtype),
        "trainer": run.trainer.model_copy(
            update={
                "train_iters": steps,
                "global_batch_size": batch,
                "micro_batch_size": rows,
                **_ramp(run, smallest, batch, seq),
                "eval_iters": 0,
                "eval_interval": 0,
                "eval_minutes": None,
                "sample_tokens": 0,
                "profile_step": None,
                "profile_every": None,
            }
        ),
        "kernels": run.kernels.model_copy(update=on_a_cpu(run)),
        "checkpoint": run.checkpoint.model_copy(
            update=dict.fromkeys(NOT_SAVED) | {"save_interval": 0}
        ),
        "cluster": run.cluster.model_copy(
            update={
                "name": "rehearsal",
                "device": CPU.name,
                "nodes": 1,
                "devices_per_node": None,
                "peak_tflops": {},
            }
        ),
    }
    small = _again(run, values | {"objective": _objective(run, values["model"])})
    small = _with_sides_of(run, small)
    return with_triton_of(run, small) if interpreted else small


def on_device_of(run: RunConfig, small: RunConfig) -> RunConfig:
    """Return `small` on the device of `run`, with the kernels of `run` that support `small`."""
    words = {op.name: getattr(run.kernels, op.name) for op in OPERATIONS}
    kept = {
        name: word
        for name, word in words.items()
        if word is not None and lacks(name, word, small) is None
    }
    cluster = small.cluster.model_copy(
        update={"device": run.cluster.device, "devices_per_node": small.parallel.ranks}
    )
    kernels = small.kernels.model_copy(update=kept)
    return small.model_copy(update={"kernels": kernels, "cluster": cluster})


def with_triton_of(run: RunConfig, small: RunConfig) -> RunConfig:
    """Return `small` with those operations by Triton that `run` has by Triton, as far as they
    support it.
    """
    ours = [op.name for op in OPERATIONS if getattr(run.kernels, op.name) == "triton"]
    kept = {name: "triton" for name in ours if lacks(name, "triton", small) is None}
    return small.model_copy(update={"kernels": small.kernels.model_copy(update=kept)})


def _fitting(p: ParallelConfig, max_ranks: int) -> ParallelConfig:
    """Return `p` with the fewest ranks that its degrees allow, or twice as many if it had data
    parallelism.
    """
    data_parallel = p.dp
    while _fewest(p) > max_ranks:
        axis = max(
            ("ep", "pp", "cp", "etp", "tp"),
            key=lambda a: (getattr(p, a) or 1) % 2 == 0 and getattr(p, a),
        )
        degree = getattr(p, axis)
        if not degree or degree % 2:
            break
        p = p.model_copy(update={axis: degree // 2})
        if axis == "cp":
            if p.hierarchical_cp_sizes:
                gather = {"cp_comm_type": "p2p", "hierarchical_cp_sizes": None}
            else:
                gather = {}
            p = p.model_copy(
                update=gather if p.cp > 1 else {"cp_comm_type": None, "hierarchical_cp_sizes": None}
            )
        if axis == "pp" and p.pp == 1:
            p = p.model_copy(update={"vpp": 1})
        if axis == "tp" and p.tp == 1:
            p = p.model_copy(update={"sequence_parallel": False})
    world = _fewest(p)
    if world == p.model_ranks and data_parallel > 1 and 2 * world <= max_ranks:
        world *= 2 * (1 + (p.hybrid_context_parallel and data_parallel > 2))
    return p.model_copy(update={"ranks": world})


def _fewest(p: ParallelConfig) -> int:
    """Return the fewest ranks of the grid, in which every replica of a sharded copy has two of them
    at least.
    """
    world = smallest_world(p)
    while p.hsdp_replicas > 1 and (world // (p.tp * p.pp)) % (2 * p.hsdp_replicas):
        world += smallest_world(p)
    return world


def _taken_in_turn(asked: ParallelConfig, p: ParallelConfig) -> int:
    """Return the number of micro-batches that a (virtual) stage of `p` takes in turn: more than
    stages if more were requested.
    """
    more = p.vpp > 1 and (asked.microbatch_group_size_per_vp_stage or 0) > asked.pp
    return 2 * p.pp if more else p.pp


def _one_layer_groups(recompute: RecomputeConfig) -> RecomputeConfig:
    return recompute.model_copy(update={"num_layers": 1}) if recompute.num_layers else recompute


def _again(run: RunConfig, values: dict[str, Any]) -> RunConfig:
    """Return a run with other sections, whose null keys are resolved for a small CPU."""
    sections = dict(run) | values
    changed = UnresolvedRun.model_construct(**sections)
    return resolve(UnresolvedRun.model_validate(changed.model_dump()), MACHINE)


def _objective(run: RunConfig, small: ModelConfig) -> ObjectiveConfig:
    """Return the objective with a teacher of the small model's shape and groups of two answers,
    where it has any.
    """
    o = run.objective
    if o.judges:
        return o.model_copy(update={"group_size": 2, "critic": None})
    if not o.distils:
        return o
    k = None if o.distil_top_k is None else min(o.distil_top_k, small.vocab_size // 2)
    own = {"teacher": DRAWN, "teacher_file": None, "distil_top_k": k}
    return o.model_copy(update=own)


def _tokens(data: DataConfig, seq: int) -> DataConfig:
    """Return synthetic tokens, packed if samples were, without the keys of the data that they
    replace.
    """
    kept = {key: getattr(data, key) for key in ("packed", "packed_by", "prefetch", "cache_dir")}
    return DataConfig(kind="mock", seq_length=seq, **kept)


def _ramp(run: RunConfig, smallest: int, batch: int, seq: int) -> dict[str, Any]:
    """Return a ramp of one smaller step, where there was a ramp and a smaller batch exists."""
    grows = len(batch_stages(run)) > 1 and smallest < batch
    return {**NO_RAMP, "batch_size_schedule": ((smallest, smallest * seq),) if grows else None}


def alone(run: RunConfig) -> RunConfig:
    """Return the same run on one rank, with everything kept on it: the same samples in the same
    micro-batches.

    Where experts are balanced sequence by sequence, each in a micro-batch of its own: nothing may
    depend on that.
    """
    # a scale of 8 bits is that of a micro-batch
    apart = balances_sequences(run) and run.precision.quantized is None
    apart = apart and not run.objective.pairs
    micro = {"micro_batch_size": 1} if apart else {}
    optim = run.optim.model_copy(update={"cpu_offload": 0.0})
    # The distributed optimizer's replacements of main weights are there on one rank too.
    parallel = ParallelConfig(
        ranks=1,
        sequence_parallel=False,
        distributed_optimizer=optim.holds_main_weights,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    trainer = run.trainer.model_copy(update=micro)
    return run.model_copy(update={"parallel": parallel, "optim": optim, "trainer": trainer})


def balances_sequences(run: RunConfig) -> bool:
    """Return whether routers balance each sequence separately, so that the other sequences of a
    micro-batch do not matter.
    """
    moe = run.model.moe
    alone = (
        moe is not None
        and moe.router_load_balancing_type == "seq_aux_loss"
        and not moe.expert_capacity_factor
    )
    return alone and not run.data.packed


def in_eight_bits(small: RunConfig, full: RunConfig, *, interpreted: bool = False) -> RunConfig:
    """Return a small run in fp32 whose linear layers all multiply in the 8 bits of `full`.

    No rule checks it: rules require bf16 with 8 bits and the sizes that GPUs multiply, and an
    emulation needs neither.
    """
    eight = {"fp8": full.precision.fp8, "fp8_recipe": full.precision.fp8_recipe}
    words = {op: getattr(small.kernels, op) for op in ("linear", "experts")}
    # the products of a CPU know no 8 bits, and the definition rounds in plain torch
    plain = {op: "reference" for op, word in words.items() if word == ON_CPU}
    update = {
        "precision": small.precision.model_copy(update=eight),
        "kernels": small.kernels.model_copy(update=plain),
    }
    small = small.model_copy(update=update)
    return with_triton_of(full, small) if interpreted else small


def without_chance(run: RunConfig) -> RunConfig:
    """Return the same run without random draws in a step: no dropout, no noise of routers, no
    random experts.

    Ranks with other tokens or layers draw other numbers, so runs of two layouts are equal only on
    average.
    """
    certain: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    if run.model.moe is not None:
        off = {"input_jitter_eps": None, "router_force_load_balancing": False}
        certain["moe"] = run.model.moe.model_copy(update=off)
    peft = run.peft.model_copy(update={"dropout": 0.0})
    return run.model_copy(update={"model": run.model.model_copy(update=certain), "peft": peft})


def by_document(run: RunConfig) -> RunConfig | None:
    """Return the same run, of packed samples, with a loss that is the sum of the losses of its
    documents.

    The balancing loss, which is of a whole micro-batch, is off; None where experts have a capacity,
    or sinkhorn balances them.
    """
    moe = run.model.moe
    if moe is None:
        return run
    if moe.expert_capacity_factor is not None or moe.router_load_balancing_type == "sinkhorn":
        return None
    alone = moe.model_copy(update={"aux_loss_coeff": 0.0})
    return run.model_copy(update={"model": run.model.model_copy(update={"moe": alone})})


def _state(run: RunConfig, dtype: str) -> dict[str, Any]:
    """Return the keys of an optimizer state in fp32, whose rounding hides no differences."""
    how = update_of(run)
    smooth = dict[str, Any]()
    if isinstance(how, Rotated):
        often = {"precondition_frequency": min(how.frequency, BASES_EVERY)}
        section = getattr(run.optim, run.optim.name).model_copy(update=often)
        smooth = {"eps": max(run.optim.eps, SMOOTH_EPS), run.optim.name: section}
    if dtype != "fp32":
        return smooth
    full = {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "main_params_dtype": "fp32"}
    sections = {
        name: getattr(run.optim, name).model_copy(
            update={key: None for key in spec.section.model_fields if key.endswith("_dtype")}
        )
        for name, spec in OPTIMIZERS.items()
        if spec.section is not None
    }
    return {**full, "store_param_remainders": False, **sections, **smooth}


def _with_sides_of(run: RunConfig, small: RunConfig) -> RunConfig:
    """Return `small` with a limit under which most sides of matrices have an eigenbasis if those of
    `run` have one.
    """
    how = update_of(run)
    if not isinstance(how, Rotated):
        return small
    long = {side for side, length in _sides(run).items() if length > how.longest}
    sides = _sides(small)
    if not long & sides.keys():
        return small
    limits = sorted({max(1, length - less) for length in sides.values() for less in (0, 1)})
    limit = max(
        limits, key=lambda n: sum((length > n) == (side in long) for side, length in sides.items())
    )
    section = getattr(small.optim, small.optim.name).model_copy(update={"max_precond_dim": limit})
    return small.model_copy(
        update={"optim": small.optim.model_copy(update={small.optim.name: section})}
    )


def _sides(run: RunConfig) -> dict[tuple[str, int], int]:
    """Return the sides of matrices by a weight's name, without the numbers of layers and experts,
    and their index in it.
    """
    found: dict[tuple[str, int], int] = {}
    for stage in stages(run):
        for weight, matrix in matrices(run, stage):
            lengths = (length for part in matrix.parts for length in part)
            found |= {
                (_NUMBERS.sub(".", weight.name), place): length
                for place, length in enumerate(lengths)
            }
    return found


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the changes from `before` to `after`, as `key: old -> new`."""
    old = before.flat()
    new = after.flat()
    watched = (
        "model.",
        "data.seq_length",
        "trainer.global_batch_size",
        "parallel.",
        "optim.eps",
        "optim.soap.max",
        *_FORMATS,
    )
    return [
        f"{k}: {old.get(k)} -> {v}"
        for k, v in new.items()
        if old.get(k) != v and k.startswith(watched)
    ]


def on_a_cpu(run: RunConfig) -> dict[str, Any]:
    """Return the keys of `kernels` with the portable ones everywhere."""
    words = dict.fromkeys((key for key, value in run.kernels if not isinstance(value, bool)))
    return {
        **words,
        "default": "cpu",
        "optimizer": "auto",
        "gradient_accumulation_fusion": False,
    }


def _optimizer(run: RunConfig, steps: int, dtype: str) -> OptimConfig:
    """Return the same optimizer, warm after half of the steps."""
    return run.optim.model_copy(
        update={
            "warmup_iters": min(run.optim.warmup_iters, steps // 2),
            "decay_iters": None,
            **_final_decay(run),
            **_state(run, dtype),
        }
    )


def _final_decay(run: RunConfig) -> dict[str, Any]:
    return {"wsd_decay_iters": 1} if run.optim.schedule == "wsd" else {}


def _depth(p: ParallelConfig, deep: list[Stage], fewest: int) -> tuple[int, ParallelConfig]:
    """Return the layers of the small model, `fewest` at least where stages are equal, and the
    layout that says how they are sharded.
    """
    blocks = p.pp * p.vpp
    smallest = min((len(s.layers) for s in deep if s.layers), default=0)
    sizes = [min(len(s.layers), 1 + (len(s.layers) > smallest)) for s in deep]
    if p.pipeline_layout is not None:
        kinds = zip(deep, sizes, strict=True)
        words = ["E" * s.embedding + "t" * n + "m" * s.mtp + "L" * s.loss for s, n in kinds]
        return sum(sizes), p.model_copy(update={"pipeline_layout": "|".join(words)})
    if p.layers_per_stage is not None:
        return sum(sizes), p.model_copy(update={"layers_per_stage": tuple(sizes)})
    more = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    if more:
        return 2 * blocks - more, p
    return blocks * -(-fewest // blocks), p


def portable(run: RunConfig) -> RunConfig:
    """Return a resolved run with its model, layout and batch as they are, on synthetic tokens,
    without CUDA graphs and copies of activations to host memory.

    TransformerEngine's, Triton's and torch's kernels for a GPU become those of a CPU, which save
    the same tensors. Two stay as they are: the implementation of the loss, and Triton's attention,
    since a CPU's saves scores as well. Products in eight bits become products in the format of the
    weights.
    """
    run = run.on_any_device()
    kernels = {**on_a_cpu(run), **({"loss": "megatron"} if run.kernels.loss == "megatron" else {})}
    kernels |= {"attention": "triton"} if Rank.of(run).words["attention"] == "triton" else {}
    values = {
        "precision": run.precision.unquantized(run.precision.format),
        "data": run.data.model_copy(
            update={"kind": "mock", "path": None, "blend": None, "blend_weights": None}
        ),
        "kernels": run.kernels.model_copy(update=kernels),
        "cluster": run.cluster.model_copy(
            update={"device": CPU.name, "nodes": 1, "devices_per_node": None, "peak_tflops": {}}
        ),
    }
    return _again(run, values)
