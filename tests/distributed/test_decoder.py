"""Steps that draw a token on the device: the same text, the same work for each token, no host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain.config.schema.rope_scaling import RopeScalingConfig
from mtrain.train.generate.request import END, LENGTH, Sampling
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

PROMPTS = [[5, 17, 8, 250, 31], [9] * 11, list(range(40, 57))]
TOKENS = 40
"""Beyond the 32 tokens of the context, and more than two blocks."""
DRAWN = Sampling(TOKENS, temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=3)
GREEDY = Sampling(TOKENS, temperature=0)
CASES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "window": {"window_size": 6},
    "sinks and every other layer windowed": {
        "softmax_type": "learnable",
        "window_size": 6,
        "window_attn_skip_freq": 2,
    },
    "learned positions": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    "capped scores": {"attn_logit_softcapping": 5.0},
    "scaled embeddings and frequencies": {
        "scale_embedding": True,
        "rope_scaling": RopeScalingConfig(
            rope_type="llama3", factor=4.0, original_max_position_embeddings=16
        ),
    },
}
READS_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
"""Operations that wait for a number of the device."""
MAKES_ON_HOST = ("lift_fresh",)
"""Operations that make a tensor of numbers of the host, which a device has to wait for."""


@contextmanager
def _sampler(run: Any, **options: Any) -> Iterator[Any]:
    from mtrain.assembly.model import build_model
    from mtrain.train.generate.sampler import Sampler
    from mtrain.world.init import joined

    torch.set_num_threads(1)
    with joined(run) as world, torch.no_grad():
        chunks = build_model(run, world, wrap=False)
        for parameter in (p for chunk in chunks for p in chunk.parameters() if p.ndim > 1):
            parameter.mul_(8.0)  # logits that are far apart
        yield Sampler(run, world, chunks, **options)


def _ending_at(count: int) -> Callable[[list[int]], str]:
    return lambda ids: END if len(ids) == count else LENGTH


def _texts(run: Any, sampling: Sampling) -> Any:
    """Return the texts drawn in blocks, and with the host between tokens: each with two
    requests.
    """
    found = {}
    for blocks in (True, False):
        with _sampler(run, blocks=blocks) as sampler:
            assert sampler.block_obstacle() == ""
            found[blocks] = [
                [(text.ids, text.ended) for text in sampler.continued(PROMPTS, sampling, **more)]
                for more in ({}, {"ending": _ending_at(19)})
            ]
            assert len(sampler.decoders) == blocks  # the second request uses the first one's
    return found[True], found[False]


@pytest.mark.parametrize("name", some(CASES, ["sinks and every other layer windowed"]))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_decoder_blocks_draw_the_same_tokens(name: str, sampling: Sampling) -> None:
    ((blocks, single),) = run_ranks(1, _texts, tiny_run(model=CASES[name]), sampling)
    assert blocks == single
    assert len({tuple(ids) for ids, _ in blocks[0]}) == len(PROMPTS)
    assert [len(ids) for ids, _ in blocks[1]] == [19] * len(PROMPTS)


def test_decoder_capacity_keeps_frequencies() -> None:
    # Beyond 24 tokens all frequencies are others, and a cache has room for some tokens more.
    factors = {"short_factor": (1.0,) * 4, "long_factor": (1.0, 1.5, 3.0, 9.0)}
    scaling = RopeScalingConfig(
        rope_type="longrope", factor=2.0, original_max_position_embeddings=24, **factors
    )
    run = tiny_run(model={"rope_scaling": scaling})
    ((blocks, single),) = run_ranks(1, _texts, run, Sampling(6, temperature=0))
    assert blocks == single


class Recorded(TorchDispatchMode):
    """The operations of a step: their names, and the shapes, strides and memory that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Any]] = []
        self.old: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS_HOST:
            raise RuntimeError(f"{func} reads a value")
        if name in MAKES_ON_HOST:
            raise RuntimeError(f"{func} copies a value")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        plain = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float | bool)]
        places = [t.data_ptr() for t in tensors if t.untyped_storage().data_ptr() in self.old]
        shapes = [(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]
        self.steps[-1].append((str(func), shapes, plain, places))
        return func(*args, **(kwargs or {}))


def _recorded(run: Any, sampling: Sampling, fault: str) -> list[list[Any]]:
    """Return the operations of two steps in the middle of a text."""
    from mtrain.train.generate import decoder as module

    with _sampler(run) as sampler:
        sampler.continued(PROMPTS, replace(sampling, tokens=10))
        (decoder,) = sampler.decoders.values()
        chosen = module.chosen
        taken: list[int] = []

        def faulty(logits: Any, *given: Any) -> Any:
            if fault == "reads a value":
                taken.append(int(logits.argmax()))
            if fault == "copies a value":
                logits = logits + torch.tensor([1.0])
            if fault == "grows":
                taken.append(1)
                logits = torch.cat([logits, logits[:, : len(taken)]], -1)
            if fault == "a number of the host":
                taken.append(1)
                logits = logits + len(taken)
            return chosen(logits, *given)

        module.chosen = faulty
        recorded = Recorded()
        tensors = [*sampler.chunks[0].parameters(), *sampler.chunks[0].buffers(), decoder.ids]
        tensors += [decoder.place, decoder.slot, decoder.drawn]
        tensors += [t for pair in decoder.cache.key_value_memory_dict.values() for t in pair]
        recorded.old = {t.untyped_storage().data_ptr() for t in tensors}
        with decoder.cache.decoding(decoder.place, 32):
            decoder.place.fill_(decoder.cache.read)
            decoder.slot.zero_()
            for _ in range(2):
                recorded.steps.append([])
                with recorded:
                    decoder.step()
        return recorded.steps


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", some(CASES, ["sinks and every other layer windowed"]))
def test_decoder_steps_issue_the_same_work(name: str, sampling: Sampling) -> None:
    sampling = replace(sampling, top_p=0.9 if sampling.temperature else 1.0)
    run = tiny_run(model=CASES[name])
    ((first, second),) = run_ranks(1, _recorded, run, sampling, "")
    assert len(first) > 50
    assert first == second


@pytest.mark.parametrize(
    "fault", ["reads a value", "copies a value", "grows", "a number of the host"]
)
def test_decoder_work_of_the_host_is_found(fault: str) -> None:
    try:
        ((first, second),) = run_ranks(1, _recorded, tiny_run(), GREEDY, fault)
        found = "not the same step" if first != second else ""
    except Exception as error:
        found = str(error)
    assert (fault if "value" in fault else "not the same step") in found


def _captured(run: Any, fails: bool) -> Any:
    """Return the texts of a device that captures, the number of captures, and the reason for
    none.
    """
    issued: list[str] = []

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        issued.append("capture")
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return work

    with _sampler(run, captures=True) as sampler:
        plain = [text.ids for text in sampler.continued(PROMPTS, GREEDY)]
        device = replace(sampler.world.device, captured=captured)
        able = replace(sampler, world=replace(sampler.world, device=device), decoders={})
        texts = [[text.ids for text in able.continued(PROMPTS, GREEDY)] for _ in range(2)]
        assert able.steady_tokens_per_s()
        return plain, texts, issued, able.graph_obstacle(), sampler.graph_obstacle()


@pytest.mark.parametrize("fails", [False, True])
def test_decoder_captures_once_for_each_shape(fails: bool) -> None:
    ((plain, texts, issued, why, why_plain),) = run_ranks(1, _captured, tiny_run(), fails)
    assert texts == [plain, plain]
    assert issued == ["capture"]
    wanted = "a step was not captured: operation not permitted when stream is capturing"
    assert why == (wanted if fails else "")
    assert why_plain == ""
