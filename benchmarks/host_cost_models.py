"""The contenders of `host_cost.py`: mtrain, megatron-core's own layers, and transformers, with
layers of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

SEQUENCE = 16
MICRO_BATCHES = 4
SIZES = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 2,
    "vocab_size": 512,
}
"""Small enough that a GEMM takes 12 microseconds, and whole blocks of FP8."""
HEADS = {"num_query_groups": 1, "kv_channels": 16}
"""torch's attention takes a CPU 8 microseconds forward and 33 backward with these; the backward
took 200 with four heads of 32.
"""
FORMATS = {
    "bf16": ("precision=bf16",),
    "fp8 tensorwise": (
        "precision=fp8_tensorwise",
        "precision.num_layers_at_start_in_bf16=0",
        "precision.num_layers_at_end_in_bf16=0",
    ),
    "fp8 blockwise": ("precision=fp8_blockwise",),
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
    """A kind of layers."""

    about: str
    words: tuple[str, ...]
    """Keys of mtrain's configuration."""
    config: Callable[[Any], Any]
    """Makes transformers' config from mtrain's section `model`."""
    pattern: str = ""
    """Letters of `model.hybrid.pattern` that repeat; "" for layers that are all alike."""
    megatron: str | None = None
    """Reason why plain megatron-core cannot train them here; None if it can."""

    @property
    def period(self) -> int:
        """Return how many layers repeat."""
        return len(self.pattern) or 1


def _sizes(m: Any) -> dict[str, Any]:
    return {
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.query_groups,
        "vocab_size": m.padded_vocab_size,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }


def _llama(m: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_sizes(m), head_dim=m.head_dim)


def _mixtral(m: Any) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **_sizes(m) | {"intermediate_size": m.moe.ffn_hidden_size},
        head_dim=m.head_dim,
        num_local_experts=m.moe.num_experts,
        num_experts_per_tok=m.moe.router_topk,
        sliding_window=None,
        output_router_logits=True,
        router_aux_loss_coef=m.moe.aux_loss_coeff,
    )


def _deepseek(m: Any) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_sizes(m),
        first_k_dense_replace=m.num_layers,
        q_lora_rank=m.mla.q_lora_rank,
        kv_lora_rank=m.mla.kv_lora_rank,
        qk_nope_head_dim=m.mla.qk_head_dim,
        qk_rope_head_dim=m.mla.qk_pos_emb_head_dim,
        v_head_dim=m.mla.v_head_dim,
    )


def _nemotron_h(m: Any) -> Any:
    from transformers import NemotronHConfig

    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return NemotronHConfig(
        **_sizes(m),
        head_dim=m.head_dim,
        layers_block_type=[kinds[letter] for letter in m.hybrid.pattern],
        mamba_num_heads=m.hybrid.num_heads,
        mamba_head_dim=m.hybrid.head_dim,
        ssm_state_size=m.hybrid.state_dim,
        n_groups=m.hybrid.num_groups,
        chunk_size=m.hybrid.chunk_size,
    )


def _words(sizes: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"model.{key}={value}" for key, value in sizes.items())


MLA = (
    "{q_lora_rank: 64, kv_lora_rank: 32, qk_head_dim: 16, qk_pos_emb_head_dim: 16, v_head_dim: 16}"
)
KINDS = {
    "dense": Kind(
        "Llama: grouped-query attention and SwiGLU",
        ("model=llama_tiny", *_words(HEADS)),
        _llama,
    ),
    "moe": Kind(
        "Mixtral: the same attention, 4 experts, 2 for a token",
        ("model=mixtral_tiny", *_words(HEADS), "model.moe.ffn_hidden_size=128"),
        _mixtral,
    ),
    "mla": Kind(
        "DeepSeek-V3's attention with a dense SwiGLU",
        (
            "model=deepseek_tiny",
            "model.moe=null",
            "model.mtp_num_layers=null",
            "model.mtp_loss_scaling_factor=null",
            f"model.mla={MLA}",
        ),
        _deepseek,
        megatron="its local attention has one width for keys and values",
    ),
    "hybrid": Kind(
        "Nemotron-H: Mamba-2, MLP, attention, MLP; a layer is one of the four",
        (
            "model=nemotron_h_tiny",
            *_words(HEADS),
            "model.hybrid.num_heads=16",
            "model.hybrid.head_dim=8",
            "model.hybrid.num_groups=1",
            "model.hybrid.chunk_size=16",
        ),
        _nemotron_h,
        pattern="M-*-",
        megatron="its Mamba mixer needs mamba_ssm, which needs a GPU",
    ),
}


@contextmanager
def contenders(kind: Kind, layers: int, overrides: list[str]) -> Iterator[list[Contender]]:
    """Yield all that train this kind of layers, in one world of one rank."""
    from mtrain.api import load
    from mtrain.world.init import joined

    layers = max(layers, 3 * kind.period)
    runs = {form: load(words_of(kind, layers, form, overrides)).run for form in FORMATS}
    plain = load(words_of(kind, layers, "bf16", [], kernels="reference")).run
    with joined(plain) as world:
        found = [mtrain(f"mtrain {form}", one, world, kind) for form, one in runs.items()]
        if kind.megatron is None:
            found.append(megatron(plain, world))
        if find_spec("transformers") is not None:
            found.append(transformers(plain, kind))
        yield found


def words_of(
    kind: Kind, layers: int, form: str, overrides: list[str], kernels: str = "triton"
) -> list[str]:
    """Return the words of mtrain's configuration."""
    layers -= layers % kind.period
    pattern = [f"model.hybrid.pattern={kind.pattern * (layers // kind.period)}"]
    on_gpu = []
    if kernels == "triton":
        # What mtrain chooses on a GPU, and a CPU does not.
        on_gpu = ["kernels.gradient_accumulation_fusion=true"]
        on_gpu += ["kernels.linear=torch"] if form == "bf16" else []
    return [
        *kind.words,
        *_words(SIZES | {"num_layers": layers}),
        *(pattern if kind.pattern else []),
        f"kernels={kernels}",
        *on_gpu,
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


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model: its longest list of modules called `layers`."""
    lists = [module.layers for module in model.modules() if hasattr(module, "layers")]
    return list(max(lists, key=len))


def mtrain(name: str, run: Any, world: Any, kind: Kind) -> Contender:
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

    return Contender(name, step, layers_of(parts.state.chunks[0]), kind.period)


def megatron(run: Any, world: Any) -> Contender:
    """Return a bare loop over megatron-core's own objects: local layer specs, data parallelism,
    optimizer.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mtrain.assembly.model import transformer_config
    from mtrain.assembly.optim import build_optimizer
    from mtrain.config.engine.core_fields import DDP_FIELDS, GPT_FIELDS, values
    from mtrain.mcore import api
    from mtrain.mcore.adapter.op_overrides import override_operations

    config = transformer_config(run, world.device)
    spec = get_gpt_layer_local_spec(
        normalization=run.model.normalization,
        num_experts=run.model.moe.num_experts if run.model.moe else None,
        multi_latent_attention=run.model.mla is not None,
        qk_layernorm=run.model.qk_layernorm,
    )
    config.sparse_experts = None
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

    return Contender("megatron-core bf16", step, layers_of(model))


def transformers(run: Any, kind: Kind) -> Contender:
    """Return transformers' model in an eager loop in bf16, with torch's fused AdamW."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_config(kind.config(run.model)).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, run.model.vocab_size, (1, SEQUENCE))

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Contender("transformers", step, layers_of(model), kind.period)
