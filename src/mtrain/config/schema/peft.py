"""`peft`: low-rank adapters of a model with frozen weights."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Effect, Key, PositiveFloat, Probability, Section, Width

Target = Literal["qkv", "proj", "fc1", "fc2", "in_proj", "out_proj", "experts"]
TARGETS: tuple[Target, ...] = ("qkv", "proj", "fc1", "fc2", "in_proj", "out_proj", "experts")
# The layers of Mamba-2 mixers.
MIXERS: tuple[Target, ...] = ("in_proj", "out_proj")


class PeftConfig(Section):
    """`peft`: parameter-efficient fine-tuning. The weights W of the model are frozen, and each GEMM
    with one is followed by the product of two trained small matrices, B A of rank r.
    """

    kind: Annotated[Literal["lora", "dora"] | None, Key(effect=Effect.ARCHITECTURE)] = None
    """lora: W + (alpha / r) B A (Hu et al. 2021, arXiv:2106.09685); dora: the same with a magnitude
    of each row that is trained too (Liu et al. 2024, arXiv:2402.09353); null: every weight of the
    model is trained.
    """
    r: Annotated[
        Width | None, Key(when="peft.kind", null=16, effect=Effect.ARCHITECTURE, aka="lora_rank")
    ] = None
    """The rank of an adapter: of queries, keys, values, gate and up projection each, and of both
    layers of each expert; null: 16.
    """
    alpha: Annotated[
        PositiveFloat | None,
        Key(when="peft.kind", null=32.0, effect=Effect.ARCHITECTURE, aka="lora_alpha"),
    ] = None
    """The scale of an adapter is alpha / r; null: 32."""
    dropout: Annotated[Probability, Key(when="peft.kind=lora", aka="lora_dropout")] = 0.0
    """Dropout on the input of A; not for experts, whose adapters have none in `peft` either."""
    target: Annotated[
        tuple[Target, ...] | None,
        Key(when="peft.kind", effect=Effect.ARCHITECTURE, aka="target_modules"),
    ] = Field(default=None, strict=False)
    """Layers with adapters: qkv (queries, keys, values; all of MLA's), proj (the output of
    attention), fc1 and fc2 (gate and up, and down projection, of dense MLPs and shared experts),
    in_proj and out_proj (the first and last layer of a Mamba-2 mixer), experts (both layers of each
    routed expert). Layers that the model lacks are skipped, and MTP layers have none; null: all
    that the kind supports except out_proj, which `peft` adapts in few models.
    """
    init_from: Annotated[str | None, Key(when="peft.kind")] = None
    """A folder of `peft` whose adapters a new run starts from, together with the Hugging Face
    folder of checkpoint.init_from or of `convert import`; null: A is drawn from trainer.seed, and B
    is 0.
    """

    @property
    def scale(self) -> float:
        """Return the factor of B A in a resolved run."""
        assert self.alpha is not None
        assert self.r is not None
        return self.alpha / self.r
