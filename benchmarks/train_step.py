"""A training step of mtrain against megatron-core's and Hugging Face transformers', on one Llama of
26M parameters.

    python benchmarks/train_step.py [--steps 20] [--threads 2] [--out FILE] [--dtypes fp32 bf16]
    [OVERRIDES ...]

All train in this process, on one rank, from the same weights and samples, in turn and in an order
that alternates. A ratio is another's seconds in a round divided by mtrain's (above 1: mtrain is
faster), the median over the rounds with its quartiles, of wall and of CPU time. A busy machine
disturbs CPU time least, but with several threads it includes waiting. mtrain does not depend on
transformers: install it for its rows.

- `mtrain`: the whole step, with reading samples, the report over all ranks and the hooks of a
  training run.
- `megatron-core`: its GPTModel of its local layer specs, its DistributedDataParallel and optimizer,
  in a bare loop.
- `transformers`: LlamaForCausalLM, its loss, gradient clipping, and the fused AdamW that is its
  Trainer's default. In bf16 there are two: `transformers`, all in bf16 without the fp32 main
  weights that mtrain has; and `transformers, autocast`, fp32 weights under autocast, as with
  `TrainingArguments(bf16=True)`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

MODEL = {
    "name": "llama_26m",
    "num_layers": 8,
    "hidden_size": 384,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 6,
    "num_query_groups": 6,
    "vocab_size": 16384,
}
WORDS = [
    "model=llama_tiny",
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    "parallel=single",
    "data=mock",
]
WORDS += ["data.seq_length=256", "trainer.global_batch_size=4", "trainer.micro_batch_size=4"]
Step = Callable[[], float]


def main() -> int:
    """Run the comparison and print it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument(
        "--matmul", nargs="+", choices=["auto", "blas", "onednn"], default=["auto"],
        help="mtrain's fp32 products: by torch's BLAS, by oneDNN, or by what is faster here (auto)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=int, metavar="N", help="also the N operations of a step that cost most"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    result: dict[str, Any] = {}
    for dtype in options.dtypes:
        # torch computes half-precision products by oneDNN, whatever the choice
        libraries = options.matmul if dtype == "fp32" else ["auto"]
        for matmul in libraries:
            words = [
                *WORDS,
                f"precision={dtype}",
                f"kernels.cpu_matmul={matmul}",
                *options.overrides,
            ]
            name = dtype if matmul == "auto" else f"{dtype}, {matmul}"
            result[name] = measured(words, options.steps, options.profile or 0)
            print(json.dumps({name: result[name]}, indent=2), flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({**result, **circumstances(options.threads)}, indent=2) + "\n"
        )
    return 0


def measured(words: list[str], steps: int, profiled: int = 0) -> dict[str, Any]:
    """Return the median seconds of a step of each contender, and the ratios to mtrain."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry
    from mtrain.launching import matmul

    adapter.install(registry.get("cpu"))
    import torch

    from mtrain.world.init import joined

    run = matmul.chosen(load(words).run)
    threads = int(os.environ["OMP_NUM_THREADS"])
    with joined(run) as world, tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(threads)
        ours, chunk = mtrain_step(run, world, Path(folder))
        contenders: dict[str, Step] = {
            "mtrain": ours,
            "megatron-core": core_step(run, world, chunk),
        }
        contenders |= transformers_steps(run, chunk)
        first = {name: step() for name, step in contenders.items()}
        close = 1e-4 if run.precision.dtype == "fp32" else 2e-2
        assert all(abs(x - first["mtrain"]) < close for x in first.values()), (
            f"they compute differently: {first}"
        )
        for step in contenders.values():
            step()
        if profiled:
            most = {name: costliest(step, profiled) for name, step in contenders.items()}
        else:
            most = {}
        clocks = {"wall": time.perf_counter, "cpu": time.process_time}
        seconds: dict[str, dict[str, list[float]]] = {
            c: {name: [] for name in contenders} for c in clocks
        }
        for i in range(steps):
            for name, step in list(contenders.items())[:: 1 - 2 * (i % 2)]:
                begin = {c: clock() for c, clock in clocks.items()}
                step()
                for c, clock in clocks.items():
                    seconds[c][name].append(clock() - begin[c])
    tokens = run.trainer.batch * run.data.seq_length
    return {
        **{c: compared(values) for c, values in seconds.items()},
        "kernels.cpu_matmul": [run.kernels.cpu_matmul, matmul.reason(run)],
        "tokens_a_step": tokens,
        "first_losses": first,
        **({"milliseconds_of_operations": most} if most else {}),
    }


def costliest(step: Step, count: int) -> dict[str, float]:
    """Return the milliseconds of a step's most expensive operations, by name and largest shape.

    Times are those of the calling thread, the least of three steps. An operation of mtrain's own is
    counted as a whole.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Timed(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: dict[str, float] = {}

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            begin = time.thread_time()
            out = func(*args, **(kwargs or {}))
            took = time.thread_time() - begin
            shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            name = f"{func} {list(max(shapes, key=math.prod)) if shapes else ''}".strip()
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            return out

    least: dict[str, float] = {}
    for _ in range(3):
        with Timed() as timed:
            step()
        least = {name: min(took, least.get(name, took)) for name, took in timed.seconds.items()}
    ranked = sorted(least.items(), key=lambda item: -item[1])[:count]
    return {"all": round(1e3 * sum(least.values()), 1)} | {
        name: round(1e3 * took, 1) for name, took in ranked
    }


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and for each other contender the median and quartiles of its ratio to mtrain
    in a round.
    """
    out: dict[str, Any] = {"rounds": len(seconds["mtrain"]), "median_seconds": {}, "ratios": {}}
    for name, values in seconds.items():
        out["median_seconds"][name] = statistics.median(values)
        if name != "mtrain":
            ratios = [theirs / ours for theirs, ours in zip(values, seconds["mtrain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            out["ratios"][name] = {"median": middle, "quartiles": [low, high]}
    return out


def mtrain_step(run: Any, world: Any, folder: Path) -> tuple[Step, Any]:
    """Return one step of a training run with its hooks, and the model."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import HookList
    from mtrain.train.hooks.metrics import Metrics
    from mtrain.train.hooks.progress import Progress
    from mtrain.train.loop.step import train_step
    from mtrain.train.loop.trainer import report_step

    parts = assemble(run, world, splits_of(run))
    log = run.log.model_copy(update={"progress": "none"})
    progress = Progress(run.model_copy(update={"log": log}), speaks=True)
    metrics = Metrics(folder)
    chain = [metrics, progress]
    parts.hooks = HookList(chain)
    parts.hooks.call("start", parts)

    def step() -> float:
        result = train_step(parts, stop_requested=False)
        report_step(parts, result)
        return result.loss

    return step, parts.state.chunks[0]


def samples(run: Any) -> Iterator[tuple[Any, Any]]:
    """Yield tokens and labels [batch, seq] of one step after another, as mtrain draws them."""
    import numpy as np
    import torch

    from mtrain.data import open_splits, prepare

    train = open_splits(
        run.data, run.model.vocab_size, run.trainer.seed, prepare(run.data), ("train",)
    ).train
    batch = run.trainer.batch
    used = 0
    while True:
        windows = torch.from_numpy(train.batch(np.arange(used, used + batch)))
        used += batch
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def core_step(run: Any, world: Any, chunk: Any) -> Step:
    """Return a bare loop over megatron-core's own objects: local layer specs, data parallelism and
    optimizer.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mtrain.assembly.model import transformer_config
    from mtrain.assembly.optim import build_optimizer, build_schedule
    from mtrain.config.engine.core_fields import DDP_FIELDS, GPT_FIELDS, values
    from mtrain.mcore import api
    from mtrain.mcore.state.local_params import unwrap

    config = transformer_config(run, world.device)
    spec = get_gpt_layer_local_spec(normalization=run.model.normalization)
    gpt = api.GPTModel(
        config=config, transformer_layer_spec=spec, parallel_output=True, **values(GPT_FIELDS, run)
    )
    if run.precision.dtype != "fp32":
        gpt = api.Float16Module(config, gpt)
    unwrap(gpt).load_state_dict(unwrap(chunk).state_dict())
    model = api.DistributedDataParallel(
        config, api.DistributedDataParallelConfig(**values(DDP_FIELDS, run)), gpt
    )
    optimizer = build_optimizer(run, [model])
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            group["fused"] = None  # as megatron-core makes it
    schedule = build_schedule(run, optimizer)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = api.finalize_model_grads
    drawn = samples(run)
    run_schedule = api.get_forward_backward_func()
    positions = torch.arange(run.data.seq_length).expand(run.trainer.micro, -1).contiguous()

    def loss_of(losses: Any) -> Any:
        total = losses.float().sum()
        count = torch.tensor(losses.numel())
        return total, count.int(), {"loss": total.detach() / count}

    def step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = run_schedule(
            forward_step_func=lambda it, module: (
                lambda t, y: (module(t, positions, None, labels=y), loss_of)
            )(*next(it)),
            data_iterator=iter([next(drawn)]),
            model=model,
            num_microbatches=1,
            seq_length=run.data.seq_length,
            micro_batch_size=run.trainer.micro,
            forward_only=False,
        )
        schedule.step(1)
        optimizer.step()
        return float(reports[0]["loss"])

    return step


def transformers_steps(run: Any, chunk: Any) -> dict[str, Step]:
    """Return steps of Hugging Face's Llama with the same weights, or {} without transformers."""
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: it has no rows", file=sys.stderr)
        return {}
    import torch

    weights = llama_weights(run, chunk)
    m = run.model
    half = run.precision.dtype == "bf16"

    def contender(dtype: Any, autocast: bool) -> Step:
        config = transformers.LlamaConfig(
            hidden_size=m.hidden_size,
            intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_attention_heads,
            num_key_value_heads=m.query_groups,
            vocab_size=m.padded_vocab_size,
            rms_norm_eps=m.layernorm_epsilon,
            max_position_embeddings=m.max_position_embeddings,
            rope_theta=m.rotary_base,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        model = transformers.LlamaForCausalLM(config)
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not missing, missing
        assert not unexpected, unexpected
        model = model.to(dtype).train()
        o = run.optim
        drawn = samples(run)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=1e-5,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=True,
        )

        def step() -> float:
            tokens, labels = next(drawn)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(
                    input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False
                ).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad or 1.0)
            optimizer.step()
            return float(loss.detach())

        return step

    if not half:
        return {"transformers": contender(torch.float32, False)}
    return {
        "transformers": contender(torch.bfloat16, False),
        "transformers, autocast": contender(torch.float32, True),
    }


def llama_weights(run: Any, chunk: Any) -> dict[str, Any]:
    """Return the model's weights under the names of Hugging Face's Llama, in fp32."""
    from mtrain.mcore.state.local_params import unwrap

    state = {k: v.detach().float().clone() for k, v in unwrap(chunk).named_parameters()}
    m = run.model
    out = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    each = m.num_attention_heads // m.query_groups
    size = m.head_dim
    for i in range(m.num_layers):
        ours = f"decoder.layers.{i}."
        theirs = f"model.layers.{i}."
        qkv = state[f"{ours}self_attention.linear_qkv.weight"].view(
            m.query_groups, each + 2, size, m.hidden_size
        )
        for name, part in zip("qkv", qkv.split([each, 1, 1], dim=1), strict=True):
            out[f"{theirs}self_attn.{name}_proj.weight"] = part.reshape(-1, m.hidden_size)
        out[f"{theirs}self_attn.o_proj.weight"] = state[f"{ours}self_attention.linear_proj.weight"]
        gate, up = state[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        out |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
        out[f"{theirs}mlp.down_proj.weight"] = state[f"{ours}mlp.linear_fc2.weight"]
        out[f"{theirs}input_layernorm.weight"] = state[f"{ours}input_layernorm.weight"]
        out[f"{theirs}post_attention_layernorm.weight"] = state[f"{ours}pre_mlp_layernorm.weight"]
    return out


def circumstances(threads: int) -> dict[str, Any]:
    """Return the device, load, versions, commit and command of the measurement."""
    from mtrain.launching.matmul import processor

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    words = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {
        "device": f"cpu ({processor()}), {threads} threads",
        "load_at_the_end": os.getloadavg()[0],
        "versions": versions,
        "commit": commit,
        "command": f"python {words}",
    }


if __name__ == "__main__":
    raise SystemExit(main())
