"""The documents that the tokens of a sample are of, in words."""

from __future__ import annotations

from typing import Any

from mtrain.data.samples.blend import Blend
from mtrain.data.samples.token_stream import Samples
from mtrain.data.samples.whole_documents import WholeDocuments


def origin(source: Any, number: int) -> str:
    """Return the corpus and the documents of a sample; "" for synthetic tokens."""
    if hasattr(source, "place"):
        return str(source.place(number))
    corpus, documents = documents_of(source, number)
    plural = "s" if len(documents) > 1 else ""
    return f"{corpus}: document{plural} {', '.join(map(str, documents))}" if corpus else ""


def documents_of(source: Any, number: int) -> tuple[str, list[int]]:
    """Return the corpus of a sample, and the numbers of its documents there; "" and none for
    synthetic tokens, and for records that are named by file and line.
    """
    if hasattr(source, "places") and hasattr(source, "parts"):
        part, index = source.places([number])
        return documents_of(source.parts[int(part[0])], int(index[0]))
    if isinstance(source, WholeDocuments):
        read = source.read(source.find(number))
        return str(source.dataset.prefix), [int(document) for document, _, _ in read]
    if not isinstance(source, Samples):
        return "", []
    data = source.dataset
    tokens = source.tokens_of(number)
    return str(data.prefix), sorted({data.document_at(place) for place in tokens.tolist()})


def sources_of(source: Any) -> list[str]:
    """Return the corpora of a blend, in the order of its parts; none for other samples."""
    if not isinstance(source, Blend):
        return []
    return [str(part.dataset.prefix) for part in source.parts]


def pieces(source: Any, number: int) -> list[tuple[int, int, int]]:
    """Return the first token, the end and the number of each document in a sample of a token
    stream; none where the tokens of a sample are not consecutive.
    """
    if isinstance(source, Blend):
        part, index = source.places([number])
        return pieces(source.parts[int(part[0])], int(index[0]))
    if type(source) is not Samples:
        return []
    documents = [source.dataset.document_at(place) for place in source.tokens_of(number).tolist()]
    found = []
    for document in sorted(set(documents)):
        begin = documents.index(document)
        found.append((begin, begin + documents.count(document), document))
    return found
