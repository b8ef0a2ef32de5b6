"""Meanings of null: values of the model, the device and the layout, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.api import Loaded, load
from mtrain.config.compose.composer import compose
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.resolve.defaults import nearest_gpt3
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.plan.count import active_parameters
from tests.support.configs import LAPTOP, tiny

EIGHT_GPUS = Machine(64, 1 << 40, gpus=8, transformer_engine=True, triton=True)
H100X64 = "cluster=h100 cluster.nodes=8"


def loaded(words: str, machine: Machine = LAPTOP) -> Loaded:
    return load(words.split(), machine, {}, to_run=False)


def at(found: Loaded, key: str) -> tuple[Any, str]:
    """Return the value of a key and its reason."""
    return found.run.flat()[key], found.origins[key]


def test_config_defaults_70b_on_64_gpus_suits_a_cluster() -> None:
    found = loaded(f"model=llama3_70b parallel=tp4pp4 {H100X64}")
    assert {
        key: at(found, key) for key in found.run.flat() if found.origins[key].startswith("resolved")
    } == {
        "parallel.ranks": (64, "resolved from cluster h100: nodes 8 * devices_per_node 8"),
        "parallel.sequence_parallel": (True, "resolved from tp 4"),
        "parallel.distributed_optimizer": (True, "resolved from dp 4"),
        "parallel.overlap_grad_reduce": (True, "resolved from dp 4"),
        "parallel.overlap_param_gather": (True, "resolved from dp 4"),
        "precision.dtype": ("bf16", "resolved from cluster h100: bf16 on sm_90"),
        "data.kind": (
            "mock",
            "resolved from llama3_70b: vocab_size 128256, and cluster.device cuda",
        ),
        "data.seq_length": (8192, "resolved from llama3_70b: max_position_embeddings 8192"),
        "optim.lr": (1.5e-4, "resolved from llama3_70b: Llama 3 (arXiv 2407.21783), table 3"),
        "optim.min_lr": (1.5e-5, "resolved from optim.lr 0.00015: a tenth"),
        "optim.warmup_iters": (22428, "resolved from trainer.train_iters 448560: a twentieth"),
        "trainer.global_batch_size": (
            384,
            "resolved from 3145728 tokens of GPT-3 table 2.1 (arXiv 2005.14165): its 175B model",
        ),
        "trainer.micro_batch_size": (
            1,
            "resolved from cluster h100, 80 GiB: the smallest, as none fits without recomputation",
        ),
        **{
            f"parallel.recompute.{key}": (
                value,
                "resolved from cluster h100, 80 GiB: a step needs 88.1 GiB without",
            )
            for key, value in {"granularity": "full", "method": "block", "num_layers": 6}.items()
        },
        "trainer.fine_tuning": (False, "resolved from neither chats nor adapters"),
        "trainer.train_iters": (
            448560,
            "resolved from 20 tokens for each of 70.55B parameters that a token visits: "
            "Chinchilla (arXiv 2203.15556)",
        ),
        "trainer.eval_interval": (0, "resolved from trainer.eval_minutes 30"),
        "trainer.eval_minutes": (30.0, "resolved from cluster.device cuda"),
        "checkpoint.async_save": (True, "resolved from cluster.device cuda"),
        "checkpoint.save_interval": (0, "resolved from checkpoint.save_minutes 30"),
        "checkpoint.save_minutes": (30.0, "resolved from cluster.device cuda"),
        "trainer.sample_tokens": (0, "resolved from data.kind mock"),
        "kernels.gradient_accumulation_fusion": (True, "resolved from parallel.fsdp none"),
        "kernels.loss_logits_mib": (
            512,
            "resolved from cluster h100: device_memory_gib 80, a 128th of it",
        ),
        "trainer.join_timeout_s": (240.0, "resolved from cluster h100: nodes 8"),
    }
    assert [p.code for p in found.warnings] == ["MT322"], "recomputed layers make a step fit"


@pytest.mark.parametrize("cluster", ["", "cluster=h100", H100X64])
def test_config_defaults_mixtral_tp_ep_passes_as_written(cluster: str) -> None:
    found = loaded(f"model=mixtral_8x7b parallel=tp2ep4 {cluster}")
    assert at(found, "parallel.sequence_parallel") == (True, "resolved from tp 2 and experts")


def test_config_defaults_default_run_suits_a_laptop() -> None:
    run = loaded("").run
    assert (run.precision.dtype, run.data.kind, run.data.seq_length) == ("fp32", "text", 256)
    assert (run.optim.lr, run.trainer.global_batch_size, run.trainer.micro_batch_size) == (
        6e-3,
        8,
        8,
    )
    p = run.parallel
    off = (
        p.sequence_parallel,
        p.distributed_optimizer,
        p.overlap_grad_reduce,
        p.overlap_param_gather,
    )
    assert off == (False,) * 4


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("cluster=a100", "bf16"),
        ("cluster.sm=70 cluster.device=cuda cluster.devices_per_node=8", "fp32"),
        ("cluster.device=cuda cluster.devices_per_node=8", "bf16"),
        ("cluster=cpu", "fp32"),
        ("cluster=h100 precision=fp32", "fp32"),
        ("cluster=h100 precision.fp8=hybrid", "bf16"),
    ],
)
def test_config_defaults_bf16_where_the_device_has_it(words: str, dtype: str) -> None:
    assert loaded(f"parallel=tp2 {words}").run.precision.dtype == dtype


def test_config_defaults_local_gpus_equal_a_cluster() -> None:
    found = loaded("model=qwen3_8b parallel=tp4", EIGHT_GPUS)
    assert at(found, "cluster.device") == ("cuda", "resolved on this machine: 8 GPUs")
    assert at(found, "precision.dtype")[0] == "bf16"
    assert at(found, "parallel.distributed_optimizer") == (True, "resolved from dp 2")


@pytest.mark.parametrize(
    ("words", "off"),
    [
        (
            "parallel=tp4pp2",
            {"distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"},
        ),
        (
            "parallel=tp2 parallel.fsdp=fsdp2",
            {"distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"},
        ),
        ("parallel=tp2 optim=sgd", {"distributed_optimizer", "overlap_param_gather"}),
        ("parallel=tp2 optim=muon", set()),
        (
            "parallel=tp2 parallel.overlap_grad_reduce=false",
            {"overlap_grad_reduce", "overlap_param_gather"},
        ),
        ("parallel=tp2cp2", set()),
        ("parallel=tp4cp2", set()),
        (
            "parallel=dp data.packed=true parallel.hybrid_context_parallel=true",
            {"overlap_grad_reduce", "overlap_param_gather"},
        ),
    ],
)
def test_config_defaults_sharded_state_is_off_where_forbidden(words: str, off: set[str]) -> None:
    run = resolve(compose(["model=llama3_8b", "cluster=h100", *words.split()]).run, LAPTOP)
    keys = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    assert {key for key in keys if not getattr(run.parallel, key)} == off


def test_config_defaults_sequence_indivisible_by_tp_is_whole() -> None:
    found = loaded("model=llama3_8b parallel=tp4 cluster=h100 data.seq_length=4094")
    value, why = at(found, "parallel.sequence_parallel")
    assert value is False
    assert why == "resolved from data.seq_length 4094, which tp 4 * cp 1 does not divide"


def test_config_defaults_named_path_is_text_without_warning() -> None:
    assert loaded("data.path=README.md").run.data.kind == "text"
    assert loaded("data.limit_mib=1 model=llama3_8b").run.data.kind == "text"
    fits = "data.seq_length=4096 trainer.micro_batch_size=1"
    assert not loaded(f"model=llama3_70b parallel=tp4pp4 data=mock {fits} {H100X64}").warnings


def test_config_defaults_set_value_is_kept_on_every_resolve() -> None:
    words = [
        "model=llama3_8b",
        "cluster=h100",
        "precision=fp32",
        "data=mock",
        "data.seq_length=512",
        "optim.lr=1",
    ]
    raw = compose(
        [*words, "parallel.distributed_optimizer=false", "trainer.global_batch_size=64"]
    ).run
    why: dict[str, str] = {}
    run = resolve(raw, EIGHT_GPUS, why=why)
    said = {key: value for key, value in raw.flat().items() if value not in (None, "auto")}
    assert {key: run.flat()[key] for key in said} == said
    assert not why.keys() & said.keys()
    again: dict[str, str] = {}
    assert resolve(run, LAPTOP, why=again) == run
    assert not {
        key for key in again if run.flat()[key] is not None and not key.startswith("kernels.")
    }


def test_config_defaults_filled_value_has_a_reason() -> None:
    for words in (
        "",
        "model=deepseek_v3 parallel=tp2pp8ep64etp1 cluster=h100x1024",
        "cluster=h100 optim=muon",
    ):
        raw = compose(words.split()).run
        why: dict[str, str] = {}
        run = resolve(raw, LAPTOP, why=why)
        before = raw.flat()
        after = run.flat()
        assert {key for key in after if before.get(key) != after[key]} <= why.keys()
        assert all(
            text.startswith(("resolved from ", "resolved on this machine")) for text in why.values()
        )


def test_config_defaults_earlier_run_file_loads(tmp_path: Any) -> None:
    values = resolve(tiny(), LAPTOP).to_dict()
    del values["model"]["published"]  # a key that is younger than the file
    file = tmp_path / "run.yaml"
    file.write_text(
        str(values).replace("None", "null").replace("True", "true").replace("False", "false")
    )
    assert read_run_file(file) == resolve(tiny(), LAPTOP)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", [name for name in choices_of_group("model") if "tiny" not in name])
def test_config_defaults_rate_and_batch_follow_gpt3_size(name: str) -> None:
    model = compose([f"model={name}"]).run.model
    size = active_parameters(model)
    near = nearest_gpt3(model)
    assert 0.25 < near.parameters / size < 4 or near.name in ("125M", "175B")


def test_config_defaults_lion_takes_a_tenth_of_adamw_rate() -> None:
    value, why = at(loaded("optim=lion"), "optim.lr")
    assert (value, why.rpartition(", ")[2]) == (6e-4, "times 0.1 for lion")


def test_config_defaults_unknown_memory_gets_8192_tokens_at_most() -> None:
    def micro(words: str) -> int | None:
        return loaded(
            "model=llama2_7b cluster=h100 cluster.device_memory_gib=null parallel=tp2 data=mock"
            f" {words}"
        ).run.trainer.micro_batch_size

    assert [micro(f"data.seq_length={n}") for n in (512, 2048, 4096)] == [8, 4, 2]


def test_config_defaults_cluster_is_devices_times_nodes() -> None:
    for name in choices_of_group("cluster"):
        base, x, devices = name.rpartition("x")
        if not x or not devices.isdigit():
            continue
        found = compose([f"cluster={name}"]).run
        c = found.cluster
        assert c.nodes * (c.devices_per_node or 0) == int(devices)
        same = compose([f"cluster={base}", f"cluster.nodes={c.nodes}"]).run.cluster
        assert same.model_copy(update={"name": name, "fast_link_devices": c.fast_link_devices}) == c
