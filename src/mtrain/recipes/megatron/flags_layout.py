"""Megatron-LM's flags for sharding: axes, stages, sharded states, recomputation."""

from __future__ import annotations

from typing import Any

from mtrain.config.messages.keys import choices_of
from mtrain.recipes.megatron.arguments import (
    Arguments,
    Draft,
    Entry,
    Values,
    conditional,
    conditional_switch,
    list_choices,
    numbers,
    on,
    whole,
)

LAYOUT = "--pipeline-model-parallel-layout"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
PER_RANK = "--num-virtual-stages-per-pipeline-rank"
# megatron-core's word -> mtrain's
COMM = {"allgather": "all_gather"}


def _sequence(arguments: Arguments, draft: Draft) -> Draft:
    if arguments.has("--sequence-parallel") and draft["parallel.tp"] == 1:
        arguments.refuse(
            "--sequence-parallel",
            "no effect",
            "Megatron-LM turns it off without tensor parallelism",
        )
        return {"parallel.sequence_parallel": False}
    return {"parallel.sequence_parallel": arguments.has("--sequence-parallel")}


def _stages(arguments: Arguments, draft: Draft) -> Draft:
    """Return the virtual stages, and the layers of each stage."""
    out: Draft = {
        "parallel.vpp": 1,
        "parallel.pipeline_layout": None,
        "parallel.layers_per_stage": None,
    }
    layout = arguments.word(LAYOUT)
    if layout is not None:
        from mtrain.config.resolve.stages import parse_pipeline_layout

        try:
            count = len(parse_pipeline_layout(layout))
        except ValueError as error:
            arguments.refuse(LAYOUT, "unreadable", str(error))
            return out
        return {
            **out,
            "parallel.pipeline_layout": layout,
            "parallel.vpp": max(1, count // draft["parallel.pp"]),
        }
    size = arguments.converted(PER_STAGE, whole)
    virtual = arguments.converted(PER_RANK, whole)
    first = arguments.converted(FIRST, whole)
    last = arguments.converted(LAST, whole)
    if virtual is not None:
        out["parallel.vpp"] = max(1, virtual)
    if size is None and first is None and last is None:
        return out
    pp = draft["parallel.pp"]
    layers = draft.get("model.num_layers") or 0
    # with these two, Megatron-LM counts embedding and loss as layers of the pipeline
    counted = layers + bool(arguments.has("--account-for-embedding-in-pipeline-split"))
    counted += bool(arguments.has("--account-for-loss-in-pipeline-split"))
    if virtual is None and size and size > 0 and counted % (pp * size) == 0:
        out["parallel.vpp"] = counted // pp // size
    elif virtual is None and size is not None:
        arguments.refuse(
            PER_STAGE, "unreadable", f"{counted} layers over pp {pp} are no multiple of {size}"
        )
    if first is not None or last is not None:
        sizes = _ends(layers, pp, out["parallel.vpp"], first, last)
        if sizes is None:
            for flag in (FIRST, LAST):
                arguments.refuse(
                    flag, "unreadable", f"{layers} layers cannot be split so over pp {pp}"
                )
        out["parallel.layers_per_stage"] = sizes
    return out


def _ends(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int] | None:
    """Return the layers of each stage if the first and last ranks hold other numbers."""
    given = [n for n in (first, last) if n is not None]
    rest = layers - sum(given)
    between = pp - len(given)
    if pp < 2 or rest < 0 or (between == 0 and rest) or (between and rest % between):
        return None
    size = rest // between if between else 0
    ranks = [
        first if first is not None else size,
        *[size] * (pp - 2),
        last if last is not None else size,
    ]
    if any(n % vpp for n in ranks):
        return None
    # each virtual stage of a rank has as many layers
    return [n // vpp for n in ranks] * vpp


def _stages_words(values: Values) -> list[str]:
    pp = values["parallel.pp"]
    vpp = values["parallel.vpp"]
    if values["parallel.pipeline_layout"] is not None:
        return [LAYOUT, values["parallel.pipeline_layout"]]
    words = [PER_RANK, str(vpp)] if vpp > 1 else []
    sizes = values["parallel.layers_per_stage"]
    if sizes is None:
        return words
    # Megatron-LM has flags for the first and last ranks; other splits need a layout string
    ends = (sizes[0] * vpp, sizes[-1] * vpp)
    if _ends(sum(sizes), pp, vpp, *ends) == list(sizes):
        return [*words, FIRST, str(ends[0]), LAST, str(ends[1])]
    # E: embedding, t: a layer, m: an MTP layer, L: loss
    stages = ["t" * n for n in sizes]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "m" * (values["model.mtp_num_layers"] or 0) + "L"
    return [LAYOUT, "|".join(stages)]


def _context(arguments: Arguments, draft: Draft) -> Draft:
    words = arguments.words("--cp-comm-type")
    key = "parallel.cp_comm_type"
    if words is None:
        return {key: None}
    word = COMM.get(words[0], words[0]) if words else ""
    # megatron-core takes one word for each layer
    if len(set(words)) != 1 or word not in choices_of(key):
        arguments.refuse(
            "--cp-comm-type",
            "not supported",
            "one kind for all layers: " + ", ".join(choices_of(key)),
        )
        return {key: None}
    return {key: word}


def _context_words(values: Values) -> list[str]:
    word: str | None = values["parallel.cp_comm_type"]
    back = {ours: word for word, ours in COMM.items()}
    return [] if word is None else ["--cp-comm-type", back.get(word, word)]


STRATEGY = "--data-parallel-sharding-strategy"


def _sharded(arguments: Arguments, draft: Draft) -> Draft:
    out: Draft = {"parallel.fsdp": "none", "parallel.fsdp_sharding": None}
    strategy = arguments.word(STRATEGY)
    if arguments.has("--use-torch-fsdp2"):
        out["parallel.fsdp"] = "fsdp2"
    elif arguments.has("--use-megatron-fsdp") or arguments.has("--use-custom-fsdp"):
        out["parallel.fsdp"] = "megatron"
        if strategy in choices_of("parallel.fsdp_sharding"):
            return {**out, "parallel.fsdp_sharding": strategy}
        arguments.refuse(
            STRATEGY, "not supported", "one of " + ", ".join(choices_of("parallel.fsdp_sharding"))
        )
        return out
    arguments.refuse(STRATEGY, "no effect", "read only with --use-megatron-fsdp")
    return out


def _sharded_words(values: Values) -> list[str]:
    if values["parallel.fsdp"] == "none":
        return []
    if values["parallel.fsdp"] == "fsdp2":
        return ["--use-torch-fsdp2"]
    strategy = values["parallel.fsdp_sharding"]
    return ["--use-megatron-fsdp", *([STRATEGY, strategy] if strategy else [])]


def _data_parallel(flag: str, key: str) -> Entry:
    """Return a switch of DistributedDataParallel whose feature FSDP always has."""
    plain = on(flag, key)

    def read(arguments: Arguments, draft: Draft) -> Draft:
        if arguments.has(flag) and draft["parallel.fsdp"] != "none":
            arguments.refuse(flag, "derived here", "FSDP shards and overlaps by itself")
            return {key: False}
        return plain.read(arguments, draft)

    return Entry((flag,), (key,), read, plain.write, switches=(flag,))


def _recompute(arguments: Arguments, draft: Draft) -> Draft:
    kind = arguments.word("--recompute-granularity")
    listed = arguments.words("--recompute-modules")
    if listed is None:
        modules = None
    else:
        modules = [w for word in listed for w in word.strip("[]").replace(",", " ").split()]
    # short for --recompute-granularity selective
    if arguments.has("--recompute-activations"):
        kind = "selective"
    if arguments.has("--moe-layer-recompute") and kind == "full":
        arguments.refuse(
            "--moe-layer-recompute", "no effect", "Megatron-LM refuses it with full recomputation"
        )
    elif arguments.has("--moe-layer-recompute"):
        # It adds to the modules, whose default is core_attn.
        kind = "selective"
        modules = list(dict.fromkeys([*(["core_attn"] if modules is None else modules), "moe"]))
    # a module without a key would be recomputed there, and kept here
    known = list_choices("parallel.recompute.modules")
    strange = [word for word in modules or () if word not in known]
    if strange:
        arguments.refuse(
            "--recompute-modules",
            "not supported",
            f"{', '.join(strange)}: modules are {', '.join(known)}",
        )
    kept = [word for word in modules or () if word in known]
    return {
        "parallel.recompute.granularity": kind if kind in ("selective", "full") else "none",
        "parallel.recompute.modules": kept or None,
        "parallel.recompute.method": arguments.word("--recompute-method"),
        "parallel.recompute.num_layers": arguments.converted("--recompute-num-layers", whole),
    }


def _recompute_words(values: Values) -> list[str]:
    def get(name: str) -> Any:
        return values[f"parallel.recompute.{name}"]

    out = ["--recompute-granularity", get("granularity")] if get("granularity") != "none" else []
    out += ["--recompute-modules", *get("modules")] if get("modules") else []
    out += ["--recompute-method", get("method")] if get("method") else []
    return out + (["--recompute-num-layers", str(get("num_layers"))] if get("num_layers") else [])


def _has_virtual_stages(values: Values) -> bool:
    return bool(values["parallel.vpp"] > 1)


AXES: tuple[Entry, ...] = (
    Entry(
        ("--sequence-parallel",),
        ("parallel.sequence_parallel",),
        _sequence,
        lambda values: ["--sequence-parallel"] if values["parallel.sequence_parallel"] else [],
        switches=("--sequence-parallel",),
    ),
    Entry(("--cp-comm-type",), ("parallel.cp_comm_type",), _context, _context_words),
    numbers("--hierarchical-context-parallel-sizes", "parallel.hierarchical_cp_sizes"),
)

CUTS: tuple[Entry, ...] = (
    Entry(
        (PER_RANK, PER_STAGE, LAYOUT, FIRST, LAST),
        ("parallel.vpp", "parallel.pipeline_layout", "parallel.layers_per_stage"),
        _stages,
        _stages_words,
        {
            **dict.fromkeys((PER_RANK, PER_STAGE), ("parallel.vpp",)),
            **dict.fromkeys((FIRST, LAST), ("parallel.layers_per_stage",)),
            LAYOUT: ("parallel.pipeline_layout", "parallel.vpp"),
            **dict.fromkeys(
                ("model.num_layers", "parallel.pp"), ("parallel.vpp", "parallel.layers_per_stage")
            ),
        },
    ),
    Entry(
        ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp", STRATEGY),
        ("parallel.fsdp", "parallel.fsdp_sharding"),
        _sharded,
        _sharded_words,
        {STRATEGY: ("parallel.fsdp_sharding",)},
        switches=("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"),
    ),
    _data_parallel("--use-distributed-optimizer", "parallel.distributed_optimizer"),
    _data_parallel("--overlap-grad-reduce", "parallel.overlap_grad_reduce"),
    _data_parallel("--overlap-param-gather", "parallel.overlap_param_gather"),
    conditional_switch(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "parallel.ddp_reduce_scatter_with_fp32_accumulation",
        lambda values: values["parallel.distributed_optimizer"],
        "read only with --use-distributed-optimizer",
    ),
    conditional(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "parallel.microbatch_group_size_per_vp_stage",
        _has_virtual_stages,
        lambda values: values["parallel.pp"],
        "read only with virtual stages",
    ),
    Entry(
        (
            "--recompute-granularity",
            "--recompute-activations",
            "--moe-layer-recompute",
            "--recompute-modules",
            "--recompute-method",
            "--recompute-num-layers",
        ),
        tuple(
            f"parallel.recompute.{name}"
            for name in ("granularity", "modules", "method", "num_layers")
        ),
        _recompute,
        _recompute_words,
        {
            f"--recompute-{name.replace('_', '-')}": (f"parallel.recompute.{name}",)
            for name in ("granularity", "modules", "method", "num_layers")
        },
        switches=("--recompute-activations", "--moe-layer-recompute"),
    ),
)
