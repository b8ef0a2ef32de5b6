"""CUDA graphs as keys: their fields in each release of megatron-core, refusals, and flags."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.engine import release as engine
from mtrain.config.engine.core_fields import transformer_values
from mtrain.config.engine.release import Release
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import check
from mtrain.config.schema.run import RunConfig
from mtrain.recipes.megatron.exporter import export_words
from mtrain.recipes.megatron.importer import import_texts
from tests.support.configs import LAPTOP

GPU = "cluster=h100 cluster.devices_per_node=1 parallel=single data=mock"
LOCAL, TE, STEP = (
    f"{GPU} trainer.cuda_graph_impl={word}"
    for word in ("local", "transformer_engine", "full_iteration")
)
EXPERTS = "model=mixtral_tiny"
MAMBA = "model=nemotron_h_tiny model.num_layers=2 model.hybrid.pattern=MM"
SCRIPT = (
    "torchrun --nproc-per-node 1 pretrain_gpt.py --num-layers 4 --hidden-size 72"
    " --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --lr 1e-3 --vocab-size 1023"
    " --tokenizer-type NullTokenizer --mock-data --train-iters 10 --global-batch-size 8"
    " --num-experts 4"
)
AGAIN = "parallel.recompute.granularity"
PADDED = "model.moe.expert_capacity_factor=1.0 model.moe.pad_expert_input_to_capacity=true"


def _resolved(words: str, machine: Machine = LAPTOP) -> RunConfig:
    return resolve(compose(words.split()).run, machine)


def _refused(words: str) -> set[tuple[str, str]]:
    return {
        (problem.code, problem.path)
        for problem in check(_resolved(words))
        if problem.severity == "error"
    }


@pytest.mark.parametrize("release", engine.SUPPORTED)
@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        (GPU, ("none", []), ("none", [])),
        (LOCAL, ("local", []), ("local", [])),
        (
            f"{TE} trainer.cuda_graph_modules=[attn,mlp]",
            *[("transformer_engine", ["attn", "mlp"])] * 2,
        ),
        (STEP, ("local", ["full_iteration"]), ("full_iteration", [])),
    ],
)
def test_cuda_graphs_each_release_gets_its_own_words(
    words: str,
    old: tuple[Any, ...],
    new: tuple[Any, ...],
    release: Release,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _resolved(words)
    monkeypatch.setattr(engine, "release", lambda: release)
    values = transformer_values(run)
    scope = "cuda_graph_scope" if release < (0, 19, 0) else "cuda_graph_modules"
    assert (values["cuda_graph_impl"], values[scope]) == (old if release < (0, 19, 0) else new)
    assert {"cuda_graph_scope", "cuda_graph_modules"} & values.keys() == {scope}
    assert values.get("cuda_graph_warmup_steps", 3) == 3


FINE = (
    LOCAL,
    f"{TE} kernels.linear=te trainer.cuda_graph_modules=[attn]",
    f"{STEP} parallel.recompute.granularity=full",
    f"{LOCAL} {EXPERTS} {PADDED}",
    f"{LOCAL} {EXPERTS} trainer.cuda_graph_modules=[attn]",
    f"{TE} {EXPERTS} kernels.linear=te trainer.cuda_graph_modules=[attn,moe_router,moe_preprocess]",
    f"{LOCAL} {EXPERTS} {PADDED} trainer.cuda_graph_modules=[attn,moe]",
    f"{STEP} parallel.recompute.granularity=selective",
    f"{LOCAL} model.hidden_dropout=0.1 trainer.eval_iters=0",
    f"{LOCAL} precision=fp16",
    f"{LOCAL} model=nemotron_h_tiny trainer.cuda_graph_modules=[attn,mlp,mamba]",
)
BAD = (
    ("trainer.cuda_graph_impl=local", "MT410", "trainer.cuda_graph_impl"),
    (f"{TE} kernels.linear=reference", "MT411", "trainer.cuda_graph_impl"),
    (f"{LOCAL} trainer.cuda_graph_modules=[moe]", "MT412", "trainer.cuda_graph_modules"),
    (f"{LOCAL} trainer.cuda_graph_modules=[mamba]", "MT412", "trainer.cuda_graph_modules"),
    (f"{LOCAL} {EXPERTS} trainer.cuda_graph_modules=[mlp]", "MT412", "trainer.cuda_graph_modules"),
    (
        f"{LOCAL} {EXPERTS} {PADDED} trainer.cuda_graph_modules=[moe,moe_router]",
        "MT412",
        "trainer.cuda_graph_modules",
    ),
    (
        f"{LOCAL} {EXPERTS} trainer.cuda_graph_modules=[moe_preprocess]",
        "MT412",
        "trainer.cuda_graph_modules",
    ),
    (f"{STEP} {EXPERTS}", "MT413", "trainer.cuda_graph_impl"),
    (
        (
            f"{TE} {EXPERTS} kernels.linear=te {PADDED.split()[0]}"
            " trainer.cuda_graph_modules=[moe_router,moe_preprocess]"
        ),
        "MT414",
        "trainer.cuda_graph_modules",
    ),
    (
        f"{LOCAL} {EXPERTS} trainer.cuda_graph_modules=[attn,moe_router]",
        "MT412",
        "trainer.cuda_graph_modules",
    ),
    (
        f"{LOCAL} model=pythia_tiny trainer.cuda_graph_modules=[attn,mlp]",
        "MT412",
        "trainer.cuda_graph_modules",
    ),
    (
        f"{LOCAL} parallel.recompute.granularity=selective",
        "MT415",
        "parallel.recompute.granularity",
    ),
    (f"{LOCAL} parallel.recompute.granularity=full", "MT415", "parallel.recompute.granularity"),
    (
        (
            f"{STEP} parallel.recompute.granularity=selective model.attention_dropout=0.1"
            " trainer.eval_iters=0"
        ),
        "MT415",
        "parallel.recompute.granularity",
    ),
    (f"{LOCAL} data.packed=true", "MT416", "data.packed"),
    (f"{LOCAL} trainer.rampup_batch_size=[8,8,64]", "MT416", "trainer.rampup_batch_size"),
    (f"{LOCAL} model.hidden_dropout=0.1", "MT416", "trainer.eval_iters"),
    (f"{STEP} precision=fp16", "MT416", "precision.dtype"),
    (
        f"{LOCAL} {MAMBA} trainer.cuda_graph_modules=[attn,mamba]",
        "MT412",
        "trainer.cuda_graph_modules",
    ),
    (f"{LOCAL} {MAMBA} trainer.cuda_graph_modules=[mlp]", "MT412", "trainer.cuda_graph_modules"),
    (f"{LOCAL} model=t5_tiny", "MT416", "trainer.cuda_graph_impl"),
    (f"{STEP} {EXPERTS} {PADDED} trainer.loss_average=sample", "MT416", "trainer.cuda_graph_impl"),
    (f"{GPU} trainer.cuda_graph_modules=[attn]", "MT150", "trainer.cuda_graph_modules"),
    (f"{STEP} trainer.cuda_graph_modules=[attn]", "MT150", "trainer.cuda_graph_modules"),
)


@pytest.mark.parametrize("words", FINE)
def test_cuda_graphs_valid_combination_is_accepted(words: str) -> None:
    assert _refused(words) == set()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "code", "path"), BAD)
def test_cuda_graphs_unsupported_is_refused(words: str, code: str, path: str) -> None:
    assert (code, path) in _refused(words)


def test_cuda_graphs_every_fix_was_tried() -> None:
    for words, code, path in BAD:
        (found,) = (p for p in check(_resolved(words)) if (p.code, p.path) == (code, path))
        assert found.fix, words


@pytest.mark.parametrize(
    ("flags", "impl", "modules"),
    [
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router",
            "transformer_engine",
            True,
        ),
        ("--external-cuda-graph --cuda-graph-modules attn,moe_router", "transformer_engine", True),
        ("--enable-cuda-graph --cuda-graph-scope full", "local", False),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "full_iteration", False),
        ("--cuda-graph-impl full_iteration", "full_iteration", False),
        ("--cuda-graph-scope attn", "none", False),
    ],
)
def test_cuda_graphs_flags_of_every_release_are_read(flags: str, impl: str, modules: bool) -> None:
    run = import_texts([(f"{SCRIPT} {flags}\n", "run.sh")], "graphs").run
    assert run.trainer.cuda_graph_impl == impl
    assert run.trainer.cuda_graph_modules == (("attn", "moe_router") if modules else None)
    words = [word for group in export_words(resolve(run, LAPTOP))[1] for word in group]
    again = import_texts(
        [(f"torchrun --nproc-per-node 1 pretrain_gpt.py {' '.join(words)}\n", "run.sh")], "graphs"
    ).run
    assert again.trainer.cuda_graph_impl == impl
    assert again.trainer.cuda_graph_modules == run.trainer.cuda_graph_modules


@pytest.mark.parametrize(
    ("scope", "impl"), [("full_iteration", "transformer_engine"), ("atn", "none"), ("atn", "local")]
)
def test_cuda_graphs_scope_refused_by_megatron_is_listed(scope: str, impl: str) -> None:
    found = import_texts(
        [(f"{SCRIPT} --cuda-graph-impl {impl} --cuda-graph-scope {scope}\n", "run.sh")], "graphs"
    )
    assert [u.flag for u in found.unplaced if scope in u.text] == ["--cuda-graph-scope"]
