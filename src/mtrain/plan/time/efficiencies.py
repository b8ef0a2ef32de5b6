"""The efficiency of kernels, links and hosts against a device's stated rates: a few numbers, fitted
on published runs and on our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.plan.time.device import Device, device_of
from mtrain.plan.time.host import HostCost

FILE = Path(__file__).with_name("efficiencies.yaml")
OWN = Path(__file__).with_name("own.yaml")

# `cluster.reached.products` is measured with products in these formats.
WIDE = ("bf16", "fp16")


@dataclass(frozen=True)
class Efficiencies:
    """Shares of a stated rate that are reached, and fixed losses."""

    software: str
    """The release that they belong to."""
    products: Mapping[str, float]
    """Share of the peak that a large product reaches: by format, or by recipe of low precision."""
    grouped: float
    """Share of that which the products of experts reach."""
    grouped_low: float
    """Share of that which the products of experts in low precision reach."""
    attention: float
    """Share of the peak that the products of attention reach in the forward."""
    attention_backward: float
    softmax: float
    """Share of the time of attention's exponentials behind which there are no products."""
    memory: float
    """Share of the bandwidth of the device's memory."""
    fast_link: float
    network: float
    """Share of the bandwidth of links to other fast domains."""
    waves_lost: float
    """Waves of tiles over the multiprocessors that a product takes longer than its tiles."""
    tile_us: float
    """Time of a multiprocessor to begin and end a tile."""
    launch_us: float
    """Time of the host for an operation."""
    call_us: float
    """Time of the host for each further kernel of an operation: its tensors and their hooks."""
    pass_us: float
    """Device time lost in a pass through a mixture of experts: small kernels, and waits."""
    routing_us: float
    """Time of the host for a pass through a mixture of experts."""
    fixed: float
    """Share of that and of further kernels if experts have equal rows, so nobody waits."""
    graphed: float
    """Share of the host's time that is left: 1 without CUDA graphs."""
    latency_us: float
    """Latency of a collective for each doubling of its group."""
    overlapped: Mapping[str, float]
    """Share of the communication of an axis behind which there is computation."""
    power: float
    """Exponent of a device's watts for its peak: their effect on the rate of products."""
    blackwell: float
    """Share of its peak that a product reaches on that generation, against the one before."""
    mixtures: float
    """Speed of models with experts, against the release that the others belong to."""
    speed: float
    """Speed of the software as a whole, against the release that the others belong to."""
    host: HostCost | None = None
    """The measured costs of launches by kind; None: `launch_us` and the other costs above."""


def powered(device: Device, reached: Efficiencies, form: str) -> float:
    """Return the rate of large products in a format, by watts and generation, over `products`."""
    return float(
        device.power.get(form, 1.0) ** reached.power
        * (reached.blackwell if device.blackwell else 1.0)
    )


def of(values: Mapping[str, Any]) -> Efficiencies:
    """Make efficiencies of plain values, as the file has them."""
    return Efficiencies(**values)


@cache
def shipped() -> Efficiencies:
    """Return the efficiencies that were fitted on published runs."""
    return of(yaml.safe_load(FILE.read_text()))


@cache
def own() -> Efficiencies:
    """Return the efficiencies of mtrain's own kernels and host, fitted on its own runs."""
    return own_of(yaml.safe_load(OWN.read_text()))


def own_of(values: Mapping[str, Any]) -> Efficiencies:
    """Return the efficiencies of published runs, except for the values that own runs measured."""
    found = shipped()
    given = dict(values)
    host = dict(given.pop("host"))
    host["launches"] = {kind: tuple(pair) for kind, pair in host["launches"].items()}
    host["waits"] = tuple(host["waits"])
    products = {**found.products, **given.pop("products")}
    return replace(found, products=products, host=HostCost(**host), **given)


def reached_by(cluster: ClusterConfig) -> Efficiencies:
    """Return the efficiencies of mtrain on a cluster: the cluster's own measurements count before
    those that ship; the rates of a CPU are measured, so they are reached in full.
    """
    found = measured() if facts_of(cluster.device).on_host else own()
    given = cluster.reached
    host = found.host
    if host is not None:
        host = replace(
            host,
            launch_us=cluster.operation_us or host.launch_us,
            speed=given.get("host", host.speed),
        )
    attention = given.get("attention", found.attention)
    products = {name: _stated(cluster, found, name) for name in WIDE if name in found.products}
    return replace(
        found,
        software=cluster.software or found.software,
        launch_us=cluster.operation_us or found.launch_us,
        call_us=cluster.operation_us or found.call_us,
        latency_us=cluster.link_latency_us or found.latency_us,
        products={**found.products, **products},
        memory=given.get("memory", found.memory),
        attention=attention,
        # Only the forward is measured: the backward keeps its ratio to it.
        attention_backward=found.attention_backward * attention / found.attention,
        speed=given.get("speed", found.speed),
        host=host,
    )


def _stated(cluster: ClusterConfig, found: Efficiencies, form: str) -> float:
    """Return the share that large products reach; measurements include watts and generation."""
    if "products" not in cluster.reached:
        return found.products[form]
    return cluster.reached["products"] / powered(device_of(cluster), found, form)


@cache
def measured() -> Efficiencies:
    """Return the efficiencies for rates measured in runs: all are reached, and none overlap."""
    found = shipped()
    names = (
        "grouped",
        "grouped_low",
        "attention",
        "attention_backward",
        "memory",
        "fast_link",
        "network",
    )
    reached: dict[str, Any] = dict.fromkeys((*names, "blackwell", "fixed"), 1.0)
    lost: dict[str, Any] = dict.fromkeys(
        ("softmax", "waves_lost", "tile_us", "pass_us", "routing_us", "power"), 0.0
    )
    products = dict.fromkeys(found.products, 1.0)
    overlapped = dict.fromkeys(found.overlapped, 0.0)
    return replace(
        found, **reached, **lost, software="not stated", products=products, overlapped=overlapped
    )
