"""Number formats: what each word of a configuration stands for, for everything that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal["fp32", "bf16", "fp16"]
"""What weights and activations are in."""
MainFormat = Literal["fp32", "bf16"]
"""What updates add up in, and what an optimizer multiplies in."""
MomentFormat = Literal["fp32", "bf16", "fp8"]
"""What moments of an optimizer are kept in."""
ProductFormat = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
"""What linear layers multiply in."""
Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
"""What a device states a peak of."""


@dataclass(frozen=True)
class FormatFacts:
    """What is known of a number format."""

    torch: str
    """The torch dtype of a tensor of it; formats of eight bits and less are bytes, with scales
    beside them.
    """
    bits: int
    largest: float
    """Its largest number; of eight bits that of e4m3."""
    flag: str | None = None
    """Megatron-LM's flag for weights in it; None: it has none."""

    @property
    def bytes(self) -> int:
        """Of an element, rounded up."""
        return -(-self.bits // 8)


FORMATS: dict[str, FormatFacts] = {
    "fp32": FormatFacts("float32", 32, 3.4028234663852886e38),
    "tf32": FormatFacts("float32", 32, 3.4011621342146535e38),
    "bf16": FormatFacts("bfloat16", 16, 3.3895313892515355e38, "--bf16"),
    "fp16": FormatFacts("float16", 16, 65504.0, "--fp16"),
    "fp8": FormatFacts("uint8", 8, 448.0),
    "fp4": FormatFacts("uint8", 4, 6.0),
}


def bytes_of(word: str) -> int:
    """Return bytes of an element in a format."""
    return FORMATS[word].bytes


def is_half(word: str) -> bool:
    """Return whether weights in a format need main weights of more bits beside them."""
    return FORMATS[word].bits < FORMATS["fp32"].bits
