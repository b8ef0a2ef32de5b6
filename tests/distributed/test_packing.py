"""Packed samples compute what their documents do one at a time, losses and gradients; faults are
found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mtrain.api import load
from mtrain.cli.prove import reference
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.launching import local, prove
from tests.museum.exhibit import Exhibit, seeded
from tests.museum.packed import EXHIBITS
from tests.support.cases import cases_of
from tests.support.configs import LAPTOP
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

if TYPE_CHECKING:
    from mtrain.train.verify.prove import Row

MIXTRAL = "model=mixtral_tiny"
PACKED = "data.packed=true"
WHOLE = "data.packed_by=first_fit"
STEPS = 2
LAYOUTS = cases_of("packing")


def _compared(words: str) -> list[Row]:
    argv = words.split()
    argv += [] if PACKED in argv else [PACKED]
    small = prove.comparable(load(argv).run, argv, STEPS, "fp32")
    rows = prove.compared(small)
    assert {"loss of a document", "its gradient"} <= {row.what for row in rows}
    return rows


@pytest.mark.full
@pytest.mark.parametrize("name", some(LAYOUTS, ["a small DeepSeek-V3, tp2pp2ep2"]))
def test_packing_layout_is_proven(name: str) -> None:
    rows = _compared(LAYOUTS[name])
    assert all(row.equal for row in rows), prove.table(rows)


FITTED = [
    "one rank",
    "dp4",
    "dp2 distributed optimizer",
    "tp2 sequence parallel",
    "pp4",
    "pp2vpp2",
    "cp2 ring",
    "cp2 all-gather",
    "cp4 hierarchical",
    "tp2cp2 ring",
    "pp2cp2",
    "padded to four tokens",
    "tp2ep2",
    "MTP, pp2cp2",
    "learned positions, cp2",
    "dynamic context, ring",
    "Gemma's windows and bases, pp2",
]
"""Layouts of `LAYOUTS` in which whole documents are compared too."""


@pytest.mark.full
@pytest.mark.parametrize("name", some(FITTED, ["pp2cp2"]))
def test_packing_whole_document_layout_is_proven(name: str) -> None:
    rows = _compared(f"{LAYOUTS[name]} {WHOLE}")
    assert all(row.equal for row in rows), prove.table(rows)


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "8 in a micro-batch": (8, {}),
    "2 micro-batches": (4, {}),
    "8 micro-batches": (1, {}),
    "dp2, 1 each": (4, {"ranks": 2}),
    "dp2, 4 each": (1, {"ranks": 2}),
    "dp4, 2 each": (1, {"ranks": 4}),
    "cp2, 2 micro-batches": (4, {"ranks": 2, "cp": 2}),
    "cp2 ring, 8 micro-batches": (1, {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"}),
    "cp4 all-to-all": (8, {"ranks": 4, "cp": 4, "cp_comm_type": "a2a"}),
    "dp2, 2 each, dealt out by work": (2, {"ranks": 2, "packing_scheduler": "dp_balanced"}),
    "dp2cp2, 2 each": (2, {"ranks": 4, "cp": 2}),
}
"""Samples of a micro-batch, and a layout: one global batch of 8."""


@pytest.mark.parametrize("name", some(SPLITS, ["cp2, 2 micro-batches"]))
def test_packing_any_split_has_one_loss_and_gradient(name: str, tmp_path: Path) -> None:
    micro, layout = SPLITS[name]
    homes = tmp_path / "one", tmp_path / "many"
    for home in homes:
        home.mkdir()
    local.observe(_packed(8, {}), homes[0], by_document=True)
    local.observe(_packed(micro, layout), homes[1])
    from mtrain.train.verify.prove import compare

    exact = {"loss": 1e-6, "gradient norm": 1e-6, "gradient": 1e-6, "weight": 1e-3}
    rows = compare(*homes, 1, exact)
    assert all(row.equal for row in rows), prove.table(rows)


def _packed(micro: int, layout: dict[str, Any]) -> RunConfig:
    of_data = {key: value for key, value in layout.items() if key == "packing_scheduler"}
    degrees = {key: value for key, value in layout.items() if key not in of_data}
    run = tiny_run(
        model={"num_layers": 2},
        trainer={"train_iters": 1, "micro_batch_size": micro},
        optim={"warmup_iters": 0},
        **degrees,
    )
    packed = {"packed": True, "packed_multiple": 8, "seq_length": 64, **of_data}
    return resolve(run.model_copy(update={"data": run.data.model_copy(update=packed)}), LAPTOP)


@pytest.mark.full
def test_packing_balanced_run_resumes_bitwise(tmp_path: Path) -> None:
    run = _packed(2, {"ranks": 2, "packing_scheduler": "dp_balanced"})
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"train_iters": 3})})
    whole = run_ranks(2, lambda: train_steps(run, 3, save_to=tmp_path, save_after=1))[0]
    point = tmp_path / "step_00000001"
    assert run_ranks(2, lambda: train_steps(run, 2, load_from=point))[0] == whole[1:]


@pytest.mark.full
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_packing_fault_among_whole_documents_is_found(exhibit: Exhibit) -> None:
    with seeded(exhibit.fault):
        rows = _compared(f"{exhibit.layout} {WHOLE}")
    assert any(not row.equal for row in rows), prove.table(rows)


def test_packing_batch_router_is_compared_with_packed_run() -> None:
    argv = [MIXTRAL, "parallel=ep2", "data.packed=true", "model.moe.expert_capacity_factor=1.0"]
    small = prove.comparable(load(argv).run, argv, STEPS, "fp32")
    assert small.model.moe is not None
    assert small.model.moe.aux_loss_coeff > 0
    assert "packs too" in reference(small)
    without: RunConfig = prove.comparable(load(argv[:3]).run, argv[:3], STEPS, "fp32")
    assert without.model.moe is not None
    assert without.model.moe.aux_loss_coeff == 0
    assert "one document at a time" in reference(without)
