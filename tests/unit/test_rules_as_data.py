"""A rule says true things of itself: its codes, the keys it reads, and an example that raises each
code.
"""

from __future__ import annotations

import ast
import importlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError

from mtrain.config import rules as package
from mtrain.config.compose.composer import compose
from mtrain.config.families import configs
from mtrain.config.messages.codes import codes, rules_of
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.resolve.watch import watched
from mtrain.config.rules import all_rules, apply
from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import Rule, rule
from mtrain.config.schema.run import GROUPS, RunConfig, UnresolvedRun
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from mtrain.errors import Code, ConfigError, outside_rules
from tests.architecture.sources import text_of, tree_of
from tests.support.catalogue import OWN_ROWS, ROWS
from tests.support.configs import LAPTOP, MOE, tiny
from tests.support.strategies import runs
from tests.unit import test_rules_catalogue as plain
from tests.unit import test_rules_quantized as quantized

SOURCE = Path(__file__).resolve().parents[2] / "src/mtrain"
GPUS = Machine(cpu_cores=8, memory_bytes=1 << 40, gpus=4)
CHANGES = [
    *(change for _, change in plain.BROKEN),
    *plain.FINE,
    *(change for *_, change in quantized.BROKEN),
]
CHANGES.append({"trainer.global_batch_size": 1 << 20})  # a warning, whose rule reads the layout too
LINEAR_BESIDE_EXPERTS = {"cluster.device": "cuda", "kernels.linear": "te", "model.moe": plain.MOE}
LLAVA = {"model.family": "llava", "model.llava": {"image_token_id": 4000}, "data.kind": "mock"}
PADDED = {**plain.MOE, "pad_alltoall": True, "alltoall_capacity_factor": 1.5}
CHANGES += [{**LLAVA, "parallel.tp": 2}, {**LLAVA, "model.hidden_dropout": 0.1}]
CHANGES.append({**LLAVA, "data.kind": "image_text", "data.path": "images"})
NO_EXAMPLE = {
    "MT045": "another release than the one that is installed; tested with both",
    "MT321": "a folder with more files than are looked at; tested with one",
    "MT345": "a run that has a tokenizer; tested with one",
    "MT346": "a file of chats; tested with one",
    "MT395": "a file of labels; tested with one",
    "MT522": "a library that is not installed; tested without it",
    "MT607": "a tokenizer; tested with one",
    "MT611": "a corpus; tested with one",
    "MT612": "a corpus; tested with one",
    "MT613": "a tokenizer; tested with one",
    "MT620": "a corpus with a manifest; tested with one",
}
"""Codes of rules that no command line raises by itself."""
SOFTER = {"MT432", "MT456", "MT457"}
"""Codes whose rule makes a warning of some findings itself."""
CHANGES += [{"model.family": family} for family in configs()]
HYBRID = {"model.family": "hybrid", "model.hybrid": {"pattern": "M*M-", "num_heads": 8}}
CHANGES += [HYBRID, {**HYBRID, "parallel.cp": 2}]
PAIRS = {"objective.name": "dpo", "data.kind": "mock"}
# Not among those that are combined: more of them would draw other combinations of the rest.
ALONE = [PAIRS, {**PAIRS, "trainer.micro_batch_size": 1}]
ALONE += [{**PAIRS, "objective.reference": kind} for kind in ("precomputed", "adapter_off")]
ROLLED = {"objective.name": "grpo", "data.kind": "mock"}
ALONE += [ROLLED, {**ROLLED, "objective.kl_coef": 0.1, "objective.reference": "precomputed"}]
ALONE += [{**ROLLED, "objective.group_size": size} for size in (1, 3)]
DISTILS = {"objective.name": "distil", "objective.teacher": "drawn", "data.kind": "mock"}
ALONE += [DISTILS, {**DISTILS, "objective.distil_top_k": 8}]
ALONE.append({**ROLLED, "rollout.updates": 4, "resilience.rerun": "on_anomaly"})
ALONE.append({**ROLLED, "rollout.engine": "openai", "peft.kind": "lora"})
STALE = {**ROLLED, "objective.max_staleness": 1}
ALONE += [STALE, {**STALE, "rollout.engine": "sglang", "rollout.updates": 4}]
ALONE.append({**STALE, "rollout.engine": "sglang", "rollout.environment": "calculator"})
ALONE += [
    {**ROLLED, "rollout.top_p": 0.9},
    {**ROLLED, "rollout.engine": "openai", "rollout.top_k": 4},
]
FORMAT = {"rollout.rewards": ["format"], "rollout.reward_weights": [1.0, 2.0]}
ALONE += [{**ROLLED, "data.kind": "prompts"}, {**ROLLED, "data.kind": "prompts", **FORMAT}]
CHANGES += [{"launch.kind": kind} for kind in ("kubernetes", "skypilot", "ray")]
CHANGES.append({"model.family": "bert", "model.bert": {"pad_token_id": 0}, "data.kind": "text"})


@cache
def literals_of(file: Path) -> tuple[tuple[str, bool], ...]:
    """Return the codes in a file, and whether each of them is declared there: the first argument of
    `Code`.
    """
    return tuple(_literals(tree_of(file))) if re.search(r'"MT\d{3}"', text_of(file)) else ()


def _literals(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    declared = {
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Code"
    }
    compared = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.Set)
        for inner in ast.walk(node)
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            if isinstance(node, ast.Constant) and node not in compared and _is_code(node.value):
                yield node.value, False
    for node in declared:
        if isinstance(node, ast.Constant):
            yield node.value, True


def _is_code(value: object) -> bool:
    return (
        isinstance(value, str)
        and len(value) == 5
        and value.startswith("MT")
        and value[2:].isdigit()
    )


@cache
def in_source() -> tuple[list[str], set[str]]:
    """Return the codes that are declared, each as often as it is, and codes that are raised."""
    found = [pair for file in SOURCE.rglob("*.py") for pair in literals_of(file)]
    declared = [*outside_rules(), *(code for code, declared in found if declared)]
    return declared, {code for code, declared in found if not declared}


def test_rules_raised_codes_are_declared_once() -> None:
    declared, raised = in_source()
    assert sorted(set(declared)) == sorted(declared)
    assert set(declared) == raised - {"MT000"} == set(codes())


def test_rules_codes_belong_to_rules_or_table() -> None:
    of_rules = {code.code for rule in all_rules() for code in rule.own}
    assert not of_rules & set(outside_rules())
    for code in of_rules:
        assert len({id(c) for rule in rules_of(code) for c in rule.codes if c.code == code}) == 1


def test_rules_codes_raised_elsewhere_are_in_table() -> None:
    """Require codes in the table: a process that never loads the rules would print a problem
    without its code's text.
    """
    of_rules = {code.code for rule in all_rules() for code in rule.own}
    for file in SOURCE.rglob("*.py"):
        if file.parent.name != "rules" and file.name != "rules.py":
            raised = {code for code, _ in literals_of(file)}
            assert not raised & of_rules, file


def test_rules_made_rules_are_run() -> None:
    """Require every module in the package's list and every rule in its family's `RULES`: others
    would never run.
    """
    listed = {module.__name__.rpartition(".")[2] for module in package._MODULES}
    makers = {
        file.stem
        for file in (SOURCE / "config/rules").glob("*.py")
        if re.search(r"^@rule\(|^KEY_EFFECTS", file.read_text(), re.MULTILINE)
    }
    assert makers - {"families"} == listed
    for name in ("bert", "gpt", "hybrid", "llava", "t5"):
        module = importlib.import_module(f"mtrain.models.{name}.rules")
        made = {value for value in vars(module).values() if isinstance(value, Rule)}
        assert made == set(module.RULES), name


def test_rules_codes_have_example_or_reason() -> None:
    """Require an example; the tests of `explain`, which shows it, check that it raises its code."""
    assert {code.code for rule in all_rules() for code in rule.codes if not code.example} == set(
        NO_EXAMPLE
    )


@pytest.fixture(scope="module")
def configurations(tmp_path_factory: pytest.TempPathFactory) -> list[RunConfig]:
    """Return configurations: those of the catalogues, random combinations of their changes, drawn
    ones, and some with files.
    """
    out: list[UnresolvedRun] = []
    for row in (*ROWS, *OWN_ROWS):
        if not row.text:
            with suppress(ConfigError):  # bad input that no rule reads
                out.append(compose(row.words).run)
    out += [apply(tiny(), change) for change in (*CHANGES, *ALONE)]
    random_ = random.Random(3)
    for _ in range(100):
        several: dict[str, Any] = {}
        for change in random_.sample(CHANGES, random_.choice([2, 2, 3, 4])):
            several |= change
        out += _applied(several)
    drawn(out)
    out += _with_files(tmp_path_factory.mktemp("files"))
    out += _applied(
        {"model.moe": PADDED, "parallel.ep": 2, "trainer.cuda_graph_impl": "full_iteration"}
    )
    out += _applied({"parallel.activation_offload.modules": ["core_attn"], **LINEAR_BESIDE_EXPERTS})
    out += _applied({"model.moe": PADDED, "parallel.ep": 2, "kernels.experts": "reference"})
    out += _applied({**HYBRID, **quantized.FP8, "kernels.linear": "te"})
    out += _applied({**PAIRS, "data.kind": "preference", "data.path": "pairs.jsonl"})
    out += _applied({**PAIRS, "data.packed": True, "objective.reference": "precomputed"})
    out += _applied({**PAIRS, "objective.loss_weights": (1.0, 2.0)})
    own = {"objective.name": "distil", "objective.teacher": "drawn", "objective.on_policy": True}
    out += _applied({**own, "data.packed": True})
    replayed = {"model.moe": plain.MOE, "rollout.replay_routes": True}
    out += _applied({"objective.name": "grpo", **replayed, "rollout.environment": "calculator"})
    recomputed = {"granularity": "selective", "modules": ["core_attn"]}
    captured = {"trainer.cuda_graph_impl": "transformer_engine", "model.moe": plain.MOE}
    out += _applied({**captured, "parallel.recompute": recomputed})
    return [resolve(raw, machine) for raw, machine in zip(out, _machines(len(out)), strict=True)]


def _machines(count: int) -> Iterator[Machine]:
    return ((LAPTOP, GPUS)[number % 5 == 4] for number in range(count))


def _applied(changes: dict[str, Any]) -> list[UnresolvedRun]:
    try:
        return [apply(tiny(), changes)]
    except (ValidationError, KeyError, TypeError):
        return []


def drawn(out: list[UnresolvedRun]) -> None:
    """Add random configurations of the schema."""

    @given(run=runs())
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    def draw(run: UnresolvedRun) -> None:
        out.append(run)

    draw()


def _with_files(home: Path) -> list[UnresolvedRun]:
    """Return runs on an existing corpus and tokenizer."""
    with IndexedWriter(home / "tokens", token_dtype(4096)) as writer:
        for _ in range(10):
            writer.add(np.zeros(1000, np.uint16))
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    (home / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": model, "added_tokens": []})
    )
    (home / "runs/mine").mkdir(parents=True)
    base = {"data.kind": "indexed", "data.path": str(home / "tokens"), "data.seq_length": 64}
    token = {"data.tokenizer": str(home / "tokenizer.json")}
    changes: list[dict[str, Any]] = [
        {},
        {"data.split": [0.8, 0.2, 0.0]},
        {"data.seq_length": 1024, "trainer.eval_iters": 4},
        token,
        {**token, "data.packed": True, "data.eod_mask_loss": True},
        {"log.runs_dir": str(home / "runs"), "log.name": "mine"},
    ]
    return [apply(tiny(), {**base, **change}) for change in changes]


def covered(key: str, reads: tuple[str, ...]) -> bool:
    """Return whether a key that was read is declared: itself, its section, or, if it is a section,
    one of its keys.
    """
    key = key.removesuffix(".")
    return key in GROUPS or any(
        key == r or key.startswith(f"{r}.") or r.startswith(f"{key}.") for r in reads
    )


def test_rules_read_declared_keys_and_raise_declared_codes(
    configurations: list[RunConfig],
) -> None:
    read: dict[tuple[str, str], set[str]] = defaultdict(set)
    for asked in all_rules():
        severities = {code.code: code.severity for code in asked.codes}
        reads: set[str] = set()
        for run in configurations:
            for found in asked(watched(run, reads)):
                assert found.code in severities, asked.name
                assert found.severity == severities[found.code] or found.code in SOFTER, found
        undeclared = {key for key in reads if not covered(key, asked.reads)}
        assert not undeclared, (
            f"{asked.file}: {asked.name} reads {sorted(undeclared)}: declare it in reads="
        )
        read[asked.file, asked.name] |= {key.removesuffix(".") for key in reads}
    for asked in all_rules():
        stale = {
            key for key in asked.reads if not covered(key, tuple(read[asked.file, asked.name]))
        }
        assert asked.name == "key_effect" or not stale, (
            f"{asked.file}: {asked.name} never reads {sorted(stale)}"
        )


def test_rules_undeclared_read_is_found() -> None:
    """Show that the checker can fail: with an undeclared key, and with a section that is read as a
    whole.
    """

    @rule(Code("MT101", "none"), reads="parallel.tp")
    def hidden(run: RunConfig) -> Iterator[Finding]:
        if run.parallel.tp == 1 and run.model.moe is not None and run.model.moe.num_experts:
            yield Finding("MT101", "parallel.tp", "none")

    reads: set[str] = set()
    assert list(hidden(watched(resolve(apply(tiny(), {"model.moe": MOE}), LAPTOP), reads)))
    assert {key for key in reads if not covered(key, hidden.reads)} == {
        "model.moe.",
        "model.moe.num_experts",
    }


def test_rules_warning_code_makes_a_warning() -> None:
    @rule(Code("MT427", "none", severity="warning"), Code("MT421", "none"), reads="optim.lr")
    def both(run: RunConfig) -> Iterator[Finding]:
        """Unused."""
        yield Finding("MT427", "optim.lr", "unusual")
        yield Finding("MT421", "optim.lr", "wrong")

    assert [found.severity for found in both(resolve(tiny(), LAPTOP))] == ["warning", "error"]


def test_rules_docstring_is_the_default_summary() -> None:
    @rule(Code("MT427"), reads="optim.lr optim.name optim.lr")
    def named(run: RunConfig) -> Iterator[Finding]:
        """A rate of whole numbers is usually one whose exponent was lost.

        More.
        """
        yield from ()

    assert named.codes[0].text == "A rate of whole numbers is usually one whose exponent was lost."
    assert named.reads == ("optim.lr", "optim.name")
    assert named.reads_any("optim")
    assert not named.reads_any("optim.beta1", "precision")
