"""megatron-core's hybrid models, of Mamba-2 layers, attention, MLPs and experts in any order, one
layer each.

They are its HybridModel since 0.19, and its MambaModel before: `UNIFIED` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from mtrain.config.engine import release
from mtrain.config.engine.kernels import ON_CPU
from mtrain.mcore import api
from mtrain.mcore.layers.attention_spec import attention_spec
from mtrain.mcore.layers.backend import mlp_spec
from mtrain.mcore.layers.decoder_layer import (
    DecoderLayer,
    DecoderLayerSubmodules,
    leave_in_bf16,
)
from mtrain.mcore.layers.mamba_mixer import Mamba2Mixer, Mamba2MixerSubmodules, Scan
from mtrain.mcore.layers.operands import feed_norm
from mtrain.mcore.layers.portable import chosen
from mtrain.mcore.models.distillation import Lesson
from mtrain.mcore.models.language_model import SummedLosses
from mtrain.models.hybrid.config import (
    ATTENTION,
    DELTA,
    EXPERTS,
    LATENT,
    MAMBA,
    MLP,
    SOFTMAX,
    SPARSE,
)

UNIFIED = release.at_least(0, 19)
"""True if the model is HybridModel, whose pattern marks the ends of stages, and not MambaModel,
which cuts evenly.
"""

if UNIFIED:
    from megatron.core.models.hybrid.hybrid_block import HybridStack as _CoreStack
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as stack_submodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel as _CoreModel
else:
    from megatron.core.models.mamba import MambaModel as _CoreModel
    from megatron.core.ssm.mamba_block import MambaStack as _CoreStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as stack_submodules


_LAYERS = ("attention_layer", "mla_layer", "dsa_layer", "gdn_layer", "mlp_layer", "moe_layer")
"""Names in a stack for the layers of a pattern other than Mamba-2's."""


class PatternLayer(DecoderLayer):
    """A layer with attention or an MLP: the part of `parts` that the pattern has in its place.

    MambaModel knows one kind of attention, and its layers say of themselves which one they are.
    """

    def __init__(
        self,
        config: Any,
        submodules: Mapping[str, Any],
        layer_number: int,
        *,
        kinds: str,
        **more: Any,
    ) -> None:
        super().__init__(
            config, submodules[kinds[layer_number - 1]], self.number(layer_number), **more
        )

    def number(self, layer_number: int) -> int:
        """Return the layer's number in the model, from its number in the stack."""
        return layer_number


class Stack(_CoreStack):
    """megatron-core's stack with the layers of any stage, and a final norm of any kind; its own is
    TransformerEngine's.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        layers: range,
        norm: Any,
        logits_scaling: float = 1.0,
        **kwargs: Any,
    ) -> None:
        # The constructor below reads it, and initializes the module only then.
        self.__dict__["held"] = layers
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        # megatron-core would have built TransformerEngine's norm. From here on its forward applies
        # ours.
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        self._logits_scaling = logits_scaling
        for layer in self.layers:
            leave_in_bf16(layer)
            if isinstance(layer, MambaLayer):
                feed_norm(layer.norm, layer.mixer.in_proj)

    def forward(
        self, hidden_states: Any, attention_mask: Tensor | None = None, **given: Any
    ) -> Tensor:
        """Compute hidden states from hidden states [s, b, h], or this rank's [s / tp, b, h] under
        sequence parallelism; the input of the output layer, and with it the logits, is divided by
        `logits_scaling`.

        Under sequence parallelism ranks have other tokens, and drop other ones, as in
        megatron-core's GPTModel.
        """
        again = self.training and self.config.recompute_granularity == "full"
        whole = self._recomputed if again else super().forward
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            out: Tensor = whole(hidden_states, attention_mask, **given)
        return (
            out / self._logits_scaling if self.post_process and self._logits_scaling != 1.0 else out
        )

    def _recomputed(
        self,
        hidden_states: Any,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Return the forward of training, of whose layers the backward computes some again: in
        groups, or the first ones.

        0.16.1 has none, and that of 0.19 asks TransformerEngine for layers in 8 bits.
        """
        x: Tensor = hidden_states if self.pre_process else self.input_tensor
        c = self.config
        layers = list(self.layers)
        uniform = c.recompute_method == "uniform"
        size = c.recompute_num_layers
        for start in range(0, len(layers), size if uniform else 1):
            group = layers[start : start + size] if uniform else layers[start : start + 1]
            run = partial(_one_after_the_other, group, attention_mask, packed_seq_params)
            if uniform or start < size:
                x = checkpoint(run, c.distribute_saved_activations, x, rotary_pos_emb)
            else:
                x = run(x, rotary_pos_emb)
        x = self.final_norm(x) if self.post_process else x
        found: Tensor = make_viewless_tensor(inp=x, requires_grad=x.requires_grad, keep_graph=True)
        return found

    def _select_layers_for_pipeline_parallel(self, kinds: Sequence[str]) -> tuple[int, list[str]]:
        """Return the stage's layers, wherever the layout has cut (0.16.1)."""
        return self.held.start, list(kinds[self.held.start : self.held.stop])


def _one_after_the_other(
    layers: Sequence[Any],
    attention_mask: Tensor | None,
    packed: Any,
    x: Tensor,
    rotary: Tensor | None,
) -> Tensor:
    """Return layers of a stack on the residual stream; those with attention or an MLP give a
    context next to it.
    """
    for layer in layers:
        given = {"rotary_pos_emb": rotary, "packed_seq_params": packed}
        found = layer(hidden_states=x, attention_mask=attention_mask, **given)
        x = found[0] if isinstance(found, tuple) else found
    return x


class HybridModel(SummedLosses, _CoreModel):
    """A hybrid model that gives the sum of its losses where there are labels, as `LanguageModel`
    does.

    `pattern` has a letter for each layer, `stages` the layers of each (virtual) stage; `features`
    are the arguments of `complete` apart from the loss.
    """

    def __init__(
        self,
        config: Any,
        spec: Any,
        *,
        pattern: str,
        stages: Sequence[range],
        loss: str,
        loss_vocab_size: int,
        vp_stage: int | None,
        features: Mapping[str, Any] = {},
        **kwargs: Any,
    ) -> None:
        self.__dict__["_vp_stage"] = vp_stage
        if config.multi_latent_attention and kwargs.get("position_embedding_type") == "rope":
            # MLA has its own rotary embedding, for a part of each head.
            kwargs["position_embedding_type"] = "none"
        super().__init__(config, spec, **core_arguments(pattern, stages, vp_stage), **kwargs)
        self.complete(loss, loss_vocab_size, **features)

    @property
    def vp_stage(self) -> int | None:
        """Return the virtual stage, of which MambaModel knows nothing, but the class below it asks
        while it is made.
        """
        found: int | None = self.__dict__["_vp_stage"]
        return found

    @vp_stage.setter
    def vp_stage(self, value: int | None) -> None:
        """Ignore the stage that megatron-core assigns: construction fixed it."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        lesson: Lesson | None = None,
        drawn_among: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the sum of losses of tokens [b, s], or without `labels` the logits [b, s, v / tp];
        of a stage that is not the last its hidden states [s, b, h].
        """
        if labels is None or not self.post_process:
            found: Tensor = super().forward(input_ids, position_ids, attention_mask, **more)
            return found
        with _before_the_output_layer(self):
            hidden = super().forward(input_ids, position_ids, attention_mask, **more)
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        self._among = drawn_among
        with self.taught(lesson):
            return self.sum_of_losses(hidden, labels, mask)


@contextmanager
def _before_the_output_layer(model: Any) -> Iterator[None]:
    """Let megatron-core's forward end with the hidden states, as it does on a stage without output
    layer.
    """
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = True


def core_arguments(pattern: str, stages: Sequence[range], vp_stage: int | None) -> dict[str, Any]:
    """Return the arguments for this release's model: the pattern, and the layers of each (virtual)
    stage.
    """
    if UNIFIED:
        cut = "|".join(pattern[held.start : held.stop] for held in stages)
        return {"hybrid_layer_pattern": cut, "vp_stage": vp_stage}
    # MambaModel knows one letter for attention; `PatternLayer` looks its kind up in the whole
    # pattern.
    as_one = str.maketrans(dict.fromkeys((LATENT, SPARSE, DELTA), ATTENTION))
    return {"hybrid_override_pattern": pattern.translate(as_one)}


def stack_spec(
    config: Any,
    provider: Any,
    scan: Scan,
    pattern: str,
    layers: range,
    *,
    vp_stage: int | None = None,
    residual_multiplier: float = 1.0,
    logits_scaling: float = 1.0,
) -> Any:
    """Return the specification of the layers `layers` of a stage, with the implementations of a
    provider; outputs of layers are multiplied with `residual_multiplier`, and logits are divided by
    `logits_scaling`.
    """
    norm = provider.layer_norm(config.normalization == "RMSNorm")
    add = scaled_add(residual_multiplier)
    kinds_of_attention = [kind for kind in (*SOFTMAX, DELTA) if kind in pattern]
    parts = {
        **{kind: _attention(config, provider, norm, add, kind) for kind in kinds_of_attention},
        MLP: _layer("mlp.linear_fc1", **_mlp(config, provider, norm, add, None)),
        EXPERTS: _layer("", **_mlp(config, provider, norm, add, config.num_moe_experts or 1)),
    }
    # without Mamba-2 in the pattern, nothing else asks for the library that its layer needs
    mamba_layer = IdentityOp
    if MAMBA in pattern:
        mamba_layer = _mamba_layer(config, provider, norm, add, scan)
    kinds = stack_submodules(
        mamba_layer=mamba_layer,
        **pattern_layers(PatternLayer, parts, pattern, layers, vp_stage=vp_stage),
    )
    return api.ModuleSpec(
        module=Stack,
        params={"layers": layers, "norm": norm, "logits_scaling": logits_scaling},
        submodules=kinds,
    )


def scaled_add(factor: float) -> Callable[..., Any]:
    """Return megatron-core's sum of a layer's output, its bias and the residual stream, in which
    output and bias are multiplied by `factor` first.
    """
    if factor == 1.0:
        return get_bias_dropout_add  # type: ignore[no-any-return]

    def chosen(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def summed(output_with_bias: Any, residual: Tensor, dropout_p: float) -> Tensor:
            output, bias = output_with_bias
            scaled = output * factor, None if bias is None else bias * factor
            return add(scaled, residual, dropout_p)  # type: ignore[no-any-return]

        return summed

    return chosen


def pattern_layers(
    kind: type, parts: Mapping[str, Any], pattern: str, layers: range, **more: Any
) -> dict[str, Any]:
    """Return the specification of every layer but Mamba-2's, for each that a stack of this release
    knows.

    `kind` is a `PatternLayer`, which takes a letter of `pattern` for each number that the stack
    gives its layers: 0.16.1 counts those of a stage.
    """
    letters = pattern if UNIFIED else pattern[layers.start : layers.stop]
    spec = api.ModuleSpec(module=kind, params={"kinds": letters, **more}, submodules=parts)
    return {field.name: spec for field in fields(stack_submodules) if field.name in _LAYERS}


def _attention(config: Any, provider: Any, norm: Any, add: Any, kind: str) -> Any:
    fused = {ATTENTION: "self_attention.linear_qkv", DELTA: "self_attention.in_proj"}
    return _layer(
        fused.get(kind, ""),
        input_layernorm=norm,
        self_attention=attention_spec(config, provider, linear=kind == DELTA),
        self_attn_bda=add,
    )


def _mamba_layer(config: Any, provider: Any, norm: Any, add: Any, scan: Scan) -> Any:
    linear = Mamba2MixerSubmodules(
        provider.column_parallel_linear(), provider.row_parallel_linear()
    )
    impl = "reference" if provider.kernels["attention"] in ("reference", ON_CPU) else "auto"
    # The layer of MambaModel passes no epsilon to its norm, so the spec does.
    with_epsilon = api.ModuleSpec(module=norm, params={"eps": config.layernorm_epsilon})
    parts = MambaLayerSubmodules(
        norm=norm if UNIFIED else with_epsilon,
        mixer=api.ModuleSpec(
            module=chosen(Mamba2Mixer, impl), params={"scan": scan}, submodules=linear
        ),
        mamba_bda=add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    return api.ModuleSpec(module=MambaLayer, submodules=parts)


def _layer(fused: str, **parts: Any) -> DecoderLayerSubmodules:
    """Return parts of a layer with attention or an MLP; its norm is saved as if it were part
    of the layer `fused`.
    """
    layer = DecoderLayerSubmodules(**parts)
    if fused:
        norm = next(name for name in parts if name.endswith("layernorm"))
        layer.sharded_state_dict_keys_map = {f"{norm}.": f"{fused}.layer_norm_"}
    return layer


def _mlp(config: Any, provider: Any, norm: Any, add: Any, experts: int | None) -> dict[str, Any]:
    return {
        "pre_mlp_layernorm": norm,
        "mlp": mlp_spec(config, provider, experts),
        "mlp_bda": add,
    }
