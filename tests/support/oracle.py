"""The oracle: `check` accepts exactly the configurations that build and train a step.

`python -m tests.support.oracle --cases 500 --seed 1` draws configurations, runs `check`, then
builds and trains each on sharded ranks regardless of the verdict. An accepted one that does not
train, or a refused one that trains, is a defect; except under the rules of POLICY, which refuse
what would train wrongly or in vain.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mtrain.config.engine import kernels
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from mtrain.plan.count import state_bytes
from tests.support.configs import LAPTOP, errors
from tests.support.covering import Part
from tests.support.forked import import_engine
from tests.support.oracle_cases import Drawn, draw

MEMORY = 12 << 30
SKIPPED = 40
"""Steps that fp16 may skip: each halves the loss scale, which begins at 1e8 at most."""
ERROR = re.compile(r"[\w.]+(Error|Exception|Input|Environment|rank)\b")
"""Beginning of the line in a traceback that names the error."""
UNUSED_KEY = "a key that is set without an effect: its author believes that it does something"
POLICY: dict[str, str] = {
    **dict.fromkeys(
        ("MT118", "MT121", "MT150", "MT162", "MT168", "MT205", "MT206", "MT208", "MT209", "MT210"),
        UNUSED_KEY,
    ),
    **dict.fromkeys(("MT225", "MT405", "MT406", "MT441", "MT442", "MT464", "MT465"), UNUSED_KEY),
    **dict.fromkeys(("MT221", "MT232", "MT264", "MT267", "MT423"), UNUSED_KEY),
    "MT045": (
        "the release of megatron-core that is loaded does not have it, and would train as if nobody"
        " had asked"
    ),
    "MT136": "two ramps are written, and only one can be meant",
    "MT137": "a ramp that never reaches its batch: the one step that is tried does not come so far",
    "MT138": (
        "a later size of the ramp does not divide: the one step that is tried does not come so far"
    ),
    "MT262": "factors for long sequences are missing, and the short samples of a trial need none",
    "MT260": "rotary positions would be scaled twice, and only one scale can be meant",
    "MT355": "without the tokens that mark them, prefix, suffix and middle are not moved",
    "MT407": (
        "the process that tries may have an interpreter of Triton on; the machine that is validated"
        " has none"
    ),
    "MT141": "the cut into stages is written twice, and only one can be meant",
    "MT207": "MLA turns its heads by rope whatever the key says",
    "MT163": "gradients are there in time or not, as it happens: some steps end without numbers",
    "MT171": (
        "more layers than a stage has: whoever wrote it counts layers otherwise than the pipeline"
        " does"
    ),
    "MT463": (
        "some weights would keep low precision and others 32 bits, and the key does not say which"
    ),
    "MT201": "the width of a head would be rounded down silently",
    "MT203": (
        "an odd number of channels that rotate: megatron-core turns one more than was written, or"
        " none at all"
    ),
    "MT248": (
        "a family is built as it was published: what it does not have would train, and be something"
        " else"
    ),
    "MT249": UNUSED_KEY,
    "MT251": "text of one token trains, and has no other token to learn from",
    **dict.fromkeys(
        ("MT444", "MT445"),
        "a GPU multiplies blocks of 16; what stands for it on a CPU takes any width",
    ),
    "MT268": (
        "megatron-core's releases count layers of multi-token prediction differently: a window, or"
        " none"
    ),
    "MT174": "no CPU copies activations elsewhere: it would train as if nobody had asked",
    "MT446": "no layer would be left in the format that was named",
    "MT215": "one expert-parallel rank exchanges nothing; with two, the same keys would be refused",
    "MT461": "another implementation would update some of the weights, and one was named for all",
    "MT250": "two special tokens with one id train, and mean two things",
    "MT204": (
        "positions that the model was not made for: it trains, and what it learns there is not what"
        " was meant"
    ),
}
"""Code -> why it refuses what would make a step."""


@dataclass(frozen=True)
class Validated:
    """One case: the verdict of `check`, and the outcome of training."""

    drawn: Drawn
    codes: tuple[str, ...]
    """Codes of the errors that `check` found."""
    fault: str
    """The last line of what the first failing rank said; empty where a step was made."""

    @property
    def report(self) -> str:
        """Print the counts of agreed, policy, too strict (refused but trains) and too lax (accepted
        but fails) cases.
        """
        if bool(self.codes) == bool(self.fault):
            return "agreed"
        if self.codes:
            return "policy" if set(self.codes) & POLICY.keys() else "too strict"
        return "too lax"


def validated(drawn: Drawn, timeout_s: float = 60.0) -> Validated:
    """Run `check` on a configuration and try it; needs the adapter installed in this process."""
    run = resolve(apply(drawn.raw, {"trainer.join_timeout_s": timeout_s}), LAPTOP)
    found = [problem.code for problem in (*errors(drawn.raw), *kernels.problems(run, LAPTOP, {}))]
    if state_bytes(run) > MEMORY * (
        run.parallel.ranks or 1
    ):  # a warning of `check`, for which a run is refused
        found.append("MT140")
    return Validated(drawn, tuple(dict.fromkeys(found)), attempt(run, timeout_s))


def attempt(run: RunConfig, timeout_s: float = 60.0) -> str:
    """Build a resolved run on forked ranks and make a step; return the failure, or ""."""
    from tests.support.forked import RankFailed, run_ranks

    try:
        said = run_ranks(run.parallel.ranks or 1, _step, run, timeout_s=timeout_s)
    except RankFailed as failure:
        lines = str(failure).strip().splitlines()
        return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])
    return next((text for text in said if text), "")


def _step(run: RunConfig) -> str:
    """Run one step on a rank; return whether its results are finite. A job for `run_ranks`."""
    import torch

    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        result = train_step(parts, stop_requested=False)
        for _ in range(
            SKIPPED if run.precision.dtype == "fp16" else 0
        ):  # the first loss scales are meant to overflow
            if not result.updated:
                result = train_step(parts, stop_requested=False)
        finite = {
            "loss": math.isfinite(result.loss),
            "gradient norm": math.isfinite(result.grad_norm),
        }
        weights: list[Any] = [p for chunk in parts.state.chunks for p in chunk.parameters()]
        local = [p.to_local() if hasattr(p, "to_local") else p for p in weights]
        finite["weights"] = all(bool(torch.isfinite(p).all()) for p in local)
    wrong = [name for name, fine in finite.items() if not fine]
    return f"{' and '.join(wrong)}: not finite" if wrong else ""


def cases(count: int, seed: int) -> Iterator[Drawn]:
    """Yield `count` configurations of at most four ranks, every tenth of up to eight."""
    rng = random.Random(seed)
    for index in range(count):
        yield draw(rng, 8 if index % 10 == 9 else 4)


def main(argv: list[str] | None = None) -> int:
    """Validate and print every disagreement; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from", type=int, default=0, dest="first", help="the first case that is tried"
    )
    parser.add_argument("--part", type=Part.parse, default="1/1", help="K/N: each N-th case")
    parser.add_argument("--all", action="store_true", help="print agreements too")
    args = parser.parse_args(argv)
    import_engine()
    began = time.monotonic()
    found = Counter[str]()
    reasons = Counter[str]()
    for index, drawn in enumerate(cases(args.cases, args.seed)):
        if index < args.first or not args.part.has(index):
            continue
        case = validated(drawn)
        found[case.report] += 1
        found["accepted" if not case.codes else "refused"] += 1
        reasons.update(case.codes)
        if args.all or case.report.startswith("too"):
            print(
                f"[{index}] {case.report} {','.join(case.codes)} {drawn.words}\n    {case.fault}",
                flush=True,
            )
    seconds = time.monotonic() - began
    print(
        f"seed {args.seed}: {dict(found)} in {seconds:.0f} s; codes: {dict(reasons.most_common())}"
    )
    return 1 if found["too strict"] + found["too lax"] else 0


if __name__ == "__main__":
    sys.exit(main())
