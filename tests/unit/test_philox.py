"""Random numbers by element index: known answers, the same bits on any device, and a normal
distribution.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.assembly import philox
from mtrain.assembly.philox import Stream

CPU = torch.device("cpu")
ELSEWHERE: Any = SimpleNamespace(type="another device")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a device other than the host computes on the host."""
    real = Stream._elsewhere
    monkeypatch.setattr(
        Stream, "_elsewhere", lambda self, starts, count, _: real(self, starts, count, CPU)
    )


def test_philox_words_equal_publication() -> None:
    """Compare with the known answers of Random123 for a counter and a key of zeros."""
    answers = ["16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b"]
    found = Stream(0).words(torch.tensor([0]))[0].tolist()
    assert [f"{word % 2**64:016x}" for word in found] == answers


@pytest.mark.parametrize(
    ("rows", "width", "span"),
    [((0, 3), 1000, (0, 1000)), ((5, 70), 96, (24, 48)), ((2, 40), 37, (5, 30))],
)
@pytest.mark.usefixtures("elsewhere")
def test_philox_device_draws_host_bits(
    rows: tuple[int, int], width: int, span: tuple[int, int]
) -> None:
    stream = Stream.of("weight")
    host, device = (stream.rows(*rows, width, span, where) for where in (None, ELSEWHERE))
    assert torch.equal(host, device)
    whole = stream.rows(0, rows[1], width, (0, width), None)
    assert torch.equal(host, whole[rows[0] :, span[0] : span[1]])


def test_philox_known_shapes_have_recorded_digest() -> None:
    assert philox.digest("cpu") == philox.DIGEST


def test_philox_quantiles_ignore_last_bits_of_logarithm() -> None:
    edges = np.array(philox.edges())
    kept = edges.astype(np.float32)
    for beside in (np.nextafter(kept, np.float32(-1)), np.nextafter(kept, np.float32(9))):
        middle = (kept.astype(np.float64) + beside) / 2
        assert (np.abs(edges - middle) > 100 * np.spacing(edges)).all()


def test_philox_numbers_are_normal() -> None:
    drawn = philox.normal(Stream.of("numbers").rows(0, 1 << 20, 1, (0, 1), None)).double()
    moments = [float((drawn**n).mean()) for n in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.02)
    tails = [float((drawn.abs() > at).double().mean()) for at in (1, 2, 3, 4)]
    assert tails == pytest.approx([0.31731, 0.0455, 0.0027, 6.33e-5], rel=0.15)
    pairs = drawn.view(-1, 2)
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 0.01
