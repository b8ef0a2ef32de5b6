"""Configurations for tests of the rules: a small valid run, changed by dotted keys, without reading
any file.
"""

from __future__ import annotations

import gc
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.compose.grammar import parse_value
from mtrain.config.messages.suggestions import CHOOSING
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import apply, check
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import ConfigError, Problem
from tests.support.patience import slowness

LAPTOP = Machine(cpu_cores=2, memory_bytes=8 << 30)
TINY: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 704,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    },
    "trainer": {"global_batch_size": 16, "micro_batch_size": 4},
}
MOE = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 352}


SECONDS: list[float] = []
"""CPU seconds of each validation `within_a_second`."""


@contextmanager
def within_a_second() -> Iterator[None]:
    """Bound the cost of a validation: a second of a core, or two where others crowd its caches."""
    gc.disable()  # as the command does; a process of tests has far more to look through
    begun = time.process_time()
    try:
        yield
    finally:
        gc.enable()
    SECONDS.append(time.process_time() - begun)
    assert SECONDS[-1] <= min(slowness(), 2.0), f"{SECONDS[-1]:.2f} CPU s"


def tiny(**changes: Any) -> UnresolvedRun:
    """Return the small run with dotted keys changed; `__` stands for the dot."""
    return apply(
        UnresolvedRun.model_validate(TINY), {k.replace("__", "."): v for k, v in changes.items()}
    )


def refusals(*words: str) -> list[Problem]:
    """Return the problems for which composition refuses a command line."""
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return list(caught.value.problems)


def validate(raw: UnresolvedRun, machine: Machine = LAPTOP) -> list[Problem]:
    """Return the findings of the rules about `raw` on `machine`."""
    return check(resolve(raw, machine), raw=raw, resolve=lambda run: resolve(run, machine))


def errors(raw: UnresolvedRun, machine: Machine = LAPTOP) -> list[Problem]:
    """Return the errors only."""
    return [problem for problem in validate(raw, machine) if problem.severity == "error"]


def first_fix(problem: Problem) -> dict[str, Any]:
    """Return the first alternative of a fix as a change, parsed like a command line."""
    words = shlex.split(problem.fix.split(" or ")[0])
    pairs = [word.partition("=") for word in words]
    keys = {group: key for key, group in CHOOSING.items()}
    return {keys.get(key, key): parse_value(text) for key, _, text in pairs}
