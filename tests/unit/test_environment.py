"""The environment of a rank: what is set and why, what the user has set, and what is wrong before
any rank starts.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.launching import preflight
from mtrain.launching.environment import Place, apply, environment, filesystem_of, lines, verify
from mtrain.launching.limits import FILES_PER_RANK, Limits, faults, raise_files
from tests.support.configs import LAPTOP, tiny

CARDS = Machine(cpu_cores=16, memory_bytes=64 << 30, gpus=8, transformer_engine=True, triton=True)
HERE = Place(ranks_here=4, cores=16, scratch=Path("/tmp/mtrain-7"))


def on_cards(**changes: Any) -> RunConfig:
    return resolve(tiny(cluster__device="cuda", parallel__ranks=8, **changes), CARDS)


def values(run: RunConfig, place: Place = HERE, **given: str) -> dict[str, str]:
    return {name: setting.value for name, setting in environment(run, place, given).items()}


def test_environment_cpu_run_gets_nothing_of_cuda() -> None:
    run = resolve(tiny(parallel__tp=2, trainer__deterministic=True), LAPTOP)
    assert values(run) == {
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert "GLOO_SOCKET_IFNAME" not in values(
        run, Place(ranks_here=1, cores=1, on_one_machine=False)
    )


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"parallel__tp": 2}, "CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ({"parallel__cp": 2, "cluster__sm": 90}, "CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ({"parallel__tp": 2, "cluster__sm": 100}, "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ({"parallel__tp": 2, "parallel__fsdp": "fsdp2"}, "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ({"parallel__cp": 2, "parallel__fsdp": "megatron"}, "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ({}, "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ({}, "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ({"trainer__cuda_graph_impl": "local"}, "PYTORCH_ALLOC_CONF", None),
        ({"trainer__deterministic": True}, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ({"trainer__deterministic": True}, "NCCL_ALGO", "Ring"),
        (
            {"trainer__deterministic": True, "kernels__norm": "te"},
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            "0",
        ),
        (
            {"trainer__deterministic": True, "kernels__default": "reference"},
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            None,
        ),
        ({}, "NCCL_ALGO", None),
        ({"kernels__attention": "te"}, "NVTE_FLASH_ATTN", "1"),
        ({"kernels__attention": "triton"}, "NVTE_FLASH_ATTN", None),
        ({"parallel__activation_offload__modules": ("mlp_norm",)}, "NVTE_CPU_OFFLOAD_V1", "1"),
        ({}, "NVTE_CPU_OFFLOAD_V1", None),
        ({}, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "720"),
        ({"trainer__timeout_s": 3600.5}, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "3721"),
        ({"trainer__timeout_s": 5.0}, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480"),
        ({}, "TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ({}, "GLOO_SOCKET_IFNAME", None),
        ({}, "NCCL_DEBUG", None),
        ({}, "TORCH_NCCL_AVOID_RECORD_STREAMS", None),
    ],
)
def test_environment_variable_is_set_with_its_reason(
    changes: dict[str, Any], name: str, value: str | None
) -> None:
    assert values(on_cards(**changes)).get(name) == value


def test_environment_recorder_writes_to_run_folder() -> None:
    place = Place(cores=1, scratch=Path("/tmp/mtrain-7"), errors=Path("/runs/a/errors"))
    found = values(on_cards(), place)
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/a/errors/flight_rank_"
    other = values(on_cards(), Place(cores=1, scratch=place.scratch, errors=Path("/runs/b/errors")))
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] != other["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]


@pytest.mark.parametrize(
    ("filesystem", "local"), [("nfs4", True), ("lustre", True), ("ext4", False), ("", False)]
)
def test_environment_kernel_cache_avoids_network_home(filesystem: str, local: bool) -> None:
    place = Place(cores=1, scratch=Path("/tmp/mtrain-7"), home_filesystem=filesystem)
    assert values(on_cards(), place).get("TRITON_CACHE_DIR") == (
        "/tmp/mtrain-7/triton" if local else None
    )


def test_environment_filesystem_is_of_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\nlocal /home/my\\040disk xfs rw 0 0\n"
    )
    found = [
        filesystem_of(Path(path), mounts)
        for path in ("/tmp", "/home/me", "/homes", "/home/my disk/x")
    ]
    assert found == ["ext4", "nfs4", "ext4", "xfs"]
    assert filesystem_of(Path("/"), tmp_path / "none") == ""


def test_environment_user_values_win_and_are_reported() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "3"}
    settings = environment(on_cards(), HERE, given)
    assert "PYTORCH_ALLOC_CONF" not in settings
    assert settings["PYTORCH_CUDA_ALLOC_CONF"].value == "max_split_size_mb:64"
    said = [line for line in lines(settings) if "set by you" in line]
    assert [line.split("=")[0] for line in said] == ["OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"]
    apply(settings, given)
    assert (given["OMP_NUM_THREADS"], given["MKL_NUM_THREADS"]) == ("3", "4")


def test_environment_rank_verifies_required_values() -> None:
    run = on_cards(trainer__deterministic=True, kernels__attention="te", parallel__tp=2)
    environ: dict[str, str] = {}
    assert [line.split()[0] for line in verify(run, HERE, environ)] == [
        "CUBLAS_WORKSPACE_CONFIG",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "NCCL_ALGO",
    ]
    apply(environment(run, HERE, environ), environ)
    assert verify(run, HERE, environ) == []
    assert (
        verify(run, HERE, {**environ, "NCCL_ALGO": "Tree", "CUDA_DEVICE_MAX_CONNECTIONS": "8"})
        == []
    )
    (wrong,) = verify(run, HERE, {**environ, "NCCL_ALGO": "NVLS"})
    assert wrong.startswith("NCCL_ALGO='NVLS' in the environment must be Ring or Tree or ^NVLS or ")


def test_environment_contradicted_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    run = on_cards(trainer__deterministic=True)
    with pytest.raises(
        BadEnvironment,
        match="CUBLAS_WORKSPACE_CONFIG=':0:0' in the environment must be :4096:8 or :16:8",
    ):
        preflight.check(run, [], CARDS, ranks_here=1)
    with pytest.raises(BadEnvironment) as refused:
        preflight.check(on_cards(), [], CARDS, ranks_here=64)
    assert "CUBLAS" not in str(refused.value)


NO_LIMITS = Limits()


@pytest.fixture
def interfaces(tmp_path: Path) -> Path:
    for name in ("lo", "eth0", "eth10", "ib0"):
        (tmp_path / "net" / name).mkdir(parents=True)
    return tmp_path / "net"


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("GLOO_SOCKET_IFNAME", "bogus0", False),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", True),
        ("TORCH_DISTRIBUTED_DEBUG", "bogus", False),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", True),
        ("TORCH_DISTRIBUTED_DEBUG", "", True),
        ("GLOO_DEVICE_TRANSPORT", "tcp", False),
        ("TORCH_FR_BUFFER_SIZE", "many", False),
        ("TORCH_FR_BUFFER_SIZE", "0", True),
        ("TORCH_GLOO_LAZY_INIT", "maybe", False),
        ("NVTE_FLASH_ATTN", "0", False),
        ("NVTE_FLASH_ATTN", "1", True),
        ("A_VARIABLE_OF_THE_USERS", "bogus", True),
    ],
)
def test_environment_fatal_value_on_cpu_is_named(
    name: str, value: str, right: bool, interfaces: Path
) -> None:
    found = faults({name: value}, NO_LIMITS, 2, interfaces=interfaces)
    assert [text.split("=")[0].split()[0] for text in found] == ([] if right else [name])


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("eth", True),
        ("=eth0", True),
        ("=eth", False),
        ("=ib0:1", True),
        ("bond,ib", True),
        ("ens", False),
        ("^docker,lo", True),
        ("^eth,ib,lo", False),
        ("^=eth0", True),
    ],
)
def test_environment_nccl_interfaces_are_parsed_as_nccl(
    value: str, right: bool, interfaces: Path
) -> None:
    found = faults(
        {"NCCL_SOCKET_IFNAME": value}, NO_LIMITS, 2, on_host=False, interfaces=interfaces
    )
    assert (not found) == right
    # gloo does not read it
    assert not faults({"NCCL_SOCKET_IFNAME": value}, NO_LIMITS, 2, interfaces=interfaces)


def test_environment_fatal_value_with_nccl_is_named(interfaces: Path) -> None:
    environ = {"TORCH_NCCL_BLOCKING_WAIT": "often", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10m"}
    assert len(faults(environ, NO_LIMITS, 2, on_host=False, interfaces=interfaces)) == 2
    assert not faults(environ, NO_LIMITS, 2, interfaces=interfaces)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(files=24), "ulimit -n 1024"),
        (Limits(files=1024, addresses=1 << 30), "ulimit -v unlimited"),
        (Limits(files=1024, addresses=1 << 40, processes=100_000), None),
    ],
)
def test_environment_low_limit_is_named(limits: Limits, said: str | None, tmp_path: Path) -> None:
    found = faults({}, limits, 2, interfaces=tmp_path / "none")
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_environment_descriptors_count_ranks_of_world(tmp_path: Path) -> None:
    assert not faults({}, Limits(files=1024), 8, interfaces=tmp_path)
    (said,) = faults({}, Limits(files=1024), 8, world=2048, interfaces=tmp_path)
    assert "ulimit -n 2148" in said


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 2148),
        (1024, resource.RLIM_INFINITY, 2148),
        (1024, 2000, 1024),
        (4096, 4096, 4096),
        (resource.RLIM_INFINITY,) * 3,
    ],
)
def test_environment_rank_raises_its_descriptor_limit(
    soft: int, hard: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: now.get(kind, (resource.RLIM_INFINITY,) * 2)
    )
    monkeypatch.setattr(resource, "setrlimit", now.__setitem__)
    raise_files(2048)
    assert now[resource.RLIMIT_NOFILE] == (raised, hard)
    enough = raised == resource.RLIM_INFINITY or raised >= FILES_PER_RANK + 2048
    assert enough == (not faults({}, Limits.here(), 8, world=2048))
