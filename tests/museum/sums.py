"""Bugs of what ranks add up: losses, gradients, norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.museum.exhibit import Exhibit, owner, replace, without, wrap

CORE = "megatron.core."
FINALIZE = f"{CORE}distributed.finalize_model_grads"
DDP = f"{CORE}distributed.distributed_data_parallel:DistributedDataParallel"
ROUTER = f"{CORE}transformer.moe.router:TopKRouter"
MIXTRAL = "model=mixtral_tiny"
DEEPSEEK = "model=deepseek_tiny"
EVERY = "every weight"
DENSE_MLA = f"{DEEPSEEK} model.moe=null"
OVERLAPPED = "parallel.distributed_optimizer=true parallel.overlap_grad_reduce=true"


def ranks() -> Any:
    """Return megatron-core's groups."""
    return owner(f"{CORE}parallel_state")


def wrong_sign() -> None:
    """Negate one rank's gradient of a projection."""

    def build(real: Any, run: Any, world: Any, **more: Any) -> Any:
        chunks = real(run, world, **more)
        if world.rank == 1:
            next(
                p for n, p in chunks[0].named_parameters() if "linear_proj.weight" in n
            ).register_hook(torch.neg)
        return chunks

    wrap("mtrain.train.assemble", "build_model", build)


def norms_not_summed() -> None:
    """Leave gradients of norms unsummed over the ranks' parts of the sequence."""
    replace(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", lambda *args, **kwargs: None)


def query_norms_not_summed() -> None:
    """Keep only a rank's own heads in the gradient of norms of queries and keys."""

    def reduce(real: Any, model: Any, config: Any, *args: Any) -> None:
        kept = config.qk_layernorm
        config.qk_layernorm = False
        real(model, config, *args)
        config.qk_layernorm = kept

    wrap(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", reduce)


def tied_not_summed() -> None:
    """Leave the gradient of an embedding unsummed over the stages that share it."""
    replace(FINALIZE, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


def tied_summed_twice() -> None:
    """They add it up twice."""

    def twice(real: Any, *args: Any, **more: Any) -> None:
        real(*args, **more)
        real(*args, **more)

    wrap(FINALIZE, "_allreduce_word_embedding_grads", twice)


def tied_counted_twice_in_norm() -> None:
    """Count the last stage's copy of a tied embedding in the norm as well."""
    replace(f"{CORE}optimizer.optimizer", "param_is_not_shared", lambda param: True)


def _tokens(group: Any) -> None:
    """Sum the count of tokens over another group than all data- and context-parallel ranks."""

    def finalize(real: Any, model: Any, num_tokens: Any = None, *args: Any, **more: Any) -> None:
        total = dist.all_reduce
        known = ranks().get_data_parallel_group(with_context_parallel=True)

        def other(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
            if tensor is num_tokens and named.get("group") is known:
                return total(tensor, group=group()) if group() is not None else None
            return total(tensor, *given, **named)

        dist.all_reduce = other
        try:
            real(model, num_tokens, *args, **more)
        finally:
            dist.all_reduce = total

    wrap(FINALIZE, "finalize_model_grads", finalize)
    wrap(
        "mtrain.mcore.api",
        "finalize_model_grads",
        lambda real, *a, **m: owner(FINALIZE).finalize_model_grads(*a, **m),
    )


def tokens_of_one_rank() -> None:
    """Divide gradients by the tokens of one rank."""
    _tokens(lambda: None)


def tokens_without_context() -> None:
    """Divide gradients by the tokens of the data-parallel ranks without those of the context."""
    _tokens(lambda: ranks().get_data_parallel_group())


def mean_of_means() -> None:
    """Divide each micro-batch by its own tokens."""

    def summed(real: Any, objective: Any, batch: Any, output: torch.Tensor) -> Any:
        loss, count, report = real(objective, batch, output)
        return loss / count.clamp(min=1), torch.ones_like(count), report

    wrap("mtrain.train.loop.step", "sum_loss", summed)


def loss_divided_twice() -> None:
    """Divide the loss by the number of micro-batches on top of the tokens."""

    def summed(real: Any, objective: Any, batch: Any, output: torch.Tensor) -> Any:
        loss, count, report = real(objective, batch, output)
        return (
            loss / ranks().get_data_parallel_world_size(with_context_parallel=True),
            count,
            report,
        )

    wrap("mtrain.train.loop.step", "sum_loss", summed)


def reported_loss_of_rank() -> None:
    """Leave the other ranks of the context out of the reported loss."""

    def summed(real: Any, world: Any, table: Any, reports: Any, own: Any) -> Any:
        weights = torch.ones_like(reports[0]) if reports else None
        if weights is not None:
            weights[0] += world.coords["cp"]
        return real(world, table, [report * weights for report in reports], own)

    for module in ("mtrain.train.loop.step", "mtrain.train.loop.readings"):
        wrap(module, "summed_report", summed)


def scaled(of: str, factor: Any) -> None:
    """Multiply buckets of these groups by another factor before ranks sum them."""

    def made(real: Any, self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        for group in getattr(self, of):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = factor()

    wrap(DDP, "__init__", made)


def averaged_and_divided() -> None:
    """Average gradients over data-parallel ranks, and divide them by all tokens."""
    scaled(
        "bucket_groups",
        lambda: 1 / ranks().get_data_parallel_world_size(with_context_parallel=True),
    )


def context_left_out() -> None:
    """Sum gradients over data-parallel ranks, but not over those of the context."""

    def sync(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        kept = [bucket.grad_data.clone() for bucket in self.buckets]
        done = real(self, *args, **more)
        for bucket, own in zip(self.buckets, kept, strict=True):
            dist.all_reduce(own, group=ranks().get_data_parallel_group())
            bucket.grad_data.copy_(own)
        return done

    wrap(
        f"{CORE}distributed.param_and_grad_buffer:_ParamAndGradBucketGroup", "start_grad_sync", sync
    )


def only_first_bucket() -> None:
    """Skip the reduction of a bucket that was reduced with an earlier micro-batch."""
    done: set[int] = set()

    def sync(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        if id(self) not in done:
            done.add(id(self))
            return real(self, *args, **more)
        self.grad_reduce_handle = None
        return None

    def finish(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        if self.grad_reduce_handle is None:
            return None
        return real(self, *args, **more)

    group = f"{CORE}distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
    wrap(group, "start_grad_sync", sync)
    wrap(group, "finish_grad_sync", finish)


def _streams(axes: tuple[str, ...]) -> None:
    """Seed random streams by the seed and these coordinates only."""

    def seeded(
        real: Any, seed: int, step: int, name: str, coords: Any, own: tuple[str, ...]
    ) -> int:
        return int(real(seed, step, name, coords, tuple(axis for axis in own if axis in axes)))

    wrap("mtrain.world.generators", "stream_seed", seeded)


def dropout_alike_over_dp() -> None:
    """Draw the same dropout on data-parallel ranks."""
    _streams(("pp", "cp", "tp"))


def dropout_alike_over_tp() -> None:
    """Draw the same dropout for the heads of all tensor-parallel ranks."""
    _streams(("pp", "dp", "cp"))


def dropout_of_copies_differs() -> None:
    """Draw different dropout on tensor-parallel ranks for the residual stream that each holds
    whole.
    """

    def seeded(
        real: Any, seed: int, step: int, name: str, coords: Any, own: tuple[str, ...]
    ) -> int:
        return int(real(seed, step, name, coords, ("pp", "dp", "cp", "tp")))

    wrap("mtrain.world.generators", "stream_seed", seeded)


def adapters_drop_features_alike() -> None:
    """Draw the same dropout on tensor-parallel ranks for their features of an adapter's input."""
    replace("mtrain.mcore.layers.low_rank:_LowRankRow", "_inputs_differ", lambda self: False)


def norm_of_stage() -> None:
    """Clip by the norm of a pipeline stage's own weights."""

    def group(real: Any, self: Any) -> Any:
        return ranks().get_tensor_model_parallel_group()

    wrap(f"{CORE}optimizer.optimizer:MegatronOptimizer", "get_grad_stats_parallel_group", group)


def norm_counts_copies() -> None:
    """Count weights that every tensor-parallel rank holds once for each of them in the norm."""
    replace(
        f"{CORE}tensor_parallel",
        "param_is_not_tensor_parallel_duplicate",
        lambda param, tp_group=None: True,
    )


NORMS = r".*(layernorm|norm|linear_fc1|linear_qkv|router).*"
DROPS = "model.hidden_dropout=0.1 model.attention_dropout=0.1"
EXHIBITS = (
    Exhibit(
        "dropout alike over dp",
        "Megatron-LM's --data-parallel-random-init, generators.py",
        f"parallel=dp2 {DROPS}",
        "less noise than asked for",
        dropout_alike_over_dp,
        r"embedding.*|decoder.*",
    ),
    Exhibit(
        "dropout of heads alike over tp",
        "generators.py",
        f"parallel=tp2 {DROPS}",
        "heads drop alike",
        dropout_alike_over_tp,
        r"decoder\.layers\.\d\.self_attention\.core_attention",
    ),
    Exhibit(
        "dropout of copies differs over tp",
        "generators.py",
        f"parallel=tp2 {DROPS}",
        "copies of the residual stream part",
        dropout_of_copies_differs,
        r"embedding.*",
    ),
    Exhibit(
        "dropout of adapters alike over tp",
        "low_rank.py",
        "parallel=tp2 peft=lora peft.dropout=0.1",
        "features of adapters drop alike",
        adapters_drop_features_alike,
        r"decoder\.layers\.\d\.(self_attention\.linear_proj|mlp\.linear_fc2)",
    ),
    Exhibit(
        "wrong sign on one rank",
        "made for the tests of layouts",
        "parallel=dp2",
        "a gradient cancels",
        wrong_sign,
        r"decoder\.layers\.\d\.self_attention\.linear_proj",
    ),
    Exhibit(
        "norm gradients of sequence parallel not summed",
        "Megatron-LM 7452",
        "parallel=tp2sp",
        "half of a gradient",
        norms_not_summed,
        NORMS,
    ),
    Exhibit(
        "query norms not summed over heads",
        "Megatron-LM 7452 (out_norm)",
        "parallel=tp2 model.qk_layernorm=true",
        "half of a gradient",
        query_norms_not_summed,
        r".*self_attention\.[qk]_layernorm",
    ),
    Exhibit(
        "MLA's query norm summed though whole",
        "patch mla-query-norm",
        f"{DENSE_MLA} parallel=tp2",
        "gradient times tp",
        without(f"{CORE}transformer.multi_latent_attention:MLASelfAttention", "__init__"),
        r".*self_attention\.q_layernorm",
    ),
    Exhibit(
        "tied embeddings not summed over stages",
        "finalize_model_grads",
        "parallel=pp2 model.tie_word_embeddings=true",
        "stages drift apart",
        tied_not_summed,
        r"embedding\.word_embeddings",
    ),
    Exhibit(
        "tied embeddings summed twice",
        "finalize_model_grads",
        "parallel=pp2 model.tie_word_embeddings=true",
        "gradient times 2",
        tied_summed_twice,
        r"embedding\.word_embeddings",
    ),
    Exhibit(
        "tied embedding counted twice in the norm",
        "optimizer.py, param_is_not_shared",
        "parallel=pp2 model.tie_word_embeddings=true",
        "norm too large",
        tied_counted_twice_in_norm,
        r"embedding\.word_embeddings.*",
    ),
    Exhibit(
        "divided by a rank's tokens over dp",
        "prime-rl 1957, Megatron-LM 673",
        "parallel=dp2",
        "gradient times dp",
        tokens_of_one_rank,
        EVERY,
    ),
    Exhibit(
        "divided by tokens without those of cp",
        "Megatron-LM 1532",
        "parallel=cp2",
        "gradient times cp",
        tokens_without_context,
        EVERY,
    ),
    Exhibit(
        "mean of means over accumulation",
        "prime-rl 1960, tunix 1662",
        "parallel=pp2 data.packed=true",
        "long documents count less",
        mean_of_means,
        r"every weight|output_layer|decoder.*",
    ),
    Exhibit(
        "loss divided by tokens and ranks",
        "prime-rl 1961, SkyRL 1420",
        "parallel=dp2",
        "gradient divided by dp",
        loss_divided_twice,
        r"every weight|output_layer|decoder.*",
    ),
    Exhibit(
        "reported loss of cp ranks weighed wrongly",
        "Megatron-LM 1532",
        "parallel=cp2",
        "loss alone",
        reported_loss_of_rank,
        r"reported loss",
    ),
    Exhibit(
        "averaged over dp and divided by tokens",
        "SkyRL 1420",
        "parallel=dp2",
        "gradient divided by dp",
        averaged_and_divided,
        EVERY,
    ),
    Exhibit(
        "gradients not summed over cp",
        "megatron-core, dp_cp groups",
        "parallel=cp2",
        "a rank's part of a gradient",
        context_left_out,
        EVERY,
    ),
    Exhibit(
        "overlapped reduction once only",
        "Megatron-LM 3693",
        f"parallel=dp2 {OVERLAPPED}",
        "later steps keep own gradients",
        only_first_bucket,
        EVERY,
    ),
    Exhibit(
        "norm of a stage",
        "Megatron-LM 5916",
        "parallel=pp2",
        "stages clip differently",
        norm_of_stage,
        r"gradient norm",
    ),
    Exhibit(
        "norm counts copies over tp",
        "clip_grads.py",
        "parallel=tp2",
        "norm too large",
        norm_counts_copies,
        r"gradient norm|.*norm.*",
    ),
)
