"""LLaVA on one rank: the language model; on stage 0 vision tower and projector."""

from __future__ import annotations

from dataclasses import replace

from mtrain.config.resolve.stages import Stage
from mtrain.models.gpt import graph as language
from mtrain.models.graph import MASK, Graph, Tensor
from mtrain.models.llava.config import LlavaConfig
from mtrain.models.parts import column, norm, row
from mtrain.models.rank import Rank


def stage(r: Rank, held: Stage) -> list[Graph]:
    """Return the graphs of a stage on one micro-batch of samples with an image each."""
    own = LlavaConfig.of(r.model)
    frozen = set(own.freeze)
    graphs = language.stage(replace(r, frozen="language" in frozen), held)
    if not held.embedding:
        return graphs
    # the part of the tokens that a rank goes on with is a view of all of them
    graphs[0].add(
        "scatter", [Tensor((r.tokens - r.split_tokens) * r.model.hidden_size * r.element)]
    )
    tower = _tower(r)
    if "vision" not in frozen:
        first = graphs[0]
        first.add(
            "vision.patches", [Tensor(_patches(tower).tokens * 3 * own.patch_size**2 * r.element)]
        )
        norm(
            first,
            tower,
            "vision.pre_layernorm",
            language.stream(tower),
            tower.tokens,
            own.vision_hidden_size,
        )
        layers = language.stack(
            tower,
            range(own.used_layers),
            lambda g, t, x, index: language.add_layer(g, t, x, index, causal=False),
        )
        graphs[1:1] = layers
    if not {"vision", "projector"} <= frozen:
        _project(graphs[0], replace(tower, frozen="projector" in frozen), r)
    return graphs


def _tower(r: Rank) -> Rank:
    """Return the rank's view for the vision tower: whole images as patches and a class token."""
    own = LlavaConfig.of(r.model)
    shape = {
        "num_layers": own.used_layers,
        "hidden_size": own.vision_hidden_size,
        "ffn_hidden_size": own.vision_ffn_hidden_size,
        "num_attention_heads": own.vision_heads,
        "num_query_groups": own.vision_heads,
        "kv_channels": own.head_dim,
        "normalization": "LayerNorm",
        "norm_placement": "pre",
        "parallel_residual": False,
        "mla": None,
        "moe": None,
        "layernorm_zero_centered_gamma": False,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "window_size": None,
        "activation": own.vision_activation,
        "add_bias_linear": True,
        "position_embedding_type": "none",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "softmax_type": "vanilla",
        "attn_logit_softcapping": None,
    }
    # where whole layers are computed again, each of the tower's is, by itself
    again = {"method": "uniform", "num_layers": 1, "distribute_saved_activations": False}
    alone = {
        "sequence_parallel": False,
        "cp": 1,
        "recompute": r.layout.recompute.model_copy(update=again),
    }
    run = r.run.model_copy(
        update={
            "model": r.model.model_copy(update=shape),
            "parallel": r.layout.model_copy(update=alone),
            "data": r.run.data.model_copy(update={"packed": False}),
        }
    )
    return replace(r, run=run, samples=r.run.trainer.micro, length=own.image_tokens + 1)


def _patches(tower: Rank) -> Rank:
    return replace(tower, length=tower.length - 1)


def _project(g: Graph, tower: Rank, r: Rank) -> None:
    own = LlavaConfig.of(r.model)
    h = r.model.hidden_size
    rows = _patches(tower)
    # a view without the class token
    features = Tensor(tower.tokens * own.vision_hidden_size * r.element)
    up = column(g, rows, "projector.linear_fc1", features, own.vision_hidden_size, h // r.layout.tp)
    more = [Tensor(up.bytes)] if own.projector_activation == "quick_gelu" else []
    y = Tensor(up.bytes)
    g.add("projector.activation", [up, *more], reads=[up], gives=[y])
    row(g, rows, "projector.linear_fc2", y, h // r.layout.tp, h)
    g.add("projector.places", [Tensor(r.tokens * MASK)])
