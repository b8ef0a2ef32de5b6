"""Steps in FP8 whose norms and SwiGLU quantise for linear layers, and the same steps with all of
that done apart.

A program, `python -m tests.support.operands`, because Triton decides whether to interpret when it
is imported. It reads JSON, names and the words of each command line and whether there is a fault,
and prints what `both` says.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.interpreted import answer_of

CALLS = ("quantize_tensorwise", "quantize_blocks")
"""Functions that quantise for a linear layer, inside of it."""


def both(
    runs: dict[str, list[str]], *, fault: bool = False, timeout_s: float = 300
) -> dict[str, dict[str, Any]]:
    """Return, for every run with operands `together` and `apart`: losses and norms of all `steps`,
    the count of `calls` in the first rank's first forward, the bytes that its autograd `keeps`, and
    what the plan predicts for these and for `copies`.

    With a `fault`, norms take the scale of this rank's part of a tensor for that of the whole.

    Raises `AssertionError` with the output of a run that failed.
    """
    return answer_of("tests.support.operands", [runs, fault], timeout_s)  # type: ignore[no-any-return]


def _main() -> None:
    from unittest import mock

    from mtrain.api import load
    from mtrain.config.resolve.resolution import Machine
    from mtrain.models import rank
    from mtrain.plan.rank import stage_memories
    from tests.support.forked import import_engine, run_ranks
    from tests.support.memory import measured
    from tests.support.runs import train_steps

    import_engine()
    from mtrain.mcore.layers import operands as norms
    from mtrain.models.gpt import build as gpt
    from mtrain.models.hybrid import build as hybrid
    from mtrain.models.llava import build as llava

    big = Machine(cpu_cores=64, memory_bytes=1 << 40, triton=True, triton_interpreted=True)
    found = {}
    runs, fault = json.load(sys.stdin)
    for name, words in runs.items():
        run = load(words, big, {}).run
        found[name] = dict[str, Any]()
        for how in ("together", "apart"):
            why = rank.operands_apart if how == "together" else lambda run: "the test says so"
            with ExitStack() as stack:
                for module in (gpt, hybrid, llava, rank):
                    stack.enter_context(mock.patch.object(module, "operands_apart", why))
                if fault:
                    stack.enter_context(mock.patch.object(norms, "greatest", return_value=None))
                ranks = run.parallel.ranks or 1
                made = Counter[str]()

                def job(run: Any = run, made: Counter[str] = made) -> tuple[Any, dict[str, int]]:
                    with _counted(made):
                        return train_steps(run, run.trainer.train_iters), dict(made)

                steps, calls = run_ranks(ranks, job)[0]
                kept = run_ranks(ranks, lambda run=run: measured(run))[0]
                planned = stage_memories(run)[0]
            keeps = {"keeps": kept["kept"], "planned": planned.in_flight[0]}
            # of weights, of which autograd holds one
            keeps["copies"] = planned.parts["low_precision"] // 2
            found[name][how] = {"steps": steps, "calls": calls, **keeps}
    print(json.dumps(found))


@contextmanager
def _counted(made: Counter[str]) -> Iterator[None]:
    """Count calls of `CALLS` until the first loss."""
    from unittest import mock

    from mtrain_kernels.fp8_linear import op

    from mtrain.train.loop import step

    def counting(name: str, real: Any) -> Any:
        def counted(*args: Any, **given: Any) -> Any:
            made[name] += name == "losses" or not made["losses"]
            return real(*args, **given)

        return counted

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(op, name, counting(name, getattr(op, name))))
        stack.enter_context(mock.patch.object(step, "sum_loss", counting("losses", step.sum_loss)))
        yield


if __name__ == "__main__":
    _main()
