"""Number formats: the facts for each word of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Formats of weights and activations.
WeightFormat = Literal["fp32", "bf16", "fp16"]
# Formats of main weights, in which updates accumulate, and of an optimizer's GEMMs.
MainFormat = Literal["fp32", "bf16"]
# Formats of an optimizer's moments.
MomentFormat = Literal["fp32", "bf16", "fp8"]
# Formats of linear layers' GEMMs.
ProductFormat = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
# Formats with a stated peak of a device.
Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]


@dataclass(frozen=True)
class FormatFacts:
    """The facts of a number format."""

    torch: str
    """The torch dtype of its tensors; formats of up to eight bits are bytes with scales."""
    bits: int
    largest: float
    """Its largest number; for eight bits that of e4m3."""
    flag: str | None = None
    """Megatron-LM's flag for weights in it; None if there is none."""

    @property
    def bytes(self) -> int:
        """Return the bytes of an element, rounded up."""
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
    """Return the bytes of an element in a format."""
    return FORMATS[word].bytes


def is_half(word: str) -> bool:
    """Return whether weights in a format need main weights of higher precision."""
    return FORMATS[word].bits < FORMATS["fp32"].bits
