"""The same numbers come out whatever the layout: losses, gradient norms and whole gradients equal
one rank's.
"""

from pathlib import Path

import pytest
import torch

from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

STEPS = 4
TOLERANCE = 1e-5

LAYOUTS = {
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "dp2 distributed optimizer": {"ranks": 2, "distributed_optimizer": True},
    "dp2 overlapped": {
        "ranks": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "cp2": {"ranks": 2, "cp": 2},
    "tp2cp2": {"ranks": 4, "tp": 2, "cp": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
}


@pytest.fixture(scope="module")
def one_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Return loss and norm of each step, and the gradients, on one rank."""
    folder = tmp_path_factory.mktemp("one")
    values = run_ranks(1, _job, tiny_run(), folder)[0]
    return values, whole_tensors(folder / "step_00000000")


def _job(run: object, folder: Path, flip: int | None = None) -> list[tuple[float, float]]:
    return train_steps(run, STEPS, gradients_to=folder, flip_gradient_on=flip)  # type: ignore[arg-type]


def _largest_errors(
    values: list[tuple[float, float]], gradients: dict[str, torch.Tensor], one_rank: tuple
) -> tuple[float, float, float]:
    """Return the largest relative error of losses, of gradient norms, and of any parameter's
    gradient at step 0.
    """
    expected_values, expected = one_rank
    assert gradients.keys() == expected.keys()
    losses, norms = (
        max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(values, expected_values, strict=True))
        for i in (0, 1)
    )
    worst = max(float((gradients[k] - g).norm() / g.norm()) for k, g in expected.items())
    return losses, norms, worst


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    some(
        LAYOUTS, ("tp2pp2", "tp2 sequence parallel", "dp2 overlapped", "cp2", "tp2cp2", "pp2vpp2")
    ),
)
def test_layouts_train_as_one_rank(name: str, one_rank: tuple, tmp_path: Path) -> None:
    run = tiny_run(**LAYOUTS[name])
    values = run_ranks(run.parallel.ranks, _job, run, tmp_path)
    assert all(v == values[0] for v in values), "ranks report different numbers"
    losses, norms, worst = _largest_errors(
        values[0], whole_tensors(tmp_path / "step_00000000"), one_rank
    )
    assert max(losses, norms, worst) < TOLERANCE, (losses, norms, worst)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2"])
def test_layouts_flipped_gradient_is_found(name: str, one_rank: tuple, tmp_path: Path) -> None:
    run = tiny_run(**LAYOUTS[name])
    values = run_ranks(2, _job, run, tmp_path, 1)
    losses, _, worst = _largest_errors(
        values[0], whole_tensors(tmp_path / "step_00000000"), one_rank
    )
    assert losses > TOLERANCE
    assert worst > 0.1


@pytest.mark.engine
def test_layouts_initial_weights_are_equal_and_follow_seed(tmp_path: Path) -> None:
    def job(run: object, folder: Path) -> None:
        train_steps(run, 0, save_to=folder)  # type: ignore[arg-type]

    tied = {"tie_word_embeddings": True}
    for name, kwargs in {
        "one": {},
        "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
        "pp4": {"ranks": 4, "pp": 4},
    }.items():
        run_ranks(kwargs.get("ranks", 1), job, tiny_run(model=tied, **kwargs), tmp_path / name)
    run_ranks(1, job, tiny_run(model=tied, trainer={"seed": 7}), tmp_path / "seed")
    one, *others = (whole_tensors(tmp_path / n / "step_00000000") for n in ("one", "tp2pp2", "pp4"))
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(other[k], v) for k, v in one.items())
    seeded = whole_tensors(tmp_path / "seed" / "step_00000000")
    assert not torch.equal(
        seeded["model/embedding.word_embeddings.weight"],
        one["model/embedding.word_embeddings.weight"],
    )
