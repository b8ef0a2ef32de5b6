"""Keys that only have an effect together with other keys, and their default then.

Most state it in the schema (`when` and `null` of their `Key`); this module has the conditions and
defaults that must be computed.

A condition on other keys is data: `parallel.vpp>1 and parallel.fsdp=none`. A term is `KEY` (set,
and not false), `KEY=WORD`, `KEY=WORD|WORD` or `KEY>NUMBER`. mtrain checks the same text on a
configuration and on flags that it is reading, and prints it in messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from mtrain.config.engine.kernels import OPERATIONS
from mtrain.config.machine.devices import facts_of
from mtrain.config.messages.keys import key_of, schema_keys, when_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.peft import TARGETS
from mtrain.config.schema.precision import LOW_PRECISION
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.models.hybrid.config import MAMBA

_TERM = re.compile(r"(?P<key>[a-z][\w.]*)(?:=(?P<words>[^>=]+)|>(?P<above>\d+))?\Z")


@dataclass(frozen=True)
class Term:
    """One term of a condition."""

    key: str
    words: tuple[str, ...] = ()
    """The values that fulfil it, of a list any one of its own; empty: any value that is set."""
    above: int | None = None

    def holds(self, value: Any) -> bool:
        """Return whether the term holds for a value; an undecided null counts as not true."""
        if self.above is not None:
            # Flags are judged while they are read, when other keys may still be unknown.
            return value is not None and value > self.above
        if self.words == ("false",):
            return not value
        if not self.words:
            return bool(value)
        each = value if isinstance(value, tuple) else (value,)
        return any(_spelled(one) in self.words for one in each)

    def __str__(self) -> str:
        if self.above is not None:
            return f"a {self.key} above {self.above}"
        if not self.words:
            return f"a {self.key}"
        head = f"{', '.join(self.words[:-1])} or " if len(self.words) > 1 else ""
        return f"{self.key}={head}{self.words[-1]}"


@dataclass(frozen=True)
class Condition:
    """Terms that must all hold."""

    terms: tuple[Term, ...]

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether every term holds, for a function that looks up a key."""
        return all(term.holds(value_of(term.key)) for term in self.terms)

    def __str__(self) -> str:
        return " and ".join(map(str, self.terms))


def condition(text: str) -> Condition:
    """Return the condition that `text` spells.

    Raises:
        ValueError: `text` is no condition.
    """
    return Condition(tuple(_term(part) for part in text.split(" and ")))


def _term(text: str) -> Term:
    match = _TERM.match(text)
    if match is None:
        raise ValueError(f"no condition on a key: {text!r}")
    words = tuple(match["words"].split("|")) if match["words"] else ()
    return Term(match["key"], words, int(match["above"]) if match["above"] else None)


def _spelled(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Conditional:
    """A key that stays at its schema's default unless `active` holds."""

    path: str
    active: Callable[[UnresolvedRun], bool]
    needs: str
    """The condition as a user writes it."""
    default: Callable[[RunConfig], Any] = lambda run: None
    """The value of null if the key is active."""
    off: Any = None

    def value(self, run: UnresolvedRun) -> Any:
        """Return the key's value; `off` if its section is null."""
        return inside(run, self.path, self.off)


def inside(run: UnresolvedRun, path: str, absent: Any = None) -> Any:
    """Return the value at a path; `absent` if its section is null."""
    node: Any = run
    for name in _names(path):
        if node is None:
            return absent
        node = getattr(node, name)
    return node


@cache
def _names(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def _meant(run: UnresolvedRun, path: str) -> Any:
    """Return the value that conditions see: of null its meaning, of an inactive key the default."""
    key = _BY_PATH.get(path)
    value = inside(run, path)
    if key is None:
        return value
    if not key.active(run):
        return key.off
    # Only a resolved run has the keys that some defaults read; conditions on other runs need none.
    return key.default(cast(RunConfig, run)) if value is None else value


def _context_exchange(run: RunConfig) -> str | None:
    """Return the context-parallel exchange of the attention: TransformerEngine's has a ring. None:
    the machine that runs it chooses the attention.
    """
    attention = run.kernels.attention
    return {"te": "p2p", "auto": None, None: None}.get(attention, "all_gather")


def chunks_of_a_document(run: RunConfig) -> int:
    """Return the chunks that a document may be split into so that each is whole."""
    p = run.parallel
    if p.hybrid_context_parallel:
        return 2 * p.dp * (p.tp if p.sequence_parallel else 1)
    # Context parallelism gives each rank one chunk from the front and one from the back, which
    # balances causal attention.
    return 2 * p.cp if p.cp > 1 else 1


def takes_experts(run: RunConfig) -> bool:
    """Return whether the model has experts that this kind of adapters can adapt."""
    return run.model.moe is not None and run.peft.kind == "lora" and not run.peft.dropout


def _adapted(run: RunConfig) -> tuple[str, ...]:
    """Return the kinds of layers of a model that its adapters, here and in `peft`, can adapt."""
    without = {"out_proj"} if takes_experts(run) else {"out_proj", "experts"}
    without |= (
        {"in_proj"} if run.model.hybrid is None or MAMBA not in run.model.hybrid.pattern else set()
    )
    return tuple(target for target in TARGETS if target not in without)


def _layers_may_differ(run: UnresolvedRun) -> bool:
    return run.precision.quantized not in (None, "delayed")


_LAYERS = (_layers_may_differ, "a precision.fp8 whose recipe is not delayed, or a precision.fp4")
# Conditions that need code: the check, and its text for users.
_COMPUTED: dict[str, tuple[Callable[[UnresolvedRun], bool], str]] = {
    "precision.num_layers_at_start_in_bf16": _LAYERS,
    "precision.num_layers_at_end_in_bf16": _LAYERS,
    "parallel.cp_comm_type": (
        lambda r: r.parallel.cp > 1 or r.parallel.hybrid_context_parallel,
        "parallel.cp above 1",
    ),
    "model.moe.router_padding_for_quantization": (
        lambda r: (
            r.precision.quantized is not None and r.kernels.experts not in ("triton", "reference")
        ),
        "a precision.fp8 or precision.fp4, and kernels.experts=te",
    ),
    "trainer.sync_debug": (lambda r: not facts_of(r.cluster.device).on_host, "cluster.device=cuda"),
    "kernels.cpu_matmul": (lambda r: facts_of(r.cluster.device).on_host, "cluster.device=cpu"),
    **{f"kernels.{op.name}": (op.applies, op.needs) for op in OPERATIONS if op.needs},
}

# Defaults that follow from other keys.
_DEFAULTS: dict[str, Callable[[RunConfig], Any]] = {
    "parallel.cp_comm_type": _context_exchange,
    "parallel.max_seqlen_per_dp_cp_rank": lambda r: max(1, r.data.length // r.parallel.dp),
    "data.packed_multiple": chunks_of_a_document,
    "parallel.microbatch_group_size_per_vp_stage": lambda r: r.parallel.pp,
    **{
        f"optim.{name}.{key}": get
        for name, spec in OPTIMIZERS.items()
        for key, get in spec.defaults.items()
    },
    "objective.group_size": lambda r: r.objective.whole,
    "objective.critic_lr": lambda r: 10 * r.optim.lr,
    "objective.reference": lambda r: "adapter_off" if r.peft.kind else "frozen",
    "peft.target": _adapted,
    "model.rope_scaling.original_max_position_embeddings": lambda r: (
        r.model.max_position_embeddings
    ),
    "model.moe.router_group_score_topk": lambda r: (
        r.model.moe.group_score_topk if r.model.moe else None
    ),
}


def _conditionals() -> Iterator[Conditional]:
    for path, field in schema_keys().items():
        default = _DEFAULTS.get(path) or _always(key_of(path).null)
        if path in _COMPUTED:
            active, needs = _COMPUTED[path]
            yield Conditional(path, active, needs, default, field.default)
        elif text := when_of(path):
            needed = condition(text)
            yield Conditional(path, _check(needed.holds), str(needed), default, field.default)


def _always(value: Any) -> Callable[[RunConfig], Any]:
    return lambda run: value


def _check(holds: Callable[[Callable[[str], Any]], bool]) -> Callable[[UnresolvedRun], bool]:
    return lambda run: holds(lambda path: _meant(run, path))


# All conditional keys in the order of the schema; `resolve` fills in their defaults, and a rule
# refuses a key that is set without effect.
CONDITIONAL = tuple(_conditionals())
_BY_PATH = {key.path: key for key in CONDITIONAL}
# The conditional keys of low-precision GEMMs.
QUANTIZED = tuple(
    key for key in CONDITIONAL if key.path.removeprefix("precision.").startswith(LOW_PRECISION)
)
