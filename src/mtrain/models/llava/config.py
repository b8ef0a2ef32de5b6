"""`model.llava`: the vision tower and the projector of LLaVA; the language model is
`model` itself.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mtrain.config.families import NO_ADAPTERS, NO_NORMS_ON_SUMS, FamilyConfig, FamilySection, Limit
from mtrain.config.schema.base import Effect, Key, NonNegativeInt, PositiveFloat, Width

Frozen = Literal["vision", "projector", "language"]


class LlavaConfig(FamilySection):
    """`model.llava`: images for a language model (LLaVA-1.5): a CLIP vision transformer, whose
    patch features go through a projector and stand in the text as the embeddings of image tokens.
    """

    FAMILY: ClassVar[str] = "llava"

    image_size: Annotated[Width, Key(unit="pixels")] = 336
    """Height and width of an image."""
    patch_size: Annotated[Width, Key(unit="pixels")] = 14
    """Height and width of a patch: what one image token stands for."""
    vision_layers: Width = 24
    """Layers of the vision tower, those behind feature_layer included."""
    vision_hidden_size: Annotated[Width, Key(unit="channels")] = 1024
    """Width of the vision tower."""
    vision_ffn_hidden_size: Annotated[Width, Key(unit="channels")] = 4096
    """Width of its MLP."""
    vision_heads: Width = 16
    """Its attention heads."""
    vision_activation: Literal["quick_gelu", "gelu", "gelu_tanh"] = "quick_gelu"
    """Activation of its MLP; quick_gelu: x sigmoid(1.702 x)."""
    vision_layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in its norms."""
    feature_layer: Annotated[int, Field(ge=-1000, le=1000)] = -2
    """Hidden states of the tower that are its features: n behind layer n, -1 behind the last one,
    -2 behind the one before it. Layers behind them, and the tower's last norm, are kept as they are
    and never trained.
    """
    projector_activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    """Between the two layers of the projector."""
    projector_bias: bool = True
    """Biases in both."""
    image_token_id: NonNegativeInt = 32000
    """Token id in whose places patch features stand. It is never a label."""
    freeze: Annotated[tuple[Frozen, ...], Key(effect=Effect.NUMERICS)] = Field(
        default=(), strict=False
    )
    """Parts whose weights stay as they are, without gradient and optimizer state: [vision,
    language] where only the projector is trained (LLaVA's first stage), [vision] in its second.
    """

    @property
    def image_tokens(self) -> int:
        """Return the number of patches of an image, each of which is a token of the language
        model.
        """
        return (self.image_size // self.patch_size) ** 2

    @property
    def used_layers(self) -> int:
        """Return the layers of the vision tower up to its features."""
        if self.feature_layer >= 0:
            return self.feature_layer
        # Hidden states are one more than layers: the first are those before any layer.
        return self.vision_layers + 1 + self.feature_layer

    @property
    def unused_layers(self) -> int:
        """Return the layers after the features."""
        return self.vision_layers - self.used_layers

    # the tower's attention in the words of `model`, by which its weights are rearranged

    @property
    def num_attention_heads(self) -> int:
        """Return the heads of the vision tower."""
        return self.vision_heads

    @property
    def query_groups(self) -> int:
        """Return its key/value heads: one for each query head."""
        return self.vision_heads

    @property
    def head_dim(self) -> int:
        """Return the width of one of its heads."""
        return self.vision_hidden_size // self.vision_heads


_LLAMA = "LLaVA-1.5's language model is a Llama"
_IMAGES = "the sequence is not sharded over ranks: an image may lie in the parts of two"
LIMITS = (
    NO_NORMS_ON_SUMS,
    NO_ADAPTERS,
    Limit("model.moe", (None,), f"{_LLAMA}, without experts"),
    Limit("model.mla", (None,), f"{_LLAMA}, without MLA"),
    Limit("model.linear_attention", (None,), f"{_LLAMA}, with softmax attention"),
    Limit("model.mup", (None,), f"{_LLAMA}, and a vision tower has a width of its own"),
    Limit("model.attention_output_gate", (False,), f"{_LLAMA}, whose attention has no gate"),
    Limit(
        "model.mtp_num_layers", (None,), "MTP layers embed tokens by themselves, and know no images"
    ),
    Limit(
        "model.scale_embedding",
        (False,),
        f"{_LLAMA}; the scale would not be that of patch features",
    ),
    Limit("model.position_embedding_type", ("rope",), f"{_LLAMA}, whose positions are rotary"),
    Limit("parallel.cp", (1,), _IMAGES),
    Limit("parallel.hybrid_context_parallel", (False,), _IMAGES),
    Limit(
        "parallel.fsdp",
        ("none",),
        "weights that are not trained, such as those of layers behind the features, cannot be"
        " sharded by FSDP; parallel.distributed_optimizer=true shards the state of the others",
        (("parallel.fsdp_sharding", None),),
    ),
    Limit("data.packed", (False,), "a sample is one text with its images, and is padded"),
    Limit("data.eod_mask_loss", (False,), "a sample is one text, and nothing follows its end"),
    Limit("trainer.sample_tokens", (0,), "text about an image is not generated yet"),
)

CONFIG = FamilyConfig(
    section=LlavaConfig,
    about="The family llava: vision tower and projector; null: another family.",
    limits=LIMITS,
)
