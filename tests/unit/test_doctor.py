"""`doctor`: every injected fault is found and named, with its remedy, and a healthy machine has
none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.machine import hardware, nvml_health
from mtrain.config.machine.nvml import Driver, Gpu
from mtrain.config.machine.nvml_health import GpuHealth, Health
from mtrain.config.machine.visible import counted
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.doctor import gathering, probing
from mtrain.doctor.diagnosis import examined, exit_code
from mtrain.doctor.facts import Clock, Disk, Facts, Rates, Software
from mtrain.doctor.probes.gpu_state import parsed
from mtrain.doctor.rows import Row
from mtrain.doctor.software import BEFORE, PYTHON, TORCH, TRANSFORMER_ENGINE, TRITON, numbers
from mtrain.launching.limits import Limits
from tests.support.commands import ROOT, mtrain
from tests.support.nvml import Library, site

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
GPUS = 8
SECRET = "hunter2-do-not-print"
HEALTHY = GpuHealth(
    sm_mhz=1755,
    sm_most_mhz=1980,
    slowing=0x1,
    celsius=41,
    power_limit_watts=700.0,
    ecc=True,
    uncorrected=0,
    rows_pending=False,
    rows_failed=False,
    links=18,
    links_up=18,
    pcie_lanes=16,
    pcie_most_lanes=16,
)
DISK = Disk("log.runs_dir", "/runs", "ext4", 900 * GIB, 10**7, 8e8, 0.002, 0.001)


def gpu(number: int, **changed: Any) -> Gpu:
    made = Gpu(H100, f"GPU-{number}aa", 90, 80 * GIB, 79 * GIB)
    return replace(made, **changed)


def machine(
    *gpus: Gpu, cuda: tuple[int, int] = (13, 0), variables: dict[str, str] | None = None
) -> Machine:
    found = Driver("580.159.01", cuda, gpus)
    here = Machine.here(variables or {}, Path("/nowhere"), found)
    return replace(here, memory_bytes=2048 * GIB, cpu_cores=96)


@pytest.fixture(autouse=True)
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the driver with a torch for CUDA, whichever is installed."""
    monkeypatch.setattr(hardware, "cuda_of_torch", lambda: "13.0")


EIGHT = tuple(gpu(number) for number in range(GPUS))


@cache
def healthy() -> Facts:
    """Return the facts of a machine with eight GPUs and no fault."""
    here = machine(*EIGHT)
    run = resolve(compose(["cluster=h100x8"]).run, here, None)
    return Facts(
        run=run,
        machine=here,
        environment={"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"},
        software=Software(
            python=(3, 12, 4),
            torch="2.13.0+cu130",
            megatron_core=(0, 16, 1),
            triton="3.9.0",
            transformer_engine="2.11.0",
            cuda="13.0",
            nccl={"nvidia-nccl-cu13": "2.28.9"},
        ),
        limits=Limits(1 << 20, 1 << 20, None),
        disks=(DISK,),
        rates=Rates(H100, (7e14,) * GPUS, (2.8e12,) * GPUS, 3.6e11),
        clock=Clock(True, 0.003),
        shared_bytes=64 * GIB,
        shared_free_bytes=64 * GIB,
        health=Health((HEALTHY,) * GPUS, 50),
        adapters=("mlx5_0", "mlx5_1"),
        interfaces=Path("/nowhere"),
    )


def rows_of(facts: Facts) -> list[Row]:
    return [row for _, row in examined(facts)]


def faults(facts: Facts) -> list[Row]:
    return [row for row in rows_of(facts) if row.verdict != "ok"]


def software(**changed: Any) -> Facts:
    return replace(healthy(), software=replace(healthy().software, **changed))


def disk(**changed: Any) -> Facts:
    return replace(healthy(), disks=(replace(DISK, **changed),))


def state(**changed: Any) -> Facts:
    """Return a machine whose third GPU differs."""
    third = replace(HEALTHY, **changed)
    gpus = (HEALTHY, HEALTHY, third, *[HEALTHY] * (GPUS - 3))
    return replace(healthy(), health=Health(gpus, 50))


def variables(**given: str) -> Facts:
    return replace(healthy(), environment={**given, "WANDB_API_KEY": SECRET})


def limits(**changed: int) -> Facts:
    return replace(healthy(), limits=replace(healthy().limits, **changed))


def rates(**changed: Any) -> Facts:
    return replace(healthy(), rates=replace(healthy().rates, **changed))


def seeing(*gpus: Gpu, **given: Any) -> Facts:
    return replace(healthy(), machine=machine(*gpus, **given))


def on_machines(nodes: int, **changed: Any) -> Facts:
    run = healthy().run
    cluster = run.cluster.model_copy(update={"nodes": nodes})
    return replace(healthy(), run=run.model_copy(update={"cluster": cluster}), **changed)


def without_driver() -> Facts:
    """Return a container that has the device files of GPUs and no library of the driver."""
    alone = replace(machine(), gpus=GPUS, nvidia=counted(GPUS, None))
    bare = software(cuda_library=False, nvml=False)
    return replace(bare, machine=alone, health=None, container="docker")


Fault = tuple[Callable[[], Facts], str, str, str]
# Fault -> the facts, the row that names it, its verdict, and a part of the remedy
FAULTS: dict[str, Fault] = {
    "missing driver library": (without_driver, "driver library", "wrong", "--gpus all"),
    "silent management library": (without_driver, "management library", "slow", "utility"),
    "old driver": (lambda: seeing(*EIGHT, cuda=(12, 4)), "driver", "wrong", "a driver for CUDA 13"),
    "torch without CUDA": (
        lambda: rates(gemm_flop_per_s=(), error="torch was built without CUDA"),
        "rates",
        "wrong",
        "probes.device cuda",
    ),
    "no torch": (lambda: software(torch=None), "torch", "wrong", "pip install"),
    "old torch": (lambda: software(torch="2.6.0"), "torch", "wrong", "torch>=2.10"),
    "old python": (lambda: software(python=(3, 10, 9)), "python", "wrong", "3.11"),
    "unknown megatron-core": (
        lambda: software(megatron_core=(0, 17, 0)),
        "megatron-core",
        "wrong",
        "megatron-core==0.16.1",
    ),
    "old triton": (lambda: software(triton="3.1.0"), "triton", "wrong", "triton>=3.4"),
    "no triton": (lambda: software(triton=None), "triton", "slow", "triton>=3.4"),
    "new TransformerEngine": (
        lambda: software(transformer_engine="2.14.0"),
        "transformer-engine",
        "slow",
        "<2.12",
    ),
    "old CUDA": (
        lambda: replace(
            software(cuda="12.4"), machine=machine(*(replace(g, sm=100) for g in EIGHT))
        ),
        "cuda",
        "wrong",
        "12.8",
    ),
    "two NCCL": (
        lambda: software(nccl={"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}),
        "nccl",
        "slow",
        "uninstall",
    ),
    "too few GPUs": (lambda: seeing(*EIGHT[:6]), "gpus", "wrong", "6 ranks"),
    "hidden GPUs": (
        lambda: seeing(*EIGHT, variables={"CUDA_VISIBLE_DEVICES": "0,0"}),
        "visible gpus",
        "wrong",
        "list each GPU once",
    ),
    "another kind of GPU": (
        lambda: seeing(*(replace(g, name="NVIDIA H20") for g in EIGHT)),
        "kind of gpu",
        "slow",
        "cluster=local",
    ),
    "small GPU memory": (
        lambda: seeing(*EIGHT[:7], gpu(7, memory_bytes=40 * GIB, free_bytes=39 * GIB)),
        "gpu memory",
        "wrong",
        "cluster=local",
    ),
    "GPU memory of others": (
        lambda: seeing(*EIGHT[:7], gpu(7, free_bytes=1 << 20, processes=(1,))),
        "gpu memory in use",
        "wrong",
        "end the processes",
    ),
    "uncorrected ECC errors": (lambda: state(uncorrected=2), "gpu 2 ecc", "wrong", "reset"),
    "ECC off": (lambda: state(ecc=False), "gpu 2 ecc", "slow", "nvidia-smi -e 1"),
    "failed row of memory": (
        lambda: state(rows_failed=True),
        "gpu 2 memory rows",
        "wrong",
        "replace",
    ),
    "pending row of memory": (
        lambda: state(rows_pending=True),
        "gpu 2 memory rows",
        "slow",
        "reset",
    ),
    "throttled by heat": (
        lambda: state(slowing=0x40, celsius=91),
        "gpu 2 throttling",
        "slow",
        "cooling",
    ),
    "power brake": (lambda: state(slowing=0x80), "gpu 2 throttling", "slow", "power"),
    "low power limit": (
        lambda: state(power_limit_watts=350.0),
        "gpu 2 power limit",
        "slow",
        "-pl 700",
    ),
    "few PCIe lanes": (lambda: state(pcie_lanes=4), "gpu 2 pcie", "slow", "reseat"),
    "no NVLink": (
        lambda: state(links=None, links_up=None),
        "nvlink",
        "slow",
        "nvidia-fabricmanager",
    ),
    "broken NVLink": (lambda: state(links_up=17), "nvlink", "slow", "nvidia-smi nvlink"),
    "slow GEMM": (
        lambda: rates(gemm_flop_per_s=(7e14, 3e14)),
        "gemm (bf16)",
        "slow",
        "throttling",
    ),
    "slow copy": (lambda: rates(copy_bytes_per_s=(1e12,)), "memory copy", "slow", "clocks"),
    "slow all-reduce": (lambda: rates(all_reduce_bytes_per_s=2e10), "all-reduce", "slow", "clocks"),
    "all-reduce that hangs": (
        lambda: rates(all_reduce_bytes_per_s=None, error="no all-reduce within 60 s"),
        "all-reduce",
        "wrong",
        "NCCL_DEBUG",
    ),
    "invalid variable": (
        lambda: variables(TORCH_NCCL_BLOCKING_WAIT="sure"),
        "variables",
        "wrong",
        "unset it",
    ),
    "InfiniBand off and on": (
        lambda: variables(NCCL_IB_DISABLE="1", NCCL_NET="IB"),
        "variables",
        "slow",
        "unset one",
    ),
    "adapters without InfiniBand": (
        lambda: variables(NCCL_NET="Socket", NCCL_IB_HCA="mlx5_0"),
        "variables",
        "slow",
        "unset one",
    ),
    "foreign adapter": (
        lambda: variables(NCCL_IB_HCA="=bnxt_re0:1"),
        "variables",
        "slow",
        "infiniband",
    ),
    "channels": (
        lambda: variables(NCCL_MIN_NCHANNELS="32", NCCL_MAX_NCHANNELS="8"),
        "variables",
        "slow",
        "unset both",
    ),
    "NVLS off and required": (
        lambda: variables(NCCL_NVLS_ENABLE="0", NCCL_ALGO="NVLS"),
        "variables",
        "slow",
        "unset one",
    ),
    "copies between GPUs off": (
        lambda: variables(NCCL_P2P_DISABLE="1"),
        "variables",
        "slow",
        "unset NCCL_P2P_DISABLE",
    ),
    "full disk": (
        lambda: disk(error="No space left on device", free_bytes=0, write_bytes_per_s=None),
        "log.runs_dir write",
        "wrong",
        "log.runs_dir=FOLDER",
    ),
    "read-only disk": (
        lambda: disk(error="Read-only file system", write_bytes_per_s=None),
        "log.runs_dir write",
        "wrong",
        "log.runs_dir=FOLDER",
    ),
    "dead disk": (
        lambda: disk(error="no answer within 20 s", write_bytes_per_s=None, fsync_s=None),
        "log.runs_dir write",
        "wrong",
        "log.runs_dir=FOLDER",
    ),
    "no room for a checkpoint": (
        lambda: disk(free_bytes=1 << 20),
        "log.runs_dir room",
        "wrong",
        "free room",
    ),
    "no inodes": (lambda: disk(free_files=12), "log.runs_dir files", "slow", "inodes"),
    "slow disk": (
        lambda: disk(write_bytes_per_s=5e6),
        "log.runs_dir write",
        "slow",
        "faster disk",
    ),
    "slow fsync": (lambda: disk(fsync_s=4.0), "log.runs_dir fsync", "slow", "faster disk"),
    "runs in memory": (lambda: disk(filesystem="tmpfs"), "log.runs_dir write", "slow", "on a disk"),
    "clock skew": (lambda: disk(skew_s=-42.0), "clock", "slow", "chrony"),
    "clock far off": (lambda: disk(skew_s=3600.0), "clock", "wrong", "chrony"),
    "clock that nothing sets": (
        lambda: on_machines(2, clock=Clock(False)),
        "clock service",
        "slow",
        "chrony",
    ),
    "few open files": (lambda: limits(files=64), "ulimit -n", "wrong", "ulimit -n 1024"),
    "few processes": (lambda: limits(processes=100), "ulimit -u", "wrong", "ulimit -u 4096"),
    "few addresses": (lambda: limits(addresses=GIB), "ulimit -v", "wrong", "unlimited"),
    "little locked memory": (
        lambda: replace(healthy(), locked_bytes=8 << 20),
        "ulimit -l",
        "wrong",
        "unlimited",
    ),
    "small /dev/shm": (
        lambda: replace(healthy(), shared_free_bytes=64 << 20, container="docker"),
        "/dev/shm",
        "wrong",
        "--shm-size",
    ),
    "no /dev/shm": (
        lambda: replace(healthy(), shared_bytes=None, shared_free_bytes=None),
        "/dev/shm",
        "wrong",
        "remount",
    ),
}


def test_doctor_healthy_machine_is_ok() -> None:
    assert faults(healthy()) == []
    assert exit_code(rows_of(healthy())) == 0
    named = {row.name for row in rows_of(healthy())}
    assert {"gemm (bf16)", "all-reduce", "nvlink", "topology", "gpu 7 ecc", "clock"} <= named


@pytest.mark.parametrize("name", FAULTS)
def test_doctor_injected_fault_is_named(name: str) -> None:
    make, row, verdict, remedy = FAULTS[name]
    facts = make()
    found = faults(facts)
    named = [one for one in found if one.name == row and one.verdict == verdict]
    assert named, found
    assert any(remedy in one.fix for one in named), named
    assert all(one.fix for one in found)
    assert exit_code(rows_of(facts)) == (3 if any(one.verdict == "wrong" for one in found) else 0)
    assert SECRET not in str(rows_of(facts))


def test_doctor_driver_library_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = Library()
    found = nvml_health.asked(loaded)
    assert found == Health((replace(HEALTHY, pcie_lanes=None, pcie_most_lanes=None),) * 2, 50)
    assert parsed(json.loads(json.dumps(asdict(found)))) == found
    monkeypatch.setenv("FAKE_SLOWING", str(0x40))
    monkeypatch.setenv("FAKE_UNCORRECTED", "3")
    monkeypatch.setenv("FAKE_FAILED_ROWS", "1")
    monkeypatch.setenv("FAKE_LINKS_UP", "17")
    gpus = nvml_health.asked(loaded).gpus
    one = gpus[1]
    assert (one.slowing, one.uncorrected, one.rows_failed) == (0x40, 3, True)
    assert (one.links, one.links_up) == (18, 17)
    assert gpus[0].uncorrected == 0
    here = machine(*EIGHT[:2])
    named = {row.name for row in faults(replace(healthy(), machine=here, health=Health(gpus)))}
    assert {"gpu 1 throttling", "gpu 1 ecc", "gpu 1 memory rows", "nvlink"} <= named


def probed(folder: Path, limit: Callable[[], None] | None = None) -> dict[str, Any]:
    """Return what the disk probe prints, in a process with a limit of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mtrain.doctor.probes.disk", str(folder)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=limit,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_doctor_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    found = probed(tmp_path / "not/there/yet")
    assert found["place"] == str(tmp_path)
    assert found["write_bytes_per_s"] > 0
    assert found["fsync_s"] > 0
    assert abs(found["skew_s"]) < 1
    assert list(tmp_path.iterdir()) == []


def test_doctor_disk_that_takes_no_bytes_is_wrong(tmp_path: Path) -> None:
    def few() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    found = probed(tmp_path, few)
    assert found["error"] == os.strerror(errno.EFBIG)
    found.pop("place")
    named = faults(replace(healthy(), disks=(Disk("log.runs_dir", str(tmp_path), **found),)))
    assert [row.name for row in named] == ["log.runs_dir write"]


def test_doctor_read_only_folder_is_wrong() -> None:
    found = probed(Path("/proc/self"))
    assert found["error"]


def test_doctor_probe_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probing, "python", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    begun = time.monotonic()
    assert probing.probe("disk", "/", limit_s=0.3) == {"error": "no answer within 0 s"}
    assert time.monotonic() - begun < 10


def test_doctor_container_is_known_by_its_files(tmp_path: Path) -> None:
    assert gathering.container({}, tmp_path) == ""
    (tmp_path / ".dockerenv").touch()
    assert gathering.container({}, tmp_path) == "docker"
    assert gathering.container({"APPTAINER_CONTAINER": "x"}, tmp_path / "none") == "apptainer"


def test_doctor_healthy_process_is_ok_within_seconds(tmp_path: Path) -> None:
    done = mtrain("doctor", "cluster=cpu", "--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert said["ok"]
    assert {row["verdict"] for row in said["rows"]} <= {"ok", "slow"}
    measured = {row["name"]: row["value"] for row in said["rows"]}
    for name in ("gemm (numpy, fp32)", "memory copy", "log.runs_dir write", "log.runs_dir fsync"):
        assert measured[name] > 0
    # five seconds of an idle machine; tests share theirs
    assert said["seconds"] < 15
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_doctor_low_limits_of_a_process_exit_3(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    done = subprocess.run(
        [sys.executable, "-m", "mtrain", "doctor", "cluster=cpu"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=few,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "wrong  ulimit -n" in done.stdout
    assert "fix: ulimit -n 1024" in done.stdout


@pytest.mark.full
def test_doctor_all_reduce_is_measured() -> None:
    """Measure with two processes on the host, by gloo, in place of two GPUs."""
    found = probing.probe("device", "cpu", "2", limit_s=120)
    assert "all_reduce_error" not in found
    assert found["all_reduce_bytes_per_s"] > 0
    assert len(found["gemm_flop_per_s"]) == 2


def test_doctor_image_is_pinned_and_copies_what_exists() -> None:
    text = (ROOT / "docs/container/Dockerfile").read_text()
    base = re.search(r"^FROM python:(\d+)\.(\d+)\.(\d+)-", text, re.MULTILINE)
    assert base is not None
    engine = (0, 19, 2)  # that of constraints.txt for this Python
    inside = software(python=tuple(map(int, base.groups())), megatron_core=engine)
    assert faults(replace(inside, container="docker")) == []
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in text


def test_doctor_bounds_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]

    def bounds(sign: str, package: str) -> set[tuple[int, ...]]:
        pattern = rf"{package}[^;]*{sign}([\d.]+)"
        found = [match[1] for word in named if (match := re.match(pattern, word))]
        return {numbers(version) for version in found}

    assert project["requires-python"] == f">={'.'.join(map(str, PYTHON))}"
    assert bounds(">=", "torch") == {TORCH}
    assert bounds(">=", "triton") == {TRITON}
    assert bounds(">=", "transformer-engine") == {TRANSFORMER_ENGINE}
    assert bounds("<", "transformer-engine") == set(BEFORE.values())


@pytest.mark.full
def test_doctor_tiny_and_read_only_mounts_are_wrong(tmp_path: Path) -> None:
    probe = f"{sys.executable} -m mtrain.doctor.probes.disk {tmp_path}"
    script = f"mount -t tmpfs -o size=1m none {tmp_path} || exit 9; {probe}"
    script += f"; mount -o remount,ro {tmp_path}; {probe}"
    try:
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    said = [json.loads(line)["error"] for line in done.stdout.splitlines()]
    assert said == [os.strerror(errno.ENOSPC), os.strerror(errno.EROFS)]


@pytest.mark.full
def test_doctor_process_reads_state_of_gpus(tmp_path: Path) -> None:
    """Examine a machine whose driver's library is an imitation, and whose torch has no CUDA."""
    path = os.pathsep.join([str(site(tmp_path / "site")), *filter(None, sys.path)])
    changed = {"PYTHONPATH": path, "FAKE_SLOWING": str(0x40), "FAKE_UNCORRECTED": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", "doctor", "cluster=h200x8", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **changed},
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert done.returncode == 3
    assert rows["gpu 1 throttling"]["verdict"] == "slow"
    assert rows["gpu 1 ecc"]["verdict"] == "wrong"
    assert rows["gpus"]["measured"] == "needs 8 GPUs on this machine; here: 2"
    assert rows["gpu memory"]["verdict"] == "ok"
