"""Checks of the variables that NCCL, gloo and torch read: invalid ones, and ones that contradict.

Rows name variables. Values appear only where the table of valid ones is at fault, and never those
of other variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mtrain.config.machine.devices import facts_of
from mtrain.doctor.facts import Facts
from mtrain.doctor.rows import Row, ok, slow, wrong
from mtrain.launching import limits
from mtrain.launching.environment import Place, conflicts, environment
from mtrain.launching.limits import Limits

Environment = Mapping[str, str]
UNSET = "unset one of them"


def check(facts: Facts) -> Iterator[Row]:
    """Yield a row for each fault of the variables, or one that says there is none."""
    device = facts_of(facts.run.cluster.device)
    rows = [*_invalid(facts, device.on_host)]
    if device.cuda_kernels:
        rows += _contradictions(facts)
    yield from rows or [ok("variables", "of NCCL, gloo and torch: valid, no contradiction")]


def _invalid(facts: Facts, on_host: bool) -> Iterator[Row]:
    # The limits have rows of their own.
    texts = limits.faults(
        facts.environment,
        Limits(),
        facts.ranks_here,
        on_host=on_host,
        interfaces=facts.interfaces,
    )
    texts += conflicts(environment(facts.run, Place(facts.ranks_here), facts.environment))
    for text in texts:
        found, _, fix = text.rpartition(": " if ": set it" in text else "; ")
        yield wrong("variables", found or text, fix)


def _contradictions(facts: Facts) -> Iterator[Row]:
    for text, fix, contradicts in PAIRS:
        if contradicts(facts.environment):
            yield slow("variables", text, fix)
    wanted = facts.environment.get("NCCL_IB_HCA", "")
    if not wanted or wanted.startswith("^"):
        return
    names = [word.split(":")[0] for word in wanted.lstrip("=").split(",") if word]
    if not any(adapter.startswith(tuple(names)) for adapter in facts.adapters):
        here = ", ".join(facts.adapters) or "none"
        text = f"NCCL_IB_HCA names no adapter of this machine (here: {here})"
        yield slow("variables", text, "name adapters of /sys/class/infiniband, or unset it")


def _on(variables: Environment, name: str) -> bool:
    return variables.get(name, "0") not in ("", "0")


def _off(variables: Environment, name: str) -> bool:
    return variables.get(name) == "0"


def _above(variables: Environment, least: str, most: str) -> bool:
    low = variables.get(least, "")
    high = variables.get(most, "")
    return low.isdigit() and high.isdigit() and int(low) > int(high)


def _is(variables: Environment, name: str, word: str) -> bool:
    return word.lower() in variables.get(name, "").lower().lstrip("=").split(",")


Contradiction = Callable[[Environment], bool]
# A finding, its remedy, and the condition on the variables.
PAIRS: tuple[tuple[str, str, Contradiction], ...] = (
    (
        "NCCL_IB_DISABLE turns InfiniBand off, and NCCL_IB_HCA names its adapters",
        UNSET,
        lambda e: _on(e, "NCCL_IB_DISABLE") and bool(e.get("NCCL_IB_HCA")),
    ),
    (
        "NCCL_IB_DISABLE turns InfiniBand off, and NCCL_NET requires it",
        UNSET,
        lambda e: _on(e, "NCCL_IB_DISABLE") and _is(e, "NCCL_NET", "IB"),
    ),
    (
        "NCCL_NET=Socket leaves InfiniBand out, and NCCL_IB_HCA names its adapters",
        UNSET,
        lambda e: _is(e, "NCCL_NET", "Socket") and bool(e.get("NCCL_IB_HCA")),
    ),
    (
        "NCCL_P2P_DISABLE turns copies between GPUs off, and NCCL_P2P_LEVEL says how far they go",
        UNSET,
        lambda e: _on(e, "NCCL_P2P_DISABLE") and bool(e.get("NCCL_P2P_LEVEL")),
    ),
    (
        "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE leave only the network between GPUs of one machine",
        "unset both",
        lambda e: _on(e, "NCCL_P2P_DISABLE") and _on(e, "NCCL_SHM_DISABLE"),
    ),
    (
        "NCCL_P2P_DISABLE turns NVLink and copies between GPUs off",
        "unset NCCL_P2P_DISABLE",
        lambda e: _on(e, "NCCL_P2P_DISABLE"),
    ),
    (
        "NCCL_NVLS_ENABLE turns NVLink SHARP off, and NCCL_ALGO requires it",
        UNSET,
        lambda e: _off(e, "NCCL_NVLS_ENABLE") and _is(e, "NCCL_ALGO", "NVLS"),
    ),
    (
        "NCCL_CUMEM_ENABLE turns off the memory that NCCL_NVLS_ENABLE needs",
        UNSET,
        lambda e: _off(e, "NCCL_CUMEM_ENABLE") and _on(e, "NCCL_NVLS_ENABLE"),
    ),
    (
        "NCCL_MIN_NCHANNELS is above NCCL_MAX_NCHANNELS",
        "unset both",
        lambda e: _above(e, "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    ),
    (
        "NCCL_MIN_CTAS is above NCCL_MAX_CTAS",
        "unset both",
        lambda e: _above(e, "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    ),
    (
        "CUDA_LAUNCH_BLOCKING makes the host wait for every kernel",
        "unset CUDA_LAUNCH_BLOCKING",
        lambda e: _on(e, "CUDA_LAUNCH_BLOCKING"),
    ),
)
