"""`prove` and `rehearse`: a right layout is proven, a wrong one is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import some
from tests.support.launched import Launched, mtrain

pytestmark = pytest.mark.e2e


PROVEN = (
    "parallel=tp2pp2",
    "model=mixtral_8x7b parallel=tp2ep2sp",
    "parallel=tp2dp2 parallel.distributed_optimizer=true parallel.overlap_grad_reduce=true",
    "model=qwen3_8b parallel=tp2cp2sp",
    "parallel=dp2 precision=bf16 model.hidden_dropout=0.1 model.attention_dropout=0.2",
)


@pytest.mark.full
@pytest.mark.parametrize("layout", some(PROVEN, [PROVEN[1]]))
def test_prove_accepts_layout(layout: str, tmp_path: Path) -> None:
    words = layout.split()
    done = mtrain("prove", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proven" in done.stdout
    assert "shrunk to" in done.stdout
    dropped = [word.replace("=", ": ") + " -> 0.0" for word in words if "dropout" in word]
    assert all(change in done.stdout for change in dropped), (
        "what is compared without dropout says so"
    )
    assert list(tmp_path.iterdir()) == []


def _wrong_sign(parts: Any) -> None:
    if parts.world.rank == 1:
        next(iter(parts.state.chunks[0].parameters())).main_grad.neg_()


def _norms_not_summed(parts: Any) -> None:
    for param in parts.state.chunks[0].parameters():
        param.sequence_parallel = False


FAULTS = {
    "a gradient with the wrong sign on one rank": (
        ["parallel=dp2"],
        _wrong_sign,
        "gradient",
        "embedding.word_embeddings, gradient",
    ),
    "norms of sequence-parallel ranks that are not summed": (
        ["parallel=tp2sp"],
        _norms_not_summed,
        "gradient",
        "decoder.*, gradient of step 1: .*norm",
    ),
}


@pytest.mark.parametrize("name", some(FAULTS, []))
def test_prove_names_difference_of_wrong_layout(name: str, tmp_path: Path) -> None:
    words, fault, kind, module = FAULTS[name]

    def seed_fault() -> None:
        from mtrain.train.verify import prove

        assemble = prove.assemble

        def seeded(*given: Any) -> Any:
            parts = assemble(*given)
            config = parts.state.chunks[0].config
            real = config.finalize_model_grads_func

            def faulty(*arguments: Any, **named: Any) -> Any:
                fault(parts)
                return real(*arguments, **named)

            config.finalize_model_grads_func = faulty
            return parts

        prove.assemble = seeded

    done = Launched("prove", *words, cwd=tmp_path, patch=seed_fault)
    assert done.wait() == 5, done.said
    assert any(line.startswith(kind) and "<- differs" in line for line in done.said.splitlines()), (
        done.said
    )
    assert "NOT equal" in done.said
    assert re.search(rf"^where: {module}", done.said, re.MULTILINE), done.said


REHEARSED = ("parallel=tp2pp2", "model=mixtral_8x7b parallel=ep2 precision=bf16")


@pytest.mark.full
@pytest.mark.parametrize("layout", some(REHEARSED, REHEARSED[1:]))
def test_prove_rehearses_over_checkpoint(layout: str, tmp_path: Path) -> None:
    done = mtrain("rehearse", *layout.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert "ends bitwise where the whole one ends" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_prove_refuses_more_ranks_than_machine(tmp_path: Path) -> None:
    words = ["parallel=pp17", "model.num_layers=17", "trainer.global_batch_size=17"]
    done = mtrain("prove", *words, cwd=tmp_path)
    assert done.returncode == 3
    assert "needs 17 processes" in done.stderr
