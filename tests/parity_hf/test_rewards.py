"""Models of rewards against transformers' classifiers of one label, and TRL's loss restated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.cli.main import main
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.models.registry import imported as found_in
from mtrain.models.table import Table, to_ours, to_theirs
from mtrain.recipes.huggingface.classifiers import OTHERWISE, WITHOUT, as_classifier
from mtrain.recipes.huggingface.families import CLASSES
from tests.parity_hf import hf_reference
from tests.parity_hf.compare import (
    BATCH,
    STEPS,
    Case,
    Windows,
    _own_tensors,
    _parts,
    imported,
    largest_difference,
    load,
)
from tests.parity_hf.families import CASES
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks

AUTO = "AutoModelForSequenceClassification"
CENTER = 0.02


def classifier(case: Case, **more: Any) -> Any:
    """Return a classifier of one label with drawn weights."""
    given = {"num_labels": 1, "pad_token_id": None, **more}
    made = hf_reference.model(
        hf_reference.configuration(case.kind, {**case.values, **given}), 1, AUTO
    )
    made.config.architectures = [type(made).__name__]
    return made


def theirs(made: Any, batch: Any) -> tuple[list[float], Tensor]:
    """Return the score of each answer up to the token that is read, and TRL's loss of the pairs."""
    ends = batch["loss_mask"].argmax(1).tolist()
    rows = zip(batch["tokens"], ends, strict=True)
    scores = torch.cat([made(row[None, : end + 1]).logits[:, 0] for row, end in rows])
    chosen = scores[::2]
    rejected = scores[1::2]
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    return scores.tolist(), loss + CENTER * torch.mean((chosen + rejected) ** 2)


def distances(case: Case) -> dict[str, Any]:
    """Train both on the same pairs; a job for `run_ranks` with one rank."""
    from mtrain.data.pairs import MockPairs, pair_collator
    from mtrain.train.loop.step import reduce_report, run_schedule, train_step
    from mtrain.world.init import joined

    made = classifier(case)
    run, refused = imported(case, made.config.to_dict())
    assert not refused
    assert (run.model.head, run.objective.name) == ("value", "reward")
    centred = run.objective.model_copy(update={"center_weight": CENTER})
    run = resolve(run.model_copy(update={"objective": centred}), Machine.here(), 1)
    (table, *_) = found_in("mtrain.models.gpt.hf:files")(case.kind, run.model)
    table = in_memory(table, case.kind)
    windows = Windows(run.model.vocab_size, case.length, 3)
    out: dict[str, Any] = {}
    with joined(run) as world:
        parts = _parts(run, world, windows)
        data = parts.train_data
        data.collator = pair_collator(MockPairs(windows), mismatched=False, at_ends=True)
        data.average = "pair"
        chunk = parts.state.chunks[0]
        load(to_ours(table, run.model, hf_reference.tensors(made)), _own_tensors(chunk), run)
        parts.state.optimizer.reload_model_params()
        before = {name: t.detach().clone() for name, t in hf_reference.tensors(made).items()}
        (batch,) = data.microbatches(0, BATCH)
        scores, loss = theirs(made, batch)
        loss.backward()
        with torch.no_grad():
            places = torch.arange(case.length).expand_as(batch["tokens"])
            values = chunk(batch["tokens"], places, None)[..., 0]
        out["scores"] = (values * batch["loss_mask"]).sum(1).tolist(), scores
        chunk.zero_grad_buffer()
        reports = run_schedule(parts, [batch], forward_only=False)
        means = reduce_report(world, parts.table, reports, False)
        out["loss"] = means["loss"], float(loss)
        own = {n: p.main_grad for n, p in _own_tensors(chunk).items() if hasattr(p, "main_grad")}
        known = {n: p.grad for n, p in made.named_parameters()}
        out["gradients"] = largest_difference(to_theirs(table, run.model, own), known, known, 1e-3)
        made.zero_grad()
        update = hf_reference.optimizer(made, run.optim)
        for number in range(STEPS):
            step = train_step(parts, stop_requested=False)
            (batch,) = data.microbatches(number * BATCH, BATCH)
            theirs(made, batch)[1].backward()
            update(step.lr)
        after = hf_reference.tensors(made)
        moved = {name: tensor - before[name] for name, tensor in after.items()}
        ours = {n: t.detach() for n, t in _own_tensors(chunk).items()}
        out["weights"] = largest_difference(
            to_theirs(table, run.model, ours), dict(after), moved, 1e-3
        )
    return out


def in_memory(table: Table, kind: str) -> Table:
    """Return the table with the names of transformers' layers, which fuse experts."""
    from dataclasses import replace

    from mtrain.models.gpt.hf import TABLES

    return replace(table, experts=TABLES[kind].experts, layer=TABLES[kind].layer)


def without_balance(name: str) -> Case:
    case = CASES[name]
    extra = ("model.moe.aux_loss_coeff=0.0",) if "moe" in case.kind else ()
    return Case(case.kind, case.values, case.length, (*case.extra, *extra))


@pytest.mark.parametrize(
    "name",
    some(["llama 3.2, tied", "qwen3", "qwen3 moe", "gemma 2", "gpt2", "qwen2"], ["qwen3 moe"]),
)
def test_rewards_train_as_in_transformers(name: str) -> None:
    found = run_ranks(1, distances, without_balance(name))[0]
    ours, other = found["scores"]
    assert ours == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-5)
    assert found["gradients"][0] <= 2e-5, found["gradients"]
    assert found["weights"][0] <= 1e-3, found["weights"]


def test_rewards_classes_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    assert set(OTHERWISE) <= set(CLASSES)
    for kind, name in CLASSES.items():
        if kind in WITHOUT:
            assert kind not in KNOWN
        else:
            body = as_classifier(kind, {"architectures": [name]})
            assert body["architectures"] == [KNOWN[kind]]


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama 3.2, tied", "qwen3 moe"])
def test_rewards_round_trip_through_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Import a classifier, export it, and compare every byte; the verbs compare the scores."""
    there = tmp_path / "hf"
    run_alone(lambda: classifier(CASES[name]).save_pretrained(there))
    assert main(["convert", "import", str(there), str(tmp_path / "run")]) == 0
    assert main(["convert", "export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.count("of transformers' on") == 2
    assert main(["convert", "verify", str(there), str(tmp_path / "back")]) == 0
    body = json.loads((tmp_path / "back" / "config.json").read_text())
    assert body["architectures"] == json.loads((there / "config.json").read_text())["architectures"]


@pytest.mark.full
def test_rewards_several_labels_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "hf"
    case = CASES["llama 3.2, tied"]
    run_alone(lambda: classifier(case, num_labels=2).save_pretrained(there))
    assert main(["convert", "import", str(there), str(tmp_path / "run")]) == 2
    assert "the model has 2 labels" in capsys.readouterr().err
