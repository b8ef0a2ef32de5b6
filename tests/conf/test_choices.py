"""Every file under conf/: composes, validates, is short, says when to pick it, and has the right
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from mtrain.api import load as checked
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group, conf_dir
from mtrain.config.compose.yaml_reader import load
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import check
from mtrain.config.schema.run import GROUPS, UnresolvedRun
from mtrain.errors import ConfigError
from mtrain.plan.count import parameters
from tests.support.configs import LAPTOP, errors

FILES = sorted(conf_dir().glob("*/*.yaml"))
MANY_DEVICES = re.compile(r"x\d\d+")
"""Clusters for which the search for a layout takes seconds."""


def _choices() -> Iterator[Any]:
    """Yield every choice of every group; each sixth model, and clusters of few devices, are not
    `full`.
    """
    for group in GROUPS:
        for place, choice in enumerate(choices_of_group(group)):
            is_full = bool(MANY_DEVICES.search(choice)) or (group == "model" and place % 6 > 0)
            marks = [pytest.mark.full] if is_full else []
            yield pytest.param(group, choice, marks=marks, id=f"{group}/{choice}")


CHOICES = list(_choices())

# What the default layout, tp 2, refuses: 25 heads, biases of experts that are split, one group of
# states; and what a launcher needs.
UNFIT_FOR_TP2 = {"gpt2_xl": ["parallel=single"]}
UNFIT_FOR_TP2 |= {
    name: ["parallel.etp=1"] for name in ("gpt_oss_tiny", "gpt_oss_20b", "gpt_oss_120b")
}
UNFIT_FOR_TP2 |= {
    f"mamba2_{size}": ["parallel=single"] for size in ("130m", "370m", "780m", "1.3b", "2.7b")
}
UNFIT_FOR_TP2["mamba2_130m"].append("trainer.global_batch_size=1")
UNFIT_FOR_TP2["mamba2_370m"].append("trainer.global_batch_size=1")
UNFIT_FOR_TP2 |= {
    f"granite4_h_{size}": ["parallel=single"] for size in ("350m", "micro", "tiny", "small")
}
UNFIT_FOR_TP2["granite4_h_350m"].append("trainer.global_batch_size=1")
VOLUMES = ["launch.volumes={/work:disk}", "launch.workdir=/work"]
UNFIT_FOR_TP2 |= {
    "ray": ["launch.workdir=/work"],
    "skypilot": VOLUMES,
    "kubernetes": [*VOLUMES, "launch.image=registry/mtrain:1"],
    "preference": ["objective=dpo"],
    "distil": ["objective.teacher=drawn"],
    "prompts": ["objective=grpo", "rewards=[exact]"],
}
UNFIT_FOR_TP2["image_text"] = ["model=llava_tiny"]
UNFIT_FOR_TP2 |= {name: ["objective=grpo"] for name in ("openai", "sglang", "transformers")}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_choice_sets_only_its_group(group: str, choice: str) -> None:
    composed = compose([f"{group}={choice}"])
    assert composed.choices[group] == choice
    changed = {
        k.split(".")[0]
        for k, v in composed.origins.items()
        if v.startswith(f"conf/{group}/{choice}.yaml")
    }
    assert changed == {group}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_choice_passes_check_with_defaults(group: str, choice: str) -> None:
    """Warn about data or devices that the choice still lacks, and refuse a run for no other
    reason.
    """
    lacking = {"MT301", "MT403", "MT407", "MT442", "MT327", "MT340", "MT341", "MT350"}
    words = [f"{group}={choice}", *UNFIT_FOR_TP2.get(choice, ())]
    warned = {p.code for p in checked(words, LAPTOP, {}, to_run=False).warnings}
    try:
        checked(words, LAPTOP, {})
        refused = set()
    except ConfigError as error:
        refused = {p.code for p in error.problems if p.severity == "error"}
    assert refused == warned & lacking
    if refused & {"MT403", "MT407", "MT442"}:
        there = Machine(64, 1 << 40, gpus=8, transformer_engine=True, triton=True)
        checked(
            [
                f"{group}={choice}",
                f"cluster={'b200x8' if choice in ('mxfp8', 'nvfp4') else 'h100x8'}",
            ],
            there,
            {},
        )


OBJECTIVES = [
    (objective, model)
    for objective in choices_of_group("objective")
    for model in choices_of_group("model")
]
ENCODERS = ("bert", "t5", "llava")
NO_MTP = "model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"
BESIDES = {"MT329": NO_MTP, "MT390": NO_MTP}
"""Codes of parts of a model that an objective leaves out -> the words that leave them out."""


@pytest.mark.sampled(199)
@pytest.mark.parametrize(("objective", "model"), OBJECTIVES)
def test_choice_objective_goes_with_decoders(objective: str, model: str) -> None:
    """Refuse an objective of other families only, and parts of a model with a fix that works."""
    # Whether a model fits a device is another question.
    there = ["data=mock", "cluster=h100x8", "cluster.device_memory_gib=4096", "parallel=single"]
    words = [f"model={model}", f"objective={objective}", *there]
    words += UNFIT_FOR_TP2.get(objective, ())

    def refused(words: list[str]) -> set[str]:
        try:
            checked(words, LAPTOP, {}, to_run=False)
        except ConfigError as error:
            return {p.code for p in error.problems if p.severity == "error"}
        return set()

    family = compose([f"model={model}"]).run.model.family
    codes = refused(words)
    if objective in ("next_token", "label_smoothing"):
        assert codes == refused([words[0], *there])
    elif family in ENCODERS or (objective in ("reward", "ppo") and family != "gpt"):
        assert "MT330" in codes
    else:
        assert codes <= BESIDES.keys()
        assert not refused([*words, *" ".join({BESIDES[code] for code in codes}).split()])


@pytest.mark.parametrize(
    "words", ["kernels=te cluster=cpu", "precision=mxfp8 cluster.device=cpu", "kernels=nope"]
)
def test_choice_requirements_are_enforced(words: str) -> None:
    with pytest.raises(ConfigError):
        checked(words.split(), LAPTOP, {}, to_run=False)


def test_choice_files_are_short_with_header() -> None:
    assert len(FILES) > 100
    for file in FILES:
        lines = file.read_text().splitlines()
        assert len(lines) <= 40, file
        assert lines[0].startswith("# "), file
        assert len(lines[0]) > 20, file


def test_choice_root_has_only_defaults_with_self_first() -> None:
    values = load(conf_dir() / "config.yaml").values
    assert set(values) == {"defaults"}, (
        "values live in group files: with them here a recipe would lose"
    )
    assert values["defaults"][0] == "_self_", "_self_ last would silently discard a recipe's values"
    assert [next(iter(entry)) for entry in values["defaults"][1:]] == list(GROUPS)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("model", choices_of_group("model"))
def test_choice_model_named_as_its_file(model: str) -> None:
    assert compose([f"model={model}"]).run.model.name == model


def test_choice_published_shape_traps_are_avoided() -> None:
    def model(name: str) -> UnresolvedRun:
        return compose([f"model={name}"]).run

    qwen3 = model("qwen3_0.6b").model
    assert (qwen3.head_dim, qwen3.qk_layernorm, qwen3.tie_word_embeddings) == (128, True, True)
    assert qwen3.hidden_size // qwen3.num_attention_heads == 64
    llama32 = model("llama32_1b").model
    assert (llama32.head_dim, llama32.tie_word_embeddings, llama32.rope_scaling_factor) == (
        64,
        True,
        32.0,
    )
    assert model("llama31_405b").model.layernorm_epsilon == 1e-5
    qwen25 = model("qwen25_7b").model
    assert (qwen25.add_qkv_bias, qwen25.layernorm_epsilon, qwen25.num_attention_heads % 8) == (
        True,
        1e-6,
        4,
    )
    assert model("qwen25_72b").model.layernorm_epsilon == 1e-5
    assert {
        model(name).model.rotary_base for name in ("qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_4b")
    } == {1e6}
    assert (model("mixtral_8x22b").model.vocab_size, model("mixtral_8x7b").model.vocab_size) == (
        32768,
        32000,
    )
    gpt3 = model("gpt3_175b").model
    assert (gpt3.position_embedding_type, gpt3.tie_word_embeddings) == ("learned_absolute", True)
    assert (gpt3.vocab_size, gpt3.padded_vocab_size) == (50257, 50304)
    v2 = model("deepseek_v2").model.moe
    v3 = model("deepseek_v3").model.moe
    assert v2 is not None
    assert v3 is not None
    assert (v2.router_topk_scaling_factor, v2.router_score_function, v2.first_dense_layers) == (
        16.0,
        "softmax",
        1,
    )
    assert (v3.router_topk_scaling_factor, v3.router_score_function, v3.first_dense_layers) == (
        2.5,
        "sigmoid",
        3,
    )


def test_choice_default_run_has_5m_parameters_on_two_ranks() -> None:
    run = checked([], LAPTOP, {}).run
    assert parameters(run.model) == pytest.approx(5.0e6, rel=0.02)
    assert (run.parallel.ranks, run.parallel.tp, run.parallel.auto) == (2, 2, False)


@pytest.mark.parametrize(
    "parallel", ["single", "parallel.ranks=2", "tp2", "pp2", "tp2pp2", "dp2", "tp2pp2dp2"]
)
def test_choice_laptop_layouts_pass_with_default_model(parallel: str) -> None:
    argument = parallel if "=" in parallel else f"parallel={parallel}"
    assert errors(compose([argument]).run) == []


@pytest.mark.parametrize(
    ("layout", "cluster"), [("tp4pp4", "h100x64"), ("tp8pp8", "h100x64"), ("tp4pp2", "h100x8")]
)
def test_choice_70b_is_checked_for_a_cluster_anywhere(layout: str, cluster: str) -> None:
    raw = compose(["model=llama3_70b", f"parallel={layout}", f"cluster={cluster}"]).run
    for machine in (LAPTOP, Machine(cpu_cores=8, memory_bytes=1 << 36, gpus=1)):
        run = resolve(raw, machine)
        assert [p for p in check(run, raw=raw) if p.severity == "error"] == []
        assert run.parallel.ranks == run.cluster.nodes * 8


@pytest.mark.parametrize(
    ("cluster", "sm", "bf16", "fp32", "fewest_bits"),
    [
        ("a100x8", 80, 312.0, 19.5, "bf16"),
        ("l40sx8", 89, 362.0, 91.6, "fp8"),
        ("h100x8", 90, 989.0, 67.0, "fp8"),
        ("h100x64", 90, 989.0, 67.0, "fp8"),
        ("h200x8", 90, 989.0, 67.0, "fp8"),
        ("b200x8", 100, 2250.0, 75.0, "fp4"),
        ("gb200x72", 100, 2500.0, 80.0, "fp4"),
        ("gb300x72", 103, 2500.0, 80.0, "fp4"),
    ],
)
def test_choice_cluster_peaks_match_their_devices(
    cluster: str, sm: int, bf16: float, fp32: float, fewest_bits: str
) -> None:
    found = compose([f"cluster={cluster}"]).run.cluster
    peaks = found.peak_tflops
    assert (found.sm, peaks["bf16"], peaks["fp32"]) == (sm, bf16, fp32)
    assert ("fp8" in peaks, "fp4" in peaks) == (fewest_bits != "bf16", fewest_bits == "fp4")


def test_choice_cluster_states_devices_and_links() -> None:
    for choice in set(choices_of_group("cluster")) - {"local", "cpu"}:
        cluster = compose([f"cluster={choice}"]).run.cluster
        assert cluster.name == choice
        assert cluster.devices_per_node is not None
        theirs = {
            "storage_gbps",
            "price_per_device_hour",
            "operation_us",
            "link_latency_us",
            "software",
        }
        missing = {name for name, value in cluster if value is None} - theirs
        assert missing <= ({"network_gbitps"} if cluster.nodes == 1 else set()), choice
        assert cluster.fast_link_devices is not None
        assert (cluster.nodes * cluster.devices_per_node) % cluster.fast_link_devices == 0, choice
