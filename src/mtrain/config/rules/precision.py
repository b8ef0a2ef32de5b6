"""Precision and kernel rules: formats, implementations and widths that the device supports."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine.kernels import KEYS, OURS, lacks, torch_experts_obstacle
from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.resolve.conditional import QUANTIZED
from mtrain.config.rules.finding import Change, Finding, each, multiples
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.rules.sharding import GRANULARITY, MODULES
from mtrain.config.rules.unused import key_effect_rule
from mtrain.config.schema.precision import LOW_PRECISION, PrecisionConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import MAMBA
from mtrain.units import number_of

GENERATIONS: dict[str, tuple[int, int]] = {
    "delayed": (89, 999),
    "tensorwise": (89, 999),
    "blockwise": (90, 999),
    "mxfp8": (100, 120),
    "nvfp4": (100, 999),
}
"""Recipe -> the first generation that TransformerEngine runs it on, and the first later one that
it does not.
"""
MULTIPLES = {"mxfp8": 32}
"""Recipe -> the divisor of every width; 16 for the others, whose last block may be partly empty."""
PLAIN = "precision=bf16"
BF16: Change = {"precision.dtype": "bf16"}
ACCUMULATION = "parallel.ddp_reduce_scatter_with_fp32_accumulation"
FIRST = "precision.num_layers_at_start_in_bf16"
LAST = "precision.num_layers_at_end_in_bf16"
_FORMAT = tuple(
    f"precision.{name}" for name in PrecisionConfig.model_fields if name.startswith(LOW_PRECISION)
)
FORMATS = " ".join(_FORMAT)
"""Keys of a quantized format."""
_FP8 = "precision=fp8_tensorwise cluster=h100x8"
NAMED = Code(
    "MT403",
    "Cannot run the named kernel because TransformerEngine needs another device.",
    "Use a reference kernel or auto, or train on a GPU; only auto chooses.",
    example="kernels.attention=te",
)


@rule(
    Code(
        "MT402",
        example="precision=fp16 precision.min_loss_scale=4096 precision.initial_loss_scale=1024",
    ),
    reads="precision.dtype precision.initial_loss_scale precision.min_loss_scale",
)
def loss_scale_range(run: RunConfig) -> Iterator[Finding]:
    """Cannot begin with this loss scale because the smallest one is larger."""
    p = run.precision
    key = "precision.min_loss_scale"
    # Only fp16 needs a loss scale; the other formats have the range of fp32.
    if p.dtype == "fp16" and p.min_loss_scale > p.initial_loss_scale:
        detail = f"smallest {p.min_loss_scale:g}, first {p.initial_loss_scale:g}"
        yield Finding("MT402", key, detail, [{key: min(1.0, p.initial_loss_scale)}])


def kernel_runs_on_the_device(key: str) -> Rule:
    """Return the rule that an implementation named for an operation can run; only `auto` may choose
    another.
    """

    @rule(NAMED, reads=f"kernels.{key} kernels.default cluster.device")
    def named_kernel_runs(run: RunConfig) -> Iterator[Finding]:
        device = facts_of(run.cluster.device)
        if getattr(run.kernels, key) != "te" or device.cuda_kernels:
            return
        # The rule of kernels.default reports it once for all operations.
        if key == "default" or run.kernels.default != "te":
            detail = f"it runs on {with_cuda_kernels()}, and the device is {device.name}"
            fixes = each(f"kernels.{key}", ["auto", "reference"])
            yield Finding("MT403", f"kernels.{key}", detail, fixes, lacks="device")

    return named_kernel_runs


NAMED_KERNELS = tuple(map(kernel_runs_on_the_device, KEYS))


@rule(
    Code(
        "MT409",
        example=(
            "model.attn_logit_softcapping=50 kernels.attention=te cluster=h100x8 parallel=single"
        ),
    ),
    reads=(
        "kernels.attention model.attn_logit_softcapping model.position_embedding_type"
        " model.attention_dropout model.mla model.kv_channels model.hidden_size"
        " model.num_attention_heads model.mla.qk_head_dim model.mla.qk_pos_emb_head_dim"
        " model.mla.v_head_dim model.dsa"
    ),
)
def attention_cap(run: RunConfig) -> Iterator[Finding]:
    """Cannot run the named attention because it lacks what the model requires."""
    why = lacks("attention", run.kernels.attention or "", run)
    if why is not None:
        fixes = each("kernels.attention", ["torch", "reference"])
        yield Finding("MT409", "kernels.attention", why, fixes)


@rule(
    Code(
        "MT405",
        "Cannot make the sum of gradients more exact because they are already reduced in fp32.",
        example=f"{ACCUMULATION}=true",
    ),
    Code("MT406", example=f"{PLAIN} precision.grad_reduce_in_fp32=false {ACCUMULATION}=true"),
    reads=(
        f"{ACCUMULATION} parallel.distributed_optimizer"
        " precision.dtype precision.grad_reduce_in_fp32 parallel.overlap_grad_reduce"
        " parallel.hsdp_replicas"
    ),
)
def fp32_accumulation(run: RunConfig) -> Iterator[Finding]:
    """Cannot sum gradients in fp32 because that takes the distributed optimizer, one bucket at a
    time, without replicas.
    """
    p = run.parallel
    if not p.ddp_reduce_scatter_with_fp32_accumulation:
        return
    off: Change = {ACCUMULATION: False}
    if run.precision.dtype == "fp32" or run.precision.grad_reduce_in_fp32:
        less: Change = {"precision.grad_reduce_in_fp32": False}
        in_fp32 = run.precision.dtype == "fp32"
        detail = f"precision.{'dtype is fp32' if in_fp32 else 'grad_reduce_in_fp32 is true'}"
        yield Finding("MT405", ACCUMULATION, detail, [less, {**less, **BF16}, off])
    # megatron-core sums a bucket after an all-to-all, and has no such sum over replicas.
    if not (p.distributed_optimizer and p.overlap_grad_reduce) or p.hsdp_replicas > 1:
        need: Change = {
            "parallel.distributed_optimizer": True,
            "parallel.overlap_grad_reduce": True,
            "parallel.hsdp_replicas": 1,
        }
        detail = "needs distributed_optimizer, overlap_grad_reduce and hsdp_replicas 1"
        yield Finding("MT406", ACCUMULATION, detail, [need, off])


@rule(
    Code(
        "MT408",
        help="Leave kernels.experts to auto, or change sizes and format as the message says.",
        example="model=mixtral_tiny kernels.experts=torch",
    ),
    reads=(
        "kernels.experts precision.dtype model.hidden_size model.moe.ffn_hidden_size parallel.etp"
        " parallel.tp"
    ),
)
def grouped_product_shapes(run: RunConfig) -> Iterator[Finding]:
    """Cannot run torch's grouped GEMM because it takes bf16, and rows whose size is a multiple of
    16 bytes.
    """
    why = torch_experts_obstacle(run) if run.kernels.experts == "torch" else None
    if why is not None:
        yield Finding(
            "MT408", "kernels.experts", why, each("kernels.experts", ["auto", "reference"])
        )


QUANTIZED_KEYS = tuple(map(key_effect_rule, QUANTIZED))


def without_low_precision(run: RunConfig) -> Change:
    """Return the change that sets every key of a quantized format to its default."""
    fields = PrecisionConfig.model_fields
    defaults = {key: fields[key.partition(".")[2]].default for key in _FORMAT}
    return {
        key: off
        for key, off in defaults.items()
        if getattr(run.precision, key.partition(".")[2]) != off
    }


def _tensorwise(run: RunConfig) -> Change:
    """Return the change to 8 bits with the stateless recipe that runs everywhere, without keys of
    others.
    """
    rest = {k: off for k, off in without_low_precision(run).items() if k not in (FIRST, LAST)}
    fp8 = run.precision.fp8 or "hybrid"
    return {**rest, "precision.fp8": fp8, "precision.fp8_recipe": "tensorwise"}


def _key(run: RunConfig) -> str:
    return "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"


@rule(
    Code(
        "MT440",
        "Cannot multiply in two formats because linear layers take 8 bits or 4 bits, not both.",
        example=(
            "precision.dtype=bf16 precision.fp8=hybrid cluster=h100x8 parallel=single"
            " precision.fp4=e2m1"
        ),
    ),
    Code(
        "MT441",
        example="precision.fp8=hybrid cluster=h100x8 parallel=single precision.dtype=fp16",
    ),
    reads=f"{FORMATS} precision.dtype",
)
def low_precision_format(run: RunConfig) -> Iterator[Finding]:
    """Cannot use low-precision GEMMs because the rest of such a model must be in bf16."""
    p = run.precision
    if p.fp8 is not None and p.fp4 is not None:
        fixes = [
            {"precision.fp4": None, "precision.fp4_recipe": None},
            {"precision.fp8": None, "precision.fp8_recipe": None},
        ]
        yield Finding("MT440", "precision.fp4", f"fp8 {p.fp8}, fp4 {p.fp4}", fixes)
    if p.quantized is not None and p.dtype != "bf16":
        plain = [BF16, without_low_precision(run)]
        yield Finding("MT441", "precision.dtype", f"recipe {p.quantized}, dtype {p.dtype}", plain)


@rule(
    Code("MT442", example="precision=fp8_delayed"),
    reads=(
        f"kernels.linear {FORMATS} model.moe kernels.experts cluster.device kernels.default"
        " kernels.attention"
    ),
)
def low_precision_layers(run: RunConfig) -> Iterator[Finding]:
    """Cannot multiply in low precision because every such layer must be TransformerEngine's or
    ours, and the others would stay in bf16 silently.
    """
    p = run.precision
    k = run.kernels
    layers = ("linear", "experts") if run.model.moe is not None else ("linear",)
    # Low-precision attention is a separate choice, and only TransformerEngine has it.
    used = (*layers, "attention") if p.fp8_dot_product_attention else layers
    default = "reference" if k.default == "reference" else "auto"
    words = {name: getattr(k, name) or default for name in used}
    known = p.quantized in OURS
    if known and not {words[name] for name in layers} & {"te", "torch"}:
        words |= dict.fromkeys(layers, "te")  # or ours
    named = [(name, word) for name, word in words.items() if word not in ("te", "auto")]
    if p.quantized is None or not named:
        return
    device = facts_of(run.cluster.device)
    te: Change = {f"kernels.{name}": "te" for name in used}
    # The reference is mtrain's only kernel on a CPU.
    ours: Change = {
        f"kernels.{name}": "reference" if device.on_host else "triton" for name in layers
    }
    detail = f"{', '.join(f'kernels.{name} is {word}' for name, word in named)}; TransformerEngine"
    yield Finding(
        "MT442",
        _key(run),
        f"{detail} runs on {with_cuda_kernels()}, and the device is {device.name}",
        [*([ours] if known and used == layers else []), te, without_low_precision(run)],
        hint=PLAIN,
        lacks="" if device.cuda_kernels else "device",
    )


@rule(
    Code("MT443", example="precision=nvfp4 cluster=h100x8"),
    reads=f"cluster.sm {FORMATS} cluster.device",
)
def recipe_hardware(run: RunConfig) -> Iterator[Finding]:
    """Cannot run this recipe because the devices are of another generation."""
    recipe = run.precision.quantized
    sm = run.cluster.sm
    # Without a generation in the cluster file nothing can be refused.
    if recipe is None or sm is None or not facts_of(run.cluster.device).cuda_kernels:
        return
    first, end = GENERATIONS[recipe]
    if first <= sm < end:
        return
    until = f" and below sm_{end}" if end < 999 else ""
    detail = f"{recipe} needs sm_{first} or newer{until}, and the devices are sm_{sm}"
    fixes = [_tensorwise(run), without_low_precision(run)]
    yield Finding("MT443", _key(run), detail, fixes, hint=PLAIN, also=("cluster.sm",))


def _widths(run: RunConfig) -> Iterator[tuple[str, str, int, int]]:
    """Yield the key, name, width and shard count of every matrix that is multiplied in low
    precision.
    """
    m = run.model
    tp = run.parallel.tp
    yield "model.hidden_size", "the hidden size", m.hidden_size, 1
    if m.hybrid is not None and MAMBA in m.hybrid.pattern:
        h = m.hybrid
        key = "model.hybrid.num_heads"
        width = h.num_heads * h.head_dim
        first = 2 * (width + h.num_groups * h.state_dim) + h.num_heads
        yield key, "all channels of a mixer", width, tp
        yield key, "the first layer of a mixer", first, tp
    if m.moe is None or m.moe.first_dense_layers:
        yield "model.ffn_hidden_size", "the MLP", m.ffn_hidden_size, tp
    if m.moe is not None:
        yield (
            "model.moe.ffn_hidden_size",
            "an expert",
            m.moe.ffn_hidden_size,
            run.parallel.etp or tp,
        )
        if m.moe.shared_expert_intermediate_size:
            key = "model.moe.shared_expert_intermediate_size"
            yield key, "the shared experts", m.moe.shared_expert_intermediate_size, tp
    if m.mla is None:
        heads = m.head_dim * m.num_attention_heads
        yield "model.num_attention_heads", "all query heads", heads, tp
        # With more ranks than groups, each rank has a copy of a group.
        all_heads = heads + 2 * m.head_dim * max(m.query_groups, tp)
        yield "model.num_query_groups", "queries, keys and values", all_heads, tp
    else:
        mla = m.mla
        heads = m.num_attention_heads
        queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        keys_and_values = heads * (mla.qk_head_dim + mla.v_head_dim)
        positions = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        yield "model.mla.kv_lora_rank", "the latent keys and values", mla.kv_lora_rank, 1
        yield "model.mla.qk_head_dim", "all queries", queries, tp
        yield "model.mla.qk_head_dim", "all keys and values", keys_and_values, tp
        yield "model.mla.v_head_dim", "all values", heads * mla.v_head_dim, tp
        yield "model.mla.qk_pos_emb_head_dim", "latent keys, values and positions", positions, 1
        if mla.q_lora_rank:
            yield "model.mla.q_lora_rank", "the latent queries", mla.q_lora_rank, 1


@rule(
    Code("MT444", example=f"{_FP8} model.ffn_hidden_size=700"),
    Code(
        "MT445",
        "Cannot multiply a rank's tokens in low precision because they are no multiple of the"
        " recipe's block.",
        example=f"{_FP8} data.seq_length=255",
    ),
    reads=(
        f"{FORMATS} data.seq_length model.hidden_size model.num_attention_heads parallel.cp"
        " parallel.sequence_parallel parallel.tp trainer.micro_batch_size model.ffn_hidden_size"
        " model.mla.kv_lora_rank model.mla.q_lora_rank model.mla.qk_head_dim"
        " model.mla.qk_pos_emb_head_dim model.mla.v_head_dim model.kv_channels"
        " model.num_query_groups model.moe.ffn_hidden_size model.moe.first_dense_layers"
        " model.moe.shared_expert_intermediate_size parallel.etp model.hybrid.pattern"
        " model.hybrid.num_heads model.hybrid.head_dim model.hybrid.num_groups"
        " model.hybrid.state_dim"
    ),
)
def tensor_core_widths(run: RunConfig) -> Iterator[Finding]:
    """Cannot multiply this matrix in low precision because its width on a rank is no multiple of
    the recipe's block.
    """
    recipe = run.precision.quantized
    p = run.parallel
    if recipe is None:
        return
    step = MULTIPLES.get(recipe, 16)
    plain = without_low_precision(run)
    for key, words, width, ranks in _widths(run):
        if width % (ranks * step):
            one_number = ("model.hidden_size", "model.ffn_hidden_size")
            near = multiples(width, ranks * step)
            # Other widths are products of several keys, and no single one can be suggested.
            direct = key in one_number or key.startswith("model.moe.")
            fixes = [*each(key, near if direct else []), plain]
            detail = (
                f"{words}, {width} wide over {number_of(ranks, 'rank')};"
                f" {recipe} takes multiples of {step}"
            )
            yield Finding("MT444", key, detail, fixes, hint=PLAIN, also=("parallel.tp",))
    # Activations are sharded over cp, and between layers over tp.
    cut = p.cp * (p.tp if p.sequence_parallel else 1)
    tokens = run.data.length * run.trainer.micro
    if tokens % (cut * step):
        detail = (
            f"{tokens} tokens over {number_of(cut, 'rank')}; {recipe} takes multiples of {step}"
        )
        more = each("data.seq_length", multiples(run.data.length, cut * step))
        also = ("parallel.tp", "parallel.cp", "trainer.micro_batch_size")
        yield Finding("MT445", "data.seq_length", detail, [*more, plain], hint=PLAIN, also=also)


@rule(
    Code("MT446", example=f"{_FP8} parallel=pp2 {FIRST}=3"),
    reads=(
        f"model.num_layers parallel.pp precision.fp8 {LAST} {FIRST} precision.fp4"
        " precision.fp8_recipe precision.fp4_recipe"
    ),
)
def bf16_layers(run: RunConfig) -> Iterator[Finding]:
    """Cannot keep these layers in bf16 because they must lie on the first and the last stage, and
    leave others.
    """
    p = run.precision
    layers = run.model.num_layers
    pp = run.parallel.pp
    start = p.num_layers_at_start_in_bf16
    end = p.num_layers_at_end_in_bf16
    if p.quantized is None or not (start or end):
        return
    # Only the first and the last stage keep layers in bf16.
    held = layers // pp
    fixes: list[Change] = [{FIRST: 0, LAST: 0}]
    if start + end >= layers:
        detail = f"{start} first and {end} last of {layers} layers"
    elif max(start, end) > held:
        fixes = [{FIRST: min(start, held), LAST: min(end, held)}, *fixes]
        detail = f"{start} first and {end} last layers, {held} in a stage of pp {pp}"
    else:
        return
    yield Finding("MT446", FIRST, detail, fixes)


@rule(
    Code(
        "MT447",
        example=(
            f"precision=fp8_delayed cluster=h100x8 {GRANULARITY}=selective {MODULES}=[layernorm]"
        ),
    ),
    Code(
        "MT448",
        "Cannot resume exactly because checkpoints do not hold the scales of delayed fp8; a"
        " resumed run collects them again.",
        severity="warning",
        example="precision=fp8_delayed cluster=h100x8",
    ),
    reads=(
        f"{FORMATS} checkpoint.save_interval checkpoint.save_minutes {GRANULARITY} {MODULES}"
        " checkpoint.save_final"
    ),
)
def delayed_scales(run: RunConfig) -> Iterator[Finding]:
    """Cannot recompute this module because it would see the scales of a later step."""
    p = run.precision
    r = run.parallel.recompute
    if p.fp8 is None or p.quantized != "delayed":
        return
    other = _tensorwise(run)
    modules = r.modules or ()
    twice = [name for name in modules if name in ("moe_act", "layernorm")]
    if r.granularity == "selective" and twice:
        rest = [name for name in modules if name not in twice]
        drop: Change = {MODULES: rest} if rest else {GRANULARITY: "none", MODULES: None}
        yield Finding("MT447", MODULES, " and ".join(twice), [drop, other])
    # The history of largest values is in no checkpoint.
    if run.checkpoint.saves:
        yield Finding("MT448", "precision.fp8_recipe", fixes=[other])
