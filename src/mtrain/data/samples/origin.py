"""The documents that the tokens of a sample are of, in words."""

from __future__ import annotations

from typing import Any

from mtrain.data.samples.blend import Blend
from mtrain.data.samples.token_stream import Samples


def origin(source: Any, number: int) -> str:
    """Return the corpus and the documents of a sample; "" for synthetic tokens."""
    if hasattr(source, "place"):
        return str(source.place(number))
    if isinstance(source, Blend):
        part, index = source.places([number])
        return origin(source.parts[int(part[0])], int(index[0]))
    if not isinstance(source, Samples):
        return ""
    data = source.dataset
    tokens = source.tokens_of(number)
    documents = sorted({data.document_at(place) for place in tokens.tolist()})
    plural = "s" if len(documents) > 1 else ""
    return f"{data.prefix}: document{plural} {', '.join(map(str, documents))}"
