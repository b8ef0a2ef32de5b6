"""Bugs that `engines --fixes` says are kept away by tests, each brought back: what is compared
there finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.config.engine import release
from mtrain.config.schema.model import MoEConfig
from mtrain.launching import prove
from tests.museum.exhibit import replace, seeded
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, train_steps, trained

SAYS = release.at_least(0, 19)


def scattered_without_a_gather() -> None:
    """Seed #5628: embeddings of images and texts are cut for sequence parallelism, and only a part
    of their gradient returns.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group as group

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(group().size())[group().rank()]

    replace("mtrain.mcore.models.image_language_model", "scatter_to_sequence_parallel_region", cut)


def replicas_apart() -> None:
    """Seed #4953: FSDP2 knows the ranks that share weights, but not those with the same weights."""
    from torch.distributed.device_mesh import DeviceMesh

    from mtrain.mcore import api as mcore

    def mesh(device: torch.device, *, experts: bool) -> DeviceMesh:
        part = mcore.parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        return DeviceMesh.from_group(part, device.type)

    replace("mtrain.mcore.state.fsdp", "_mesh", mesh)


def held_back_until_the_last() -> None:
    """Seed #6357: if only optimizer state is sharded, gradients wait for a last micro-batch that is
    never announced.
    """
    from mtrain.train import assemble

    real = assemble.configure_schedule_hooks

    def hooks(run: Any, chunks: list[Any], optimizer: Any) -> None:
        real(run, chunks, optimizer)
        chunks[0].config.no_sync_func = chunks[0].no_sync

    replace("mtrain.train.assemble", "configure_schedule_hooks", hooks)


def predictions_weighed_by_what_is_left() -> None:
    """Seed #3159: losses of predictions weigh more if rolling leaves fewer tokens of a
    micro-batch.
    """
    from mtrain.mcore.models.language_model import LanguageModel

    real = LanguageModel.sum_of_losses

    def weighed(
        self: Any, hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        loss: torch.Tensor = real(self, hidden, labels, mask, **more)
        if "auxiliary" not in more:  # the loss of the next token
            return loss
        return loss * mask.numel() / mask.sum().clamp(min=1)

    replace("mtrain.mcore.models.language_model:LanguageModel", "sum_of_losses", weighed)


BUGS: dict[str, tuple[str, Callable[[], None]]] = {
    "#5628": ("model=llava_tiny parallel=tp2sp", scattered_without_a_gather),
    "#3159": (
        "data.packed=true model.mtp_num_layers=1 parallel=pp2",
        predictions_weighed_by_what_is_left,
    ),
    "#4953": ("parallel=dp4 parallel.fsdp=fsdp2 parallel.hsdp_replicas=2", replicas_apart),
    "#6357": (
        "parallel=dp2 parallel.fsdp=megatron parallel.fsdp_sharding=optim",
        held_back_until_the_last,
    ),
}
"""Row -> the layout that is proven, and what brings the bug back."""


@pytest.mark.full
@pytest.mark.parametrize("row", BUGS)
def test_known_bugs_found_by_their_comparison(row: str) -> None:
    words, fault = BUGS[row]
    argv = words.split()
    with seeded(fault):
        rows = prove.compared(prove.comparable(load(argv).run, argv, 2, "fp32"))
    assert any(not row.equal for row in rows), prove.table(rows)


@pytest.mark.full
def test_known_bugs_evaluation_gather_is_found() -> None:
    """Seed #3155 in a layout of `test_fully_sharded.py`: one of all resets is left out, that of the
    gather for an evaluation.

    The step that follows reads what it would have gathered itself; its update does not reach the
    one behind that.
    """
    from tests.distributed.test_fully_sharded import LAYOUTS, _run, _use

    run = _run(LAYOUTS["megatron tp2"])
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"eval_iters": 2})})

    def faulty() -> tuple[Any, int]:
        from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
            AllGatherPipeline,
        )

        from mtrain.train.loop import step

        real = AllGatherPipeline.reset
        gathered = step.gathered
        left_out = list[bool]()

        def reset(self: Any, *args: Any, **more: Any) -> None:
            if (
                left_out == [False] and torch.is_grad_enabled()
            ):  # of the step behind; texts are written before it
                left_out.append(True)
            else:
                real(self, *args, **more)

        @contextmanager
        def evaluated(chunks: list[Any]) -> Iterator[None]:
            with gathered(chunks):
                yield
            left_out.append(False)

        step.gathered = evaluated
        AllGatherPipeline.reset = reset
        return _use(run), left_out.count(True)

    ranks = run.parallel.ranks or 1
    right, (wrong, left_out) = (run_ranks(ranks, *job)[0] for job in ((_use, run), (faulty,)))
    assert left_out == 1
    assert right[:2] == wrong[:2]
    assert wrong[2] != pytest.approx(right[2], rel=1e-5)


@pytest.mark.full
def test_known_bugs_embedding_as_matrix_on_one_stage_is_found() -> None:
    """Reproduce #5034, which `test_muon.py` covers too: the stage of multi-token prediction has a
    copy of the embedding.
    """
    model = {"num_layers": 2, "mtp_num_layers": 1, "tie_word_embeddings": True}
    run = tiny_run(model=model, optim={"name": "muon"}, ranks=2, pp=2)
    alone = trained(tiny_run(model=model, optim={"name": "muon"}), 3)

    def job() -> list[tuple[float, float]]:
        from mtrain.config.optimizers import muon

        if torch.distributed.get_rank():
            muon.NO_MATRICES = ("output_layer",)
        return train_steps(run, 3)

    expected = [pytest.approx(loss, rel=1e-6) for loss, _ in alone]
    assert [loss for loss, _ in trained(run, 3)] == expected
    assert [loss for loss, _ in run_ranks(2, job)[1]] != expected


@pytest.mark.parametrize(
    "fault", [False, pytest.param(True, marks=pytest.mark.skipif(SAYS, reason="since 0.19"))]
)
def test_known_bugs_mixer_norms_have_model_epsilon(fault: bool) -> None:
    """Seed #5750: megatron-core 0.16.1's layer does not pass the epsilon, so a norm has its class's
    default.
    """
    from tests.distributed.test_hybrid import hybrid_run

    run = hybrid_run(model={"layernorm_epsilon": 0.25})

    def job() -> set[float]:
        from mtrain.mcore import api
        from mtrain.mcore.models import hybrid_model
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        if fault:
            real = hybrid_model.MambaLayerSubmodules
            hybrid_model.MambaLayerSubmodules = lambda norm, **parts: real(
                norm=norm.module, **parts
            )
        with joined(run) as world:
            (chunk,) = assemble(run, world, splits_of(run)).state.chunks
            return {
                float(layer.norm.eps)
                for layer in chunk.modules()
                if isinstance(layer, api.MambaLayer)
            }

    assert (run_ranks(1, job)[0] == {0.25}) is not fault


def test_known_bugs_balancing_loss_follows_key() -> None:
    """Seed #5694: a default of megatron-core decides how experts are balanced."""

    def handed_over(coefficient: float, *, fault: bool = False) -> float:
        run = tiny_run(
            model={"moe": MoEConfig(num_experts=4, ffn_hidden_size=64, aux_loss_coeff=coefficient)}
        )

        def job() -> float:
            from mtrain.assembly.model import transformer_config
            from mtrain.config.engine import core_fields
            from mtrain.devices import registry

            if fault:
                del core_fields.MOE_FIELDS["moe_aux_loss_coeff"]
            return float(transformer_config(run, registry.get("cpu")).moe_aux_loss_coeff)

        return float(run_alone(job))

    assert [handed_over(asked) for asked in (0.0, 0.02)] == [0.0, 0.02]
    assert handed_over(0.02, fault=True) != 0.02
