"""An analysis of a compiled kernel's instructions: how wide it reads and writes, and what keeps it
busy.

The estimate uses instructions only and covers one tile: the body of the loops that touch global
memory, or the whole kernel if no loop does. Issue cycles are those of the busiest unit of a
multiprocessor. Every instruction counts once, with the throughput that the CUDA C++ Programming
Guide gives for its kind, on branches that are not taken as well; stalls do not count. Memory cycles
are the bytes of the tile's loads and stores divided by the copy rate; a second read of the same
tile, marked volatile or evict-first, is assumed to hit the cache. If memory cycles exceed issue
cycles, the kernel can reach the speed of memory when enough of its programs run concurrently;
neither number proves that it does.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Bytes that a multiprocessor moves in a cycle: sm_90 an H200's measured copy rate at 132 processors
# and 1.755 GHz, sm_100 nine tenths of a B200's 8 TB/s at 148 and 1.85 GHz, sm_80 nine tenths of
# 2.04 TB/s at 108 and 1.41 GHz.
BYTES_PER_CYCLE = {80: 12.0, 90: 18.6, 100: 26.3}

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*)$")
LABEL = re.compile(r"^(\.L_\w+):$")
ACCESS = re.compile(r"(?:LDG|STG|LDGSTS)\b")
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
MATRIX = re.compile(r"HMMA|HGMMA|QGMMA|UTC\w*MMA|IMMA")

# Lanes that a unit finishes in a cycle (CUDA C++ Programming Guide, "Arithmetic Instructions"): all
# that is issued; sums and products of fp32, of which a pair on sm_100 is two; logic, comparison and
# sums of integers; products of integers, which have a pipe of their own next to those, half of the
# fp32 lanes (Nsight Compute, "Pipelines": ALU, FMAHeavy); special functions, of which conversions
# of a single number are one, as is the check before a division, which waits for its result as they
# do; reductions of a warp; memory and shuffles, 128 bytes.
LANES = {
    "issue": 128,
    "float": 128,
    "integer": 64,
    "product": 64,
    "special": 16,
    "reduction": 16,
    "memory": 32,
}
PAIR = re.compile(r"F(ADD|MUL|FMA)2\b")
MATRICES = re.compile(r"(?:LD|ST)SM\.16\.MT?88(?:\.([24]))?$")
UNITS = (
    ("special", re.compile(r"MUFU|F2F\.|I2F\.|F2I\.|FRND|FCHK|POPC|FLO|BREV")),
    ("reduction", re.compile(r"C?REDUX")),
    ("memory", re.compile(r"LDG|STG|LDS|STS|LDSM|STSM|SHFL|LDL|STL|ATOM|RED|LDGSTS")),
    ("float", re.compile(r"FH?(ADD|MUL|FMA)|H(ADD|MUL|FMA)2")),
    ("product", re.compile(r"IMAD|IDP|IMUL")),
    (
        "integer",
        re.compile(
            r"IADD|VIADD|LOP|PLOP|ISETP|FSET|HSETP|FMNMX|HMNMX|VIMNMX|VHMNMX|IMNMX|FSEL|SEL|PRMT|"
            r"SHF|SHL|SHR|LEA|F2FP|I2FP|IABS|MOV|P2R|R2P|SGXT|BMSK|VOTE"
        ),
    ),
)


@dataclass(frozen=True)
class Reading:
    """Accesses of global memory by their bits a lane, and cycles of one tile, which are 0 for a
    matrix product.
    """

    accesses: dict[int, int]
    issue: int
    memory: int


def read(cubin: bytes, ttgir: str, warps: int, arch: int, tools: Path) -> Reading:
    """Disassemble a kernel with `nvdisasm` of the folder `tools` and reads it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(tools / "nvdisasm"), "-c", file.name], check=True, capture_output=True, text=True
        )
    body = tile_of(listing.stdout)
    accesses = Counter(bits for name, _ in body if (bits := _bits(name)))
    if any(MATRIX.match(name) for name, _ in body):
        return Reading(dict(sorted(accesses.items())), 0, 0)
    fresh, again, looped = tile_bytes(ttgir)
    requested = sum(bits // 8 * count for bits, count in accesses.items()) * 32 * warps
    # ptxas unrolls a short loop four times or more
    copies = requested / (fresh + again) if looped else 1.0
    copies = copies if copies > 2.5 else 1.0
    issue = _issue(body, warps) / copies
    memory = fresh / BYTES_PER_CYCLE[arch]
    return Reading(dict(sorted(accesses.items())), round(issue), round(memory))


def tile_of(listing: str) -> list[tuple[str, str]]:
    """Return the instructions (name, operands) of the loops that touch global memory, or of the
    kernel if none does.
    """
    found: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        # division and roots of numbers that the fast path does not cover
        if line.startswith("$__internal"):
            break
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.match(line):
            found.append((instruction[1], instruction[2]))
    inside: set[int] = set()
    for at, (name, operands) in enumerate(found):
        target = re.search(r"`\((\.L_\w+)\)", operands)
        # A branch to an earlier label closes a loop.
        if name.startswith("BRA") and target and labels.get(target[1], at + 1) <= at:
            loop = range(labels[target[1]], at + 1)
            if any(ACCESS.match(found[i][0]) for i in loop):
                inside.update(loop)
    last = max((i for i, (name, _) in enumerate(found) if name == "EXIT"), default=len(found) - 1)
    return [found[i] for i in sorted(inside)] if inside else found[: last + 1]


def tile_bytes(ttgir: str) -> tuple[int, int, bool]:
    """Return bytes that a tile's loads and stores name, and those again; whether in loops, or in a
    kernel without any.
    """
    fresh = Counter[bool]()
    again = Counter[bool]()
    depth = 0
    loops = list[int]()
    for line in ttgir.splitlines():
        if "scf.for" in line or "scf.while" in line:
            loops.append(depth)
        depth += line.count("{") - line.count("}")
        while loops and depth <= loops[-1]:
            loops.pop()
        if re.search(r"tt\.(load|store) |async_copy_global_to_local ", line):
            (again if _again(line) else fresh)[bool(loops)] += _named(line)
    looped = fresh[True] > 0
    return fresh[looped], again[looped], looped


def _again(line: str) -> bool:
    return (
        "isVolatile = true" in line
        or re.search(r"evict(ionP|ion_p)olicy = (2|evict_first)", line) is not None
    )


def _named(line: str) -> int:
    """Return bytes of a load or store: elements of the tensor of pointers times their size."""
    pointers = re.search(r"(?:tensor<([\dx]+)x)?!tt\.ptr<(?:bf|f|i|f8E\w*?)(\d+)", line)
    if pointers is None:
        return 0
    count = 1
    for side in (pointers[1] or "").split("x"):
        count *= int(side or 1)
    return count * int(pointers[2]) // 8 if not pointers[2].startswith("0") else count


def _bits(name: str) -> int:
    """Return the bits per lane of an access of global memory, 0 for anything else."""
    return _width(name) if ACCESS.match(name) else 0


def _width(name: str) -> int:
    if matrices := MATRICES.match(name):  # of 8 x 8 halves, 4 bytes a lane each
        return 32 * int(matrices[1] or 1)
    return next((WIDTHS[part] for part in name.split(".") if part in WIDTHS), 32)


def _issue(body: list[tuple[str, str]], warps: int) -> int:
    """Return the cycles of the busiest unit for one tile of `warps` warps."""
    busy = dict.fromkeys(LANES, 0.0)
    for name, _ in body:
        busy["issue"] += 1
        unit = next((unit for unit, names in UNITS if names.match(name)), None)
        if unit is not None:
            wide = max(1.0, _width(name) / 32) if unit == "memory" else 1.0
            busy[unit] += 2.0 if PAIR.match(name) else wide
    # The pipe of integer products is half of the fp32 lanes and keeps them busy.
    busy["float"] += busy["product"]
    return round(max(32 * warps * count / LANES[unit] for unit, count in busy.items()))
