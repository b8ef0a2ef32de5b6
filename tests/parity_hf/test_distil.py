"""Distillation next to transformers: teacher and student of different sizes, read from folders of
Hugging Face, in several layouts.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.models.gpt.hf import TABLES
from mtrain.models.table import to_theirs
from tests.parity_hf import hf_reference
from tests.parity_hf.compare import COMMON, _own_tensors
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import whole_tensors
from tests.unit.test_distillation import divergence

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 150, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_moe": {
        "vocab_size": 150,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
}
STUDENT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEACHER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
}
HOW: dict[str, tuple[float, float, float, int | None]] = {
    "objective.divergence=forward_kl": (0.0, 1.0, 0.0, None),
    "objective.divergence=reverse_kl objective.temperature=2": (1.0, 2.0, 0.0, None),
    "objective.divergence=jsd objective.jsd_beta=0.3 objective.ce_weight=0.4": (
        0.3,
        1.0,
        0.4,
        None,
    ),
}
LAYOUTS = {"tp2sp": "parallel=tp2", "pp2": "parallel=pp2", "cp2": "parallel=cp2"}


@cache
def folders(kind: str) -> tuple[Path, Path]:
    """Return folders of a student and of a teacher with one layer more, larger and sharper."""
    home = Path(mkdtemp())
    for name, sizes, seed in (("student", STUDENT, 1), ("teacher", TEACHER, 2)):
        config = hf_reference.configuration(kind, FAMILIES[kind] | sizes)
        # In a process of its own: its threads would stay, and later tests fork.
        run_alone(partial(_save, config, seed, home / name))
    return home / "student", home / "teacher"


def _save(config: Any, seed: int, folder: Path) -> None:
    hf_reference.model(config, seed).save_pretrained(folder)


def run_of(kind: str, words: str) -> Any:
    from mtrain.recipes.huggingface.importer import import_config

    student, teacher = folders(kind)
    extra = ("objective=distil", f"objective.teacher={teacher}", "data=mock", "data.seq_length=32")
    # transformers adds no balancing loss to a divergence
    extra += ("model.moe.aux_loss_coeff=0",) if kind == "qwen3_moe" else ()
    run = import_config(student / "config.json", (*COMMON, *extra, *words.split())).run
    return resolve(run, Machine.here())


def one_batch(run: Any, student: Path, folder: Path) -> dict[str, Any]:
    """Return loss, tokens, labels and, on one rank, gradients by their names at the first step."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.folder_weights import load_folder
    from mtrain.train.loop.step import gradients, reduce_report
    from mtrain.train.verify.prove import save_gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        state = context.state
        load_folder(run, student, state.chunks)
        ckpt_state.renew(state)
        kept = [p.clone() for chunk in state.teacher for p in chunk.parameters()]
        batches = context.prefetcher.take(0, run.trainer.batch)
        reports = gradients(context, batches)
        found = dict(reduce_report(world, context.table, reports, False))
        save_gradients(context, folder)
        context.close()
        after = [p for chunk in state.teacher for p in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
        assert not any(p.requires_grad or hasattr(p, "main_grad") for p in after)
        if world.size > 1:
            return {"metrics": found}
        own = _own_tensors(state.chunks[0])
        mine = {name: p.main_grad for name, p in own.items() if hasattr(p, "main_grad")}
        return {
            "metrics": found,
            "tokens": torch.cat([batch["tokens"] for batch in batches]),
            "labels": torch.cat([batch["labels"] for batch in batches]),
            "gradients": {k: v.clone() for k, v in mine.items()},
        }


def theirs(
    kind: str, tokens: Tensor, labels: Tensor, how: tuple[float, float, float, int | None]
) -> tuple[float, dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    beta, temperature, weight, _ = how
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float()
        for path in folders(kind)
    )
    with torch.no_grad():
        taught = teacher(tokens).logits
    logits = student(tokens).logits
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in (logits, taught))
    found = (1 - weight) * divergence(log_p, log_q, beta).mean()
    found = found + weight * torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    )
    found.backward()
    return found.item(), {
        name: p.grad for name, p in hf_reference.tensors(student).items() if p.grad is not None
    }


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(kind, words, marks=[pytest.mark.full] if (kind, i) != ("llama", 2) else [])
        for kind in FAMILIES
        for i, words in enumerate(HOW)
    ],
)
def test_distil_equals_transformers(kind: str, words: str, tmp_path: Path) -> None:
    run = run_of(kind, f"parallel=single {words}")
    (ours,) = run_ranks(1, one_batch, run, folders(kind)[0], tmp_path)
    loss, gradients = run_alone(partial(theirs, kind, ours["tokens"], ours["labels"], HOW[words]))
    assert ours["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    largest = torch.stack([g.abs().max() for g in gradients.values()]).max()
    found = to_theirs(TABLES[kind], run.model, ours["gradients"])
    assert found.keys() >= gradients.keys()
    for name, gradient in gradients.items():
        apart = float((found[name] - gradient).abs().max())
        assert apart <= 1e-5 * float(torch.maximum(gradient.abs().max(), 1e-3 * largest)), name


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_distil_teacher_of_a_folder_in_a_layout(layout: str, tmp_path: Path) -> None:
    """Read student and teacher in parts; the teacher's three layers are split unevenly."""
    words = "objective.divergence=jsd objective.ce_weight=0.2"
    student = folders("llama")[0]
    alone = run_of("llama", f"parallel=single {words}")
    (wanted,) = run_ranks(1, one_batch, alone, student, tmp_path / "one")
    split = run_of("llama", f"{LAYOUTS[layout]} {words}")
    for found in run_ranks(2, one_batch, split, student, tmp_path / "two"):
        assert found["metrics"]["loss"] == pytest.approx(wanted["metrics"]["loss"], rel=1e-5)
    here = whole_tensors(tmp_path / "two/step_00000000")
    for name, value in whole_tensors(tmp_path / "one/step_00000000").items():
        assert torch.allclose(here[name], value, rtol=1e-4, atol=1e-6), name
