"""Checks of versions: Python, torch, megatron-core, Triton, TransformerEngine, CUDA and NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtrain.config.engine import release
from mtrain.config.engine.capabilities import CAPABILITIES, is_here
from mtrain.config.machine.devices import facts_of
from mtrain.config.messages.problem import value_at
from mtrain.config.resolve.conditional import condition
from mtrain.doctor.facts import Facts
from mtrain.doctor.rows import Row, ok, slow, wrong

# The oldest releases that pyproject.toml admits.
PYTHON = (3, 11)
TORCH = (2, 10)
TRITON = (3, 4)
TRANSFORMER_ENGINE = (2, 9)
# The first release of TransformerEngine that megatron-core 0.16 and 0.19 do not admit.
BEFORE = {(0, 16): (2, 12), (0, 19): (2, 21)}
# Compute capability -> the first CUDA whose compiler and libraries know it, from NVIDIA's release
# notes; the newest first.
CUDA_OF = ((103, (12, 9)), (100, (12, 8)), (89, (11, 8)), (80, (11, 0)))
INSTALL = "pip install mtrain"


def check(facts: Facts) -> Iterator[Row]:
    """Yield a row for each part of the software that a run on this device loads."""
    yield _python(facts)
    yield _torch(facts)
    yield _engine(facts)
    device = facts_of(facts.run.cluster.device)
    if device.triton:
        yield _triton(facts)
    if device.cuda_kernels:
        yield from _transformer_engine(facts)
        yield from _cuda(facts)
        yield from _nccl(facts)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _words(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _python(facts: Facts) -> Row:
    here = _words(facts.software.python)
    if facts.software.python < PYTHON:
        return wrong("python", here, f"Python {_words(PYTHON)} or newer")
    return ok("python", here)


def _torch(facts: Facts) -> Row:
    found = facts.software.torch
    if found is None:
        return wrong("torch", "not installed", INSTALL)
    if numbers(found) < TORCH:
        fix = f"pip install 'torch>={_words(TORCH)}'"
        return wrong("torch", f"{found}, older than {_words(TORCH)}", fix)
    return ok("torch", found)


def _engine(facts: Facts) -> Row:
    found = facts.software.megatron_core
    name = "megatron-core"
    if found is None:
        return wrong(name, "not installed, or it states no release", INSTALL)
    here = release.words(found)
    if not release.is_supported(found):
        known = release.supported_words()
        fix = f"pip install megatron-core=={release.words(release.SUPPORTED[0])}"
        return wrong(name, f"{here}; mtrain was checked with {known} and their series", fix)
    absent = [row for row in CAPABILITIES if not is_here(row, found)]
    for row in absent:
        if condition(row.when).holds(lambda key: value_at(facts.run, key)):
            fix = f"megatron-core {row.versions}, or without {row.keys[0]}"
            return wrong(name, f"{here}, which lacks what {row.keys[0]} needs: {row.about}", fix)
    later = f", without {len(absent)} capabilities of later releases (engines)" if absent else ""
    return ok(name, f"{here}{later}")


def _triton(facts: Facts) -> Row:
    found = facts.software.triton
    fix = f"pip install 'triton>={_words(TRITON)}'"
    if found is None:
        return slow("triton", "not installed: mtrain's kernels cannot run", fix)
    if numbers(found) < TRITON:
        return wrong("triton", f"{found}, older than {_words(TRITON)}", fix)
    return ok("triton", found)


def _transformer_engine(facts: Facts) -> Iterator[Row]:
    found = facts.software.transformer_engine
    engine = facts.software.megatron_core
    if found is None or engine is None:
        return
    before = BEFORE.get(engine[:2])
    if numbers(found) < TRANSFORMER_ENGINE or (before is not None and numbers(found) >= before):
        bound = f",<{_words(before)}" if before else ""
        admitted = f">={_words(TRANSFORMER_ENGINE)}{bound}"
        text = f"{found}; megatron-core {release.words(engine)} is known with {admitted}"
        yield slow(
            "transformer-engine", text, f"pip install 'transformer-engine[pytorch]{admitted}'"
        )
    else:
        yield ok("transformer-engine", found)


def _cuda(facts: Facts) -> Iterator[Row]:
    """Yield whether torch's CUDA knows the generation of the GPUs; `gpus` compares the driver."""
    built = facts.software.cuda
    sm = max((gpu.sm for gpu in facts.machine.nvidia.gpus), default=facts.run.cluster.sm or 0)
    if not built:
        return
    needed = next((cuda for first, cuda in CUDA_OF if sm >= first), (0, 0))
    if numbers(built) < needed:
        text = f"torch is built for CUDA {built}, and sm_{sm} needs {_words(needed)}"
        yield wrong("cuda", text, f"a torch for CUDA {_words(needed)} or newer (pytorch.org)")
    else:
        yield ok("cuda", f"torch is built for CUDA {built}")


def _nccl(facts: Facts) -> Iterator[Row]:
    packages = [f"{name} {version}" for name, version in facts.software.nccl.items()]
    if len(packages) > 1:
        text = f"{' and '.join(packages)} write the same file, and the last one installed counts"
        yield slow(
            "nccl", text, f"pip uninstall {' '.join(facts.software.nccl)}, then reinstall torch"
        )
    else:
        yield ok("nccl", packages[0] if packages else "that of torch")
