"""Layers in CUDA graphs of their own, captured and replayed by megatron-core: the same steps as
without.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.schema.run import RunConfig
from tests.support.captured import let_capture
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

# Model, modules that are captured, and how many sums of a forward of its four layers norms make.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "whole layers": ({}, (), 4),
    "attention alone": ({}, ("attn",), 0),
    "only MLPs, LayerNorm and biases": (
        {"normalization": "LayerNorm", "add_bias_linear": True},
        ("mlp",),
        0,
    ),
    "a norm of queries and keys, post-norms": (
        {"qk_layernorm": True, "norm_placement": "pre_and_post"},
        (),
        4,
    ),
    "two predictions more": ({"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, (), 6),
}


def _steps(run: RunConfig, together: bool = False) -> tuple[list[tuple[float, float]], int]:
    """Return the losses and gradient norms of three steps, and the number of sums that norms made
    in the first of their forwards.
    """

    def job() -> tuple[list[tuple[float, float]], int]:
        from mtrain.mcore.layers import residual

        made: list[Any] = []
        whole = residual.ResidualNorm.forward

        def counted(self: Any, x: Any, stream: Any = None) -> Any:
            if stream is not None:
                made.append(self)
            return whole(self, x, stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(residual.ResidualNorm, "forward", counted)
            # only on a CPU does it
            patch.setattr("mtrain.mcore.layers.linear._adds_in_place", lambda x, weight: False)
            if together:
                for module in ("residual", "decoder_layer"):
                    patch.setattr(
                        f"mtrain.mcore.layers.{module}.one_graph", lambda config, layers: True
                    )
            if run.trainer.cuda_graph_impl == "local":
                let_capture(patch)
            return train_steps(run, 3), len({id(norm) for norm in made})

    found: tuple[list[tuple[float, float]], int] = run_ranks(1, job)[0]
    return found


@pytest.fixture(autouse=True)
def sums_by_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain.models.gpt.build.sums_apart", lambda run: None)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(CASES, ["whole layers", "attention alone"]))
def test_captured_layers_train_as_uncaptured(name: str) -> None:
    model, modules, sums = CASES[name]
    right, _ = _steps(tiny_run(model=model))
    graphs = {"cuda_graph_impl": "local", "cuda_graph_modules": modules or None}
    found, made = _steps(tiny_run(model=model, trainer=graphs))
    # norms round sums of their own otherwise
    assert found == [pytest.approx(step, rel=1e-5) for step in right]
    assert made == sums, "a sum made by the norm of another graph, or none by that of the same"


@pytest.mark.engine
def test_captured_layers_accumulating_products_are_captured() -> None:
    run = tiny_run()
    fused = run.model_copy(
        update={"kernels": run.kernels.model_copy(update={"gradient_accumulation_fusion": True})}
    )
    graphs = fused.trainer.model_copy(update={"cuda_graph_impl": "local"})
    found, _ = _steps(fused.model_copy(update={"trainer": graphs}))
    assert found == [pytest.approx(step, rel=1e-5) for step in _steps(run)[0]]


@pytest.mark.engine
def test_captured_layers_captured_norm_is_not_reused_in_replay() -> None:
    """Capture sums across the ends of graphs: a replayed norm has nodes of its own, whatever makes
    the sum.
    """
    right, _ = _steps(tiny_run())
    found, made = _steps(tiny_run(trainer={"cuda_graph_impl": "local"}), together=True)
    assert made == 8
    assert found == [pytest.approx(step, rel=1e-5) for step in right]
