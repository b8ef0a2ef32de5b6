"""The implementation of each operation: what exists, what speaks against it, the choice of `auto`,
and the operations that kernels fuse into one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mtrain_kernels.admitted import missing

from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.messages.problem import problem_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.watch import watched
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import Problem


class Facts(Protocol):
    """Facts of the machine."""

    @property
    def gpus(self) -> int: ...
    @property
    def transformer_engine(self) -> bool: ...
    @property
    def triton(self) -> bool: ...
    @property
    def triton_interpreted(self) -> bool: ...


@dataclass(frozen=True)
class Operation:
    """An operation of a model, under its key in `kernels`."""

    name: str
    order: tuple[str, ...]
    """Its implementations in the order in which `auto` tries them."""
    applies: Callable[[UnresolvedRun], bool] = lambda run: True
    """Predicate: does the model of a run contain the operation?"""
    needs: str = ""
    """The condition on the model, as a user writes it."""


def _routes(run: UnresolvedRun) -> bool:
    return run.model.moe is not None and run.model.moe.router_load_balancing_type != "sinkhorn"


def _activates(run: UnresolvedRun) -> bool:
    m = run.model
    plain = m.glu_linear_offset == 0 and m.activation_func_clamp_value is None
    return plain and m.activation in ("swiglu", "geglu", "geglu_tanh", "squared_relu")


# The implementation for a CPU, whatever a device is called.
ON_CPU = "cpu"
# The implementation by the libraries that torch calls.
BY_TORCH = "torch"

# All operations, in the order of the keys of `kernels`.
OPERATIONS = (
    Operation("norm", ("te", "triton", "cpu", "reference")),
    Operation(
        "rope",
        ("triton", "cpu", "reference"),
        lambda r: r.model.mla is not None or r.model.position_embedding_type == "rope",
        "model.position_embedding_type=rope",
    ),
    Operation("attention", ("te", "torch", "triton", "cpu", "reference")),
    Operation("linear", ("te", "triton", "torch", "cpu", "reference")),
    Operation(
        "activation",
        ("triton", "reference"),
        _activates,
        "model.activation swiglu, geglu, geglu_tanh or squared_relu, without offset and clamp",
    ),
    Operation(
        "experts",
        ("te", "triton", "torch", "cpu", "reference"),
        lambda r: r.model.moe is not None,
        "a model.moe",
    ),
    Operation(
        "moe_router",
        ("triton", "reference"),
        _routes,
        "a model.moe that is not balanced by sinkhorn",
    ),
    Operation(
        "moe_permute", ("triton", "reference"), lambda r: r.model.moe is not None, "a model.moe"
    ),
    Operation("loss", ("triton", "cpu", "reference", "megatron")),
    Operation("optimizer", ("triton", "te", "torch", "reference")),
)


# Ops of `mtrain_kernels` that implement an operation in Triton; the others have its name.
PARTS: dict[str, tuple[str, ...]] = {
    "linear": ("fp8_linear", "quantize"),
    "experts": ("grouped_gemm",),
    "loss": ("cross_entropy", "linear_cross_entropy"),
}


def parts_of(op: str, run: RunConfig) -> tuple[str, ...]:
    """Return the ops of `mtrain_kernels` that run if Triton implements an operation."""
    parts = PARTS.get(op, (op,))
    if op == "experts" and run.precision.quantized in OURS:
        parts += ("fp8_grouped", "quantize")
    # Optimizers of whole matrices multiply them, too, in a separate kernel.
    whole = op == "optimizer" and OPTIMIZERS[run.optim.name].whole_matrices is not None
    return (*parts, "newton_schulz") if whole else parts


# Recipes of precision.fp8 that our linear layers and experts support.
OURS = ("tensorwise", "blockwise")
# Limits of Triton's attention, as in `mtrain_kernels.attention.tiles`.
WIDEST_HEAD = 256
NO_COUNTS = (
    "TransformerEngine's experts want counts of rows on the host, where model.moe.pad_alltoall has"
    " none"
)


def routes_by_lists(run: RunConfig) -> bool:
    """Return whether a resolved run routes tokens by lists, so that no layer waits for the device.

    It does if routing and permutation are kernels, or `model.moe.pad_alltoall` is set, no token is
    dropped, and nothing else needs a map.
    """
    moe = run.model.moe
    k = run.kernels
    if moe is None or k.experts == "te":
        return False
    if "moe_router" in (run.trainer.cuda_graph_modules or ()):
        return False  # a captured router leaves maps to the rest of a layer
    if (k.moe_router, k.moe_permute) != ("triton", "triton") and not moe.padded:
        return False
    dropless = moe.expert_capacity_factor is None and not moe.router_padding_for_quantization
    return (
        dropless
        and moe.token_dispatcher_type != "flex"
        and moe.router_load_balancing_type != "sinkhorn"
    )


def stands_for(op: Operation, run: RunConfig, machine: Facts) -> str | None:
    """Return the implementation of an operation that no key names; None if one does, or if the
    machine that runs it decides.

    `kernels.default` holds everywhere; only `auto` depends on the machine.
    """
    word = getattr(run.kernels, op.name)
    default = run.kernels.default
    device = run.cluster.device
    if word not in (None, "auto") or not op.applies(run):
        return None
    # `kernels.default` is a preference: an operation that it cannot run falls back to auto, whereas
    # a named implementation raises.
    if word is None and default in op.order and not lacks(op.name, default, run):
        return default
    return _auto(op, run, device, machine)[0] if facts_of(device).on_host or machine.gpus else None


def reasons(run: RunConfig, machine: Facts) -> dict[str, str]:
    """Return key -> a sentence with the reason for its implementation in a resolved run.

    It names the obstacles of the ones that `auto` would have preferred, or the key that set it.
    """
    out: dict[str, str] = {}
    for op in OPERATIONS:
        word = getattr(run.kernels, op.name)
        if word is None:
            continue
        impl, against = _auto(op, run, run.cluster.device, machine)
        refused = "; ".join(f"no {name}: {why}" for name, why in against.items())
        out[op.name] = (refused or "the first that can run") if word == impl else "named"
    more = fusions(run)
    return {name: f"{why}; {more[name]}" if name in more else why for name, why in out.items()}


def left_to_others(run: RunConfig, machine: Facts) -> list[str]:
    """Return the operations whose Triton kernels `auto` skips as unmeasured on these GPUs."""
    device = run.cluster.device
    if not facts_of(device).cuda_kernels:
        return []
    found = []
    for op in OPERATIONS:
        chosen = stands_for(op, run, machine)
        if chosen is None:  # it is named, or no operation of this model
            continue
        why = _auto(op, run, device, machine)[1].get("triton")
        if chosen != run.kernels.default and why is not None and why == _not_run(op.name, run):
            found.append(op.name)
        # The choice of later operations depends on earlier ones, as in `resolve`.
        run = run.model_copy(update={"kernels": run.kernels.model_copy(update={op.name: chosen})})
    return found


def summary(run: RunConfig) -> str:
    """Return the operations of a resolved run by implementation: `triton: rope, loss; te: norm`."""
    by_word: dict[str, list[str]] = {}
    for op in OPERATIONS:
        word = getattr(run.kernels, op.name)
        if op.applies(run):
            by_word.setdefault(word or "chosen where it runs", []).append(op.name)
    if len(by_word) == 1:
        return next(iter(by_word))
    return "; ".join(f"{w}: {', '.join(n)}" for w, n in by_word.items())


def _auto(op: Operation, run: RunConfig, device: str, machine: Facts) -> tuple[str, dict[str, str]]:
    """Return the choice of `auto`, after those of earlier OPERATIONS, and each obstacle."""
    against: dict[str, str] = {}
    for word in op.order:
        why = _unwanted(op.name, word, run, device, machine) or obstacle(
            op.name, word, run, device, machine
        )
        if why is None:
            return word, against
        against[word] = why
    return "reference", against


def obstacle(op: str, word: str, run: RunConfig, device: str, machine: Facts) -> str | None:
    """Return why an implementation cannot run, or None."""
    facts = facts_of(device)
    if word == "te":
        if not facts.cuda_kernels:
            return f"TransformerEngine runs on {with_cuda_kernels()}, and the device is {device}"
        if machine.gpus and not machine.transformer_engine:
            return "TransformerEngine is not installed"
    if word == ON_CPU and not facts.on_host:
        return f"cpu is for operations on a CPU, and the device is {device}"
    if word == "triton":
        if not machine.triton and (facts.on_host or machine.gpus):
            return "Triton is not installed"
        if facts.on_host and not machine.triton_interpreted:
            return (
                "Triton runs on a GPU, and on a CPU only in its interpreter, with"
                " TRITON_INTERPRET=1"
            )
    return lacks(op, word, run) or (
        torch_experts_obstacle(run) if (op, word) == ("experts", "torch") else None
    )


def lacks(op: str, word: str, run: RunConfig) -> str | None:
    """Return the reason why an implementation cannot serve this run on any device, or None."""
    if op == "optimizer":
        return update_obstacle(word, run)
    if (op, word) == ("linear", "triton") and run.precision.quantized not in OURS:
        return (
            "Triton multiplies for linear layers in precision.fp8, with precision.fp8_recipe"
            " tensorwise or blockwise"
        )
    full = {"linear": (ON_CPU, "torch"), "experts": (ON_CPU,)}.get(op, ())
    if word in full and run.precision.quantized is not None:
        return (
            f"{word} multiplies in {run.precision.dtype}, and precision is"
            f" {run.precision.quantized}"
        )
    if op in ("linear", "experts") and word == "te" and run.peft.kind is not None:
        return (
            f"TransformerEngine's layers support no adapters, which peft.kind {run.peft.kind} needs"
        )
    if (op, word) == ("attention", "te") and run.model.position_embedding_type == "relative":
        return (
            "mtrain does not pass TransformerEngine's attention the biases of"
            " model.position_embedding_type relative"
        )
    if (op, word) == ("attention", "te") and run.model.attn_logit_softcapping is not None:
        return "TransformerEngine's attention lacks model.attn_logit_softcapping"
    if op == "attention" and word in ("te", "triton") and run.model.dsa is not None:
        return (
            f"attention by {word} accepts no mask of each pair, with which model.dsa selects keys"
        )
    if (op, word) == ("attention", "triton"):
        return _fused_attention_lacks(run)
    if op == "experts" and run.model.moe is not None:
        return _experts_lack(word, run)
    return None


def _experts_lack(word: str, run: RunConfig) -> str | None:
    """Return the reason why an implementation of experts cannot serve this run, or None."""
    if word == "te" and run.model.moe is not None and run.model.moe.padded:
        return NO_COUNTS
    if (
        word == "te"
        and run.precision.quantized in OURS
        and run.kernels.linear in ("triton", "reference")
    ):
        return (
            "TransformerEngine's experts need its linear layers for precision.fp8, and those are"
            f" {run.kernels.linear}"
        )
    if word == "torch" and run.precision.quantized is not None:
        return (
            f"torch's grouped product is in {run.precision.dtype}, and precision is"
            f" {run.precision.quantized}"
        )
    return None


def _experts_are_ours(run: RunConfig) -> str | None:
    """Return why experts in eight bits need our linear layers and not TransformerEngine's."""
    moe = run.model.moe
    word = run.kernels.experts
    if moe is None:
        return None
    if word in ("triton", "reference"):
        return (
            "experts and linear layers in precision.fp8 need one implementation, and"
            " kernels.experts is"
            f" {word}"
        )
    return NO_COUNTS if word != "te" and moe.padded else None


def _fused_attention_lacks(run: RunConfig) -> str | None:
    """Return what Triton's attention lacks for this model, or None."""
    m = run.model
    if m.position_embedding_type == "relative":
        return "Triton's attention lacks the biases of model.position_embedding_type relative"
    if m.attention_dropout:
        return (
            "Triton's attention has no dropout, and model.attention_dropout is"
            f" {m.attention_dropout:g}"
        )
    # MLA's queries are wider than its values; the kernel's tile holds the wider of both.
    latent = m.mla and max(m.mla.qk_head_dim + m.mla.qk_pos_emb_head_dim, m.mla.v_head_dim)
    width = latent or m.head_dim
    if width > WIDEST_HEAD:
        return (
            f"Triton's attention has heads of {WIDEST_HEAD} at most, and those of the model are"
            f" {width} wide"
        )
    return None


def update_obstacle(word: str, run: RunConfig) -> str | None:
    """Return why an implementation cannot update the weights that this run trains, or None."""
    return OPTIMIZERS[run.optim.name].obstacle(word, run)


def torch_experts_obstacle(run: RunConfig) -> str | None:
    """Return why torch's grouped GEMM cannot run the experts of this model, or None."""
    if run.precision.dtype != "bf16":
        return f"torch's grouped product takes bf16, and precision.dtype is {run.precision.dtype}"
    if run.model.moe:
        share = run.model.moe.ffn_hidden_size // (run.parallel.etp or run.parallel.tp)
    else:
        share = 8
    if run.model.hidden_size % 8 or share % 8:
        return (
            f"torch's grouped product takes sizes by 8, and experts are {run.model.hidden_size} x"
            f" {share} on a rank"
        )
    return None


def te_norm_obstacle(run: RunConfig) -> str | None:
    """Return why TransformerEngine's norms do not fit this model, or None."""
    m = run.model
    if m.mla is None or m.mla.layernorm_epsilon in (None, m.layernorm_epsilon):
        return None
    return f"TransformerEngine's norms all have model.layernorm_epsilon, {m.layernorm_epsilon:g}"


def _unwanted(op: str, word: str, run: RunConfig, device: str, machine: Facts) -> str | None:
    """Return why `auto` skips an implementation that could run, or None."""
    facts = facts_of(device)
    if facts.on_host and word == "triton" and machine.triton_interpreted:
        return (
            "Triton's interpreter is for tests: it takes a millisecond for what a GPU does in a"
            " microsecond"
        )
    if op == "optimizer" and word == "torch":
        return None
    if facts.on_host and word == "torch":
        if op == "attention":
            return "cpu and the reference call the same kernels of torch"
        return "measured on no CPU"
    served = {"triton": facts.triton, "torch": facts.torch_kernels}.get(word, True)
    if not facts.on_host and not served:
        return f"it is not declared to serve {device}"
    if op == "norm" and word == "te" and (why := te_norm_obstacle(run)):
        return why
    if (
        (op, word) == ("linear", "te")
        and run.precision.quantized in OURS
        and (why := _experts_are_ours(run))
    ):
        return why
    if (op, word) == ("experts", "torch") and (run.cluster.sm or 0) >= 100:
        return (
            "torch's grouped product is wrong for experts without tokens on sm_100 (pytorch issue"
            " 172439)"
        )
    triton_could = obstacle(op, "triton", run, device, machine) is None and not _not_run(op, run)
    if (op, word) == ("attention", "torch") and triton_could:
        what = "caps" if run.model.attn_logit_softcapping else ""
        if run.model.softmax_type != "vanilla":
            what = "sinks"
        if not what:
            return None
        return f"torch's kernels support {what} of scores only as a number for each pair"
    if op == "activation" and word == "triton" and run.kernels.linear == "te":
        return "megatron-core's fused activations go with TransformerEngine's layers"
    return _not_run(op, run) if word == "triton" and facts.cuda_kernels else None


def _not_run(op: str, run: RunConfig) -> str | None:
    """Return why `auto` skips Triton's kernels on a generation without admitted results."""
    anyway = f"kernels.{op}=triton takes them anyway"
    if run.cluster.sm is None:
        return (
            "auto takes Triton where it has run, and cluster.sm does not say which GPU this is;"
            f" {anyway}"
        )
    new = missing(run.cluster.sm, parts_of(op, run))
    if not new:
        return None
    return (
        f"Triton's kernels of {' and '.join(new)} have not run on sm_{run.cluster.sm} yet; {anyway}"
    )


def loss_is_whole(run: RunConfig) -> bool:
    """Return whether a step minimises the sum that the model computes, so that its gradient is 1.

    fp16 multiplies the sum by a scale, and other objectives do as they like.
    """
    return run.objective.name == "next_token" and run.precision.dtype != "fp16"


def losses_add_gradients(run: RunConfig) -> bool:
    """Return whether the loss adds the gradient of the output layer to its buffer, part by part."""
    wide = run.precision.grad_reduce_in_fp32 or run.precision.dtype == "fp32"
    fuses = bool(run.kernels.gradient_accumulation_fusion) and run.parallel.fsdp == "none"
    return fuses and wide and loss_is_whole(run)


# Keys of `kernels` that name an implementation.
KEYS = ("default", *(op.name for op in OPERATIONS))


def problems(
    run: RunConfig, machine: Facts, origins: Mapping[str, str], keys: Sequence[str] = KEYS
) -> Iterator[Problem]:
    """Return a problem for each named implementation that this machine cannot run."""
    for key in keys:
        yield from _problem(run, machine, origins, key)


def _problem(
    run: RunConfig, machine: Facts, origins: Mapping[str, str], key: str
) -> Iterator[Problem]:
    word = getattr(run.kernels, key)
    device = run.cluster.device
    if word not in ("triton", "te", ON_CPU) or (word == "te" and not facts_of(device).cuda_kernels):
        return
    # The problem of the default is reported once, at its own key.
    if key != "default" and word == run.kernels.default:
        return
    reads: set[str] = set()
    why = obstacle("norm" if key == "default" else key, word, watched(run, reads), device, machine)
    if why is not None:
        path = f"kernels.{key}"
        fix = f"{path}=reference"
        if machine.triton and word == "triton":
            fix += " or TRITON_INTERPRET=1 in the environment (slow, for tests)"
        elif word == "triton":
            fix += " or pip install 'mtrain[triton]'"
        named = sorted(read for read in reads if read in why and not read.endswith("."))
        related = ["cluster.device", *(read for read in named if read != "cluster.device")]
        yield problem_of(run, origins, "MT407", path, why, fix, related=related)


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
    """Return why norms and SwiGLU do not quantise for the next linear layers, or None."""
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
    """Return why queries and keys are not normed and rotated as they are unpacked, or None."""
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
    """Return the extra work of each operation's Triton kernel, or the reason against it."""
    out = {}
    for name, (words, apart) in FUSIONS.items():
        if getattr(run.kernels, name) == "triton":
            why = apart(run)
            out[name] = words if why is None else f"not with what else its kernel could do: {why}"
    return out
