"""Blend and sample rules: a weight for each corpus, a plan that can be followed, and existing
marker tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from mtrain.config.rules.data import LEAST_SHARE, is_lost
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

_PER_CORPUS = {
    "blend_sizes": "blend",
    "blend_max_epochs": "blend",
    "validation_weights": "validation_blend",
    "test_weights": "test_blend",
}
"""Keys with a number for each corpus of another one."""


@rule(
    Code(
        "MT351",
        "A blend has a number for each of its corpora.",
        example="data=indexed data.blend=[a,b] data.blend_sizes=[1]",
    ),
    Code(
        "MT353",
        "The shares of a blend are weights, sizes or a curriculum, and not several of them.",
        example="data=indexed data.blend=[a,b] data.blend_weights=[1,2] data.blend_sizes=[3,4]",
    ),
    reads=(
        "data.kind data.blend data.blend_weights data.blend_sizes data.blend_curriculum"
        " data.blend_max_epochs data.validation_blend data.validation_weights data.test_blend"
        " data.test_weights"
    ),
)
def blend_numbers(run: RunConfig) -> Iterator[Finding]:
    """A blend has one number for each corpus, and one kind of shares."""
    d = run.data
    if d.kind != "indexed":
        return
    for key, names in _PER_CORPUS.items():
        numbers = getattr(d, key)
        corpora = getattr(d, names)
        if numbers is not None and corpora is not None and len(numbers) != len(corpora):
            rule = f"{len(numbers)} numbers for the {len(corpora)} corpora of data.{names}"
            yield Finding("MT351", f"data.{key}", rule, ({f"data.{key}": None},))
    kinds = ("blend_weights", "blend_sizes", "blend_curriculum")
    given = [f"data.{key}" for key in kinds if getattr(d, key) is not None]
    if d.blend is not None and len(given) > 1:
        fixes: list[Change] = [{key: None for key in given if key != kept} for kept in given]
        yield Finding(
            "MT353",
            given[0],
            f"{' and '.join(given)} all say what the shares are",
            tuple(fixes),
            unset=True,
        )


@rule(
    Code(
        "MT352",
        "Some corpus of a blend has a weight.",
        example="data=indexed data.blend=[a,b] data.blend_curriculum=[[0,[0,0]]]",
    ),
    Code(
        "MT354",
        "A curriculum has weights for all corpora from sample 0 on, and its sample numbers rise.",
        example="data=indexed data.blend=[a,b] data.blend_curriculum=[[5,[1,0]]]",
    ),
    reads="data.kind data.blend data.blend_curriculum",
)
def blend_curriculum(run: RunConfig) -> Iterator[Finding]:
    """A curriculum begins at sample 0 with rising sample numbers and weights that can be
    followed.
    """
    d = run.data
    plan = d.blend_curriculum
    if d.kind != "indexed" or d.blend is None or plan is None:
        return
    none: Change = {"data.blend_curriculum": None}
    for first, weights in plan:
        if len(weights) != len(d.blend):
            rule = f"{len(weights)} weights from sample {first} on, for {len(d.blend)} corpora"
            yield Finding("MT354", "data.blend_curriculum", rule, (none,))
            return
        total = sum(weights)
        least = min((w for w in weights if w > 0), default=0.0)
        if not total:
            rule = f"all weights are zero from sample {first} on: no corpus is read"
            even = [[at, [1.0] * len(each) if not sum(each) else list(each)] for at, each in plan]
            yield Finding(
                "MT352", "data.blend_curriculum", rule, ({"data.blend_curriculum": even}, none)
            )
            return
        if is_lost(least, total):
            rule = (
                f"the smallest share from sample {first} on is {least / total:.2g} of all, and"
                f" {LEAST_SHARE:g} is"
            )
            said = [
                [at, [0.0 if is_lost(w, sum(each) or 1.0) else w for w in each]]
                for at, each in plan
            ]
            yield Finding(
                "MT354",
                "data.blend_curriculum",
                f"{rule} the least",
                ({"data.blend_curriculum": said},),
            )
            return
    yield from _rises([first for first, _ in plan], plan)


def _rises(firsts: list[int], plan: Sequence[tuple[int, Sequence[float]]]) -> Iterator[Finding]:
    none: Change = {"data.blend_curriculum": None}
    if firsts[0] != 0:
        fixed = [[0, list(plan[0][1])], *[[first, list(weights)] for first, weights in plan[1:]]]
        rule = f"begins at sample {firsts[0]}, and the samples from 0 on have no weights"
        yield Finding(
            "MT354", "data.blend_curriculum", rule, ({"data.blend_curriculum": fixed}, none)
        )
    elif any(b <= a for a, b in pairwise(firsts)):
        rule = f"its sample numbers must rise: {', '.join(map(str, firsts[:8]))}"
        yield Finding("MT354", "data.blend_curriculum", rule, (none,))


@rule(
    Code(
        "MT355",
        "Tokens that mark the parts of a document are three ids of the vocabulary.",
        example="data=mock data.fim.rate=0.5",
    ),
    Code(
        "MT356",
        "Fill in the middle is for models that predict the next token of a text.",
        example="model=bert_tiny data=mock data.fim.rate=0.5 data.fim.ids=[1,2,3]",
    ),
    reads="data.fim.rate data.fim.ids model.vocab_size model.family",
)
def middle_marks(run: RunConfig) -> Iterator[Finding]:
    """Fill-in-the-middle needs three marker tokens of its own and a model that predicts the next
    token.
    """
    fim = run.data.fim
    vocab = run.model.vocab_size
    off: Change = {"data.fim.rate": 0.0, "data.fim.ids": None, "data.fim.spm_rate": 0.5}
    if not fim.rate:
        return
    if run.model.family not in ("gpt", "hybrid"):
        rule = f"model.family {run.model.family} does not predict the next token of a text"
        yield Finding("MT356", "data.fim.rate", rule, (off,), unset=True)
    hint = "data.fim.ids=[PREFIX,SUFFIX,MIDDLE]"
    if fim.ids is None:
        rule = f"data.fim.rate is {fim.rate:g}, and no ids mark prefix, suffix and middle"
        yield Finding("MT355", "data.fim.ids", rule, (off,), hint=hint)
    elif len(set(fim.ids)) < 3 or max(fim.ids) >= vocab:
        rule = f"three different ids from 0 to {vocab - 1} mark prefix, suffix and middle"
        yield Finding("MT355", "data.fim.ids", rule, (off,), hint=hint, also=("model.vocab_size",))


RULES = (blend_numbers, blend_curriculum, middle_marks)
