"""The same run, small enough for a laptop: layout, stages, experts per rank and schedule stay; widths do not."""

from __future__ import annotations

from typing import Any

from mtrain.config.model import MLAConfig, ModelConfig, MoEConfig
from mtrain.config.parallel import ParallelConfig
from mtrain.config.resolve import Machine, resolve, smallest_world
from mtrain.config.run import RunConfig

HEAD, HIDDEN, FFN, VOCAB = 16, 64, 128, 512
MACHINE = Machine(cpu_cores=1, memory_bytes=0)


def shrink(run: RunConfig, *, steps: int, dtype: str = "fp32", max_ranks: int = 16) -> RunConfig:
    """`run` with the same layout, on made-up tokens on a CPU.

    Of its data-parallel ranks the fewest stay that the layout allows, and a second one where all fit in `max_ranks`.

    Layers become one per (virtual) stage, heads and key/value heads the fewest that keep how they are cut, experts
    at most two per rank. Everything that decides which code runs stays as it was: norm, activation, biases,
    positions, tying, routing, optimizer, schedule.
    """
    p = run.parallel
    world = smallest_world(p)
    if world == p.model_ranks and _data_parallel(run) > 1 and 2 * world <= max_ranks:
        world *= 2
    seq = 2 * p.cp * p.tp * -(-32 // (2 * p.cp * p.tp))
    data_parallel = world // p.model_ranks
    batch = data_parallel * p.pp * max(1, 4 // p.pp)
    values: dict[str, Any] = {
        "model": _model(run.model, p, seq),
        "parallel": p.model_copy(update={"ranks": world}),
        "precision": run.precision.model_copy(update={"dtype": dtype}),
        "data": run.data.model_copy(
            update={"kind": "mock", "path": None, "tokenizer": None, "seq_length": seq, "eod_mask_loss": False}
        ),
        "optim": run.optim.model_copy(
            update={"warmup_iters": min(run.optim.warmup_iters or 0, 2), "decay_iters": None, **_final_decay(run)}
        ),
        "trainer": run.trainer.model_copy(
            update={
                "train_iters": steps,
                "global_batch_size": batch,
                "micro_batch_size": 1,
                "eval_iters": 0,
                "eval_interval": None,
                "sample_tokens": 0,
                "profile_step": None,
            }
        ),
        "kernels": run.kernels.model_copy(update=_on_a_cpu(run)),
        "checkpoint": run.checkpoint.model_copy(update={"save_interval": None, "resume": None}),
        "cluster": run.cluster.model_copy(
            update={"name": "rehearsal", "device": "cpu", "nodes": 1, "devices_per_node": None, "peak_tflops": {}}
        ),
    }
    return resolve(RunConfig.model_validate(run.model_copy(update=values).model_dump()), MACHINE)


def alone(run: RunConfig) -> RunConfig:
    """The same run on one rank: the same samples in the same micro-batches."""
    return run.model_copy(update={"parallel": ParallelConfig(ranks=1)})


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """What was shrunk, as `key: old -> new`."""
    old, new = before.flat(), after.flat()
    watched = ("model.", "data.seq_length", "trainer.global_batch_size", "parallel.ranks", "precision.dtype")
    return [f"{k}: {old.get(k)} -> {v}" for k, v in new.items() if old.get(k) != v and k.startswith(watched)]


def _data_parallel(run: RunConfig) -> int:
    return max(1, (run.parallel.ranks or 1) // run.parallel.model_ranks)


def _on_a_cpu(run: RunConfig) -> dict[str, Any]:
    words = {key: "reference" for key, value in run.kernels if isinstance(value, str)}
    return {**words, "gradient_accumulation_fusion": False}


def _final_decay(run: RunConfig) -> dict[str, Any]:
    return {"wsd_decay_iters": 1} if run.optim.schedule == "wsd" else {}


def _model(model: ModelConfig, p: ParallelConfig, seq: int) -> ModelConfig:
    groups = p.tp if model.query_groups >= p.tp else model.query_groups
    ratio = min(2, model.num_attention_heads // model.query_groups)
    heads = groups * ratio
    if heads % p.tp:
        heads = groups * p.tp
    blocks = p.pp * p.vpp
    update: dict[str, Any] = {
        "num_layers": blocks if blocks > 1 else 2,
        "hidden_size": HIDDEN * max(1, p.tp // 4),
        "ffn_hidden_size": FFN * max(1, p.tp // 4),
        "num_attention_heads": heads,
        "num_query_groups": groups if model.num_query_groups is not None else None,
        "kv_channels": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": max(seq, 64),
    }
    if model.num_query_groups is None:
        update["num_attention_heads"] = max(p.tp, 2)
    if model.moe is not None:
        update["moe"] = _experts(model.moe, p, update["num_layers"])
    if model.mla is not None:
        update["mla"] = MLAConfig(
            q_lora_rank=32 if model.mla.q_lora_rank else None,
            kv_lora_rank=32,
            qk_head_dim=16,
            qk_pos_emb_head_dim=8,
            v_head_dim=16,
        )
    return model.model_copy(update=update)


def _experts(moe: MoEConfig, p: ParallelConfig, layers: int) -> MoEConfig:
    groups = 2 if moe.router_num_groups else None
    experts = p.ep * min(2, moe.num_experts // p.ep)
    experts = max(experts, 4) if experts % (2 * p.ep) == 0 or p.ep in (1, 2, 4) else experts
    topk = min(moe.router_topk, 2, experts)
    return moe.model_copy(
        update={
            "num_experts": experts,
            "router_topk": topk,
            "ffn_hidden_size": 32 * (p.etp or p.tp),
            "shared_expert_intermediate_size": 32 * p.tp if moe.shared_expert_intermediate_size else None,
            "first_dense_layers": min(moe.first_dense_layers, 1 if layers > 1 else 0),
            "router_num_groups": groups,
            "router_group_topk": 1 if groups and moe.router_group_topk else None,
        }
    )
