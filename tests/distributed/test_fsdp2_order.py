"""FSDP2 adds up gradients itself, and gathers what the next layer needs while one computes."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

AGAIN = RecomputeConfig(granularity="full", method="uniform", num_layers=1)


def _run(**parallel: Any) -> RunConfig:
    return tiny_run(
        dtype="bf16", ranks=2, fsdp="fsdp2", trainer={"global_batch_size": 8}, **parallel
    )


def _gradients(run: RunConfig) -> list[tuple[bool, str, bool]]:
    """Return for each weight after two micro-batches: has it hooks, the dtype of its gradient, and
    has FSDP2 added to it.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        gradients(parts, parts.prefetcher.take(0, 8))
        found = []
        for param in parts.state.chunks[0].parameters():
            hooks = getattr(param, "_post_accumulate_grad_hooks", None)
            added = param.grad is param.main_grad and bool(param.main_grad.to_local().any())
            found.append((bool(hooks), str(param.main_grad.dtype), added))
        return found


def test_fsdp2_gradients_accumulate_in_fp32_without_hooks() -> None:
    for found in run_ranks(2, _gradients, _run()):
        assert set(found) == {(False, "torch.float32", True)}


def _order(run: RunConfig) -> tuple[list[str], list[str]]:
    """Return the gathers and computations of the layers in one micro-batch, in their order:
    forward, then backward.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from mtrain.mcore import api
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import gradients
    from mtrain.world.init import joined

    said: list[str] = []
    unshard = FSDPParamGroup.unshard

    def gathered(self: Any, *args: Any) -> Any:
        name = str(self._module_fqn)
        if ".layers." in name and not self.is_unsharded and self._all_gather_result is None:
            said.append(f"gather {name.rpartition('.')[2]}")
        return unshard(self, *args)

    with joined(run) as world, pytest.MonkeyPatch.context() as patch:
        parts = assemble(run, world, splits_of(run))
        patch.setattr(FSDPParamGroup, "unshard", gathered)
        layers = [m for m in parts.state.chunks[0].modules() if isinstance(m, api.TransformerLayer)]
        for number, layer in enumerate(layers):
            layer.self_attention.register_forward_pre_hook(
                lambda *_, n=number: said.append(f"compute {n}")
            )
        gradients(parts, parts.prefetcher.take(0, 8))
    last = said.index("compute 3") + 1
    return said[:last], said[last:]


def test_fsdp2_next_layer_is_prefetched() -> None:
    for forward, backward in run_ranks(2, _order, _run()):
        assert forward == [
            "gather 0",
            "gather 1",
            "compute 0",
            "gather 2",
            "compute 1",
            "gather 3",
            "compute 2",
            "compute 3",
        ]
        assert backward[:4] == ["gather 3", "gather 2", "gather 1", "gather 0"]


@pytest.mark.full
def test_fsdp2_recomputation_regathers_no_used_layer() -> None:
    for _, backward in run_ranks(2, _order, _run(recompute=AGAIN)):
        first = backward[: backward.index("compute 0") + 1]
        assert sorted(word for word in first if word.startswith("gather")) == [
            f"gather {n}" for n in (0, 1, 2, 3)
        ]
