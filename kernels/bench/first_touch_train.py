"""Stages of `first_touch.py` about whole models: training, transformers next to it, and where a
step's time goes.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from first_touch_device import Skipped, device_here, needs_device
from first_touch_results import ROOT, Results, Walk, tree_environment

Units = dict[str, Callable[[], Any]]
STEPS = 12
SEQUENCE = 4096
# The second has the widths of an 8B model and as many of its layers as one device has memory for
# with AdamW.
SHAPES = {"1b": ("llama32_1b", {}), "8b": ("llama3_8b", {"num_layers": 8})}
TINY = (
    "llama_tiny",
    {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "vocab_size": 128},
)
PRECISIONS = ("bf16", "fp8_tensorwise", "fp8_blockwise")
GAPS = 10


def train(walk: Walk, folder: Path) -> Units:
    """Run `launch.py` at the widths of 1B and 8B models, by number format: tokens a second, peak
    memory, losses.

    What is compared with the goals comes first; TransformerEngine's layers come last.
    """
    if walk.dry:
        models = {"tiny": TINY}
        if walk.whole:
            some = [("tiny", form, "triton") for form in PRECISIONS[:2]]
        else:
            some = [("tiny", "bf16", "auto")]
    else:
        models = SHAPES
        some = [(shape, form, "triton") for form in PRECISIONS for shape in SHAPES]
        some += [
            ("8b", "bf16", "auto"),
            *((shape, form, "te") for form in PRECISIONS for shape in SHAPES),
        ]
    return {
        f"{shape} {form} {kernels}": functools.partial(
            _launch, walk, folder, f"{shape} {form} {kernels}", models[shape], form, kernels
        )
        for shape, form, kernels in some
    }


def words_of(
    walk: Walk, model: tuple[str, Mapping[str, int]], precision: str, kernels: str
) -> list[str]:
    """Return the configuration of a shape: one rank, mock data, four micro-batches of
    one sample.
    """
    steps, length = (3, 16) if walk.dry else (STEPS, SEQUENCE)
    words = [f"model={model[0]}", *(f"model.{key}={value}" for key, value in model[1].items())]
    words += ["parallel=single", f"precision={precision}", f"kernels={kernels}", "data=mock"]
    if walk.dry:
        words += ["cluster=cpu"]
        ends = [f"precision.num_layers_at_{end}_in_bf16=0" for end in ("start", "end")]
        words += ends if precision == "fp8_tensorwise" else []  # two layers are all that it has
    elif kernels == "triton":
        words += ["kernels.attention=torch"]  # cuDNN's and torch's first
    words += [f"data.seq_length={length}", f"trainer.train_iters={steps}"]
    words += ["trainer.micro_batch_size=1", f"trainer.global_batch_size={1 if walk.dry else 4}"]
    words += [
        "trainer.eval_iters=0",
        "trainer.eval_interval=0",
        "trainer.sample_tokens=0",
        "log.progress=none",
    ]
    return [*words, "checkpoint.save_interval=0", "checkpoint.save_final=false"]


def _launch(
    walk: Walk,
    folder: Path,
    unit: str,
    model: tuple[str, Mapping[str, int]],
    precision: str,
    kernels: str,
) -> dict[str, Any]:
    if kernels == "te" and importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("TransformerEngine is not installed")
    if not walk.dry and not Path("/dev/nvidiactl").exists():
        raise Skipped("there is no GPU here; --dry-run walks this on a CPU")
    runs = folder / "runs" / unit.replace(" ", "-")
    words = words_of(walk, model, precision, kernels)
    more = [f"trainer.profile_step={3 if walk.dry else STEPS}", f"log.runs_dir={runs}"]
    command = [sys.executable, str(ROOT / "launch.py"), *words, *more]
    with DriverMemory() as driver:
        done = subprocess.run(
            command, capture_output=True, text=True, env=tree_environment(), cwd=ROOT
        )
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"launch.py ended with {done.returncode}: {lines[-1] if lines else ''}")
    run = max(runs.iterdir(), key=lambda path: path.stat().st_mtime)
    rows = [
        row
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    ]
    # behind the first steps, which compile, and before the profiled one
    late = rows[len(rows) // 3 : -1] or rows
    peak = json.loads((run / "memory.json").read_text()) if (run / "memory.json").exists() else {}
    keys = ("tokens_per_s", "tflops_per_rank", "mfu", "step_s")
    found = {
        key: statistics.median(row[key] for row in late)
        for key in keys
        if all(key in row for row in late)
    }
    found |= {"driver_peak_bytes": driver.peak_bytes} if driver.peak_bytes else {}
    return {
        "run": str(run),
        "losses": [row["loss"] for row in rows],
        **found,
        **peak,
        "command": " ".join(words),
    }


class DriverMemory:
    """The most memory of the first device that its driver says is in use inside, sampled; None
    without nvidia-smi.
    """

    EVERY_S = 0.5

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> DriverMemory:
        if shutil.which("nvidia-smi"):
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()

    def _watch(self) -> None:
        ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not self.over.wait(self.EVERY_S):
            said = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
            if said.isdigit():
                self.peak_bytes = max(self.peak_bytes or 0, int(said) << 20)


def rivals(walk: Walk, folder: Path) -> Units:
    """Return the same models by transformers: with Liger's kernels and torch.compile, where they
    are installed.

    Liger's replace those of transformers in the whole process: what is measured without them comes
    first.
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


def _transformers(
    walk: Walk, model: tuple[str, Mapping[str, int]], liger: bool, compiled: bool
) -> dict[str, Any]:
    for name in ("transformers", *(("liger_kernel",) if liger else ())):
        if importlib.util.find_spec(name) is None:
            raise Skipped(f"{name} is not installed")
    needs_device(walk)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    device = device_here()
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
    found = {
        "tokens_per_s": micro * length / step,
        "step_s": step,
        "note": "weights and moments in bf16",
    }
    return found | (
        {"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}
    )


def _hugging_face(model: tuple[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the sizes of a model of ours under the names of transformers."""
    import yaml

    m = yaml.safe_load((ROOT / "conf/model" / f"{model[0]}.yaml").read_text()) | dict(model[1])
    names = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}
    names |= {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
    names |= {"tie_word_embeddings": "tie_word_embeddings"}
    same = ("hidden_size", "num_attention_heads", "vocab_size")
    return {names.get(key, key): value for key, value in m.items() if key in names or key in same}


def profile(walk: Walk, folder: Path) -> Units:
    """Read each traced step of `train`: how busy the device was, its longest gaps, and the longest
    kernels.
    """
    trained = Results(folder).ends("train")
    return {
        unit: functools.partial(_gaps, Path(line["result"]["run"]))
        for unit, line in trained.items()
        if "result" in line
    }


def _gaps(run: Path) -> dict[str, Any]:
    traces = sorted(run.rglob("*trace*.json*"))
    if not traces:
        raise Skipped(f"{run} holds no trace")
    import gzip

    path = traces[-1]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return gaps_of(json.loads(text)["traceEvents"])


def gaps_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return busy share, longest gaps and longest kernels of a torch.profiler trace; times in
    microseconds.

    Of kernels and copies on a GPU; without them, of what the host computed.
    """
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_gpu = [
        event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    work = sorted(
        on_gpu or [e for e in timed if e.get("cat") == "cpu_op"],
        key=lambda event: float(event["ts"]),
    )
    if not work:
        raise Skipped("the trace holds no kernel")
    gaps = []
    busy = 0.0
    totals: dict[str, float] = {}
    end = float(work[0]["ts"])
    last = work[0]["name"]
    for event in work:
        start = float(event["ts"])
        stop = start + float(event["dur"])
        totals[event["name"]] = totals.get(event["name"], 0.0) + float(event["dur"])
        if start > end:
            gaps.append(
                {"us": round(start - end, 1), "behind": last[:80], "before": event["name"][:80]}
            )
        if stop > end:
            busy += stop - max(start, end)
            end = stop
            last = event["name"]
    whole = end - float(work[0]["ts"])
    longest = sorted(totals.items(), key=lambda item: -item[1])[:GAPS]
    return {
        "of": "kernels" if on_gpu else "operations of the host",
        "step_us": round(whole, 1),
        "busy_share": round(busy / whole, 4) if whole else 1.0,
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:GAPS],
        "longest": [{"us": round(us, 1), "name": name[:80]} for name, us in longest],
    }
