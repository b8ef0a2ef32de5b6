"""Numbers as people write them."""

from __future__ import annotations

import re

import pytest

from mtrain import units
from mtrain.plan.tune.choose import PARTS
from tests.support.commands import ROOT
from tests.support.launched import light


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (5_605_860, "65 days"),
        (216_000, "2.5 days"),
        (164_160, "45h36m"),
        (4000, "1h06m"),
        (75, "1m15s"),
        (1.234, "1.2s"),
    ],
)
def test_units_long_duration_is_in_days(seconds: float, said: str) -> None:
    assert units.seconds(seconds) == said


def test_units_plan_uses_devices_days_and_hours() -> None:
    done = light("plan", "recipe=llama3/70b_h100x64", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert " on 64 x h100\n" in done.stdout
    assert re.search(r"tokens: \d+ days, \d\d\.\dk GPU hours", done.stdout)
    assert not re.search(r"\de\+\d", done.stdout)
    assert "batch        1024 x 4096 = 4.19M tokens a step" in done.stdout


def test_units_short_numbers_have_three_digits() -> None:
    told = {
        0: "0",
        0.5: "0.50",
        9.996: "10.0",
        999.6: "1.00k",
        99_660: "99.7k",
        999_960: "1.00M",
        1.5e12: "1.50T",
    }
    assert {number: units.short(number) for number in told} == told


def test_units_cluster_counts_in_devices() -> None:
    told = {
        "h100x64": "8 x h100",
        "a100_40gx8": "8 x a100_40g",
        "h100": "8 x h100",
        "mx4": "8 x mx4",
        "box": "8 x box",
    }
    assert {name: units.devices(8, name) for name in told} == told


def test_units_time_parts_use_shorter_units() -> None:
    done = light("tune", "model=llama32_1b", "cluster=h100x8", cwd=ROOT)
    assert "less time for " in done.stdout
    assert not re.search(
        rf"\b(less|more) ({'|'.join(map(re.escape, PARTS.values()))})", done.stdout
    )
