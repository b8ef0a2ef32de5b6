"""Every file under conf/: composes, validates, is short, says when to pick it, and has the right numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.cli.setup import load as checked
from mtrain.config.compose import compose
from mtrain.config.load import load
from mtrain.config.paths import choices_of_group, conf_dir
from mtrain.config.resolve import Machine, resolve
from mtrain.config.rules import check
from mtrain.config.run import GROUPS, RunConfig
from mtrain.errors import ConfigError
from mtrain.models.gpt.count import prediction_parameters
from mtrain.plan.count import parameters
from tests.support.configs import LAPTOP, errors

FILES = sorted(conf_dir().glob("*/*.yaml"))
CHOICES = [(group, choice) for group in GROUPS for choice in choices_of_group(group)]

# Billions of parameters as published or computed from the published shapes, with the vocabulary unpadded.
PUBLISHED = {
    "llama3_8b": 8.030,
    "llama3_70b": 70.554,
    "llama31_8b": 8.030,
    "llama31_405b": 405.853,
    "llama32_1b": 1.236,
    "llama2_7b": 6.738,
    "llama2_13b": 13.016,
    "llama2_70b": 68.977,
    "gpt_1.7b": 1.745,
    "gpt_7.1b": 7.11,
    "gpt_16b": 16.1,
    "gpt_70b": 69.8,
    "gpt_177b": 177.2,
    "qwen25_7b": 7.616,
    "qwen3_0.6b": 0.596,
    "qwen3_8b": 8.191,
    "mixtral_8x7b": 46.703,
    "deepseek_v2_lite": 15.706,
    "deepseek_v3": 671.03,
    "gpt_32b": 31.5,
    "gpt_119b": 118.4,
    "gpt_314b": 313.5,
    "gpt_462b": 461.4,
    "gpt3_175b": 174.6,
    "llama31_70b": 70.554,
    "llama32_3b": 3.213,
    "mixtral_8x22b": 140.630,
    "deepseek_v2": 235.741,
    "qwen25_0.5b": 0.494,
    "qwen25_72b": 72.706,
    "qwen3_1.7b": 1.721,
    "qwen3_4b": 4.022,
    "qwen3_14b": 14.768,
    "qwen3_32b": 32.762,
    "qwen3_30b_a3b": 30.532,
    "qwen3_235b_a22b": 235.094,
    "gemma2_9b": 9.242,
    "gemma3_1b": 1.000,
    "gemma3_4b": 3.880,
    "gemma3_12b": 11.766,
    "gemma3_27b": 27.009,
    "minimax_m2": 228.7,
    "olmo2_7b": 7.299,
    "olmo2_13b": 13.716,
    "gpt2": 0.124440,
    "gpt2_medium": 0.354823,
    "gpt2_large": 0.774030,
    "gpt2_xl": 1.557611,
    "pythia_70m": 0.070427,
    "pythia_160m": 0.162323,
    "pythia_410m": 0.405334,
    "pythia_1b": 1.011782,
    "pythia_1.4b": 1.414648,
    "pythia_2.8b": 2.775209,
    "pythia_6.9b": 6.857302,
    "pythia_12b": 11.846072,
    "llama33_70b": 70.554,
    "mistral_7b": 7.241732,
    "mistral_nemo_12b": 12.247782,
    "qwen25_1.5b": 1.543714,
    "qwen25_3b": 3.085939,
    "qwen25_14b": 14.770034,
    "qwen25_32b": 32.763876,
    "phi3_mini": 3.821080,
    "phi4_mini": 3.836022,
    "glm45_air": 106.852,
    "gpt_oss_20b": 20.914757,
    "gpt_oss_120b": 116.829157,
    "deepseek_v31": 671.03,
    "kimi_k2": 1026.408,
    "moonlight_16b_a3b": 15.960112,
    "bert_base": 0.110106428,
    "bert_large": 0.336226108,
    "t5_small": 0.060507,
    "t5_base": 0.222904,
    "t5_large": 0.737668,
    "t5_3b": 2.851598,
    "t5_11b": 11.307321,
    "t5_v1_1_base": 0.247578,
    "t5_v1_1_large": 0.783150,
    "t5_v1_1_xl": 2.849757,
    "t5_v1_1_xxl": 11.135332,
}
# What the default layout, tp 2, refuses: 25 heads, and biases of experts that are split.
UNFIT_FOR_TP2 = {"gpt2_xl": ["parallel=single"]}
UNFIT_FOR_TP2 |= {name: ["parallel.etp=1"] for name in ("gpt_oss_tiny", "gpt_oss_20b", "gpt_oss_120b")}
TABULATED = {name for name in PUBLISHED if name.startswith("gpt_") and "oss" not in name}
OURS = {name for name in choices_of_group("model") if name.endswith("_tiny")}


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids="/".join)
def test_every_choice_composes_and_sets_nothing_but_its_group(group: str, choice: str) -> None:
    composed = compose([f"{group}={choice}"])
    assert composed.choices[group] == choice
    changed = {k.split(".")[0] for k, v in composed.origins.items() if v.startswith(f"conf/{group}/{choice}.yaml")}
    assert changed == {group}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_passes_check_alone_with_the_defaults_of_the_rest(group: str, choice: str) -> None:
    """What a machine or a user still has to bring is a warning; a run is refused for it, and for nothing else."""
    lacking = {"MT301", "MT403", "MT407", "MT442"}
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
        checked([f"{group}={choice}", f"cluster={'b200x8' if choice in ('mxfp8', 'nvfp4') else 'h100x8'}"], there, {})


@pytest.mark.parametrize("words", ["kernels=te cluster=cpu", "precision=mxfp8 cluster.device=cpu", "kernels=nope"])
def test_what_a_configuration_says_that_it_runs_on_must_have_the_rest(words: str) -> None:
    with pytest.raises(ConfigError):
        checked(words.split(), LAPTOP, {}, to_run=False)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_every_file_is_short_and_begins_with_when_to_pick_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert len(lines[0]) > 20


def test_the_root_holds_a_defaults_list_only_with_itself_first() -> None:
    values = load(conf_dir() / "config.yaml").values
    assert set(values) == {"defaults"}, "values live in group files: with them here a recipe would lose"
    assert values["defaults"][0] == "_self_", "_self_ last would silently discard a recipe's values"
    assert [next(iter(entry)) for entry in values["defaults"][1:]] == list(GROUPS)


@pytest.mark.parametrize("model", choices_of_group("model"))
def test_a_model_is_called_as_its_file(model: str) -> None:
    assert compose([f"model={model}"]).run.model.name == model


def test_every_model_has_a_published_count_or_is_ours() -> None:
    assert set(choices_of_group("model")) - set(PUBLISHED) == OURS


@pytest.mark.parametrize(("model", "billions"), PUBLISHED.items())
def test_a_model_has_the_published_number_of_parameters(model: str, billions: float) -> None:
    m = compose([f"model={model}"]).run.model
    tables = 1 if m.tie_word_embeddings else 2
    padding = tables * (m.padded_vocab_size - m.vocab_size) * m.hidden_size
    # The scaling tables count 12 L h^2 + 2 V h: no positions, and no biases and norms (below 0.2%).
    if m.position_embedding_type == "learned_absolute" and model in TABULATED:
        padding += m.max_position_embeddings * m.hidden_size
    padding += (m.mtp_num_layers or 0) * prediction_parameters(m)
    tolerance = 2e-3 if model in TABULATED else 1e-5 if len(f"{billions}") > 7 else 1e-3
    assert (parameters(m) - padding) / 1e9 == pytest.approx(billions, rel=tolerance)


def test_the_traps_of_published_shapes_are_avoided() -> None:
    def model(name: str) -> RunConfig:
        return compose([f"model={name}"]).run

    qwen3 = model("qwen3_0.6b").model
    assert (qwen3.head_dim, qwen3.qk_layernorm, qwen3.tie_word_embeddings) == (128, True, True)
    assert qwen3.hidden_size // qwen3.num_attention_heads == 64
    llama32 = model("llama32_1b").model
    assert (llama32.head_dim, llama32.tie_word_embeddings, llama32.rope_scaling_factor) == (64, True, 32.0)
    assert model("llama31_405b").model.layernorm_epsilon == 1e-5
    qwen25 = model("qwen25_7b").model
    assert (qwen25.add_qkv_bias, qwen25.layernorm_epsilon, qwen25.num_attention_heads % 8) == (True, 1e-6, 4)
    assert model("qwen25_72b").model.layernorm_epsilon == 1e-5
    assert {model(name).model.rotary_base for name in ("qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_4b")} == {1e6}
    assert (model("mixtral_8x22b").model.vocab_size, model("mixtral_8x7b").model.vocab_size) == (32768, 32000)
    gpt3 = model("gpt3_175b").model
    assert (gpt3.position_embedding_type, gpt3.tie_word_embeddings) == ("learned_absolute", True)
    assert (gpt3.vocab_size, gpt3.padded_vocab_size) == (50257, 50304)
    v2, v3 = model("deepseek_v2").model.moe, model("deepseek_v3").model.moe
    assert v2 is not None
    assert v3 is not None
    assert (v2.router_topk_scaling_factor, v2.router_score_function, v2.first_dense_layers) == (16.0, "softmax", 1)
    assert (v3.router_topk_scaling_factor, v3.router_score_function, v3.first_dense_layers) == (2.5, "sigmoid", 3)


def test_the_default_run_has_five_million_parameters_on_two_ranks() -> None:
    run = resolve(compose([]).run, LAPTOP)
    assert parameters(run.model) == pytest.approx(5.0e6, rel=0.02)
    assert run.parallel.ranks == 2
    assert errors(compose([]).run) == []


@pytest.mark.parametrize("parallel", ["single", "parallel.ranks=2", "tp2", "pp2", "tp2pp2", "dp2", "tp2pp2dp2"])
def test_layouts_of_a_laptop_pass_with_the_default_model(parallel: str) -> None:
    argument = parallel if "=" in parallel else f"parallel={parallel}"
    assert errors(compose([argument]).run) == []


@pytest.mark.parametrize(("layout", "cluster"), [("tp4pp4", "h100x64"), ("tp8pp8", "h100x64"), ("tp4pp2", "h100x8")])
def test_a_70b_model_can_be_checked_for_a_cluster_from_anywhere(layout: str, cluster: str) -> None:
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
def test_clusters_have_the_dense_peaks_of_their_devices(
    cluster: str, sm: int, bf16: float, fp32: float, fewest_bits: str
) -> None:
    found = compose([f"cluster={cluster}"]).run.cluster
    peaks = found.peak_tflops
    assert (found.sm, peaks["bf16"], peaks["fp32"]) == (sm, bf16, fp32)
    assert ("fp8" in peaks, "fp4" in peaks) == (fewest_bits != "bf16", fewest_bits == "fp4")


def test_a_cluster_of_accelerators_says_everything_of_its_devices_and_links() -> None:
    for choice in set(choices_of_group("cluster")) - {"local", "cpu"}:
        cluster = compose([f"cluster={choice}"]).run.cluster
        assert cluster.name == choice
        assert cluster.devices_per_node is not None
        missing = {name for name, value in cluster if value is None}
        assert missing <= ({"network_gbitps"} if cluster.nodes == 1 else set()), choice
        assert cluster.fast_link_devices is not None
        assert (cluster.nodes * cluster.devices_per_node) % cluster.fast_link_devices == 0, choice
