"""Rows of published throughput as configurations of mtrain, each with the software behind it."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import yaml
from plan_time_recipes import Recipe, recipe
from plan_time_software import described

from mtrain.api import load
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError
from mtrain.plan.count import flops_per_token, parameters

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "data" / "published_throughput.csv"
OTHER = FILE.with_name("published_other.csv")
"""Rows of other software than Megatron-Bridge, which are fitted too."""
UNFITTED = FILE.with_name("published_throughput_unfitted.csv")
BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
Row = dict[str, str]

NAMES = {
    "deepseek_v3_nomtp": "deepseek_v3",
    "nemotron3_nano_30b": "nemotron3_nano_30b_a3b",
    "qwen2.5_32b": "qwen25_32b",
}
LONGEST = 1 << 17
PLAIN = (
    "model=llama3_8b",
    "parallel=single",
    "data=mock",
    "trainer.sample_tokens=0",
    "cluster.device_memory_gib=4096",
)
PER_NODE = {"gb200": 4, "gb300": 4}
# Software and device -> facts that its pages state and that differ from the device's data sheet.
HARDWARE = {("torchtitan", "h100"): ["cluster.power_watts=500", "cluster.memory_gbps=2400"]}
SELECTIVE = 0.45
"""torchtitan's selective recomputation saves every other product and attention: of a forward that
is two thirds products and a fifth attention, half of the first and none of the second are computed
again, and all of the rest.
"""
RELEASE = re.compile(r"(2[5-9]\.\d\d)(?:\.\d+)?")


@dataclass(frozen=True)
class Measured:
    """A row that is a configuration."""

    row: Row
    model: str
    """The model without its variants, which are left out together."""
    run: RunConfig
    software: str
    tokens: float
    """Published tokens per second and device."""

    def label(self) -> str:
        """Return the first columns of a line of the table."""
        r = self.row
        layout = " ".join(
            f"{key}{r[key]}" for key in ("tp", "pp", "vp", "cp", "ep") if r[key] not in ("", "1")
        )
        return (
            f"{r['model']:24} {r['gpu']:5} {r['gpus']:>4} {r['precision']:14} {layout or 'dp':22}"
            f" {self.software:18}"
        )


def rows(path: Path = FILE) -> list[Row]:
    """Return the rows of a file without its remarks."""
    with path.open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def software(row: Row) -> str:
    """Return the software and release that measured a row."""
    source = row["source"]
    if source.endswith("performance summary"):
        return "bridge 26.02"
    if "torchtitan" in source:
        return "torchtitan 25" if "2025" in source else "torchtitan 24"
    if "Automodel" in source:
        return "automodel"
    if "core 0.8" in source:
        return "core 0.8"
    if "NeMo 24" in source:
        return "nemo 24"
    if "llm-foundry" in source:
        return "llm-foundry"
    found = RELEASE.search(source)
    return f"bridge {found[1]}" if found else "bridge 26.08"


def base_name(row: Row) -> str:
    """Return the model that a row trains, without the way of training."""
    return row["model"].removesuffix("_tokendrop").removesuffix("_nomtp").removesuffix("_lora")


def release(row: Row) -> str:
    """Return the release of Megatron-Bridge, such as 26.04, or "" for other software."""
    found = software(row)
    return found.removeprefix("bridge ") if found.startswith("bridge ") else ""


def recipe_of(row: Row) -> Recipe:
    """Return the recipe of a row of Megatron-Bridge, or an empty one for other software."""
    found = release(row)
    name = row["model"].removesuffix("_tokendrop").removesuffix("_nomtp")
    layout = " ".join(row[key] or "1" for key in ("tp", "pp", "vp", "ep"))
    return recipe(name, row["gpu"], row["precision"], found, layout) if found else Recipe()


def graphed(row: Row) -> frozenset[str]:
    """Return the parts that CUDA graphs capture."""
    return recipe_of(row).graphs


def experts_overlapped(row: Row) -> bool:
    """Return whether dispatch to experts overlapped with computation; in pipelines, that needs
    virtual stages.
    """
    able = row["pp"] in ("", "1") or row["vp"] not in ("", "1")
    return (recipe_of(row).overlaps_experts and able) or "EP overlap" in row["source"]


def overlapped(row: Row) -> bool:
    """Return whether tensor-parallel communication overlapped with GEMMs, in Megatron or by
    torchtitan's async TP.
    """
    if "torchtitan" in row["source"]:
        return "async TP" in row["source"]
    return recipe_of(row).overlaps_tp if release(row) else "Automodel" not in row["source"]


def obstacle(row: Row) -> str | None:
    """Return why a row is not a configuration of mtrain, or None."""
    base = row["model"].removesuffix("_tokendrop").removesuffix("_lora")
    if not row.get("overrides") and NAMES.get(base, base) not in choices_of_group("model"):
        return f"{base} is not a model that ships"
    if not (row["tp"] and row["pp"] and row["gbs"] and row["gpus"]):
        return "the source leaves the layout out"
    if "torchtitan" in row["source"] and row["cp"] not in ("", "1"):
        return "torch's ring attention, which is not TransformerEngine's"
    if row["precision"] == "fp8_rowwise":
        return "a scale for each row is no recipe of TransformerEngine"
    if row["pp"] not in ("", "1") and not row["vp"] and "Bridge" in row["source"] and _few(row):
        return (
            "the source leaves the virtual stages out, which decide the bubble of so few"
            " micro-batches"
        )
    if not row["tokens_s_per_gpu"] and not row["tflops_per_gpu"]:
        return "no figure"
    return None


def _few(row: Row) -> bool:
    p = {key: int(row[key] or 1) for key in ("tp", "pp", "cp", "mbs", "gpus", "gbs")}
    return p["gbs"] * p["tp"] * p["pp"] * p["cp"] < 8 * p["pp"] * p["gpus"] * p["mbs"]


def degrees(row: Row) -> dict[str, int]:
    """Return the degrees of the layout.

    The runs of Megatron-LM's scaling table were interleaved, by two layers where that divides.
    """
    p = {key: int(row[key] or 1) for key in ("tp", "pp", "vp", "cp", "ep")}
    if "core 0.8" in row["source"] and p["pp"] > 1:
        each = layers_of(row["model"], row.get("overrides", "")) // p["pp"]
        p["vp"] = each // 2 if each % 2 == 0 else each
    return p


def words(row: Row) -> list[str]:
    """Return the configuration of a row."""
    name = row["model"].removesuffix("_tokendrop").removesuffix("_lora")
    p = degrees(row)
    layout = "".join(
        f"{'vpp' if key == 'vp' else key}{n}"
        for key, n in p.items()
        if n > 1 and (key != "vp" or p["pp"] > 1)
    )
    gpus = int(row["gpus"])
    seq = row["seq"] or "4096"
    per_node = min(gpus, PER_NODE.get(row["gpu"], 8))
    micro = row["mbs"] or "1"
    precision = row["precision"]
    found = [
        *(row.get("overrides", "").split() or [f"model={NAMES.get(name, name)}"]),
        f"parallel={layout or 'single'}",
        f"precision={precision}",
        "data=mock",
        f"data.seq_length={seq}",
        "trainer.sample_tokens=0",
        f"trainer.micro_batch_size={micro}",
        f"trainer.global_batch_size={flushed(row, p)}",
        f"cluster={row['gpu']}",
        f"cluster.nodes={gpus // per_node}",
        f"cluster.devices_per_node={per_node}",
        f"parallel.ranks={gpus}",
        # a published run fitted, perhaps by settings that the row leaves out
        "cluster.device_memory_gib=4096",
    ]
    found += ["parallel.sequence_parallel=true"] if p["tp"] > 1 else []
    found += HARDWARE.get((software(row).partition(" ")[0], row["gpu"]), [])
    found += [f"model.max_position_embeddings={seq}"] if int(seq) > LONGEST else []
    found += (
        ["kernels.default=reference", "kernels.attention=torch"] if "eager" in row["source"] else []
    )
    # TransformerEngine's fused rotary positions have no scale of yarn, and Automodel has experts of
    # its own
    found += (
        ["kernels.rope=reference"] if base_name(row).startswith("gpt_oss") and release(row) else []
    )
    found += ["kernels.experts=triton"] if "Automodel" in row["source"] and _mixture(row) else []
    found += ["kernels.loss=megatron"] if "core 0.8" in row["source"] else []
    found += ["kernels.loss=megatron"] if software(row) == "llm-foundry" else []
    megatron = release(row) or software(row) == "nemo 24"
    sent_in_16_bits = megatron or described(software(row)).gradient_bytes == 2
    found += ["precision.grad_reduce_in_fp32=false"] if sent_in_16_bits else []
    if name.endswith("_nomtp"):
        found += ["model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null"]
    found += ["peft=lora"] if row["model"].endswith("_lora") else []
    found += _experts(row, p) + _sharded(row) + _again(row) + _stages(row, p)
    return found


def flushed(row: Row, p: dict[str, int]) -> int:
    """Return the samples after which all stages of a pipeline are idle."""
    each = described(software(row)).flushed_batch
    batch = int(row["gbs"])
    ranks = int(row["gpus"]) // (p["tp"] * p["pp"] * p["cp"])
    return batch if each is None or p["pp"] == 1 else min(batch, each * ranks)


def _mixture(row: Row) -> bool:
    return row["ep"] not in ("", "1") or base_name(row).startswith(
        ("qwen3_", "deepseek", "gpt_oss")
    )


def _experts(row: Row, p: dict[str, int]) -> list[str]:
    name = row["model"]
    if not _mixture(row):
        return []
    found = ["parallel.etp=1"]
    if "tokendrop" in name:
        found += [
            "model.moe.expert_capacity_factor=1.0",
            "model.moe.pad_expert_input_to_capacity=true",
        ]
    elif p["ep"] > 1 and _flex(row):
        found += ["model.moe.token_dispatcher_type=flex"]
    return found


def _flex(row: Row) -> bool:
    """Return whether a token is sent once to each domain, by DeepEP or HybridEP."""
    return not release(row) or recipe_of(row).flex


def _sharded(row: Row) -> list[str]:
    if "FULL_SHARD" in row["source"]:
        return ["parallel.fsdp=fsdp2"]
    if "FSDP" in row["source"] and row["ep"] in ("", "1") and not row["model"].endswith("_lora"):
        if described(software(row)).gathers_once and row["pp"] not in ("", "1"):
            return ["parallel.fsdp=megatron", "parallel.fsdp_sharding=optim"]
        return ["parallel.fsdp=fsdp2"]
    if int(row["gpus"]) > int(row["tp"]) * int(row["pp"]):
        return ["parallel.distributed_optimizer=true"]
    return []


def _again(row: Row) -> list[str]:
    whole = not row["recompute"] and "Automodel" in row["source"] and not _mixture(row)
    if row["recompute"] == "full" or (whole and row["gpus"] != "1"):
        return _recomputed("granularity=full")
    found = recipe_of(row)
    if found.recompute:
        return _recomputed("granularity=selective", f"modules=[{','.join(found.recompute)}]")
    if found.block:
        return _recomputed("granularity=full", "method=block", f"num_layers={found.block}")
    if row["recompute"] == "selective":
        again = round(SELECTIVE * layers_of(row["model"], row.get("overrides", "")))
        return _recomputed("granularity=full", "method=block", f"num_layers={again}")
    return []


def _recomputed(*words: str) -> list[str]:
    return [f"parallel.recompute.{word}" for word in words]


def layers_of(name: str, overrides: str = "") -> int:
    """Return the number of layers of a model that ships, or of overrides that state it."""
    stated = re.search(r"model\.num_layers=(\d+)", overrides)
    if stated:
        return int(stated[1])
    if overrides:
        name = overrides.split()[0].removeprefix("model=")
    base = name.removesuffix("_tokendrop").removesuffix("_lora")
    values = yaml.safe_load((ROOT / "conf" / "model" / f"{NAMES.get(base, base)}.yaml").read_text())
    if "num_layers" in values:
        return int(values["num_layers"])
    return layers_of(next(word for word in values["defaults"] if word != "_self_"))


def _stages(row: Row, p: dict[str, int]) -> list[str]:
    """Return the keys for layers that do not divide evenly among the stages.

    The embedding and the output layer count as a layer each, or the last stages have fewer layers.
    """
    parts = p["pp"] * (p["vp"] if p["pp"] > 1 else 1)
    if parts == 1:
        return []
    layers = layers_of(row["model"], row.get("overrides", ""))
    if layers % parts == 0:
        return []
    if (layers + 2) % parts == 0 and not row["model"].startswith("deepseek"):
        both = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        return [f"parallel.{key}=true" for key in both]
    more = int(row["model"].startswith("deepseek") and not row["model"].endswith("_nomtp"))
    each = -(-(layers + more + 1) // parts)
    sizes = [each] * parts
    extra = each * parts - layers
    sizes[-1] -= min(extra, each)
    extra -= min(extra, each)
    for i in range(extra):
        sizes[i] -= 1
    texts = [
        f"{'E' if i == 0 else ''}{'t' * n}{'m' * more + 'L' if i == parts - 1 else ''}"
        for i, n in enumerate(sizes)
    ]
    return [f"parallel.pipeline_layout='{'|'.join(texts)}'"]


def contradicted(m: Measured) -> str | None:
    """Return why a row cannot be right, if gathering its weights takes longer than its step."""
    run = m.run
    c = m.run.cluster
    p = run.parallel
    t = run.trainer
    if p.fsdp == "none" or c.network_gbitps is None or c.fast_link_devices is None:
        return None
    inside = min(c.fast_link_devices, p.ranks or 1)
    if inside == p.ranks:
        return None
    weights = 2 * parameters(run.model) / (p.tp * p.pp)
    least = (
        2 * (t.batch // (t.micro * p.dp)) * weights / (inside / p.tp * c.network_gbitps / 8 * 1e9)
    )
    step = t.batch * run.data.length / (p.ranks or 1) / m.tokens
    if least <= step:
        return None
    return (
        f"weights gathered twice a micro-batch take {least:.1f} s at all of the network's rate, its"
        f" step {step:.1f} s"
    )


def _loaded(row: Row) -> RunConfig:
    """Return the run of a row; if mtrain refuses its format for the model, the bf16 run with that
    format.
    """
    try:
        return load(words(row), BIG, {}, to_run=False).run
    except MtrainError:
        if row["precision"] == "bf16":
            raise
        own = [word for word in words(row) if not word.startswith("precision=")]
        wide = load([*own, "precision=bf16"], BIG, {}, to_run=False).run
        low = [word for word in words(row) if word.startswith(("precision", "cluster="))]
        plain = load([*PLAIN, *low], BIG, {}, to_run=False).run
        return wide.model_copy(update={"precision": plain.precision})


STATED = ("gpu", "gpus", "precision", "tp", "pp", "vp", "cp", "ep", "mbs", "seq")
AGREE = 1.5
"""The largest ratio of two rows of one configuration; repetitions differ by 5.8% in the median, and
releases by up to a fifth.
"""


def disagreeing(found: Sequence[Measured]) -> dict[int, str]:
    """Return place -> contradiction of each row that differs by more than `AGREE` from another row
    of the same configuration.

    It is unknown which of the two is wrong, so both are listed. A batch of more samples is the same
    configuration, and so are dropped tokens, with which experts compute as many rows.
    """
    out: dict[int, str] = {}
    for (i, one), (j, two) in combinations(enumerate(found), 2):
        models = [m.row["model"].removesuffix("_tokendrop") for m in (one, two)]
        stated = [[m.row[key] or "1" for key in STATED] for m in (one, two)]
        ratio = max(one.tokens / two.tokens, two.tokens / one.tokens)
        if models[0] == models[1] and stated[0] == stated[1] and ratio > AGREE:
            out |= {
                a: f"{b.software} has {b.tokens:.0f}, {ratio:.2f} times apart"
                for a, b in ((i, two), (j, one))
            }
    return out


def measured(row: Row) -> Measured | str:
    """Return a row as a configuration, or the reason why it is not one."""
    why = obstacle(row)
    if why:
        return why
    try:
        run = _loaded(row)
    except MtrainError as error:
        return str(error).splitlines()[0][:200]
    if recipe_of(row).attention_8_bit:
        low = run.precision.model_copy(update={"fp8_dot_product_attention": True})
        run = run.model_copy(update={"precision": low})
    found = _case(row, run)
    return contradicted(found) or found


def _case(row: Row, run: RunConfig) -> Measured:
    tokens = row["tokens_s_per_gpu"]
    base = base_name(row)
    model = {"llama31_8b": "llama3_8b"}.get(base, base)
    if tokens:
        return Measured(row, model, run, software(row), float(tokens))
    # Megatron-LM's figure counts attention to every key
    each = flops_per_token(run.model, run.data.length, causal=False)
    return Measured(row, model, run, software(row), float(row["tflops_per_gpu"]) * 1e12 / each)
