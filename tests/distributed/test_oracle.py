"""`check` says yes exactly where the model builds and makes a step: a sample of what `make oracle`
tries.
"""

from __future__ import annotations

import pytest

from mtrain.config.messages.codes import codes
from tests.support.oracle import POLICY, UNUSED_KEY, Validated, cases, validated
from tests.support.oracle_cases import Drawn, keys

CASES = 10
"""`make oracle` tries 500."""
SEED = 5


@pytest.mark.full
def test_oracle_check_agrees_with_training() -> None:
    found = [validated(drawn) for drawn in cases(CASES, SEED)]
    wrong = [case for case in found if case.report.startswith("too")]
    assert not wrong, "\n".join(f"{c.report} {c.codes} {c.drawn.words}: {c.fault}" for c in wrong)
    assert {bool(case.codes) for case in found} == {True, False}, "the sample is all of one kind"


def test_oracle_verdict_compares_check_with_outcome() -> None:
    drawn = next(cases(1, SEED))
    reports = {
        ((), ""): "agreed",
        (("MT101",), "RuntimeError"): "agreed",
        (("MT150",), ""): "policy",
        (("MT101",), ""): "too strict",
        ((), "RuntimeError"): "too lax",
    }
    assert {key: Validated(drawn, *key).report for key in reports} == reports


def test_oracle_policy_codes_exist_with_reasons() -> None:
    assert POLICY.keys() <= codes().keys()
    assert all(len(reason) > 20 for reason in (*POLICY.values(), UNUSED_KEY))


def test_oracle_every_step_key_is_drawn() -> None:
    drawn = keys()
    assert all(len(values) > 1 for values in drawn.values()), [
        k for k, v in drawn.items() if len(v) < 2
    ]
    sections = {key.rpartition(".")[0] for key in drawn}
    assert {
        "model",
        "model.moe",
        "model.mla",
        "parallel",
        "parallel.recompute",
        "precision",
        "optim",
    } <= sections


def test_oracle_same_seed_draws_same_cases() -> None:
    first, second = ([drawn.words for drawn in cases(5, SEED)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 5


@pytest.mark.parametrize("fault", ["loss", "build"])
def test_oracle_failing_case_is_found(fault: str) -> None:
    alone = (
        d for d in cases(50, SEED) if d.raw.parallel.ranks in (None, 1) and d.raw.parallel.tp == 1
    )
    drawn = next(
        d for d in alone if (d.raw.optim.name, d.raw.optim.schedule_counts) == ("adamw", "updates")
    )
    change = {"loss": {"optim": {"lr": 1e38}}, "build": {"model": {"num_query_groups": 3}}}[fault]
    raw = drawn.raw.model_copy(
        update={k: getattr(drawn.raw, k).model_copy(update=v) for k, v in change.items()}  # type: ignore[attr-defined]
    )
    assert validated(Drawn(raw)).fault
