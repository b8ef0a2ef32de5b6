"""Checks of the measured rates against those of the cluster file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtrain.config.engine.formats import Format
from mtrain.config.machine.devices import facts_of
from mtrain.doctor.facts import Facts
from mtrain.doctor.rows import Row, ok, slow, wrong
from mtrain.plan.time.efficiencies import shipped

# Part of the rate that the plan expects of a device, below which it is slow.
SHARE = 0.7
# The format of the measured product on a GPU.
FORMAT: Format = "bf16"
LOOK = "compare the rows on clocks, throttling, power and other processes"


def check(facts: Facts) -> Iterator[Row]:
    """Yield the rates of products, copies and an all-reduce."""
    rates = facts.rates
    cluster = facts.run.cluster
    on_host = facts_of(cluster.device).on_host
    if rates.error and not rates.gemm_flop_per_s:
        row = slow if on_host else wrong
        program = "host" if on_host else f"device {cluster.device} 1"
        fix = f"python -m mtrain.doctor.probes.{program} shows the whole error"
        yield row("rates", f"not measured: {rates.error}", fix)
        return
    what = "numpy, fp32" if on_host else FORMAT
    share = cluster.reached.get("products", shipped().products[FORMAT])
    peak = None if on_host else cluster.peak_tflops.get(FORMAT)
    expected = None if peak is None else peak * share
    yield from _compared(f"gemm ({what})", rates.gemm_flop_per_s, 1e12, "TFLOP/s", expected)
    share = cluster.reached.get("memory", shipped().memory)
    bandwidth = None if on_host else cluster.memory_gbps
    expected = None if bandwidth is None else bandwidth * share
    yield from _compared("memory copy", rates.copy_bytes_per_s, 1e9, "GB/s", expected)
    yield from _all_reduce(facts)


def _compared(
    name: str, measured: Sequence[float], unit: float, word: str, expected: float | None
) -> Iterator[Row]:
    """Yield a row for the slowest device, in the unit, next to the rate that the plan expects."""
    if not measured:
        return
    least = min(measured) / unit
    which = f" (device {measured.index(min(measured))})" if len(measured) > 1 else ""
    text = f"{least:.3g} {word}{which}"
    if expected is not None:
        text = f"{text}; {expected:.3g} expected"
    if expected is not None and least < SHARE * expected:
        yield slow(name, text, LOOK, least, word)
    else:
        yield ok(name, text, least, word)


def _all_reduce(facts: Facts) -> Iterator[Row]:
    cluster = facts.run.cluster
    rate = facts.rates.all_reduce_bytes_per_s
    link = cluster.fast_link_gbps
    if rate is not None:
        expected = None if link is None else link * shipped().fast_link
        yield from _compared("all-reduce", (rate,), 1e9, "GB/s", expected)
    elif facts.rates.error:
        fix = "NCCL_DEBUG=INFO names the connection that fails"
        yield wrong("all-reduce", facts.rates.error, fix)
