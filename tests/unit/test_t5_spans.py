"""Spans that T5 fills in: the inputs of encoder and decoder, and random numbers that depend only on
the sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrain.errors import ConfigError
from mtrain.loading.configuration import load
from mtrain.models.t5.config import T5Config, lengths, padded, spans
from mtrain.models.t5.data import Spans

TOKENS = 64
FIRST = 999


def made(part: str = "train", seed: int = 0, **keys: Any) -> Spans:
    return Spans(T5Config(**({"start_id": 900, "end_id": 901} | keys)), TOKENS, FIRST, seed, part)


def batch(form: Spans, numbers: list[int]) -> dict[str, torch.Tensor]:
    windows = torch.from_numpy(
        np.random.default_rng(7).integers(0, 800, (len(numbers), TOKENS + 1))
    )
    return {**form(windows, np.array(numbers)), "windows": windows}


def joined(source: list[int], target: list[int], end: int) -> list[int]:
    """Return the sample, reassembled from the encoder's input and the decoder's targets."""
    found: dict[int, list[int]] = {}
    for token in target[: target.index(end)]:
        if token > 900:
            found[token] = []
            last = token
        else:
            found[last].append(token)
    out: list[int] = []
    for token in source[: source.index(end)]:
        out += found.pop(token) if token > 900 else [token]
    assert not found, "each sentinel of the decoder stands in the encoder's sequence"
    return out


def test_spans_encoder_and_decoder_share_the_sample() -> None:
    found = batch(made(encoder_length=72, decoder_length=16), [0, 1, 5])
    noise, parts = spans(T5Config(), TOKENS)
    assert (noise, parts) == (10, 3)
    for row in range(3):
        source = found["encoder_tokens"][row].tolist()
        target = found["labels"][row].tolist()
        assert joined(source, target, 901) == found["windows"][row, :-1].tolist()
        assert [t for t in target if t > 901] == [FIRST - i for i in range(parts)]
        assert found["tokens"][row].tolist() == [900, *target[:-1]]
        assert int(found["loss_mask"][row].sum()) == noise + parts + 1
        assert int(found["encoder_mask"][row].sum()) == TOKENS - noise + parts + 1
        assert source[int(found["encoder_mask"][row].sum()) - 1] == 901
    assert found["encoder_tokens"].shape == (3, 72)
    assert found["tokens"].shape == found["labels"].shape == (3, 16)


def test_spans_follow_seed_split_and_sample() -> None:
    form = made()
    several = batch(form, [3, 4, 5])
    alone = form.noisy(4)
    assert not torch.equal(several["encoder_tokens"][1], several["encoder_tokens"][0])
    assert np.array_equal(alone, made().noisy(4))
    others = [made(seed=1).noisy(4), made("validation").noisy(4), form.noisy(5)]
    assert not any(np.array_equal(alone, other) for other in others)


def test_spans_mask_tokens_at_given_density() -> None:
    noisy = np.stack([made().noisy(n) for n in range(4000)])
    share = noisy.mean(0)
    assert noisy.mean() == pytest.approx(10 / 64)
    assert share[0] == 0, "a sample begins with a token that stays, as in the paper's code"
    assert share[8:-8].min() > 0.05
    assert share[8:-8].max() < 0.25


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("data.seq_length=101 parallel=tp8", True),
        ("data.seq_length=512 parallel.tp=16 model.num_attention_heads=16", False),
    ],
)
def test_spans_tp_shared_parts_are_the_sequences(words: str, on: bool) -> None:
    given = ["model=t5_tiny", "data=mock", "cluster=h100x64", *words.split()]
    assert load(given, to_run=False).run.parallel.sequence_parallel is on
    said = [*given, "parallel.sequence_parallel=true"]
    if on:
        assert load(said, to_run=False).run.parallel.sequence_parallel
    else:
        with pytest.raises(ConfigError, match=r"model\.t5\.decoder_length=104"):
            load(said, to_run=False)


@given(st.integers(2, 3000), st.floats(0.01, 0.95), st.floats(1, 40))
def test_spans_fit_any_sample(tokens: int, density: float, mean: float) -> None:
    t = T5Config(noise_density=density, mean_noise_span_length=mean)
    noise, parts = spans(t, tokens)
    assert 1 <= parts <= noise < tokens
    assert parts <= tokens - noise
    noisy = Spans(t, tokens, 10**6, 0, "train").noisy(1)
    assert (len(noisy), int(noisy.sum())) == (tokens, noise)
    assert int((noisy[1:] & ~noisy[:-1]).sum()) == parts
    assert sum(lengths(t, tokens)) == tokens + 2 * parts + 2
    assert [padded(n) for n in (1, 8, 9)] == [8, 8, 16]
