"""Operations that kernels fuse into one pass over memory, and the obstacles in a resolved run."""

from __future__ import annotations

from collections.abc import Callable

from mtrain.config.schema.run import RunConfig


def sums_apart(run: RunConfig) -> str | None:
    """Return why norms do not add up the residual stream that they read, or None if they do."""
    if run.kernels.norm != "triton":
        return f"kernels.norm is {run.kernels.norm}, and Triton's kernel makes the sum"
    if run.parallel.fsdp != "none":
        return (
            f"parallel.fsdp {run.parallel.fsdp} gathers a layer when it is called, and its first"
            " norm would be early"
        )
    if run.model.hidden_dropout:
        return f"model.hidden_dropout {run.model.hidden_dropout:g} lies between output and sum"
    if run.model.hybrid is not None or run.model.builder == "hybrid":
        return "the layers of hybrids make it apart"
    return None if run.model.t5 is None else "the layers of T5 are megatron-core's own"


def operands_apart(run: RunConfig) -> str | None:
    """Return why norms and SwiGLU do not quantise for the next linear layers, or None if
    they do.
    """
    k = run.kernels
    m = run.model
    if run.precision.quantized not in ("tensorwise", "blockwise") or k.linear != "triton":
        return (
            f"kernels.linear is {k.linear}, and products are in"
            f" {run.precision.quantized or run.precision.dtype}"
        )
    if k.norm != "triton":
        return f"kernels.norm is {k.norm}, and Triton's kernel quantises"
    return None if m.bert is None and m.t5 is None else "the layers of BERT and T5 quantise apart"


def positions_apart(run: RunConfig) -> str | None:
    """Return why queries and keys are not normed and rotated as they are unpacked, or None if they
    are.
    """
    m = run.model
    k = run.kernels
    if m.mla is not None:
        return "the positions of model.mla are a part of a head that is made apart"
    if m.hybrid is not None:
        return "the layers of hybrids norm and turn apart"
    if m.attention_output_gate:
        return (
            "model.attention_output_gate: gates stand between queries and keys in the packed"
            " product"
        )
    if k.rope != "triton" or m.position_embedding_type != "rope":
        return f"kernels.rope is {k.rope}, and Triton's kernel unpacks"
    if m.query_groups < run.parallel.tp:
        return (
            f"model.num_query_groups {m.query_groups} are fewer than parallel.tp {run.parallel.tp}"
        )
    if run.data.packed:
        return "data.packed: the positions of each document begin at 0"
    if m.qk_l2_norm or (
        m.qk_layernorm and (m.qk_layernorm_across_heads or m.normalization != "RMSNorm")
    ):
        return "the norm of queries and keys is not RMSNorm of each head"
    if m.qk_layernorm and k.norm != "triton":
        return f"kernels.norm is {k.norm}, and the norms of queries and keys would be Triton's"
    return None


# Operation whose kernel does more, the extra work, and why not in a resolved run, or None.
FUSIONS: dict[str, tuple[str, Callable[[RunConfig], str | None]]] = {
    "norm": ("makes the sums of the residual stream, too", sums_apart),
    "linear": ("gets inputs that norms and SwiGLU quantise", operands_apart),
    "rope": ("norms and turns queries and keys as it unpacks them", positions_apart),
}


def fusions(run: RunConfig) -> dict[str, str]:
    """Return, for each operation that Triton runs, the extra work of its kernel or the reason
    against it.
    """
    out = {}
    for name, (words, apart) in FUSIONS.items():
        if getattr(run.kernels, name) == "triton":
            why = apart(run)
            out[name] = words if why is None else f"not with what else its kernel could do: {why}"
    return out
