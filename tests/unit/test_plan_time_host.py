"""The launch queue of a step: what it says of spans, and of mtrain's own runs on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mtrain.plan.time.device import device_of
from mtrain.plan.time.efficiencies import own
from mtrain.plan.time.host import Span, queued, waiting
from mtrain.plan.time.step import StepWork, priced
from mtrain.plan.tune.costs import Costs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plan_host

SPANS = [Span(5.0, 1.0), Span(1.0, 6.0), Span(4.0, 2.0)]


def followed(spans: list[Span]) -> float:
    """Follow the same queue, kernel by kernel."""
    parts = 1000
    host = device = 0.0
    for span in spans:
        for _ in range(parts):
            host += span.host / parts
            device = max(device, host) + span.device / parts
    return device


def test_plan_time_queue_equals_kernels_in_order() -> None:
    for spans in (SPANS, SPANS[::-1], SPANS[:1], SPANS[1:2]):
        assert queued(spans) == pytest.approx(followed(spans), rel=2e-3)
    assert waiting(SPANS) == 5 + 6 + 4


@cache
def work(words: str, *more: str) -> StepWork:
    shape = [*plan_host.SHAPES[words.split()[0]], *plan_host.LENGTHS]
    return plan_host.work_of([*shape, f"precision={words.split()[1]}", *more])


@pytest.mark.parametrize(
    "row", plan_host.rows(plan_host.SINCE), ids=lambda row: f"{row.name} {row.date}"
)
def test_plan_time_own_runs_are_within_10_percent(row: plan_host.Row) -> None:
    step = priced(row.work, device_of(row.work.run.cluster), own())
    assert step.seconds == pytest.approx(row.step_s, rel=0.1 if row.device_s else 0.2)
    if row.device_s is not None:
        assert plan_host.computed(step) == pytest.approx(row.device_s, rel=0.1)


def test_plan_time_host_cost_hides_behind_device() -> None:
    wide = work("8b bf16")
    device = device_of(wide.run.cluster)
    host = own().host
    assert host is not None
    half = replace(own(), host=replace(host, launch_us=host.launch_us / 2))
    now = priced(wide, device, own()).seconds
    assert priced(wide, device, half).seconds == pytest.approx(now, rel=1e-3)
    narrow = work("1b fp8_tensorwise")
    assert priced(narrow, device, half).seconds < 0.85 * priced(narrow, device, own()).seconds


def test_plan_time_low_precision_waits_per_product() -> None:
    """Show that a host that waits in each layer gains nothing from being ahead in another."""
    found = work("8b fp8_tensorwise")
    device = device_of(found.run.cluster)
    host = own().host
    assert host is not None
    waits = replace(own(), host=replace(host, waits=("tensorwise",)))
    assert priced(found, device, own()).seconds < 0.95 * priced(found, device, waits).seconds


def test_plan_time_recomputed_layer_is_launched_again() -> None:
    host = own().host
    assert host is not None
    again = work("1b bf16", "parallel.recompute.granularity=full")
    once = work("1b bf16")
    forward, backward = host.kernels(once.stages[0], "bf16")
    more = host.kernels(again.stages[0], "bf16")
    assert more[0] == forward
    assert more[1] == pytest.approx(backward + forward, rel=0.02)


def test_plan_time_search_has_host_as_plan() -> None:
    run = work("1b bf16").run
    step = priced(work("1b bf16"), device_of(run.cluster), own())
    assert Costs(run).seconds(run) == pytest.approx(step.seconds, rel=0.1)
    assert Costs(run).seconds(run) <= step.seconds * 1.001
