"""`prove` finds the silent bugs of the field with what it draws by default, and names
the module.
"""

from __future__ import annotations

import pytest

from mtrain.api import load
from mtrain.launching import prove
from tests.museum.clean import drawn
from tests.museum.exhibit import show
from tests.museum.exhibits import EXHIBITS
from tests.support.covering import some

BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}
ALWAYS = (
    "norm gradients of sequence parallel not summed",
    "optimizer step lost at resume",
)
"""A backward and a resume: each fifth of the others has a dozen of the museum's."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", some(BY_NAME, ALWAYS))
def test_museum_bug_is_found_and_module_named(name: str) -> None:
    seen = show(BY_NAME[name])
    assert seen.found, seen.said
    assert seen.named, seen.said


CLEAN = {
    "tp2 sequence parallel, experts": "model=mixtral_tiny parallel=tp2ep2sp",
    "pp2vpp2": "parallel=pp2vpp2",
    "packed, pp2cp2": "parallel=pp2cp2 data.packed=true",
    "cp2 ring with Gemma's norms": "model=gemma_tiny parallel=tp2cp2sp parallel.cp_comm_type=p2p",
    "a small DeepSeek-V3": "model=deepseek_tiny parallel=tp2pp2ep2etp1sp",
    "MLA without sequence parallelism": "model=deepseek_tiny model.moe=null parallel=tp2",
    "megatron-core's FSDP": "parallel=dp2 parallel.fsdp=megatron",
    "tied, predicting, with adapters": (
        "parallel=pp2 model.mtp_num_layers=2 model.tie_word_embeddings=true peft=lora"
    ),
    "recomputed": (
        "parallel=tp2pp2sp parallel.recompute.granularity=full parallel.recompute.method=block"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", some(CLEAN, ["packed, pp2cp2"]))
def test_museum_clean_layout_passes_same_modules_as_one_rank(
    name: str,
) -> None:
    argv = CLEAN[name].split()
    small = prove.comparable(load(argv).run, argv, 2, "fp32")
    with prove.observed(small, traced=True) as (one, many):
        from mtrain.train.verify.first_divergence import BACKWARD, FORWARD, Recorded, errors

        expected = Recorded(one)
        found = Recorded(many)
        compared = list(errors(expected, found))
    assert {passed.way for passed, _ in compared} == {FORWARD, BACKWARD}
    forward = [passed for passed in expected.order if passed.way == FORWARD]
    assert all(passed in found.parts for passed in forward), "every module is seen on some rank"
    bounds = {1: prove.MODULE["fp32"], 2: 1e-3}
    off = [(passed, error) for passed, error in compared if not error <= bounds[passed.step]]
    assert not off, off[:5]


def test_museum_clean_layouts_follow_seed() -> None:
    assert drawn(6, 3) == drawn(6, 3)
    assert drawn(6, 3) != drawn(6, 4)


def test_museum_exhibits_name_their_source() -> None:
    assert len(BY_NAME) == len(EXHIBITS) >= 40
    assert all(exhibit.source and exhibit.does for exhibit in EXHIBITS)
