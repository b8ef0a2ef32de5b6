"""Resolving: device, ranks and kernels from a configuration and a machine, without
touching either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mtrain.api import load
from mtrain.config.engine.kernels import OPERATIONS, problems, reasons, routes_by_lists
from mtrain.config.resolve.resolution import (
    Machine,
    machine_problems,
    resolve,
    smallest_world,
    world_size_of,
)
from mtrain.config.schema.kernels import KernelsConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError
from mtrain.launching import preflight
from tests.support.configs import LAPTOP, MOE, tiny
from tests.support.tables import tables

TABLES = tables("config_resolve")

GPUS = Machine(cpu_cores=64, memory_bytes=1 << 40, gpus=8, transformer_engine=True)


def test_resolve_auto_device_is_cpu_without_gpu() -> None:
    assert resolve(tiny(), LAPTOP).cluster.device == "cpu"
    assert resolve(tiny(), GPUS).cluster.device == "cuda"
    assert resolve(tiny(cluster__device="cpu"), GPUS).cluster.device == "cpu"


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, 1),
        ({"tp": 2, "pp": 2}, 4),
        ({"tp": 2, "cp": 2, "pp": 3}, 12),
        ({"ep": 4}, 4),
        ({"tp": 2, "ep": 4}, 8),
        ({"tp": 2, "ep": 4, "etp": 1}, 4),
        ({"tp": 4, "pp": 2, "ep": 2, "etp": 1}, 8),
        ({"tp": 3, "ep": 2, "etp": 1}, 6),
    ],
)
def test_resolve_cpu_takes_fewest_ranks_for_both_grids(
    parallel: dict[str, int], ranks: int
) -> None:
    run = resolve(tiny(**{f"parallel__{k}": v for k, v in parallel.items()}), LAPTOP)
    assert run.parallel.ranks == ranks
    assert run.cluster.devices_per_node is None


@given(
    st.builds(
        dict, tp=st.integers(1, 6), pp=st.integers(1, 3), cp=st.integers(1, 4), ep=st.integers(1, 6)
    )
)
@settings(max_examples=60, deadline=None)
def test_resolve_cpu_world_is_smallest_legal(parallel: dict[str, int]) -> None:
    run = resolve(tiny(**{f"parallel__{k}": v for k, v in parallel.items()}), LAPTOP)
    p = run.parallel
    assert p.ranks is not None

    def legal(world: int) -> bool:
        return world % (p.tp * p.pp * p.cp) == 0 and world % (p.tp * p.ep * p.pp) == 0

    assert legal(p.ranks)
    assert not any(legal(world) for world in range(1, p.ranks))


def test_resolve_named_cluster_is_used_whole() -> None:
    run = resolve(
        tiny(cluster__device="cuda", cluster__nodes=8, cluster__devices_per_node=8, parallel__tp=4),
        LAPTOP,
    )
    assert run.parallel.ranks == 64


def test_resolve_local_gpus_are_all_used_by_default() -> None:
    run = resolve(tiny(), GPUS)
    assert (run.parallel.ranks, run.cluster.devices_per_node) == (8, 8)
    fewer = resolve(tiny(parallel__ranks=4), GPUS)
    assert (fewer.parallel.ranks, fewer.cluster.devices_per_node) == (4, 4)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"hsdp_replicas": 2}, 4),
        ({"hsdp_replicas": 3}, 6),
        ({"hsdp_replicas": 2, "cp": 3}, 6),
        ({"hsdp_replicas": 2, "tp": 2, "pp": 2}, 16),
        ({"hsdp_replicas": 2, "ep": 4}, 8),
        ({"hsdp_replicas": 2, "ep": 2, "tp": 2, "etp": 1}, 8),
    ],
    ids=str,
)
def test_resolve_smallest_world_holds_every_replica(layout: dict[str, int], ranks: int) -> None:
    p = tiny(**{f"parallel__{key}": value for key, value in layout.items()}).parallel
    assert smallest_world(p) == ranks
    shared = ranks // (p.tp * p.pp)
    alike = ranks // (p.pp * p.ep * (p.etp or p.tp))
    assert shared % p.hsdp_replicas == alike % p.hsdp_replicas == 0
    assert shared > p.hsdp_replicas


def test_resolve_launcher_sets_unset_ranks() -> None:
    assert resolve(tiny(parallel__tp=2), LAPTOP, world_size=4).parallel.ranks == 4
    asked = tiny(parallel__tp=2, parallel__ranks=2)
    got = resolve(asked, LAPTOP, world_size=4)
    assert got.parallel.ranks == 2, "check, never correct"
    (problem,) = machine_problems(asked, got, LAPTOP, 4, {})
    assert (problem.code, problem.fix, problem.severity) == ("MT110", "parallel.ranks=4", "error")


@pytest.mark.parametrize(
    ("keys", "laptop", "gpu", "without_triton"),
    [
        ({}, "torch", "triton", "te"),
        ({"optim__exp_avg_dtype": "bf16"}, "reference", "triton", "reference"),
        ({"optim__name": "sgd"}, "torch", "te", "te"),
        ({"optim__name": "muon"}, "reference", "triton", "reference"),
        ({"parallel__fsdp": "fsdp2"}, "torch", "te", "te"),
        ({"optim__cpu_offload": 0.5}, "torch", "te", "te"),
        ({"kernels__optimizer": "torch"}, "torch", "torch", "torch"),
    ],
)
def test_resolve_optimizer_is_ours_on_gpu_or_low_precision(
    keys: dict[str, Any], laptop: str, gpu: str, without_triton: str
) -> None:
    run = tiny(**keys, cluster__sm=90)
    found = [resolve(run, m).kernels.optimizer for m in (LAPTOP, replace(GPUS, triton=True), GPUS)]
    assert found == [laptop, gpu, without_triton]


TRITON = replace(GPUS, transformer_engine=False, triton=True)
INTERPRETED = replace(LAPTOP, triton=True, triton_interpreted=True)


def _words(run: RunConfig) -> dict[str, str]:
    return {
        key: word
        for key, word in run.kernels
        if isinstance(word, str) and key not in ("default", "optimizer")
    }


def test_resolve_every_operation_gets_an_implementation() -> None:
    dense = set(_words(resolve(tiny(), LAPTOP)))
    assert dense == {"norm", "rope", "attention", "linear", "activation", "loss"}
    experts = set(_words(resolve(tiny(model__moe=MOE), LAPTOP)))
    assert experts == dense | {"experts", "moe_router", "moe_permute"}
    others = {"cpu_matmul", "loss_logits_mib", "gradient_accumulation_fusion"}
    unset = {key for key, value in KernelsConfig() if value is None}
    assert {op.name for op in OPERATIONS} == unset - others


PLAIN = {"cpu", "reference"}
"""Implementations that `auto` takes on a CPU: the first where there is one."""


def test_resolve_auto_takes_first_usable() -> None:
    assert set(_words(resolve(tiny(model__moe=MOE), LAPTOP)).values()) == PLAIN
    assert set(_words(resolve(tiny(model__moe=MOE), INTERPRETED)).values()) == PLAIN
    assert set(_words(resolve(tiny(cluster__device="cpu"), GPUS)).values()) == PLAIN
    engine = _words(resolve(tiny(cluster__sm=90), replace(GPUS, triton=True)))
    assert engine == {
        **dict.fromkeys(("norm", "attention", "linear"), "te"),
        **{"rope": "triton", "loss": "triton", "activation": "reference"},
    }
    plain = _words(resolve(tiny(model__moe=MOE, precision__dtype="bf16", cluster__sm=90), TRITON))
    assert (plain["norm"], plain["attention"], plain["linear"]) == ("triton", "torch", "torch")
    assert (plain["experts"], plain["activation"], plain["moe_permute"]) == (
        "triton",
        "triton",
        "triton",
    )
    bare = replace(TRITON, triton=False)
    words = [
        _words(resolve(tiny(model__moe=MOE, precision__dtype=d), bare))["experts"]
        for d in ("bf16", "fp32")
    ]
    assert words == ["torch", "reference"], "torch's product takes bf16 only"
    assert (
        _words(resolve(tiny(model__moe=MOE, precision__dtype="bf16", cluster__sm=100), bare))[
            "experts"
        ]
        == "reference"
    ), "torch's product is wrong there for experts without tokens"


@pytest.mark.parametrize(
    ("keys", "auto", "triton"),
    [
        ({}, "torch", "triton"),
        ({"model__window_size": 8}, "torch", "triton"),
        ({"model__softmax_type": "learnable"}, "triton", "triton"),
        ({"model__attn_logit_softcapping": 50.0}, "triton", "triton"),
        (
            {"model__attn_logit_softcapping": 50.0, "model__attention_dropout": 0.1},
            "torch",
            "torch",
        ),
        ({"model__softmax_type": "learnable", "model__kv_channels": 264}, "torch", "torch"),
    ],
)
def test_resolve_triton_attention_avoids_score_matrix(
    keys: dict[str, Any], auto: str, triton: str
) -> None:
    run = tiny(**keys, precision__dtype="bf16", cluster__sm=90)
    assert resolve(run, TRITON).kernels.attention == auto
    assert resolve(tiny(**keys, kernels__default="triton"), TRITON).kernels.attention == triton
    assert resolve(run, replace(TRITON, triton=False)).kernels.attention == "torch"
    assert ("torch's kernels support" in reasons(resolve(run, TRITON), TRITON)["attention"]) == (
        auto == "triton"
    )


def test_resolve_expert_lists_replace_unneeded_maps() -> None:
    here = {"precision__dtype": "bf16", "cluster__sm": 90}
    run = resolve(tiny(model__moe=MOE, **here), TRITON)
    assert routes_by_lists(run)
    for keys in (
        {"kernels__moe_router": "reference"},
        {"kernels__moe_permute": "reference"},
        {"model__moe": {**MOE, "expert_capacity_factor": 1.0}},
        {"model__moe": {**MOE, "token_dispatcher_type": "flex"}},
    ):
        assert not routes_by_lists(resolve(tiny(**({"model__moe": MOE} | here | keys)), TRITON))
    assert not routes_by_lists(resolve(tiny(**here), TRITON))
    assert not routes_by_lists(resolve(tiny(model__moe=MOE), LAPTOP))


def test_resolve_default_applies_but_named_choice_stays() -> None:
    mixed = _words(resolve(tiny(kernels__default="triton", kernels__norm="reference"), INTERPRETED))
    assert (mixed["norm"], mixed["rope"], mixed["loss"], mixed["linear"]) == (
        "reference",
        "triton",
        "triton",
        "cpu",
    )
    assert resolve(tiny(kernels__norm="te"), LAPTOP).kernels.norm == "te"
    assert (
        _words(resolve(tiny(kernels__default="triton", kernels__loss="auto"), INTERPRETED))["loss"]
        == "cpu"
    )


def test_resolve_reference_on_cpu_is_every_definition() -> None:
    named = _words(resolve(tiny(model__moe=MOE, kernels__default="reference"), LAPTOP))
    assert set(named.values()) == {"reference"}
    auto = _words(resolve(tiny(model__moe=MOE), LAPTOP))
    assert {name for name, word in auto.items() if word == "cpu"} == {
        "norm",
        "rope",
        "attention",
        "linear",
        "experts",
        "loss",
    }
    why = reasons(resolve(tiny(kernels__norm="reference"), LAPTOP), LAPTOP)
    assert why["norm"] == "named"


def test_resolve_without_gpu_leaves_unknowns_open() -> None:
    assert _words(resolve(tiny(cluster__device="cuda", parallel__ranks=1), LAPTOP)) == {}


def test_resolve_reasons_explain_rejected_ones() -> None:
    why = reasons(resolve(tiny(kernels__norm="te", kernels__loss="megatron"), LAPTOP), LAPTOP)
    assert (why["norm"], why["loss"]) == ("named", "named")
    assert why["linear"].startswith(
        "no te: TransformerEngine runs on cuda, and the device is cpu; no triton: "
    )
    assert "Triton is not installed" in why["rope"]
    assert (
        "TRITON_INTERPRET=1"
        in reasons(resolve(tiny(), LAPTOP), replace(LAPTOP, triton=True))["rope"]
    )
    assert reasons(resolve(tiny(), GPUS), GPUS)["linear"] == "the first that can run"


def test_resolve_unusable_named_kernel_states_fix() -> None:
    machine = replace(LAPTOP, triton=True)
    run = resolve(tiny(kernels__default="triton"), machine)
    (problem,) = problems(run, machine, {"kernels.default": "command line"})
    assert (problem.code, problem.path, problem.source) == (
        "MT407",
        "kernels.default",
        "command line",
    )
    assert "only in its interpreter" in problem.rule
    assert "kernels.default=reference or TRITON_INTERPRET=1" in problem.fix
    assert (
        list(problems(resolve(tiny(kernels__default="triton"), INTERPRETED), INTERPRETED, {})) == []
    )
    (problem,) = problems(resolve(tiny(kernels__rope="triton"), LAPTOP), LAPTOP, {})
    assert (problem.path, problem.detail) == ("kernels.rope", "Triton is not installed")
    (problem,) = problems(resolve(tiny(kernels__norm="te"), TRITON), TRITON, {})
    assert (problem.path, problem.detail) == ("kernels.norm", "TransformerEngine is not installed")


@pytest.mark.parametrize("machine", [LAPTOP, GPUS])
def test_resolve_is_idempotent_and_pure(machine: Machine) -> None:
    raw = tiny(parallel__tp=2)
    before = raw.to_dict()
    once = resolve(raw, machine)
    assert resolve(once, machine) == once
    assert resolve(once, LAPTOP) == once, "a resolved run means the same elsewhere"
    assert raw.to_dict() == before


def test_resolve_cuda_visible_devices_hides_gpus(tmp_path: Path) -> None:
    files(tmp_path, dict.fromkeys(["dev/nvidiactl", *(f"dev/nvidia{i}" for i in range(4))], ""))
    assert Machine.here({}, tmp_path).gpus == 4
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path).gpus == 2
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == 0
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path).gpus == 1


def files(root: Path, texts: dict[str, str]) -> None:
    """Write files under `root`, which stands for `/`."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("texts", "cores", "gib"),
    TABLES["cgroup_limits"],
)
def test_resolve_cgroup_limits_count(
    texts: dict[str, str],
    cores: int,
    gib: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    files(
        tmp_path,
        {"proc/self/cgroup": "0::/a/b\n"} | {f"sys/fs/cgroup/{k}": v for k, v in texts.items()},
    )
    machine = Machine.here({}, tmp_path)
    assert machine.cpu_cores == cores
    assert machine.memory_bytes == (
        gib << 30 if gib else Machine.here({}, tmp_path / "none").memory_bytes
    )


def test_resolve_cgroup_v1_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    groups = "12:cpuset:/docker/x\n5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/docker/x\n"
    # in a container the group is at the top, whatever its path is outside
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    texts = {f"{cpu}/cpu.cfs_quota_us": "600000", f"{cpu}/cpu.cfs_period_us": "100000"}
    texts |= {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 30)}
    texts |= {"sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712"}
    files(tmp_path, {"proc/self/cgroup": groups} | texts)
    machine = Machine.here({}, tmp_path)
    assert (machine.cpu_cores, machine.memory_bytes) == (6, 1 << 30)
    files(
        tmp_path,
        {f"{cpu}/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpuset/docker/x/cpuset.cpus": "3"},
    )
    assert Machine.here({}, tmp_path).cpu_cores == 1


@pytest.mark.parametrize(("built_for_amd", "device"), [(True, "cuda"), (False, "cpu")])
def test_resolve_amd_gpus_work_with_capable_torch(
    built_for_amd: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = (
        "cuda: Optional[str] = None\nhip: Optional[str] ="
        f" {chr(39) + '6.4' + chr(39) if built_for_amd else None}\n"
    )
    files(tmp_path / "torch", {"version.py": version})
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr("mtrain.config.machine.hardware.find_spec", lambda _: found)
    nodes = {
        f"sys/class/kfd/kfd/topology/nodes/{i}/properties": f"cpu_cores_count 0\nsimd_count {n}\n"
        for i, n in enumerate([0, 0, 304, 304])
    }
    files(tmp_path, {"dev/kfd": ""} | nodes)
    machine = Machine.here({}, tmp_path)
    assert (machine.gpus, machine.unusable_gpus) == ((2, 0) if built_for_amd else (0, 2))
    assert resolve(tiny(), machine).cluster.device == device
    hidden = Machine.here({"HIP_VISIBLE_DEVICES": "1"}, tmp_path)
    assert hidden.gpus + hidden.unusable_gpus == 1
    wanted = resolve(
        tiny(cluster__device="cuda", parallel__ranks=3, cluster__devices_per_node=3), machine
    )
    with pytest.raises(BadEnvironment, match="here: 2" if built_for_amd else "2 of AMD"):
        preflight.check(wanted, [], machine)


def test_resolve_world_comes_from_launcher_environment() -> None:
    assert world_size_of({"WORLD_SIZE": "4", "RANK": "0"}) == 4
    assert world_size_of({"WORLD_SIZE": "4"}) is None
    assert world_size_of({}) is None
    assert world_size_of({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert world_size_of({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "29500"}) == 1


def test_resolve_micro_batch_fits_rank_and_fills_pipeline() -> None:
    def size(**changes: Any) -> int | None:
        return resolve(
            tiny(trainer__micro_batch_size=None, **changes), LAPTOP
        ).trainer.micro_batch_size

    assert size(trainer__global_batch_size=16) == 8
    assert size(trainer__global_batch_size=16, parallel__ranks=8) == 2
    assert size(trainer__global_batch_size=6) == 2
    assert size(trainer__global_batch_size=8, parallel__pp=4) == 2
    assert size(trainer__global_batch_size=2, parallel__pp=4) == 1
    assert size(trainer__global_batch_size=24, parallel__pp=3, parallel__vpp=2) == 8


def test_resolve_learning_rate_sets_dependent_keys() -> None:
    run = resolve(tiny(optim__lr=3e-4, trainer__train_iters=200), LAPTOP)
    assert (run.optim.min_lr, run.optim.warmup_iters) == (3e-5, 10)
    kept = resolve(tiny(optim__lr=3e-4, optim__min_lr=0.0, optim__warmup_iters=0), LAPTOP)
    assert (kept.optim.min_lr, kept.optim.warmup_iters) == (0.0, 0)


def test_resolve_samples_text_with_a_tokenizer() -> None:
    assert resolve(tiny(), LAPTOP).trainer.sample_tokens == 64
    assert resolve(tiny(data__kind="mock"), LAPTOP).trainer.sample_tokens == 0


ELSEWHERE = LAPTOP
THERE = replace(LAPTOP, gpus=8, transformer_engine=True, triton=True)
BARE = replace(THERE, transformer_engine=False)
ON_A_CLUSTER: tuple[str, ...] = ("cluster=h100x8", "data=mock", "trainer.global_batch_size=64")
USES = (
    "kernels.gradient_accumulation_fusion=true",
    "precision=fp8_tensorwise",
    "precision=bf16 optim.exp_avg_dtype=bf16",
    "precision=bf16 optim.exp_avg_dtype=bf16 optim.exp_avg_sq_dtype=fp8",
    "parallel=cp2 parallel.cp_comm_type=p2p",
    "parallel=cp2",
    "model=mixtral_tiny precision=bf16",
    "optim=muon",
    "parallel.fsdp=fsdp2",
)


def _errors_on(words: str, machine: Machine) -> set[tuple[str, str]]:
    try:
        layout = [] if "parallel=" in words else ["parallel=single"]
        load([*ON_A_CLUSTER, *layout, *words.split()], machine, {})
    except ConfigError as error:
        return {(p.code, p.path) for p in error.problems if p.severity == "error"}
    return set()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "choice",
    ["kernels=auto", "kernels=te", "kernels=triton", "kernels.linear=te", "kernels.attention=te"],
)
def test_resolve_missing_devices_refuse_no_cluster_run(choice: str, use: str) -> None:
    """Skip rules on a key that the cluster's machine resolves, but apply them to a key that is
    set.
    """
    there = _errors_on(f"{choice} {use}", THERE)
    elsewhere = _errors_on(f"{choice} {use}", ELSEWHERE)
    assert elsewhere <= there
    if choice == "kernels=te":
        assert elsewhere == there


def test_resolve_local_choice_stays_open_elsewhere() -> None:
    words = [*ON_A_CLUSTER, "parallel=cp2"]
    assert load(words, ELSEWHERE, {}).run.parallel.cp_comm_type is None
    assert load([*words, "kernels=te"], ELSEWHERE, {}).run.parallel.cp_comm_type == "p2p"
    assert load(words, THERE, {}).run.parallel.cp_comm_type == "p2p"
    assert load(words, BARE, {}).run.parallel.cp_comm_type == "all_gather"
    fused = "kernels.gradient_accumulation_fusion=true"
    for kernels in ("kernels=auto", "kernels=te", "kernels.linear=reference"):
        assert _errors_on(f"{kernels} {fused}", ELSEWHERE) == set()
    sharded = f"parallel=dp2 parallel.fsdp=fsdp2 {fused}"
    assert ("MT404", "kernels.gradient_accumulation_fusion") in _errors_on(sharded, BARE)


def test_resolve_softcapped_attention_is_not_te() -> None:
    gemma = [*ON_A_CLUSTER, "parallel=single", "model=gemma2_9b"]
    for words in ([], ["kernels=te"]):
        found = load([*gemma, *words], THERE, {}).run
        assert (found.kernels.linear, found.kernels.attention) == ("te", "triton")
    assert "attn_logit_softcapping" in reasons(found, THERE)["attention"]
    assert ("MT409", "kernels.attention") in _errors_on(
        "model=gemma2_9b kernels.attention=te", THERE
    )
    ours = "model=gemma2_9b model.attention_dropout=0.1 kernels.attention=triton"
    assert ("MT409", "kernels.attention") in _errors_on(ours, THERE)
    assert (
        load([*gemma, "model.attn_logit_softcapping=null"], THERE, {}).run.kernels.attention == "te"
    )
