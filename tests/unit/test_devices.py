"""Devices: what ships, how a plug-in is found, what megatron-core sees on a CPU."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint

import pytest
import torch

from mtrain.config.machine import devices, installed
from mtrain.config.machine.hardware import memory_bytes
from mtrain.devices import cpu_namespace, registry
from mtrain.errors import BadEnvironment, ConfigError


def test_devices_cpu_is_available_and_measures_process() -> None:
    cpu = registry.get("cpu")
    assert cpu.available() is None
    assert cpu.device(3) == torch.device("cpu")
    memory = cpu.memory_stats()
    assert 10**7 < memory["allocated_bytes"] <= memory["peak_bytes"] < memory_bytes()
    assert cpu.adapts_megatron


def test_devices_cpu_random_state_is_restored() -> None:
    cpu = registry.get("cpu")
    cpu.seed(5)
    state = cpu.rng_state()
    first = torch.rand(3)
    torch.rand(7)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_devices_unknown_names_near_and_all() -> None:
    with pytest.raises(ConfigError) as raised:
        registry.get("cpuu")
    (problem,) = raised.value.problems
    assert problem.path == "cluster.device"
    assert "near: cpu" in problem.rule
    assert "cuda" in problem.rule
    assert problem.fix == "cluster.device=cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_missing_gpu_is_an_error_auto_takes_cpu() -> None:
    with pytest.raises(BadEnvironment, match=r"cuda.*(built without CUDA|no CUDA GPU)"):
        registry.get("cuda")
    assert registry.get("auto").name == "cpu"


def _plug_in(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("toy", value, devices.GROUP)
    monkeypatch.setattr(
        installed, "entry_points", lambda group: [entry] if group == devices.GROUP else []
    )


toy = dataclasses.replace(registry.get("cpu"), name="toy", available=lambda: "no toy is plugged in")
no_device = object()


def test_devices_plug_in_is_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    _plug_in(monkeypatch, f"{__name__}:toy")
    assert devices.names() == ["cpu", "cuda", "toy"]
    with pytest.raises(BadEnvironment, match=r"toy.*no toy is plugged in"):
        registry.get("toy")


@pytest.mark.parametrize(
    ("value", "said"), [("nowhere:x", "does not load"), (f"{__name__}:no_device", "is no mtrain")]
)
def test_devices_broken_plug_in_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    _plug_in(monkeypatch, value)
    with pytest.raises(BadEnvironment, match=said):
        registry.get("toy")


def test_devices_stand_in_namespace_mimics_torch_cuda() -> None:
    ns = cpu_namespace
    start = ns.Event(enable_timing=True)
    end = ns.Event(enable_timing=True)
    with ns.stream(ns.Stream()), ns.device(0), ns.nvtx.range("x"):
        start.record(ns.current_stream())
        ns.current_stream().wait_event(start)
        end.record()
    assert start.elapsed_time(end) >= 0
    assert torch.zeros(1, device=ns.current_device()).device.type == "cpu"
    assert ns.default_generators[ns.current_device()] is torch.default_generator
    assert ns.memory_stats()["whatever"] == 0
    assert not ns.is_available()
    with pytest.raises(RuntimeError, match="recorded"):
        ns.Event().elapsed_time(end)
