"""LLaVA in training: images of a folder, frozen parts, resumes, and layouts that compute what one
rank computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.run import RunConfig
from mtrain.launching import prove
from mtrain.loading.configuration import load
from mtrain.models.count import frozen_parameters
from mtrain.plan.count import parameters
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors
from tests.support.shapes import folder_of_shapes

OWN: dict[str, Any] = {
    "image_size": 17,
    "patch_size": 8,
    "vision_layers": 3,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 48,
    "vision_heads": 4,
    "image_token_id": 511,
}
SEQUENCE = 24
PARTS = {"vision": "model/vision.", "projector": "model/projector."}


def run_with(
    freeze: tuple[str, ...] = (), data: DataConfig | None = None, **more: Any
) -> RunConfig:
    """Return a tiny LLaVA on synthetic images, or on those of `data`; keyword arguments are keys of
    `parallel`.
    """
    model = {"family": "llava", "vocab_size": 512, "llava": {**OWN, "freeze": freeze}}
    run = tiny_run(
        model=model, optim={"lr": 3e-3}, trainer={"micro_batch_size": 4, "train_iters": 100}, **more
    )
    given = data or DataConfig(kind="mock", seq_length=SEQUENCE)
    return run.model_copy(update={"data": given})


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Write images of coloured shapes with captions, some with a question."""
    home = tmp_path_factory.mktemp("shapes")
    folder_of_shapes(home / "captions", 48, seed=3)
    return DataConfig(
        kind="image_text",
        path=str(home / "captions"),
        tokenizer_vocab_size=320,
        seq_length=SEQUENCE,
        cache_dir=str(home / "cache"),
        split=(0.8, 0.2, 0.0),
    )


def part_of(key: str) -> str:
    """Return the part of the model that a tensor of a checkpoint belongs to."""
    return next((part for part, prefix in PARTS.items() if key.startswith(prefix)), "language")


@pytest.mark.full
def test_llava_captions_are_learned_and_resume_bitwise(shapes: DataConfig, tmp_path: Path) -> None:
    run = run_with(("vision",), shapes)

    def whole() -> list[tuple[float, float]]:
        return train_steps(run, 100, save_to=tmp_path / "whole", save_after=60)

    rows = run_ranks(1, whole)[0]
    assert rows[-1][0] < 0.25 * rows[0][0]
    before = tmp_path / "whole/step_00000060"
    again = run_ranks(
        1, lambda: train_steps(run, 40, save_to=tmp_path / "again", load_from=before)
    )[0]
    assert again == rows[60:]
    first, last = (whole_tensors(tmp_path / name / "step_00000100") for name in ("whole", "again"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "freeze",
    some(["vision", "vision,language", "projector", "language"], ["vision,language", "projector"]),
)
def test_llava_frozen_part_stays_bitwise_without_state(freeze: str, tmp_path: Path) -> None:
    frozen = tuple(freeze.split(","))
    run = run_with(frozen, ranks=2, tp=2)
    run_ranks(2, lambda: train_steps(run, 3, save_to=tmp_path, save_after=0))
    begun, ended = (whole_tensors(tmp_path / f"step_{n:08d}") for n in (0, 3))
    behind = ("model/vision.behind.", "model/vision.post_layernorm.")
    for key in (key for key in begun if key.startswith("model/")):
        still = part_of(key) in frozen or key.startswith(behind)
        if not still and "position_embedding" not in key:
            assert not torch.equal(begun[key], ended[key]), key
        assert torch.equal(begun[key], ended[key]) or not still, key
        state = key.replace("model/", "optim/exp_avg/")
        assert (state in ended) is not still, key


@pytest.mark.parametrize("pp", [1, 2])
def test_llava_plan_counts_built_and_frozen(pp: int) -> None:
    run = run_with(("projector",), ranks=pp, pp=pp)

    def job() -> tuple[int, int]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.world.init import joined

        with joined(run) as world:
            shards = model_shards(build_model(run, world), trainable=True)
            frozen = [s for s in shards if s.param is not None and not s.param.requires_grad]
            return sum(s.tensor.numel() for s in shards), sum(s.tensor.numel() for s in frozen)

    found = run_ranks(pp, job)
    assert sum(all_ for all_, _ in found) == parameters(run.model)
    assert sum(frozen for _, frozen in found) == frozen_parameters(run.model)


LAYOUTS = cases_of("llava")


def compared(words: str) -> list[Any]:
    """Return the rows of `prove` for a tiny LLaVA with these words."""
    argv = ["model=llava_tiny", *words.split()]
    full = load(argv).run
    return [
        row
        for dtype in prove.formats(full)
        for row in prove.compared(prove.shrunk(full, argv, 2, dtype))
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(LAYOUTS, ["tp2 sequence parallel", "pp2, projector alone"]))
def test_llava_layout_equals_one_rank(name: str) -> None:
    rows = compared(LAYOUTS[name])
    assert all(row.equal for row in rows), prove.table(rows)


@pytest.mark.full
def test_llava_wrong_images_on_one_rank_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain.mcore.models.image_language_model import ImageLanguageModel

    real = ImageLanguageModel._features

    def faulty(self: Any, images: torch.Tensor) -> torch.Tensor:
        return real(self, images if torch.distributed.get_rank() == 0 else 0.99 * images)

    monkeypatch.setattr(ImageLanguageModel, "_features", faulty)
    assert not all(row.equal for row in compared("parallel=tp2sp trainer.seed=99"))


def test_llava_rank_reads_its_samples_and_images(shapes: DataConfig, tmp_path: Path) -> None:
    """Compare two data-parallel ranks with one, text without an image included."""
    lines = (Path(str(shapes.path)) / "shapes.jsonl").read_text().splitlines()
    mixed = Path(str(shapes.path)) / "mixed.jsonl"
    mixed.write_text("\n".join([*lines[:20], *['{"text": "No picture of a shape."}'] * 12]) + "\n")
    data = shapes.model_copy(update={"path": str(mixed)})
    one = run_ranks(1, lambda: train_steps(run_with((), data), 3))[0]
    sharded = run_with((), data, ranks=2, overlap_grad_reduce=True)
    two = run_ranks(2, lambda: train_steps(sharded, 3))[0]
    mixed.unlink()
    for (loss, norm), (expected_loss, expected_norm) in zip(two, one, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
