"""All exhibits."""

from __future__ import annotations

from tests.museum import experts, layers, packed, resumes, sums

EXHIBITS = (
    *sums.EXHIBITS,
    *experts.EXHIBITS,
    *layers.EXHIBITS,
    *packed.EXHIBITS,
    *resumes.EXHIBITS,
)
