"""The GPUs of a machine: what the driver says, what CUDA shows of them, and the file that describes
their kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.api import Loaded, load
from mtrain.cli.check import summary
from mtrain.config.compose.paths import conf_dir
from mtrain.config.compose.yaml_reader import load as read
from mtrain.config.machine import nvml
from mtrain.config.machine.nvml import Driver, Gpu
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.errors import BadEnvironment
from mtrain.launching import preflight
from tests.support.configs import LAPTOP, tiny
from tests.support.nvml import Library
from tests.support.tables import tables

TABLES = tables("machine_gpus")

MIB = 1 << 20
H200 = "NVIDIA H200"


def gpu(
    number: int, name: str = H200, free_mib: int = 143_000, processes: tuple[int, ...] = ()
) -> Gpu:
    return Gpu(name, f"GPU-{number}{number}aa", 90, 143_771 * MIB, free_mib * MIB, processes)


def driver(*gpus: Gpu, cuda: tuple[int, int] = (13, 0)) -> Driver:
    return Driver("580.159.01", cuda, gpus)


def machine(found: Driver, visible: str | None = None, nowhere: Path = Path("/nowhere")) -> Machine:
    return Machine.here(
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, nowhere, found
    )


FOUR = driver(*(gpu(number) for number in range(4)))
INSTANCES = tuple(
    Gpu(f"{H200} MIG 1g.18gb", f"MIG-{n}{n}bb", 90, 16_384 * MIB, 16_000 * MIB) for n in range(2)
)
PARTED = driver(
    gpu(0), Gpu(H200, "GPU-11aa", 90, 143_771 * MIB, instances=INSTANCES, partitioned=True)
)


def test_machine_gpus_driver_library_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = Library()
    monkeypatch.setenv("FAKE_USED_MIB", "1000")
    monkeypatch.setenv("FAKE_PID", "4711")
    found = nvml.asked(loaded)
    known = (90, 143_771 * MIB, 142_771 * MIB, (4711, 4712))
    two = (Gpu(H200, "GPU-0000-af", *known), Gpu(H200, "GPU-1111-af", *known))
    assert found == Driver("580.159.01", (13, 0), two)
    monkeypatch.setenv("FAKE_MIG", "1")
    parted = nvml.asked(loaded).gpus[1]
    assert parted.partitioned
    assert [(one.name, one.uuid, one.sm, one.memory_bytes >> 20) for one in parted.instances] == [
        (f"{H200} MIG 1g.18gb", "MIG-10101010-af", 90, 16_384),
        (f"{H200} MIG 1g.18gb", "MIG-13131313-af", 90, 16_384),
    ]
    monkeypatch.setenv("FAKE_NO_DRIVER", "1")
    with pytest.raises(nvml.Failed):
        nvml.asked(loaded)


def test_machine_gpus_any_number_of_processes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = Library()
    monkeypatch.setenv("FAKE_PID", "4711")
    monkeypatch.setattr(nvml, "USUAL_PROCESSES", 1)
    assert [gpu.processes for gpu in nvml.asked(loaded).gpus] == [(4711, 4712), (4711, 4712)]


@pytest.mark.parametrize(
    ("visible", "numbers", "said"),
    TABLES["visible"],
)
def test_machine_gpus_visible_list_reads_as_cuda(
    visible: str | None, numbers: list[int], said: str
) -> None:
    here = machine(FOUR, visible)
    assert here.gpus == len(numbers)
    assert here.nvidia.gpus == tuple(FOUR.gpus[number] for number in numbers)
    assert said in here.nvidia.fault
    assert bool(here.nvidia.fault) is bool(said)
    assert here.nvidia.on_purpose is (visible in (None, "2,0", "GPU-33aa,GPU-1", "", "-1"))


def test_machine_gpus_visible_list_reads_without_library(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for number in range(4):
        (tmp_path / f"dev/nvidia{number}").touch()
    lists = {"0,1,0": 0, "0,9,1": 1, "GPU-a,GPU-b": 2, "GPU-a,GPU-a": 0, "3": 1}
    found = {text: Machine.here({"CUDA_VISIBLE_DEVICES": text}, tmp_path).gpus for text in lists}
    assert found == lists


@pytest.mark.parametrize("visible", ["", "0", "0,0", "GPU-a,GPU-a"])
def test_machine_gpus_visible_list_without_gpus_is_no_fault(visible: str, tmp_path: Path) -> None:
    seen = Machine.here({"CUDA_VISIBLE_DEVICES": visible}, tmp_path).nvidia
    assert (seen.count, seen.fault) == (0, "")


def test_machine_gpus_wsl_gpu_has_no_device_file(tmp_path: Path) -> None:
    for name in ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert Machine.here({}, tmp_path).gpus == 1
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").unlink()
    assert Machine.here({}, tmp_path).gpus == 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["MIG-00bb"]),
        ("0", ["GPU-00aa"]),
        ("1", ["MIG-00bb"]),
        ("MIG-11bb,MIG-00bb", ["MIG-11bb"]),
    ],
)
def test_machine_gpus_partitioned_shows_one_instance(visible: str | None, names: list[str]) -> None:
    here = machine(PARTED, visible)
    assert [one.uuid for one in here.nvidia.gpus] == names
    assert here.gpus == 1


@pytest.mark.parametrize(
    ("environment", "gpus"),
    TABLES["per_task"],
)
def test_machine_gpus_one_per_task_adds_up_to_machine(
    environment: dict[str, str], gpus: int
) -> None:
    seen = {"CUDA_VISIBLE_DEVICES": "2"}
    assert Machine.here({**environment, **seen}, Path("/nowhere"), FOUR).gpus == gpus
    assert Machine.here(environment, Path("/nowhere"), FOUR).gpus == 4, (
        "a task that sees several is no such task"
    )


def local(found: Driver, *words: str, visible: str | None = None) -> Loaded:
    said = ["data=mock", "parallel=single", *words]
    return load(said, machine(found, visible), {}, to_run=False)


def test_machine_gpus_local_cluster_uses_file_of_its_gpu() -> None:
    found = local(driver(gpu(0)))
    cluster = found.run.cluster
    filed = read(conf_dir() / "cluster/h200.yaml").values
    assert (cluster.device, cluster.driver_names, cluster.sm) == ("cuda", (H200,), 90)
    assert cluster.device_memory_gib == 140.4, "of the device, and not of its data sheet"
    assert cluster.peak_tflops == filed["peak_tflops"]
    assert cluster.memory_gbps == filed["memory_gbps"]
    where = f"resolved on this machine: {H200}, conf/cluster/h200.yaml"
    assert (
        found.origins["cluster.peak_tflops.bf16"] == found.origins["cluster.memory_gbps"] == where
    )
    assert found.origins["cluster.device_memory_gib"] == f"resolved on this machine: {H200}"
    assert f"{H200}, sm_90, 140.4 GiB, MFU of 989 TFLOP/s" in summary(found)
    assert resolve(found.run, LAPTOP) == found.run


def test_machine_gpus_local_cluster_yields_to_user() -> None:
    cluster = local(driver(gpu(0)), "cluster.device_memory_gib=10.0", "cluster.sm=80").run.cluster
    assert (cluster.device_memory_gib, cluster.sm, cluster.memory_gbps) == (10.0, 80, 4800.0)


def test_machine_gpus_other_cluster_ignores_local_gpus() -> None:
    assert local(driver(gpu(0)), "cluster=h100x8").run.cluster.memory_gbps == 3350.0
    own = tiny(cluster__name="box", cluster__device="cuda", cluster__sm=80)
    assert resolve(own, machine(driver(gpu(0)))).cluster.memory_gbps is None


def test_machine_gpus_without_file_keep_driver_facts() -> None:
    cluster = local(driver(gpu(0, "NVIDIA Z1"))).run.cluster
    assert (cluster.driver_names, cluster.sm, cluster.device_memory_gib) == (
        ("NVIDIA Z1",),
        90,
        140.4,
    )
    assert cluster.peak_tflops == {}


def test_machine_gpus_two_kinds_are_not_described() -> None:
    mixed = driver(gpu(0), gpu(1, "NVIDIA H100 NVL"))
    assert local(mixed).run.cluster.sm is None
    assert local(mixed, visible="1").run.cluster.memory_gbps == 3900.0


def test_machine_gpus_own_file_describes_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster").mkdir()
    own = (
        "# Ours\ndefaults: [h100, _self_]\nname: z1\ndriver_names: [NVIDIA Z1]\npeak_tflops: {bf16:"
        " 7.0}\n"
    )
    (tmp_path / "cluster/z1.yaml").write_text(own)
    (tmp_path / "cluster/broken.yaml").write_text("driver_names: [NVIDIA Z1\n")
    monkeypatch.setenv("MTRAIN_CONF", str(tmp_path))
    cluster = local(driver(gpu(0, "NVIDIA Z1"))).run.cluster
    assert (cluster.peak_tflops, cluster.memory_gbps) == ({"bf16": 7.0}, 3350.0)


def test_machine_gpus_every_device_is_in_one_file() -> None:
    files = {
        file.stem: read(file).values for file in sorted((conf_dir() / "cluster").glob("*.yaml"))
    }
    own = {stem: values for stem, values in files.items() if "peak_tflops" in values}
    names = [name for values in own.values() for name in values["driver_names"]]
    assert len(names) == len(set(names)) >= len(own) > 9
    assert {stem for stem, values in files.items() if "driver_names" in values} == own.keys()


CUDA = {"cluster__device": "cuda", "cluster__devices_per_node": 1}


def refused(found: Machine, **changes: object) -> str:
    run = resolve(tiny(**(CUDA | changes)), found)
    with pytest.raises(BadEnvironment) as caught:
        preflight.check(run, [], found)
    return str(caught.value)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch is built for CUDA 13.0."""
    monkeypatch.setattr("mtrain.config.machine.hardware.cuda_of_torch", lambda: "13.0")


@pytest.mark.usefixtures("built")
def test_machine_gpus_all_faults_are_reported_at_once() -> None:
    crowded = driver(gpu(0, free_mib=10, processes=(1,)), cuda=(12, 2))
    text = refused(machine(crowded, "0,5"), cluster__devices_per_node=2, parallel__ranks=2)
    for piece in (
        "[MT051] needs 2 GPUs on this machine; here: 1",
        "[MT052] CUDA_VISIBLE_DEVICES=0,5: 5 is no GPU of this machine, which has number 0",
        "fix: unset CUDA_VISIBLE_DEVICES, or list each GPU once: CUDA_VISIBLE_DEVICES=0",
        "[MT053] GPU 0 (NVIDIA H200) has 10.0 MiB of 140.4 GiB free, and process 1",
        "need at least",
        (
            "[MT054] driver 580.159.01 serves CUDA up to 12.2, and the installed torch is built for"
            " CUDA 13.0"
        ),
    ):
        assert piece in text, text


def test_machine_gpus_torch_without_cuda_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain.config.machine.hardware.cuda_of_torch", lambda: "")
    assert "[MT055] the installed torch is built without CUDA" in refused(machine(driver(gpu(0))))


@pytest.mark.usefixtures("built")
def test_machine_gpus_shared_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    found = machine(driver(gpu(0, processes=(1, 99_999_999)), cuda=(13, 2)))
    preflight.check(resolve(tiny(**CUDA), found), [], found)
    said = capsys.readouterr().err
    assert (
        "warning: [MT053] GPU 0 (NVIDIA H200) has 139.6 GiB of 140.4 GiB free, and process 1"
        in said
    )
    assert "and 1 more compute on it: the run will share it" in said


@pytest.mark.usefixtures("built")
def test_machine_gpus_planned_memory_shortage_is_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = machine(driver(gpu(0, free_mib=600)))
    preflight.check(resolve(tiny(**CUDA), found), [], found)
    assert "has 600.0 MiB of 140.4 GiB free; a step is planned to need" in capsys.readouterr().err


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            driver(gpu(0)),
            (
                "1 x NVIDIA H200, 140.4 GiB, driver 580.159.01 for CUDA 13.0; peaks and rates of"
                " conf/cluster"
            ),
        ),
        (driver(gpu(0, "NVIDIA Z1")), "write mine/cluster/box.yaml"),
        (
            driver(gpu(0), gpu(1, "NVIDIA H100 NVL")),
            "of several kinds (NVIDIA H100 NVL, NVIDIA H200)",
        ),
    ],
)
def test_machine_gpus_start_prints_them_in_a_line(
    found: Driver, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = machine(found)
    preflight.check(resolve(tiny(**CUDA), here), [], here)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.usefixtures("built")
def test_machine_gpus_other_kind_than_cluster_warns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = machine(driver(*(gpu(number) for number in range(8))))
    run = load(["data=mock", "cluster=h100x8", "parallel=single"], here, {}, to_run=False).run
    preflight.check(run, [], here)
    assert (
        "[MT056] cluster h100x8 has NVIDIA H100 80GB HBM3, and the GPUs here are NVIDIA H200"
        in (capsys.readouterr().err)
    )


def test_machine_gpus_hidden_by_mistake_do_not_train_on_cpu() -> None:
    with pytest.raises(BadEnvironment, match="names 0 twice"):
        load(["data=mock", "parallel=single"], machine(FOUR, "0,0"), {})
    for on_purpose in ("", "-1"):
        found = load(["data=mock", "parallel=single"], machine(FOUR, on_purpose), {})
        assert found.run.cluster.device == "cpu"
        assert "every GPU is hidden" in found.origins["cluster.device"]
    assert load(["data=mock", "cluster=cpu"], machine(FOUR, "0,0"), {}).run.cluster.device == "cpu"


@pytest.mark.parametrize(
    ("memory_mib", "works"),
    [(300, ["check", "show"]), (2_000, ["check", "show", "rehearse", ""])],
)
def test_machine_gpus_check_agrees_with_preflight(memory_mib: int, works: list[str]) -> None:
    here = Machine(cpu_cores=2, memory_bytes=memory_mib * MIB)
    words = ["model=llama3_8b", "cluster=cpu", "data=mock", "parallel=tp2"]
    with pytest.raises(BadEnvironment) as caught:
        preflight.check(load(words, here, {}, to_run=False).run, words, here)
    _, _, listed = str(caught.value).partition("what works here:\n")
    lines = [
        line.split("   (")[0].strip().removeprefix("python launch.py").strip()
        for line in listed.splitlines()
    ]
    assert [line.split(" ")[0] for line in lines] == works
