"""The contenders of `host_cost.py`: mtrain, megatron-core's own layers, and transformers, with
layers of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SEQUENCE = 16
MICRO_BATCHES = 4
SIZES = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 512,
}
"""Small enough that a GEMM takes 12 microseconds, about as long as cuBLAS takes the host; large
enough for blocks of FP8.
"""
FORMATS = {
    "bf16": ["precision=bf16"],
    "fp8 tensorwise": [
        "precision=fp8_tensorwise",
        "precision.num_layers_at_start_in_bf16=0",
        "precision.num_layers_at_end_in_bf16=0",
    ],
    "fp8 blockwise": ["precision=fp8_blockwise"],
}


@dataclass(frozen=True)
class Contender:
    """One that trains."""

    name: str
    step: Callable[[], None]
    """Runs forward, backward and update of a step."""
    layers: list[Any]
    period: int = 1
    """Layers after which the pattern of kinds of layers repeats."""


@dataclass(frozen=True)
class Kind:
    """A kind of layers: keys of mtrain's model, and the same model of transformers."""

    words: list[str]
    formats: tuple[str, ...] = tuple(FORMATS)
    sizes: dict[str, int] = field(default_factory=dict)


KINDS = {"dense": Kind(["model=llama_tiny"])}


@contextmanager
def contenders(kind: str, layers: int, overrides: list[str]) -> Iterator[list[Contender]]:
    """Yield all that train this kind of layers, in one world of one rank."""
    from mtrain.api import load
    from mtrain.world.init import joined

    chosen = KINDS[kind]
    runs = {
        form: load(words_of(chosen, layers, form, overrides)).run for form in chosen.formats
    }
    plain = load(words_of(chosen, layers, "bf16", [], kernels="reference")).run
    with joined(plain) as world:
        found = [mtrain(f"mtrain {form}", one, world) for form, one in runs.items()]
        found.append(megatron(plain, world))
        found.append(transformers(plain))
        yield found


def words_of(
    kind: Kind, layers: int, form: str, overrides: list[str], kernels: str = "triton"
) -> list[str]:
    """Return the words of mtrain's configuration."""
    sizes = SIZES | kind.sizes | {"num_layers": layers}
    return [
        *kind.words,
        *(f"model.{key}={value}" for key, value in sizes.items()),
        f"kernels={kernels}",
        *FORMATS[form],
        "cluster=cpu",
        "parallel=single",
        "data=mock",
        f"data.seq_length={SEQUENCE}",
        "trainer.micro_batch_size=1",
        f"trainer.global_batch_size={MICRO_BATCHES}",
        "trainer.eval_iters=0",
        *overrides,
    ]


def longest(model: Any) -> list[Any]:
    """Return the layers of a model: its longest list of modules called `layers`."""
    lists = [module.layers for module in model.modules() if hasattr(module, "layers")]
    return list(max(lists, key=len))


def mtrain(name: str, run: Any, world: Any) -> Contender:
    """Return mtrain's own step, without the hooks of a run."""
    from mtrain.mcore.adapter.op_overrides import override_operations
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step

    parts = assemble(run, world, splits_of(run))

    score = run.model.moe.group_score_topk if run.model.moe else None

    def step() -> None:
        # Functions of megatron-core that kernels stand for are those of the whole process.
        override_operations(run.kernels, score)
        train_step(parts, stop_requested=False)

    return Contender(name, step, longest(parts.state.chunks[0]))


def megatron(run: Any, world: Any) -> Contender:
    """Return a bare loop over megatron-core's own objects: local layer specs, data parallelism,
    optimizer.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mtrain.assembly.optim import build_optimizer
    from mtrain.assembly.transformer import transformer_config
    from mtrain.config.engine.core_fields import DDP_FIELDS, GPT_FIELDS, values
    from mtrain.mcore import api
    from mtrain.mcore.adapter.op_overrides import override_operations

    config = transformer_config(run, world.device)
    spec = get_gpt_layer_local_spec(normalization=run.model.normalization)
    gpt = api.GPTModel(
        config=config, transformer_layer_spec=spec, parallel_output=True, **values(GPT_FIELDS, run)
    )
    ddp = api.DistributedDataParallelConfig(**values(DDP_FIELDS, run))
    model = api.DistributedDataParallel(config, ddp, api.Float16Module(config, gpt))
    optimizer = build_optimizer(run, [model])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = api.finalize_model_grads
    schedule = api.get_forward_backward_func()
    positions = torch.arange(SEQUENCE).expand(1, -1).contiguous()
    tokens = torch.randint(0, run.model.vocab_size, (1, SEQUENCE))

    def loss_of(losses: Any) -> Any:
        total = losses.float().sum()
        count = torch.tensor(losses.numel())
        return total, count.int(), {"loss": total.detach()}

    def forward(iterator: Any, module: Any) -> Any:
        return module(tokens, positions, None, labels=tokens), loss_of

    def step() -> None:
        override_operations(run.kernels)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward,
            data_iterator=iter(()),
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()

    return Contender("megatron-core bf16", step, longest(model))


def transformers(run: Any) -> Contender:
    """Return transformers' eager loop in bf16, with torch's fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    m = run.model
    config = LlamaConfig(
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.query_groups,
        vocab_size=m.padded_vocab_size,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, m.vocab_size, (1, SEQUENCE))

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Contender("transformers", step, longest(model))
