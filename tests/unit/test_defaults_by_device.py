"""Defaults follow the device: what a laptop takes never reaches a cluster, and fine-tuning has
values of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.api import Loaded, load
from mtrain.config.resolve.rates import rate as rate_of
from mtrain.config.resolve.resolution import Machine
from mtrain.plan.time.report import in_steps
from tests.support.configs import LAPTOP
from tests.support.launched import light

CLUSTER = "model=llama3_8b cluster=h100x8"
NODE = "cluster=h100x8 parallel=single"


def loaded(words: str, machine: Machine = LAPTOP) -> Loaded:
    return load(words.split(), machine, {}, to_run=False)


def values(found: Loaded, *keys: str) -> tuple[Any, ...]:
    flat = found.run.flat()
    return tuple(flat[key] for key in keys)


def test_device_defaults_laptop_values_never_reach_a_cluster() -> None:
    found = loaded(CLUSTER)
    assert found.origins["parallel.tp"] == "chosen by tune for cluster h100x8"
    assert found.origins["parallel.auto"] == "answered by tune"
    assert "Chinchilla (arXiv 2203.15556)" in found.origins["trainer.train_iters"]
    batch, steps = values(found, "trainer.global_batch_size", "trainer.train_iters")
    assert steps * batch * found.run.data.length == pytest.approx(20 * 8.03e9, rel=1e-3)
    intervals = (
        "trainer.eval_interval",
        "trainer.eval_minutes",
        "checkpoint.save_interval",
        "checkpoint.save_minutes",
    )
    assert values(found, *intervals) == (0, 30.0, 0, 30.0)


def test_device_defaults_laptop_trains_a_minute_on_two_ranks() -> None:
    found = loaded("")
    keys = (
        "parallel.tp",
        "parallel.ranks",
        "trainer.train_iters",
        "trainer.eval_interval",
        "checkpoint.save_interval",
    )
    assert values(found, *keys) == (2, 2, 80, 40, 40)
    assert values(found, "trainer.eval_minutes", "checkpoint.save_minutes") == (None, None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("parallel.tp=4", {"parallel.tp": 4}),
        ("parallel=tp2pp2", {"parallel.tp": 2, "parallel.pp": 2}),
        ("trainer.train_iters=9", {"trainer.train_iters": 9, "optim.warmup_iters": 0}),
        ("trainer.eval_interval=7", {"trainer.eval_interval": 7, "trainer.eval_minutes": None}),
        (
            "checkpoint.save_minutes=5",
            {"checkpoint.save_minutes": 5.0, "checkpoint.save_interval": 0},
        ),
        ("checkpoint=off", {"checkpoint.save_minutes": None, "checkpoint.save_interval": 0}),
        ("trainer.eval_interval=0", {"trainer.eval_interval": 0, "trainer.eval_minutes": None}),
    ],
)
def test_device_defaults_messages_hold_on_a_cluster(words: str, said: dict[str, Any]) -> None:
    assert values(loaded(f"{CLUSTER} {words}"), *said) == tuple(said.values())


def test_device_defaults_single_gpu_is_used_by_one_rank() -> None:
    found = loaded("data=mock", Machine(8, 1 << 36, gpus=1, triton=True))
    assert values(found, "cluster.device", "parallel.tp", "parallel.ranks") == ("cuda", 1, 1)


@pytest.mark.full
def test_device_defaults_unfitting_model_names_more_nodes() -> None:
    done = light("check", "model=llama31_405b", "cluster=h100x8", cwd=Path.cwd())
    assert done.returncode == 2
    assert "[MT257]" in done.stderr
    assert "Use cluster.nodes=" in done.stderr


def test_device_defaults_cluster_recipes_have_no_laptop_value(tmp_path: Path) -> None:
    assert light("recipe", "new", "my.yaml", *CLUSTER.split(), cwd=tmp_path).returncode == 0
    text = (tmp_path / "my.yaml").read_text()
    assert not {"train_iters", "eval_interval", "save_interval", "tp2"} & set(
        text.replace(":", " ").split()
    )
    flags = light("recipe", "export", "--megatron", "recipe=my.yaml", cwd=tmp_path).stdout.split()
    said = {flag: flags[n + 1] for n, flag in enumerate(flags) if flag.startswith("--")}
    assert int(said["--train-iters"]) > 70_000
    # a step takes more than 10 seconds and less than a minute: half an hour is some dozens of steps
    assert 30 < int(said["--save-interval"]) < 180
    assert 30 < int(said["--eval-interval"]) < 180


def test_device_defaults_run_length_is_one_line_with_source() -> None:
    done = light("check", *CLUSTER.split(), "parallel=tp2", cwd=Path.cwd())
    (line,) = (row for row in done.stdout.splitlines() if row.startswith("  tokens"))
    assert "in 76580 steps" in line
    assert "20 tokens for each of 8.03B parameters" in line
    assert "Chinchilla (arXiv 2203.15556)" in line


def test_device_defaults_minutes_become_predicted_steps() -> None:
    unknown = loaded(
        "model=llama_tiny parallel=single cluster=h100x8 cluster.memory_gbps=null"
        " cluster.peak_tflops={}"
    )
    run = in_steps(unknown.run)
    assert (run.trainer.eval_interval, run.checkpoint.save_interval) == (1000, 1000)
    assert in_steps(loaded("").run) == loaded("").run


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "rate", "batch", "source"),
    [
        ("model=llama32_1b", 2e-5, 128, "SmolLM3"),
        ("model=llama32_3b", 2e-5, 128, "SmolLM3"),
        ("model=llama3_8b", 5e-6, 128, "Tulu 3"),
        ("model=llama3_70b", 2e-6, 128, "Tulu 3"),
        ("model=llama3_8b peft=lora", 2e-4, 16, "QLoRA"),
        ("model=llama3_70b peft=dora", 1e-4, 16, "QLoRA"),
    ],
)
@pytest.mark.parametrize("way", ["trainer=sft", "data=sft"])
def test_device_defaults_fine_tuning_uses_published_rates(
    words: str, rate: float, batch: int, source: str, way: str
) -> None:
    run, why = load_anyway(f"{words} {way} {NODE}")
    assert (run.optim.lr, run.trainer.global_batch_size) == (rate, batch)
    assert run.optim.min_lr == pytest.approx(rate / run.trainer.steps, rel=1e-5)
    assert source in why["optim.lr"]
    assert source in why["trainer.global_batch_size"]


@pytest.mark.parametrize("steps", [1, 2, 100])
def test_device_defaults_every_fine_tuning_step_learns(steps: int) -> None:
    run, _ = load_anyway(f"model=llama3_8b trainer=sft trainer.train_iters={steps} {NODE}")
    rates = [rate_of(run, step) for step in range(1, steps + 1)]
    assert rates[-1] == pytest.approx(5e-6 / steps, rel=1e-5), (
        "what is left of a rate that goes down to nothing"
    )
    assert max(rates) <= 5e-6


def test_device_defaults_packed_chats_count_in_windows() -> None:
    run, why = load_anyway(f"model=llama3_8b data=sft data.packed=true data.seq_length=4096 {NODE}")
    assert run.trainer.global_batch_size == 32
    assert "1024 tokens each" in why["trainer.global_batch_size"]


def load_anyway(words: str) -> tuple[Any, dict[str, str]]:
    """Resolve without rules: neither chats nor memory are the subject here."""
    from mtrain.config.compose.composer import compose
    from mtrain.config.resolve.resolution import resolve

    why: dict[str, str] = {}
    return resolve(compose(words.split()).run, LAPTOP, why=why), why


@pytest.mark.parametrize(
    ("chats", "batch", "steps"),
    [(20, 8, 5), (1000, 32, 62), (40_000, 128, 613), (0, 128, 500), (None, 128, 500)],
)
def test_device_defaults_steps_are_two_epochs_of_chats(
    chats: int | None, batch: int, steps: int, tmp_path: Path
) -> None:
    line = json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    if chats is not None:
        (tmp_path / "chats.jsonl").write_text("\n".join([line] * chats))
    words = (
        f"model=llama3_8b data=sft data.path={tmp_path}/chats.jsonl cluster=h100"
        " cluster.devices_per_node=1"
    )
    run, why = load_anyway(f"{words} parallel=single")
    assert (run.trainer.global_batch_size, run.trainer.train_iters) == (batch, steps)
    assert run.optim.warmup_iters == steps * 3 // 100
    assert ("2 epochs" in why["trainer.train_iters"]) == bool(chats)


def test_device_defaults_fine_tuning_messages_hold() -> None:
    run, _ = load_anyway(
        "trainer=sft optim.lr=1e-3 optim.min_lr=1e-4 trainer.train_iters=7"
        " trainer.global_batch_size=3"
    )
    assert (run.optim.lr, run.optim.min_lr, run.trainer.steps, run.trainer.batch) == (
        1e-3,
        1e-4,
        7,
        3,
    )
    plain, _ = load_anyway("trainer=sft trainer.fine_tuning=false")
    assert plain.optim.lr == 6e-3
