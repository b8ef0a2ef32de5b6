"""`model`: the shape of the network. Keys carry megatron-core's names."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mtrain.config.families import with_sections
from mtrain.config.schema.base import (
    MOST,
    NAME,
    SAME,
    Effect,
    Flag,
    Key,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    Width,
)
from mtrain.config.schema.dsa import SparseAttentionConfig
from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.mla import MLAConfig
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.mup import MupConfig
from mtrain.config.schema.rope_scaling import RopeScalingConfig

if TYPE_CHECKING:
    from mtrain.models.bert.config import BertConfig
    from mtrain.models.hybrid.config import HybridConfig
    from mtrain.models.llava.config import LlavaConfig
    from mtrain.models.t5.config import T5Config

VOCAB_MULTIPLE = 128
# Name of the layer that makes one number of each position, in place of an output layer.
VALUE_HEAD = "value_head"
# The condition of keys that only a gated MLP reads.
GATED = "model.activation=swiglu|geglu|geglu_tanh|quick_geglu"


class PublishedConfig(Section):
    """`model.published`: how the model was trained, for null values of `optim.lr` and
    `trainer.global_batch_size`.
    """

    peak_lr: PositiveFloat | None = None
    """Largest learning rate; null: not published."""
    batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step; null: not published."""
    source: Annotated[str, Field(max_length=200)]
    """The source of these figures."""


@with_sections
class ModelConfig(Section):
    """`model`: a transformer, decoder-only unless `family` names another."""

    name: Annotated[str, Field(pattern=NAME, max_length=100), Key(effect=Effect.RUNTIME)] = "custom"
    """Name used in run folders and reports."""
    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = "gpt"
    """The family that counts, shrinks and builds it: gpt, a decoder-only transformer; bert, an
    encoder trained on masked tokens; t5, an encoder-decoder, whose num_layers are those of the
    encoder; llava, a decoder-only transformer that reads images; hybrid, a decoder of Mamba-2
    layers, attention and MLPs; or a family of a plug-in.
    """
    builder: Annotated[
        Literal["gpt", "hybrid"], Key(when="model.family=gpt", effect=Effect.PARALLELISM)
    ] = "gpt"
    """The model of megatron-core that holds the layers: gpt, its GPTModel, or hybrid, its
    HybridModel (MambaModel before 0.19), in which attention and MLP are separate layers. Weights,
    their names and results are the same.
    """
    num_layers: Annotated[
        Width,
        Key(
            feeds=SAME,
            flag=Flag(SAME, also=("--encoder-num-layers",)),
            hf="num_hidden_layers n_layer",
            aka="n_layers",
        ),
    ]
    """Transformer layers."""
    hidden_size: Annotated[
        Width, Key(feeds=SAME, flag=SAME, hf="hidden_size n_embd", aka="d_model", unit="channels")
    ]
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[Width, Key(feeds=SAME, hf="intermediate_size", unit="channels")]
    """Width of the MLP (of each half for gated activations)."""
    num_attention_heads: Annotated[
        Width, Key(feeds=SAME, flag=SAME, hf="num_attention_heads n_head", aka="n_heads num_heads")
    ]
    """Query heads."""
    num_query_groups: Annotated[Width | None, Key(hf="num_key_value_heads", aka="n_kv_heads")] = (
        None
    )
    """Key/value heads (grouped-query attention); null: as many as query heads."""
    kv_channels: Annotated[Width | None, Key(hf="head_dim", unit="channels")] = None
    """The width of a head; null: hidden_size / num_attention_heads."""
    vocab_size: Annotated[Width, Key(hf="vocab_size", aka="padded_vocab_size", unit="token ids")]
    """The number of token ids; the embedding is padded up to a multiple of 128."""
    mask_padded_vocab: Annotated[bool, Key(effect=Effect.NUMERICS)] = True
    """Ids that only pad the embedding have no probability: losses are over `vocab_size` ids, in
    training, evaluation and MTP layers. false: over all rows of the embedding, as in Megatron-LM.
    """
    max_position_embeddings: Annotated[
        PositiveInt,
        Key(
            feeds="gpt.max_sequence_length", hf="max_position_embeddings n_positions", unit="tokens"
        ),
    ]
    """The longest sequence that the positions support."""
    normalization: Annotated[
        Literal["RMSNorm", "LayerNorm"], Key(feeds=SAME, flag=Flag(SAME, absent="LayerNorm"))
    ] = "RMSNorm"
    """The norm of every layer."""
    layernorm_epsilon: Annotated[
        NonNegativeFloat,
        Key(
            feeds=SAME,
            flag=Flag("--norm-epsilon", also=("--layernorm-epsilon",)),
            hf="rms_norm_eps layer_norm_eps",
            aka="norm_eps",
        ),
    ] = 1e-5
    """Added to the variance in a norm."""
    layernorm_zero_centered_gamma: Annotated[bool, Key(feeds=SAME, flag="--apply-layernorm-1p")] = (
        False
    )
    """A norm's weight is stored as its distance from 1, which loses less in half precision."""
    norm_placement: Literal["pre", "post", "pre_and_post", "post_residual"] = "pre"
    """The place of a layer's norms: before attention and MLP (pre), on their outputs before the
    residual sum (post, OLMo 2), both (Gemma), or after the residual sum (post_residual, BERT). One
    with pre is Megatron's: the embeddings have no norm, and the last layer is followed by one.
    """
    activation: Annotated[
        Literal[
            "swiglu",
            "geglu",
            "geglu_tanh",
            "quick_geglu",
            "gelu",
            "gelu_tanh",
            "relu",
            "squared_relu",
        ],
        Key(hf="hidden_act", aka="activation_func"),
    ] = "swiglu"
    """The MLP activation; names with glu are gated. gelu and geglu are exact, x Phi(x) by erf;
    gelu_tanh and geglu_tanh their tanh approximation (GPT-2's, and Megatron-LM's fused bias-gelu);
    quick_geglu: x sigmoid(1.702 x) as the gate. Every implementation computes the named form.
    """
    glu_linear_offset: Annotated[
        float, Field(ge=-10, le=10), Key(feeds=SAME, when=GATED, effect=Effect.NUMERICS)
    ] = 0.0
    """Gated activations: a constant added to the half that is gated (1 in GPT-OSS)."""
    activation_func_clamp_value: Annotated[
        PositiveFloat | None, Key(feeds=SAME, when=GATED, effect=Effect.NUMERICS, flag=SAME)
    ] = None
    """Gated activations: the bound of both halves before the gate (7 in GPT-OSS); null: none."""
    parallel_residual: Annotated[bool, Key(hf="use_parallel_residual")] = False
    """Attention and MLP of a layer read the same input, each after its own norm, and their outputs
    are added (GPT-NeoX).
    """
    add_bias_linear: Annotated[
        bool, Key(feeds=SAME, flag=Flag("--disable-bias-linear", off=True))
    ] = False
    """Biases in all linear layers."""
    add_qkv_bias: Annotated[bool, Key(feeds=SAME, flag=SAME, hf="attention_bias")] = False
    """Biases in the query/key/value projection only (Qwen2)."""
    add_proj_bias: Annotated[bool, Key(when="model.add_bias_linear=false and model.mla=null")] = (
        False
    )
    """A bias in the output projection of attention; with add_qkv_bias, only attention has biases
    (Llama's attention_bias).
    """
    add_mlp_bias: Annotated[
        bool, Key(when="model.add_bias_linear=false and model.moe=null", hf="mlp_bias")
    ] = False
    """Biases in the MLP."""
    qk_layernorm: Annotated[bool, Key(feeds=SAME, flag=SAME, aka="qk_norm")] = False
    """Norm on queries and keys (Qwen3)."""
    qk_layernorm_across_heads: Annotated[
        bool, Key(when="model.qk_layernorm and model.mla=null and model.normalization=RMSNorm")
    ] = False
    """qk_layernorm: one norm over the queries of all heads, and one over all keys (OLMo 2); false:
    a norm for each head.
    """
    qk_l2_norm: Annotated[bool, Key(feeds=SAME)] = False
    """Divide queries and keys by their root mean square, without a weight (Llama 4)."""
    softmax_scale: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None,
        Key(when="model.mla=null and model.mup=null", effect=Effect.NUMERICS),
    ] = None
    """Factor on attention logits; null: 1 / sqrt(width of a head)."""
    attn_logit_softcapping: Annotated[
        PositiveFloat | None, Key(effect=Effect.NUMERICS, hf="attn_logit_softcapping")
    ] = None
    """The bound of the attention logits: x becomes c tanh(x / c) (50 in Gemma 2); null: none."""
    position_embedding_type: Annotated[
        Literal["rope", "learned_absolute", "relative", "none"], Key(feeds="gpt.")
    ] = "rope"
    """The encoding of positions; relative: a learned bias of attention by distance (T5)."""
    rotary_base: Annotated[
        float,
        Field(gt=1),
        Key(
            feeds="mla.rotary_base gpt.rotary_base",
            when="model.position_embedding_type=rope",
            flag=SAME,
            hf="rope_theta",
        ),
    ] = 10000.0
    """Base of the rotary frequencies."""
    rotary_base_local: Annotated[
        Annotated[float, Field(gt=1)] | None,
        Key(
            when="model.window_size and model.position_embedding_type=rope and model.mla=null",
            effect=Effect.NUMERICS,
            hf="rope_local_base_freq",
        ),
    ] = None
    """The base of layers with a window, whose positions are then not scaled (Gemma 3); null: as in
    all other layers.
    """
    rotary_percent: Annotated[
        float,
        Field(gt=0, le=1),
        Key(
            feeds="mla.rotary_percent gpt.rotary_percent",
            when="model.position_embedding_type=rope",
            flag=SAME,
            hf="partial_rotary_factor",
        ),
    ] = 1.0
    """Share of a head that rotates."""
    rotary_interleaved: Annotated[
        bool, Key(feeds=SAME, when="model.position_embedding_type=rope", flag=SAME)
    ] = False
    """Rotary pairs are adjacent channels (GPT-J) instead of the halves of the head."""
    rope_scaling_factor: PositiveFloat | None = None
    """Llama-3.1 frequency scaling (low 1, high 4, original 8192), as rope_scaling of llama3; null:
    off.
    """
    rotary_seq_len_interpolation_factor: Annotated[
        PositiveFloat | None,
        Key(
            feeds="gpt.seq_len_interpolation_factor",
            when="model.position_embedding_type=rope and model.mla=null",
            effect=Effect.NUMERICS,
            flag="--rotary-seq-len-interpolation-factor",
        ),
    ] = None
    """Rotary positions are divided by this, also called linear scaling (Chen et al.
    2023); null: 1.
    """
    rope_scaling: RopeScalingConfig | None = None
    """Rotary frequencies for longer sequences: yarn, longrope and others; null: unchanged."""
    no_rope_freq: Annotated[
        Annotated[int, Field(ge=2, le=MOST)] | None,
        Key(feeds=SAME, when="model.position_embedding_type=rope and model.mla=null"),
    ] = None
    """Every n-th layer has no rotary positions (Llama 4); null: every layer has them."""
    window_size: Annotated[
        Annotated[int, Field(ge=2, le=MOST)] | None, Key(effect=Effect.NUMERICS, unit="tokens")
    ] = None
    """Sliding-window attention: a token sees this many keys, including itself; null: all keys
    before it.
    """
    window_attn_skip_freq: Annotated[
        Annotated[int, Field(ge=2, le=MOST)] | None,
        Key(feeds=SAME, when="model.window_size", effect=Effect.NUMERICS, flag=SAME),
    ] = None
    """window_size: every n-th layer sees all keys; null: every layer has the window."""
    softmax_type: Annotated[
        Literal["vanilla", "off-by-one", "learnable"], Key(feeds=SAME, flag=SAME)
    ] = "vanilla"
    """Attention sinks: an extra logit in the softmax of each head; off-by-one: a logit of 0,
    learnable: a weight.
    """
    attention_output_gate: Annotated[bool, Key(feeds=SAME, when="model.mla=null", flag=SAME)] = (
        False
    )
    """The output of attention is multiplied by the sigmoid of a gate, which a wider query
    projection computes (Qwen3-Next).
    """
    mtp_num_layers: Annotated[Width | None, Key(feeds=SAME, flag=Flag(SAME, none=(0,)))] = None
    """Multi-token prediction (DeepSeek-V3): extra layers that each predict one token further; null:
    none.
    """
    mtp_loss_scaling_factor: Annotated[
        PositiveFloat | None,
        Key(
            feeds=SAME,
            when="model.mtp_num_layers",
            null=0.1,
            effect=Effect.NUMERICS,
            flag=Flag(SAME, absent=0.1),
        ),
    ] = None
    """mtp_num_layers: the weight of their mean loss; null: 0.1."""
    mtp_detach_heads: Annotated[
        bool, Key(feeds=SAME, when="model.mtp_num_layers", effect=Effect.NUMERICS)
    ] = False
    """mtp_num_layers: their loss trains only their own layers, with a gradient norm of their own.
    Needs 0.19.
    """
    mtp_use_repeated_layer: Annotated[bool, Key(when="model.mtp_num_layers>1", flag=SAME)] = False
    """mtp_num_layers above 1: one layer is applied so many times, each time to its last output,
    with the same weights.
    """
    final_logit_softcapping: Annotated[
        PositiveFloat | None, Key(effect=Effect.NUMERICS, hf="final_logit_softcapping")
    ] = None
    """The bound of the logits, in every loss and in generation: x becomes c tanh(x / c) (30 in
    Gemma 2); null: none.
    """
    tie_word_embeddings: Annotated[
        bool,
        Key(
            feeds="gpt.share_embeddings_and_output_weights",
            flag=Flag("--untie-embeddings-and-output-weights", off=True),
            hf="tie_word_embeddings",
        ),
    ] = False
    """The output layer shares the embedding's weights."""
    head: Annotated[
        Literal["value"] | None, Key(when="model.family=gpt", aka="num_labels score")
    ] = None
    """The layer behind the last norm. value: one number at each position, by a weight of its own
    with the initial deviation 1/sqrt(hidden_size + 1) (Stiennon et al. 2020, arXiv:2009.01325,
    appendix B), whether or not embeddings are tied; null: value with objective=reward, else
    the logits of tokens.
    """
    scale_embedding: Annotated[bool, Key(effect=Effect.NUMERICS)] = False
    """Multiply the token embeddings by sqrt(hidden_size), rounded to the dtype of the weights
    (Gemma).
    """
    attention_dropout: Annotated[
        Probability,
        Key(
            feeds=SAME, effect=Effect.NUMERICS, flag=Flag(SAME, absent=0.1), hf="attention_dropout"
        ),
    ] = 0.0
    """Dropout on attention probabilities."""
    hidden_dropout: Annotated[
        Probability, Key(feeds=SAME, effect=Effect.NUMERICS, flag=Flag(SAME, absent=0.1))
    ] = 0.0
    """Dropout on the output of each block before the residual sum."""
    init_method_std: Annotated[
        float,
        Field(gt=0, le=20),
        Key(feeds=SAME, effect=Effect.NUMERICS, flag=SAME, hf="initializer_range"),
    ] = 0.02
    """The standard deviation of initial weights; output projections are scaled by 1/sqrt(2
    num_layers), except with norm_placement post_residual.
    """
    embedding_init_method_std: Annotated[
        Annotated[float, Field(gt=0, le=10)] | None, Key(effect=Effect.NUMERICS, flag=SAME)
    ] = None
    """The standard deviation of the initial embeddings, of tokens and learned positions; null:
    init_method_std.
    """
    moe: MoEConfig | None = None
    """Mixture of experts; null: dense."""
    mla: MLAConfig | None = None
    """Multi-head latent attention (MLA); null: standard attention."""
    dsa: SparseAttentionConfig | None = None
    """Sparse attention over MLA (DSA): each query attends to keys that an indexer chooses; null: to
    all.
    """
    mup: MupConfig | None = None
    """Rates, deviations and factors by width (muP); null: those that do not depend on width."""
    linear_attention: LinearAttentionConfig | None = None
    """Layers that are gated delta nets; null: every layer has softmax attention."""
    published: Annotated[PublishedConfig | None, Key(effect=Effect.RUNTIME)] = None
    """Published facts of the model's own training; null: unknown."""

    if TYPE_CHECKING:  # `with_sections` adds these, and those of plug-ins
        bert: BertConfig | None
        t5: T5Config | None
        llava: LlavaConfig | None
        hybrid: HybridConfig | None

    @property
    def gated(self) -> bool:
        """Return whether the MLP has a gate next to its up projection."""
        return "glu" in self.activation

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float | None:
        """Return the factor on attention logits outside of MLA; None: 1 / sqrt(head_dim)."""
        return self.softmax_scale if self.mup is None else self.mup.softmax_scale(self.head_dim)

    @property
    def width_mult(self) -> float:
        """Return the width relative to the base of muP; 1 without muP."""
        return 1.0 if self.mup is None else self.mup.width_mult(self.hidden_size)

    @property
    def mtp_held(self) -> int:
        """Return the number of MTP layers with weights of their own."""
        return 1 if self.mtp_use_repeated_layer else self.mtp_num_layers or 0

    @property
    def rotary_dim(self) -> int:
        """Return the channels of a head that rotate; MLA's yarn rotates its whole
        positional part.
        """
        width = self.head_dim if self.mla is None else self.mla.qk_pos_emb_head_dim
        # megatron-core's yarn ignores model.rotary_percent.
        if self.mla is not None and self.mla.rope_type == "yarn":
            return width
        return int(width * self.rotary_percent)

    @property
    def rotary_constant_to(self) -> float:
        """Return the sequence length up to which rotary frequencies do not depend on the length."""
        if (scaling := self.rope_scaling) is None or scaling.rope_type not in (
            "dynamic",
            "longrope",
        ):
            return math.inf
        known = (
            scaling.original_max_position_embeddings if scaling.rope_type == "longrope" else None
        )
        return known or self.max_position_embeddings

    @property
    def query_groups(self) -> int:
        """Return the number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    def softmax_among(self, first: int) -> int:
        """Return the number of layers with softmax attention among the first so many."""
        # Every freq-th layer has softmax attention, the others are gated delta nets.
        return first if self.linear_attention is None else first // self.linear_attention.freq

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the layers with experts."""
        if self.moe is None:
            return ()
        if self.hybrid is not None:
            return tuple(i for i, kind in enumerate(self.hybrid.pattern) if kind == "E")
        return tuple(range(self.moe.first_dense_layers, self.num_layers))

    def is_linear(self, index: int) -> bool:
        """Return whether layer `index` (from 0) is a gated delta net."""
        if self.hybrid is not None:
            return self.linear_attention is not None and self.hybrid.is_delta(index)
        return self.linear_attention is not None and (index + 1) % self.linear_attention.freq != 0

    @property
    def ties_output(self) -> bool:
        """Return whether the output layer is the embedding; a value head is not."""
        return self.tie_word_embeddings and self.head is None

    @property
    def value_head_std(self) -> float:
        """Return the standard deviation of the initial weights of a value head."""
        return float((self.hidden_size + 1) ** -0.5)

    @property
    def padded_vocab_size(self) -> int:
        """Return the rows of the embedding: `vocab_size` rounded up, the same for every layout."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def loss_vocab_size(self) -> int:
        """Return the number of token ids that have a probability in a loss."""
        return self.vocab_size if self.mask_padded_vocab else self.padded_vocab_size

    @property
    def padding_in_words(self) -> str:
        """Describe the ids that losses are over, and padding; empty if the vocabulary has none."""
        if self.padded_vocab_size == self.vocab_size:
            return ""
        kept = "masked" if self.mask_padded_vocab else "in the softmax"
        return f"vocabulary {self.vocab_size} padded to {self.padded_vocab_size}, padding {kept}"
