"""`model`: the shape of the network. Keys carry megatron-core's names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.base import (
    MOST,
    NAME,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    Width,
)

VOCAB_MULTIPLE = 128


class MoEConfig(Section):
    """`model.moe`: a mixture of experts in place of the dense MLP."""

    num_experts: Width
    """Routed experts per layer."""
    router_topk: Width = 2
    """Experts that each token visits."""
    ffn_hidden_size: Width
    """Width of one expert's MLP."""
    shared_expert_intermediate_size: Width | None = None
    """Total width of the shared experts that every token visits; null: none."""
    first_dense_layers: NonNegativeInt = 0
    """How many of the first layers keep the dense MLP of `model.ffn_hidden_size`."""
    router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    router_pre_softmax: bool = False
    """Softmax before the top-k choice rather than over the chosen ones."""
    router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"] = "aux_loss"
    """How the load of the experts is balanced."""
    aux_loss_coeff: NonNegativeFloat = 0.01
    """Weight of the balancing loss of each layer with experts. That is E sum_i f_i P_i, summed over the layers: E
    experts, f_i the share of the choices that fell on expert i (by scores alone, without groups and bias; the shares
    add up to 1), P_i the mean of its normalised scores; over a micro-batch, for seq_aux_loss over each sample of it.
    As in megatron-core; it is alpha_1 of DeepSeek-V2. transformers' router_aux_loss_coef weighs one loss of f and P
    averaged over L layers, its f adding up to router_topk: the coefficient here is theirs times router_topk / L."""
    z_loss_coeff: NonNegativeFloat | None = None
    """Weight of the router's z-loss; null: off."""
    router_enable_expert_bias: bool = False
    """Balance by a bias on the scores that is moved after each step (DeepSeek-V3), not by a loss."""
    router_num_groups: Width | None = None
    """Groups of experts for group-limited routing; null: off."""
    router_group_topk: Width | None = None
    """Groups that a token may choose from."""
    router_group_score_topk: PositiveInt | None = None
    """router_num_groups: a group is worth the sum of its so many best scores: 1 in DeepSeek-V2, 2 in DeepSeek-V3;
    null: 2, or 1 where a group is one expert. Megatron-LM takes router_topk // router_group_topk."""
    router_topk_scaling_factor: Annotated[float, Field(gt=0, le=100)] | None = None
    """Factor on the chosen scores."""
    router_bias_update_rate: PositiveFloat | None = None
    """router_enable_expert_bias: how far the bias of an expert moves in a step; null: 0.001."""
    router_padding_for_quantization: bool = False
    """precision.fp8, fp4: the router pads the tokens of an expert to the multiple that its products take, instead of
    the experts' copying them."""
    router_force_load_balancing: bool = False
    """For benchmarks of speed: tokens go to random experts, all with the same load; the model learns no routing."""
    input_jitter_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The router sees its input times a random number between 1 - this and 1 + this; null: as it is. Random as
    dropout: other layouts draw other numbers."""
    apply_probs_on_input: bool = False
    """router_topk=1: what goes into an expert is weighed, not what comes out (Llama 4)."""
    shared_expert_gate: bool = False
    """The output of the shared experts is weighed by a learnt gate for each token (Qwen2-MoE)."""
    token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens travel to the ranks of their experts; flex: by the kernels of `flex_dispatcher_backend`, on GPUs."""
    flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    """token_dispatcher_type=flex: whose kernels; null: deepep."""
    expert_capacity_factor: PositiveFloat | None = None
    """Tokens that an expert takes of a rank's micro-batch, over the even share; others are dropped; null: none is."""
    pad_expert_input_to_capacity: bool = False
    """Experts always compute their whole capacity: one shape in every step."""
    token_drop_policy: Literal["probs", "position"] | None = None
    """expert_capacity_factor: which tokens stay, the most probable or the first ones; null: probs."""
    shared_expert_overlap: bool = False
    """Shared experts compute while tokens travel; needs the alltoall dispatcher."""

    @property
    def group_score_topk(self) -> int | None:
        """How many of its best scores a group of experts is worth; None: there are no groups."""
        if self.router_num_groups is None:
            return None
        return self.router_group_score_topk or min(2, max(1, self.num_experts // self.router_num_groups))


class MLAConfig(Section):
    """`model.mla`: multi-head latent attention (MLA) (DeepSeek-V2)."""

    q_lora_rank: Width | None = None
    """Rank of the query's low-rank projection; null: a full projection."""
    kv_lora_rank: Width = 512
    """Rank of the joint key and value projection."""
    qk_head_dim: Width = 128
    """Width of a head's part without rotary positions."""
    qk_pos_emb_head_dim: Width = 64
    """Width of a head's part with rotary positions."""
    v_head_dim: Width = 128
    """Width of a head's values."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """yarn: rotary positions stretched beyond the length that the model was trained for (Peng et al. 2023)."""
    rotary_scaling_factor: PositiveFloat | None = None
    """yarn: how much longer; null: 40."""
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    """yarn: the length before stretching; null: 4096."""
    mscale: Annotated[float, Field(gt=0, le=100)] | None = None
    """yarn: weight of the attention temperature; null: 1."""
    mscale_all_dim: Annotated[float, Field(ge=0, le=100)] | None = None
    """yarn: the same for all dimensions; null: 0."""
    beta_fast: PositiveFloat | None = None
    """yarn: turns within the original length above which a frequency stays as it is; null: 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: turns below which it is stretched in full; null: 1."""


class PublishedConfig(Section):
    """`model.published`: how the model was trained, for `optim.lr` and `trainer.global_batch_size` that are null."""

    peak_lr: PositiveFloat | None = None
    """Largest learning rate; null: not published."""
    batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step; null: not published."""
    source: Annotated[str, Field(max_length=200)]
    """Where that is said."""


class ModelConfig(Section):
    """`model`: a decoder-only transformer."""

    name: Annotated[str, Field(pattern=NAME, max_length=100)] = "custom"
    """Name used in run folders and reports."""
    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = "gpt"
    """Who counts, shrinks and builds it: gpt, a decoder-only transformer, or a family that a plug-in adds."""
    num_layers: Width
    """Transformer layers."""
    hidden_size: Width
    """Width of the residual stream."""
    ffn_hidden_size: Width
    """Width of the MLP (of each half for gated activations)."""
    num_attention_heads: Width
    """Query heads."""
    num_query_groups: Width | None = None
    """Key/value heads (grouped-query attention); null: as many as query heads."""
    kv_channels: Width | None = None
    """Width of a head; null: hidden_size / num_attention_heads."""
    vocab_size: Width
    """Token ids; the embedding is padded up to a multiple of 128."""
    mask_padded_vocab: bool = True
    """Ids that only pad the embedding have no probability: losses are over `vocab_size` ids, in training, evaluation
    and MTP layers. false: over all rows of the embedding, as in Megatron-LM."""
    max_position_embeddings: PositiveInt
    """Longest sequence that the positions are made for."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Norm of every layer."""
    layernorm_epsilon: NonNegativeFloat = 1e-5
    """Added to the variance in a norm."""
    layernorm_zero_centered_gamma: bool = False
    """A norm's weight is kept as its distance from 1, which half precision rounds less."""
    activation: Literal["swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "squared_relu"] = (
        "swiglu"
    )
    """MLP activation; those in glu are gated. gelu and geglu are exact, x Phi(x) by erf; gelu_tanh and geglu_tanh
    their tanh approximation (GPT-2's, and Megatron-LM's fused bias-gelu); quick_geglu: x sigmoid(1.702 x) as the
    gate. Whatever implements a layer computes the form that is named."""
    glu_linear_offset: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """Gated activations: added to the half that is gated (1 in GPT-OSS)."""
    activation_func_clamp_value: PositiveFloat | None = None
    """Gated activations: bound of both halves before the gate (7 in GPT-OSS); null: none."""
    add_bias_linear: bool = False
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """Biases in the query/key/value projection only (Qwen2)."""
    qk_layernorm: bool = False
    """Norm on queries and keys (Qwen3)."""
    qk_l2_norm: bool = False
    """Queries and keys are divided by the root of their mean square, without a weight (Llama 4)."""
    softmax_scale: Annotated[float, Field(gt=0, le=100)] | None = None
    """Factor on attention logits; null: 1 / sqrt(width of a head)."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """How positions enter."""
    rotary_base: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head that rotates."""
    rotary_interleaved: bool = False
    """Rotary pairs are neighbours (GPT-J) instead of halves of the head."""
    rope_scaling_factor: PositiveFloat | None = None
    """Llama-3.1 frequency scaling (low 1, high 4, original 8192); null: off."""
    rotary_seq_len_interpolation_factor: PositiveFloat | None = None
    """Rotary positions are divided by this (Chen et al. 2023); null: by 1."""
    no_rope_freq: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Every n-th layer has no rotary positions (Llama 4); null: every layer has them."""
    window_size: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Sliding-window attention: a token sees this many keys, itself included; null: all before it."""
    window_attn_skip_freq: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """window_size: every n-th layer sees all keys; null: every layer has the window."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sinks: what stands beside the keys in the softmax of each head; off-by-one: a logit of 0, learnable:
    a weight."""
    mtp_num_layers: Width | None = None
    """Multi-token prediction (DeepSeek-V3): extra layers that each predict one token further; null: none."""
    mtp_loss_scaling_factor: PositiveFloat | None = None
    """mtp_num_layers: weight of their mean loss; null: 0.1."""
    final_logit_softcapping: PositiveFloat | None = None
    """Bound of the logits, in every loss and in generation: x becomes c tanh(x / c) (30 in Gemma 2); null: none."""
    tie_word_embeddings: bool = False
    """The output layer shares the embedding's weights."""
    attention_dropout: Probability = 0.0
    """Dropout on attention probabilities."""
    hidden_dropout: Probability = 0.0
    """Dropout on what each block adds to the residual stream."""
    init_method_std: Annotated[float, Field(gt=0, le=20)] = 0.02
    """Standard deviation of initial weights; output projections are scaled by 1/sqrt(2 num_layers)."""
    embedding_init_method_std: Annotated[float, Field(gt=0, le=10)] | None = None
    """Standard deviation of the initial embeddings, of tokens and learned positions; null: init_method_std."""
    moe: MoEConfig | None = None
    """Mixture of experts; null: dense."""
    mla: MLAConfig | None = None
    """Multi-head latent attention (MLA); null: standard attention."""
    published: PublishedConfig | None = None
    """How the model was trained; null: unknown."""

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return "glu" in self.activation

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up, the same for every layout."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def loss_vocab_size(self) -> int:
        """Token ids that have a probability in a loss."""
        return self.vocab_size if self.mask_padded_vocab else self.padded_vocab_size

    @property
    def padding_in_words(self) -> str:
        """The ids that losses are over, and what becomes of padding; empty where the vocabulary has none."""
        if self.padded_vocab_size == self.vocab_size:
            return ""
        kept = "masked" if self.mask_padded_vocab else "in the softmax"
        return f"vocabulary {self.vocab_size} padded to {self.padded_vocab_size}, padding {kept}"
