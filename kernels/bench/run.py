"""Measures every op next to other implementations, against what the device can copy and multiply.

    python kernels/bench/run.py [op ...] [--shapes llama3_8b,llama3_70b] [--device cuda] [--json
    bench.json]

Each contender gets the same inputs: what `auto` takes in training, the Triton kernel, the reference
run eagerly and under torch.compile, and Liger and TransformerEngine where they are installed.
`share` is the least time that the op's bytes and FLOPs take at the rates measured in the same run
at the size of the case, divided by the measured time. `--device cpu --tiny` tries the program, not
the device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mtrain_kernels import parity, tuning
from mtrain_kernels.registry import MODELS, Case, Cost, Model, Unavailable, ops
from mtrain_kernels.runtime import HAS_TRITON

# larger than any L2 cache, and longer to read than the host needs to launch a call
FLUSH_BYTES = 2 << 30
WARM_S = 0.05  # of calls before one counts: clocks rise, caches of compiled code fill


@dataclass
class Row:
    """One contender at one case: median times in seconds, rates, share of the limit, extra memory
    in bytes.
    """

    op: str
    case: str
    model: str
    contender: str
    forward_s: float | None = None
    backward_s: float | None = None
    forward_gb_per_s: float | None = None
    backward_gb_per_s: float | None = None
    forward_tflop_per_s: float | None = None
    backward_tflop_per_s: float | None = None
    forward_share: float | None = None
    backward_share: float | None = None
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    copy_gb_per_s: float | None = None
    agrees: bool | None = None
    note: str = ""


class Clock:
    """Times calls on a device; `repeat` measurements each, the cache flushed between them, and the
    median told.

    The cache is flushed by reading: lines that were written would be on their way to memory while a
    call is timed.
    """

    def __init__(self, device: torch.device, repeat: int, tiny: bool) -> None:
        self.device = device
        self.repeat = repeat
        self.gpu = device.type != "cpu"
        self.api = torch.get_device_module(device) if self.gpu else None
        self.warm_s = 0.0 if tiny else WARM_S
        size = FLUSH_BYTES if self.gpu and not tiny else 0
        self.flush = torch.zeros(size // 4, dtype=torch.float32, device=device)

    def seconds(self, call: Callable[..., Any], prepare: Callable[[], Any] = tuple) -> float:
        """Return the median time of `call(*prepare())`, what is prepared not counted, after calls
        that warm up.
        """
        warm = self._once(call, prepare())
        while warm < self.warm_s:
            warm += max(self._once(call, prepare()), 1e-4)
        return statistics.median([self._once(call, prepare()) for _ in range(self.repeat)])

    def _once(self, call: Callable[..., Any], arguments: Any) -> float:
        self.flush.sum()
        if self.api is None:
            start = time.perf_counter()
            call(*arguments)
            return time.perf_counter() - start
        begin, end = (self.api.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(*arguments)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def memory(self, call: Callable[..., Any], prepare: Callable[[], Any] = tuple) -> int | None:
        """Return how many bytes the device holds at most during the call beyond what it held
        before; None on a CPU.
        """
        arguments = prepare()
        if self.api is None:
            return None
        self.api.synchronize()
        before = self.api.memory_allocated()
        self.api.reset_peak_memory_stats()
        kept = call(*arguments)
        self.api.synchronize()
        del kept
        return self.api.max_memory_allocated() - before


def ceilings(
    clock: Clock, dtype: torch.dtype, tiny: bool, copied: int = 1 << 30, side: int = 8192
) -> dict[str, float]:
    """Return the measured copy rate in bytes/s, both ways counted, and the matrix rate in FLOP/s,
    of bytes and a side.
    """
    n, side = (1 << 16, 64) if tiny else (copied, side)
    source, target = (torch.zeros(n, dtype=torch.uint8, device=clock.device) for _ in range(2))
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    return {
        "copy_bytes_per_s": 2 * n / clock.seconds(lambda: target.copy_(source)),
        "gemm_flop_per_s": 2 * side**3 / clock.seconds(lambda: a @ b),
    }


def ceilings_of(cost: Cost, setting: Setting) -> dict[str, float]:
    """Return the rates at the size of a case: as many bytes copied, matrices of as many FLOPs."""
    if cost.bytes >= 1 << 31 or setting.clock.warm_s == 0.0:
        return setting.rates
    side = min(8192, max(256, round((cost.flops / 2) ** (1 / 3) / 256) * 256))
    copied = max(1 << 20, 1 << (cost.bytes // 2).bit_length() - 1)
    key = (copied, side)
    if key not in setting.known:
        setting.known[key] = ceilings(setting.clock, setting.dtype, False, copied, side)
    return setting.known[key]


def contenders(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return the contenders of a case, each as a function that sets it up and returns the call."""
    return {
        "eager": lambda: lambda: case.call(inputs, "reference"),
        "auto": lambda: lambda: case.call(inputs, "auto"),
        "triton": lambda: lambda: case.call(inputs, "triton"),
        "compile": lambda: _compiled(case, inputs),
        **{name: lambda rival=rival: rival(inputs) for name, rival in case.rivals.items()},
    }


def _compiled(case: Case, inputs: dict[str, Any]) -> Callable[[], Any]:
    torch.compiler.reset()
    compiled = torch.compile(lambda given: case.call(given, "reference"))
    return lambda: compiled(inputs)


def use_measured(device: torch.device) -> None:
    """Take the variants of kernels that a run takes: those that `mtrain_kernels.tune` noted for
    this device.
    """
    if device.type == "cuda" and HAS_TRITON:
        tuning.use(tuning.read(tuning.file_of(device)))


@dataclass(frozen=True)
class Setting:
    """The settings that all measurements share; `contenders` are those to measure, all if empty."""

    clock: Clock
    dtype: torch.dtype
    rates: dict[str, float]
    contenders: list[str]
    known: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    """Rates by bytes copied and side of matrices."""


def measure(op: str, case: Case, model: Model, setting: Setting) -> Iterator[Row]:
    """Yield a row for every contender of a case; one that cannot run says why."""
    torch.manual_seed(0)
    inputs = case.make(model, setting.clock.device, setting.dtype)
    truth: list[Tensor] = []
    for name, prepare in contenders(case, inputs).items():
        if setting.contenders and name not in setting.contenders:
            continue
        row = Row(op, case.name, model.name, name)
        try:
            call = prepare()
            try:
                values = _compared(case, name, call, inputs)
                if name == "eager":
                    truth = values
                elif values and truth:
                    row.agrees = agree(values, truth)
            except (
                RuntimeError
            ) as error:  # as too little memory for what is compared; the time counts nonetheless
                row.note = f"not compared: {last_line(error)}"
            values = []
            _time(row, case, model, call, setting)
        except ImportError as error:
            row.note = f"not installed: {error}"
        except Unavailable as error:
            row.note = str(error)
        except Exception as error:  # a contender that breaks is a result, and the others go on
            row.note = last_line(error)
        yield row


OURS = {"eager": "reference", "auto": "auto", "triton": "triton", "compile": "reference"}
"""Contenders that are called with the inputs themselves, so that all can be compared, and as which
implementation.
"""
PIECE = (
    1 << 28
)  # elements that are compared at a time: fp64 of more has no room next to the tensors


def last_line(error: BaseException) -> str:
    """Return an error in a line: the last of what the compiler said, which names the fault, under
    the innermost cause.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _compared(
    case: Case, name: str, call: Callable[[], Any], inputs: dict[str, Any]
) -> list[Tensor]:
    """Return the values that a contender is compared by; empty if it has inputs of its own."""
    if case.checked is not None:
        return (
            _tensors(case.checked(inputs, OURS[name])) if name in OURS and name != "compile" else []
        )
    return _values_and_gradients(call, inputs) if name in OURS else []


def _values_and_gradients(call: Callable[[], Any], inputs: dict[str, Any]) -> list[Tensor]:
    """Return the outputs, and gradients of the inputs that need them, in one direction for all
    contenders.
    """
    outputs = _tensors(call())
    wanted = [
        given for given in inputs.values() if isinstance(given, Tensor) and given.requires_grad
    ]
    roots = [out for out in outputs if out.requires_grad]
    found = [out.detach() for out in outputs]
    if roots and wanted:
        generator = torch.Generator(roots[0].device).manual_seed(1)
        steps = [
            torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
            for out in roots
        ]
        given = torch.autograd.grad(roots, wanted, steps, allow_unused=True)
        found += [x for x in given if x is not None]
    return found


def _time(row: Row, case: Case, model: Model, call: Callable[[], Any], setting: Setting) -> None:
    clock = setting.clock
    rates = ceilings_of(case.forward(model), setting)
    row.copy_gb_per_s = rates["copy_bytes_per_s"] / 1e9
    row.forward_bytes = clock.memory(call)
    row.forward_s = clock.seconds(call)
    row.forward_gb_per_s, row.forward_tflop_per_s, row.forward_share = _rates(
        case.forward(model), row.forward_s, rates
    )
    if case.backward is None or not any(out.requires_grad for out in _tensors(call())):
        return

    def fresh() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        # anew: an op may allow one backward only
        outputs = [out for out in _tensors(call()) if out.requires_grad]
        return outputs, _leaves(outputs), [torch.ones_like(out) for out in outputs]

    def backward(*arguments: list[Tensor]) -> Any:
        return torch.autograd.grad(*arguments, allow_unused=True)

    row.backward_bytes = clock.memory(backward, fresh)
    row.backward_s = clock.seconds(backward, fresh)
    row.backward_gb_per_s, row.backward_tflop_per_s, row.backward_share = _rates(
        case.backward(model), row.backward_s, ceilings_of(case.backward(model), setting)
    )


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that the outputs depend on: the inputs, or what a rival made of them."""
    found = []
    seen = set()
    queue = [out.grad_fn for out in outputs]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue += [parent for parent, _ in node.next_functions]
    return found


def _rates(
    cost: Cost, seconds: float, rates: dict[str, float]
) -> tuple[float, float | None, float]:
    limit = cost.seconds(rates["copy_bytes_per_s"], rates["gemm_flop_per_s"])
    return (
        cost.bytes / seconds / 1e9,
        cost.flops / seconds / 1e12 if cost.flops else None,
        limit / seconds,
    )


def _tensors(outputs: Any) -> list[Tensor]:
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return [out for out in outputs if isinstance(out, Tensor)]


def agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Tell if contenders, which all round, agree in each tensor as a whole; parity compares
    elements.
    """
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return False
    for a, b in zip(found, wanted, strict=True):
        pairs = zip(a.flatten().split(PIECE), b.flatten().split(PIECE), strict=True)
        squares = [
            ((x.double() - y.double()).square().sum(), y.double().square().sum()) for x, y in pairs
        ]
        apart, whole = (float(sum(sums)) for sums in zip(*squares, strict=True))
        if (
            not apart**0.5 <= parity.TOLERANCE[torch.bfloat16] * whole**0.5
        ):  # not a number agrees with nothing
            return False
    return True


def surroundings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the context that a number needs: device, versions, commit, command."""
    versions = {"python": platform.python_version()}
    for name in (
        "torch",
        "triton",
        "megatron-core",
        "liger_kernel",
        "transformers",
        "transformer_engine",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    said = subprocess.run(git, capture_output=True, text=True)
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": versions,
        "commit": said.stdout.strip() if said.returncode == 0 else "unknown",
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def line(row: Row) -> str:
    """Return one row of the printed table."""

    def way(
        seconds: float | None, gb: float | None, tflop: float | None, share: float | None
    ) -> str:
        if seconds is None:
            return f"{'':>34}"
        rate = f"{tflop:8.1f} TFLOP/s" if tflop else f"{gb:8.0f} GB/s   "
        return f"{1e6 * seconds:9.1f} us {rate} {share:4.0%}"

    forward = way(row.forward_s, row.forward_gb_per_s, row.forward_tflop_per_s, row.forward_share)
    backward = way(
        row.backward_s, row.backward_gb_per_s, row.backward_tflop_per_s, row.backward_share
    )
    if row.forward_bytes:
        memory = f"{max(row.forward_bytes or 0, row.backward_bytes or 0) / 2**20:8.0f} MiB"
    else:
        memory = ""
    wrong = "DIFFERS FROM THE REFERENCE " if row.agrees is False else ""
    return (
        f"{row.case:<24} {row.model:<14} {row.contender:<18} {forward} | {backward} {memory}"
        f" {wrong}{row.note}"
    )


def plot(report: dict[str, Any], path: Path) -> str | None:
    """Draw shares of the limit, a panel a model; why not, if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed: no plot"
    rows = [row for row in report["rows"] if row["forward_share"] is not None]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    places = list(dict.fromkeys((row["case"], row["model"]) for row in rows))
    figure = Figure(figsize=(10, 1 + 0.3 * len(places)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, way in zip(panels, ("forward", "backward"), strict=True):
        for i, name in enumerate(names):
            mine = [
                row for row in rows if row["contender"] == name and row[f"{way}_share"] is not None
            ]
            heights = [
                places.index((row["case"], row["model"])) + 0.8 * i / len(names) for row in mine
            ]
            panel.barh(
                heights, [row[f"{way}_share"] for row in mine], height=0.8 / len(names), label=name
            )
        panel.set(title=way, xlabel="share of the measured copy or GEMM limit")
        panel.set_yticks(range(len(places)), [" ".join(place) for place in places])
    panels[0].legend()
    figure.suptitle(f"{report['device']}, {report['dtype']}, {report['commit']}")
    figure.savefig(path)
    return None


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line names, prints the table, writes JSON and plot, returns the
    report.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", help="all unless named")
    parser.add_argument(
        "--shapes", default="llama3_8b", help=f"models, by comma: {', '.join(MODELS)}"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--tiny", action="store_true", help="the tiny model, to try the program and not the device"
    )
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument(
        "--contenders",
        default="",
        help="by comma: eager, triton, compile, liger, ...; all unless named",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.ops if name not in ops()]
    models = ["tiny"] if chosen.tiny else chosen.shapes.split(",")
    unknown += [name for name in models if name not in MODELS]
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; ops are {', '.join(ops())}, shapes {', '.join(MODELS)}"
        )
    device = torch.device(chosen.device)
    dtype = getattr(torch, chosen.dtype)
    use_measured(device)
    clock = Clock(device, 1 if chosen.tiny else chosen.repeat, chosen.tiny)
    rates = ceilings(clock, dtype, chosen.tiny)
    setting = Setting(clock, dtype, rates, [name for name in chosen.contenders.split(",") if name])
    report = {**surroundings(device, dtype), "ceilings": rates, "rows": []}
    print(f"{report['device']}: copy {rates['copy_bytes_per_s'] / 1e12:.3g} TB/s", end=", ")
    print(
        f"{report['dtype']} GEMM {rates['gemm_flop_per_s'] / 1e12:.4g} TFLOP/s; forward | backward"
    )
    for name in chosen.ops or ops():
        for case in ops()[name].cases:
            for model in (MODELS[name] for name in models if case.applies(MODELS[name])):
                for row in measure(name, case, model, setting):
                    print(line(row), flush=True)
                    report["rows"].append(asdict(row))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1))
    if chosen.plot and (reason := plot(report, chosen.plot)):
        print(reason, file=sys.stderr)
    return report


if __name__ == "__main__":
    main()
