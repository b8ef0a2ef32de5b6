"""The rule of the family."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import Code
from mtrain.config.schema.run import RunConfig
from ngram_family.config import NgramConfig


@of_family("ngram", Code("NGRAM001"), reads="model.ngram.longest data.seq_length")
def ngrams_fit_samples(run: RunConfig, ngram: NgramConfig) -> Iterator[Finding]:
    """The longest n-gram is not longer than a sample."""
    if run.data.length < ngram.longest:
        why = f"a sample has {run.data.length} tokens (data.seq_length)"
        yield Finding("NGRAM001", "model.ngram.longest", why, ({"data.seq_length": 128},))


RULES = (ngrams_fit_samples,)
