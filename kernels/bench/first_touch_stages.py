"""The stages of `first_touch.py`, unit by unit; a unit returns JSON or raises `Skipped` with why not."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from first_touch import Walk

Units = dict[str, Callable[[], Any]]
ROOT = Path(__file__).resolve().parents[2]
STEPS, SEQUENCE = 12, 4096
# The second has the widths of an 8B model and as many of its layers as one device has memory for with AdamW.
SHAPES = {"1b": ("llama32_1b", {}), "8b": ("llama3_8b", {"num_layers": 8})}
TINY = ("llama_tiny", {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "vocab_size": 128})
PRECISIONS = ("bf16", "fp8_tensorwise", "fp8_blockwise")
GAPS = 10


class Skipped(Exception):
    """A unit that cannot be done here, and why."""


def poisoned() -> bool:
    """Whether the device answers no more, as after an access outside of memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return True
    return False


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _needs_device(walk: Walk) -> None:
    if not walk.dry and _device().type == "cpu":
        raise Skipped("there is no GPU here; --dry-run walks this on a CPU")


def environment(walk: Walk, folder: Path) -> Units:
    """Device, driver, memory, versions, commit."""

    def facts() -> dict[str, Any]:
        import torch
        from run import surroundings

        said = surroundings(_device(), torch.bfloat16)
        if _device().type == "cuda":
            facts = torch.cuda.get_device_properties(0)
            free, total = torch.cuda.mem_get_info()
            said |= {"capability": [facts.major, facts.minor], "processors": facts.multi_processor_count}
            said |= {"free_bytes": free, "total_bytes": total, "cuda": torch.version.cuda}
        return said

    return {"machine": facts}


def _ops(walk: Walk) -> list[str]:
    from mtrain_kernels.registry import ops

    return [name for name in ops() if not walk.ops or name in walk.ops]


def parity(walk: Walk, folder: Path) -> Units:
    """Every case of every op beside its definition in fp64, at odd sizes and a model's, and `first_touch_edges`."""
    from mtrain_kernels.registry import MODELS, Model, ops

    odd = Model("odd", 104, 136, 5, 5, 40, 331, 40, experts=6, top_k=3, expert_ffn=72, tokens=37)
    production = Model("llama3_8b", 4096, 14336, 32, 8, 128, 128256, 128, tokens=1000)
    models = [MODELS["tiny"]] if walk.dry else [production, odd, MODELS["tiny"]]  # what training needs comes first
    cases = {
        f"{case.name} {model.name}": functools.partial(_compare, walk, name, case, model)
        for model in models
        for name in _ops(walk)
        for case in ops()[name].cases
        if case.applies(model)
    }
    edges = ("functions", "operands") if "quantize" in _ops(walk) else ()
    return cases | {f"edges of {name}": functools.partial(_edges, walk, name) for name in edges}


def _edges(walk: Walk, name: str) -> dict[str, Any]:
    _needs_device(walk)
    if importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    import first_touch_edges

    wrong = getattr(first_touch_edges, name)(_device())
    return {"wrong": wrong} if wrong else {"edges": "as defined"}


def _compare(walk: Walk, name: str, case: Any, model: Any) -> dict[str, Any]:
    import torch
    from mtrain_kernels import parity
    from mtrain_kernels.registry import Unavailable, choose, ops
    from mtrain_kernels.runtime import capability

    _needs_device(walk)
    device = _device()
    torch.manual_seed(0)
    inputs = case.make(model, device, torch.bfloat16)
    compared, impls = {}, ["auto", *(["triton"] if "triton" in ops()[name].implementations else [])]
    call = case.checked or case.call
    for impl in impls[1:] if walk.dry and len(impls) > 1 else impls:
        given = functools.partial(lambda impl, **i: call(i, impl), impl)
        wanted = functools.partial(lambda **i: call(i, "reference"))
        tolerance = case.tolerance or (parity.TOLERANCE[torch.bfloat16] if case.checked else None)
        try:
            compared[impl] = _agreement(parity, given, wanted, inputs, tolerance)
        except Unavailable as error:
            compared[impl] = f"cannot run: {error}"
    signs = ["differs"] + ["cannot run"] * (capability(device) >= ops()[name].oldest and not walk.dry)
    wrong = [impl for impl, said in compared.items() if said.startswith(tuple(signs))]
    return {"auto is": choose(ops()[name], "auto", device)[0], **compared, **({"wrong": wrong} if wrong else {})}


def _agreement(parity: Any, given: Any, wanted: Any, inputs: dict[str, Any], tolerance: float | None) -> str:
    floats = [value for value in inputs.values() if hasattr(value, "is_floating_point") and value.is_floating_point()]
    for upcast, words in ((True, "fp64"), (False, "the definition in its own format")):
        if upcast and not floats:  # nothing that fp64 is put in for
            continue
        try:
            parity.check(given, wanted, inputs, upcast=upcast, tolerance=tolerance)
            return f"as {words}"
        except AssertionError as error:
            return f"differs from {words}: {error}"
        except (ValueError, TypeError, RuntimeError) as error:
            if not upcast or "float64" not in f"{error}":  # a definition of formats takes no fp64
                raise
    raise AssertionError("either way ends before")


def autotune(walk: Walk, folder: Path) -> Units:
    """The tiles of products of experts, attention and logits, measured for models; later stages and runs take it."""
    some = {"grouped_gemm": ("qwen3_30b_a3b", "deepseek_v3"), "attention": ("llama3_8b", "deepseek_v3")}
    some["linear_cross_entropy"] = ("llama3_8b", "deepseek_v3")
    return {
        f"{op} {model}": functools.partial(_tune, walk, op, model)
        for op, models in some.items()
        if op in _ops(walk)
        for model in models
    }


def _tune(walk: Walk, op: str, name: str) -> dict[str, str]:
    if walk.dry:
        raise Skipped("the interpreter says nothing about speed")
    _needs_device(walk)
    import torch
    from mtrain_kernels import tune, tuning
    from mtrain_kernels.registry import MODELS
    from triton.testing import do_bench

    m, device = MODELS[name], _device()
    if op == "linear_cross_entropy":
        given = tuning.file_of(device), device, m.tokens, m.hidden, m.vocab, torch.bfloat16
        return tune.measure_loss(*given, seconds=lambda call: do_bench(call) / 1e3)
    if op == "attention":
        heads, widths = (m.heads, m.kv_heads), (m.head_dim, 128 if m.head_dim == 192 else m.head_dim)
        return tune.measure_attention(
            *(tuning.file_of(device), device, *heads, widths, m.tokens, torch.bfloat16),
            seconds=lambda call: do_bench(call) / 1e3,
        )
    sizes = (m.tokens * m.top_k, m.experts, m.hidden, m.expert_ffn)
    return tune.measure(
        tuning.file_of(device), device, *sizes, torch.bfloat16, seconds=lambda call: do_bench(call) / 1e3
    )


def measured(walk: Walk, folder: Path) -> Units:
    """The bench of every case: each contender a row, with its share of what the device can do at that size."""
    from mtrain_kernels.registry import MODELS, ops

    models = ["tiny"] if walk.dry else ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3"]
    names = [(name, case) for name in _ops(walk) for case in ops()[name].cases[: 1 if walk.dry else None]]
    return {
        f"{case.name} {model}": functools.partial(_measure, walk, name, case, MODELS[model])
        for name, case in names
        for model in models
        if case.applies(MODELS[model])
    }


@functools.cache
def _setting(dry: bool) -> Any:
    import torch
    from run import Clock, Setting, ceilings, use_measured

    use_measured(_device())
    clock = Clock(_device(), 1 if dry else 20, dry)
    some = ["eager", "auto"] if dry else []  # the interpreter says nothing about speed
    return Setting(clock, torch.bfloat16, ceilings(clock, torch.bfloat16, dry), some)


def _measure(walk: Walk, name: str, case: Any, model: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from run import measure

    _needs_device(walk)
    setting = _setting(walk.dry)
    rows = [asdict(row) for row in measure(name, case, model, setting)]
    short = [{key: value for key, value in row.items() if value not in (None, "")} for row in rows]
    wrong = [row["contender"] for row in rows if row["agrees"] is False]
    return {"rows": short, "ceilings": setting.rates, **({"wrong": wrong} if wrong else {})}


def train(walk: Walk, folder: Path) -> Units:
    """`launch.py` at the widths of 1B and 8B models, by number format: tokens a second, peak memory, losses."""
    if walk.dry:
        some = {f"tiny {precision} triton": (TINY, precision, "triton") for precision in PRECISIONS[:2]}
        return {unit: functools.partial(_launch, walk, folder, unit, *given) for unit, given in some.items()}
    found: Units = {}
    for (shape, model), precision, kernels in itertools.product(SHAPES.items(), PRECISIONS, ("triton", "te")):
        unit = f"{shape} {precision} {kernels}"
        found[unit] = functools.partial(_launch, walk, folder, unit, model, precision, kernels)
    return found


def _launch(
    walk: Walk, folder: Path, unit: str, model: tuple[str, Mapping[str, int]], precision: str, kernels: str
) -> dict[str, Any]:
    if kernels == "te" and importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("TransformerEngine is not installed")
    if not walk.dry and not Path("/dev/nvidiactl").exists():
        raise Skipped("there is no GPU here; --dry-run walks this on a CPU")
    runs = folder / "runs" / unit.replace(" ", "-")
    steps, length = (3, 16) if walk.dry else (STEPS, SEQUENCE)
    words = [f"model={model[0]}", *(f"model.{key}={value}" for key, value in model[1].items())]
    words += ["parallel=single", f"precision={precision}", f"kernels={kernels}", "data=mock"]
    words += ["kernels.attention=torch"] if kernels == "triton" and not walk.dry else []  # cuDNN's and torch's first
    ends = [f"precision.num_layers_at_{end}_in_bf16=0" for end in ("start", "end")]
    words += ends if walk.dry and precision == "fp8_tensorwise" else []  # two layers are all that it has
    words += [f"data.seq_length={length}", f"trainer.train_iters={steps}", f"trainer.profile_step={steps}"]
    words += ["trainer.micro_batch_size=1", f"trainer.global_batch_size={1 if walk.dry else 4}"]
    words += ["trainer.eval_iters=0", "trainer.eval_interval=null", "trainer.sample_tokens=0", "log.progress=none"]
    words += ["checkpoint.save_interval=null", "checkpoint.save_final=false", f"log.runs_dir={runs}"]
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels"), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"launch.py ended with {done.returncode}: {lines[-1] if lines else ''}")
    run = max(runs.iterdir(), key=lambda path: path.stat().st_mtime)
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    late = rows[len(rows) // 3 : -1] or rows  # behind the first steps, which compile, and before the profiled one
    peak = json.loads((run / "memory.json").read_text()) if (run / "memory.json").exists() else {}
    keys = ("tokens_per_s", "tflops_per_rank", "mfu", "step_s")
    found = {key: statistics.median(row[key] for row in late) for key in keys if all(key in row for row in late)}
    return {"run": str(run), "losses": [row["loss"] for row in rows], **found, **peak, "command": " ".join(words)}


def rivals(walk: Walk, folder: Path) -> Units:
    """The same models by transformers: with Liger's kernels and torch.compile, where they are installed.

    Liger's replace those of transformers in the whole process: what is measured without them comes first.
    """
    if walk.dry:
        return {"tiny transformers": functools.partial(_transformers, walk, TINY, False, False)}
    return {
        f"{shape} transformers{' liger' * liger}{' compiled' * compiled}": functools.partial(
            _transformers, walk, model, liger, compiled
        )
        for liger, compiled in ((False, False), (True, False), (True, True))
        for shape, model in SHAPES.items()
    }


def _transformers(walk: Walk, model: tuple[str, Mapping[str, int]], liger: bool, compiled: bool) -> dict[str, Any]:
    for name in ("transformers", *(("liger_kernel",) if liger else ())):
        if importlib.util.find_spec(name) is None:
            raise Skipped(f"{name} is not installed")
    _needs_device(walk)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    device = _device()
    if device.type == "cuda":  # the peak is this model's, and not the one's before
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    sizes = LlamaConfig(**_hugging_face(model), attn_implementation="sdpa", use_cache=False)
    with torch.device(device):
        net = LlamaForCausalLM(sizes).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")
    forward = torch.compile(net) if compiled else net
    steps, length, micro = (2, 16, 1) if walk.dry else (STEPS, SEQUENCE, 4)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        for _ in range(micro):
            tokens = torch.randint(0, net.config.vocab_size, (1, length), device=device)
            loss = forward(input_ids=tokens, labels=tokens).loss / micro
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    step = statistics.median(times[len(times) // 3 :])
    found = {"tokens_per_s": micro * length / step, "step_s": step, "note": "weights and moments in bf16"}
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {})


def _hugging_face(model: tuple[str, Mapping[str, int]]) -> dict[str, Any]:
    """The sizes of a model of ours under the names of transformers."""
    import yaml

    m = yaml.safe_load((ROOT / "conf/model" / f"{model[0]}.yaml").read_text()) | dict(model[1])
    names = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}
    names |= {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
    names |= {"tie_word_embeddings": "tie_word_embeddings"}
    same = ("hidden_size", "num_attention_heads", "vocab_size")
    return {names.get(key, key): value for key, value in m.items() if key in names or key in same}


def profile(walk: Walk, folder: Path) -> Units:
    """Of each traced step of `train`: how busy the device was, its ten longest gaps, and what took longest."""
    from first_touch import Results

    lines = [line for line in Results(folder).lines() if line["stage"] == "train" and "result" in line]
    return {line["unit"]: functools.partial(_gaps, Path(line["result"]["run"])) for line in lines}


def _gaps(run: Path) -> dict[str, Any]:
    traces = sorted(run.rglob("*trace*.json*"))
    if not traces:
        raise Skipped(f"{run} holds no trace")
    import gzip

    path = traces[-1]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return gaps_of(json.loads(text)["traceEvents"])


def gaps_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Busy share, longest gaps and longest kernels of a torch.profiler trace; times in microseconds.

    Of kernels and copies on a GPU; where there are none, of what the host computed.
    """
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_gpu = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = sorted(on_gpu or [e for e in timed if e.get("cat") == "cpu_op"], key=lambda event: float(event["ts"]))
    if not work:
        raise Skipped("the trace holds no kernel")
    gaps, busy, totals = [], 0.0, dict[str, float]()
    end, last = float(work[0]["ts"]), work[0]["name"]
    for event in work:
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        totals[event["name"]] = totals.get(event["name"], 0.0) + float(event["dur"])
        if start > end:
            gaps.append({"us": round(start - end, 1), "behind": last[:80], "before": event["name"][:80]})
        if stop > end:
            busy += stop - max(start, end)
            end, last = stop, event["name"]
    whole = end - float(work[0]["ts"])
    longest = sorted(totals.items(), key=lambda item: -item[1])[:GAPS]
    return {
        "of": "kernels" if on_gpu else "operations of the host",
        "step_us": round(whole, 1),
        "busy_share": round(busy / whole, 4) if whole else 1.0,
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:GAPS],
        "longest": [{"us": round(us, 1), "name": name[:80]} for name, us in longest],
    }


UNITS: dict[str, Callable[[Walk, Path], Units]] = {
    "environment": environment,
    "parity": parity,
    "autotune": autotune,
    "ops": measured,
    "train": train,
    "rivals": rivals,
    "profile": profile,
}
"""Stage -> its units for a walk."""
