"""Low-precision rules: who multiplies in 8 and 4 bits, and which widths fit."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine.kernels import OURS
from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.resolve.conditional import QUANTIZED
from mtrain.config.rules.finding import Change, Finding, multiples
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.unused import key_effect_rule
from mtrain.config.schema.precision import LOW_PRECISION, PrecisionConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import MAMBA

# Where TransformerEngine runs a recipe: the first generation, and the first later one without it.
GENERATIONS: dict[str, tuple[int, int]] = {
    "delayed": (89, 999),
    "tensorwise": (89, 999),
    "blockwise": (90, 999),
    "mxfp8": (100, 120),
    "nvfp4": (100, 999),
}
MULTIPLES = {"mxfp8": 32}
"""Recipe -> what every width must be a multiple of; 16 for the others, whose last block may be
partly empty.
"""
PLAIN = "precision=bf16"
_FORMAT = tuple(
    f"precision.{name}" for name in PrecisionConfig.model_fields if name.startswith(LOW_PRECISION)
)
FORMATS = " ".join(_FORMAT)
"""Keys of a quantized format."""


def without_low_precision(run: RunConfig) -> Change:
    """Return the change that sets every key of a quantized format to its default."""
    defaults = {key: PrecisionConfig.model_fields[key.partition(".")[2]].default for key in _FORMAT}
    return {
        k: off for k, off in defaults.items() if getattr(run.precision, k.partition(".")[2]) != off
    }


def _tensorwise(run: RunConfig) -> Change:
    """Return the change to 8 bits with the stateless recipe that runs everywhere, without keys of
    others.
    """
    kept = ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16")
    rest = {key: value for key, value in without_low_precision(run).items() if key not in kept}
    return {
        **rest,
        "precision.fp8": run.precision.fp8 or "hybrid",
        "precision.fp8_recipe": "tensorwise",
    }


def _key(run: RunConfig) -> str:
    return "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"


@rule(
    Code(
        "MT440",
        "Linear layers multiply in 8 bits or in 4, not in both.",
        example=(
            "precision.dtype=bf16 precision.fp8=hybrid cluster=h100x8 parallel=single"
            " precision.fp4=e2m1"
        ),
    ),
    Code(
        "MT441",
        "The rest of a model with low-precision GEMMs is in bf16.",
        example="precision.fp8=hybrid cluster=h100x8 parallel=single precision.dtype=fp16",
    ),
    reads=f"{FORMATS} precision.dtype",
)
def low_precision_format(run: RunConfig) -> Iterator[Finding]:
    """Products are in 8 or in 4 bits, and everything else in bf16."""
    p = run.precision
    if p.fp8 is not None and p.fp4 is not None:
        rule = f"linear layers multiply in 8 bits or in 4: fp8 is {p.fp8} and fp4 is {p.fp4}"
        four: Change = {"precision.fp8": None, "precision.fp8_recipe": None}
        yield Finding(
            "MT440",
            "precision.fp4",
            rule,
            ({"precision.fp4": None, "precision.fp4_recipe": None}, four),
        )
    if p.quantized is not None and p.dtype != "bf16":
        rule = (
            f"the {p.quantized} recipe is one of models in bf16, and precision.dtype is {p.dtype}"
        )
        yield Finding(
            "MT441",
            "precision.dtype",
            rule,
            ({"precision.dtype": "bf16"}, without_low_precision(run)),
        )


@rule(
    Code("MT442", example="precision=fp8_delayed"),
    reads=(
        f"kernels.linear {FORMATS} model.moe kernels.experts cluster.device kernels.default"
        " kernels.attention"
    ),
)
def low_precision_layers(run: RunConfig) -> Iterator[Finding]:
    """All linear layers and experts use our low-precision products or TransformerEngine's: others
    would stay in bf16 silently.
    """
    p = run.precision
    k = run.kernels
    layers = ("linear", "experts") if run.model.moe is not None else ("linear",)
    used = (*layers, "attention") if p.fp8_dot_product_attention else layers
    words = {
        name: getattr(k, name) or ("reference" if k.default == "reference" else "auto")
        for name in used
    }
    known = p.quantized in OURS
    if known and not {words[name] for name in layers} & {"te", "torch"}:
        words |= dict.fromkeys(layers, "te")  # or ours
    others = [
        f"kernels.{name} is {word}" for name, word in words.items() if word not in ("te", "auto")
    ]
    if p.quantized is None or not others:
        return
    device = facts_of(run.cluster.device)
    what = "8" if p.fp8 is not None else "4"
    where = f"on {with_cuda_kernels()}; the device is {device.name}, {', '.join(others)}"
    rule = f"products in {what} bits are TransformerEngine's, {where}"
    te: Change = {f"kernels.{name}": "te" for name in used}
    ours: Change = {
        f"kernels.{name}": "reference" if device.on_host else "triton" for name in layers
    }
    fixes = (*((ours,) if known and used == layers else ()), te, without_low_precision(run))
    yield Finding(
        "MT442", _key(run), rule, fixes, hint=PLAIN, lacks="" if device.cuda_kernels else "device"
    )


@rule(
    Code("MT443", example="precision=nvfp4 cluster=h100x8"),
    reads=f"cluster.sm {FORMATS} cluster.device",
)
def recipe_hardware(run: RunConfig) -> Iterator[Finding]:
    """8 bits need sm_89, block-wise 8 bits sm_90 or sm_100, and 4 bits sm_100."""
    recipe = run.precision.quantized
    sm = run.cluster.sm
    if recipe is None or sm is None or not facts_of(run.cluster.device).cuda_kernels:
        return
    first, end = GENERATIONS[recipe]
    if first <= sm < end:
        return
    until = f" and below sm_{end}" if end < 999 else ""
    rule = f"the {recipe} recipe needs sm_{first} or newer{until}, and the devices are sm_{sm}"
    yield Finding(
        "MT443",
        _key(run),
        rule,
        (_tensorwise(run), without_low_precision(run)),
        hint=PLAIN,
        also=("cluster.sm",),
    )


def _widths(run: RunConfig) -> Iterator[tuple[str, str, int, int]]:
    """Yield the key, name, width and shard count of every matrix that is multiplied in low
    precision.
    """
    m = run.model
    p = run.parallel
    yield "model.hidden_size", "the hidden size", m.hidden_size, 1
    if m.hybrid is not None and MAMBA in m.hybrid.pattern:
        h = m.hybrid
        width = h.num_heads * h.head_dim
        states = h.num_groups * h.state_dim
        yield "model.hybrid.num_heads", "all channels of a mixer", width, p.tp
        yield (
            "model.hybrid.num_heads",
            "the first layer of a mixer",
            2 * (width + states) + h.num_heads,
            p.tp,
        )
    if m.moe is None or m.moe.first_dense_layers:
        yield "model.ffn_hidden_size", "the MLP", m.ffn_hidden_size, p.tp
    if m.moe is not None:
        yield "model.moe.ffn_hidden_size", "an expert", m.moe.ffn_hidden_size, p.etp or p.tp
        if m.moe.shared_expert_intermediate_size:
            key = "model.moe.shared_expert_intermediate_size"
            yield key, "the shared experts", m.moe.shared_expert_intermediate_size, p.tp
    if m.mla is None:
        heads = m.head_dim * m.num_attention_heads
        yield "model.num_attention_heads", "all query heads", heads, p.tp
        queries_keys_values = heads + 2 * m.head_dim * max(m.query_groups, p.tp)
        yield "model.num_query_groups", "queries, keys and values", queries_keys_values, p.tp
    else:
        yield "model.mla.kv_lora_rank", "the latent keys and values", m.mla.kv_lora_rank, 1
        heads = m.num_attention_heads
        queries = heads * (m.mla.qk_head_dim + m.mla.qk_pos_emb_head_dim)
        yield "model.mla.qk_head_dim", "all queries", queries, p.tp
        yield (
            "model.mla.qk_head_dim",
            "all keys and values",
            heads * (m.mla.qk_head_dim + m.mla.v_head_dim),
            p.tp,
        )
        yield "model.mla.v_head_dim", "all values", heads * m.mla.v_head_dim, p.tp
        positions = m.mla.kv_lora_rank + m.mla.qk_pos_emb_head_dim
        yield "model.mla.qk_pos_emb_head_dim", "latent keys, values and positions", positions, 1
        if m.mla.q_lora_rank:
            yield "model.mla.q_lora_rank", "the latent queries", m.mla.q_lora_rank, 1


@rule(
    Code(
        "MT444",
        "Every width that a rank multiplies is a multiple of what the recipe takes.",
        example="precision=fp8_tensorwise cluster=h100x8 model.ffn_hidden_size=700",
    ),
    Code(
        "MT445",
        "The tokens of a micro-batch are a multiple of what the recipe takes.",
        example="precision=fp8_tensorwise cluster=h100x8 data.seq_length=255",
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
    """Every multiplied width, and a rank's tokens, are multiples of the recipe's block."""
    recipe = run.precision.quantized
    p = run.parallel
    if recipe is None:
        return
    step = MULTIPLES.get(recipe, 16)
    for key, words, width, ranks in _widths(run):
        if width % (ranks * step):
            rule = (
                f"{words}, {width} wide over {ranks} rank(s): {recipe} takes multiples of {step} on"
                " each"
            )
            fixes: tuple[Change, ...] = (without_low_precision(run),)
            if key in ("model.hidden_size", "model.ffn_hidden_size") or key.startswith(
                "model.moe."
            ):
                fixes = (*({key: n} for n in multiples(width, ranks * step)), *fixes)
            yield Finding("MT444", key, rule, fixes, hint=PLAIN, also=("parallel.tp",))
    cut = p.cp * (p.tp if p.sequence_parallel else 1)
    tokens = run.data.length * run.trainer.micro
    if tokens % (cut * step):
        rule = (
            f"micro-batches of {tokens} tokens over {cut} rank(s): {recipe} takes multiples of"
            f" {step} on each"
        )
        more: tuple[Change, ...] = tuple(
            {"data.seq_length": n} for n in multiples(run.data.length, cut * step)
        )
        yield Finding(
            "MT445",
            "data.seq_length",
            rule,
            (*more, without_low_precision(run)),
            hint=PLAIN,
            also=("parallel.tp", "parallel.cp", "trainer.micro_batch_size"),
        )


@rule(
    Code(
        "MT446",
        example=(
            "precision=fp8_tensorwise cluster=h100x8 parallel=pp2"
            " precision.num_layers_at_start_in_bf16=3"
        ),
    ),
    reads=(
        "model.num_layers parallel.pp precision.fp8 precision.num_layers_at_end_in_bf16"
        " precision.num_layers_at_start_in_bf16 precision.fp4 precision.fp8_recipe"
        " precision.fp4_recipe"
    ),
)
def bf16_layers(run: RunConfig) -> Iterator[Finding]:
    """The bf16 layers at both ends lie on the first and the last stage, and do not cover
    the model.
    """
    p = run.precision
    layers = run.model.num_layers
    pp = run.parallel.pp
    start = p.num_layers_at_start_in_bf16
    end = p.num_layers_at_end_in_bf16
    if p.quantized is None or not (start or end):
        return
    none: Change = {
        "precision.num_layers_at_start_in_bf16": 0,
        "precision.num_layers_at_end_in_bf16": 0,
    }
    if start + end >= layers:
        rule = (
            f"{start} first and {end} last layers in bf16 of {layers} leave none for {p.quantized}"
        )
        yield Finding("MT446", "precision.num_layers_at_start_in_bf16", rule, (none,))
    elif max(start, end) > layers // pp:
        rule = (
            f"{start} first and {end} last layers in bf16, and a stage of pp {pp} has"
            f" {layers // pp}"
        )
        few: Change = {
            "precision.num_layers_at_start_in_bf16": min(start, layers // pp),
            "precision.num_layers_at_end_in_bf16": min(end, layers // pp),
        }
        yield Finding("MT446", "precision.num_layers_at_start_in_bf16", rule, (few, none))


@rule(
    Code(
        "MT447",
        "No part is computed again under the scales of a later step.",
        example=(
            "precision=fp8_delayed cluster=h100x8 parallel.recompute.granularity=selective "
            "parallel.recompute.modules=[layernorm]"
        ),
    ),
    Code(
        "MT448",
        "The scales of delayed 8 bits are in no checkpoint.",
        severity="warning",
        example="precision=fp8_delayed cluster=h100x8",
    ),
    reads=(
        f"{FORMATS} checkpoint.save_interval checkpoint.save_minutes parallel.recompute.granularity"
        " parallel.recompute.modules checkpoint.save_final"
    ),
)
def delayed_scales(run: RunConfig) -> Iterator[Finding]:
    """Delayed scales exclude recomputation, and no checkpoint contains them."""
    p = run.precision
    r = run.parallel.recompute
    if p.fp8 is None or p.quantized != "delayed":
        return
    other = _tensorwise(run)
    twice = [name for name in r.modules or () if name in ("moe_act", "layernorm")]
    if r.granularity == "selective" and twice:
        rest = [name for name in r.modules or () if name not in twice]
        rule = f"{' and '.join(twice)} cannot be computed again under the scales of a later step"
        if rest:
            change: Change = {"parallel.recompute.modules": rest}
        else:
            change = {"parallel.recompute.granularity": "none"}
        drop = change if rest else {**change, "parallel.recompute.modules": None}
        yield Finding("MT447", "parallel.recompute.modules", rule, (drop, other))
    if run.checkpoint.saves:
        rule = (
            "the largest values of past steps are in no checkpoint: after a resume they are"
            " collected anew"
        )
        yield Finding("MT448", "precision.fp8_recipe", rule, (other,))


RULES = (
    *map(key_effect_rule, QUANTIZED),
    low_precision_format,
    low_precision_layers,
    recipe_hardware,
    tensor_core_widths,
    bf16_layers,
    delayed_scales,
)
