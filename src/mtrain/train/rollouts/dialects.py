"""Ways in which servers are requested to continue token ids, and their answers.

`openai` is the completions route of OpenAI with the token ids that vLLM adds (`return_token_ids`),
`sglang` the native route of SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mtrain.train.generate.request import Sampling


class BadAnswer(Exception):
    """An answer that is not to the request, or not whole."""


@dataclass(frozen=True)
class Asked:
    """A request for one answer."""

    name: str
    """A name that no other request has, which the server repeats."""
    ids: tuple[int, ...]
    tokens: int
    """Upper limit of new tokens."""
    seed: int
    ends: frozenset[int]
    """Tokens that end a text."""
    routed: bool = False
    """True if the answer has to name the experts of its tokens."""


@dataclass(frozen=True)
class Answered:
    """The answer of a server."""

    ids: list[int]
    log_probabilities: list[float]
    ends: bool
    """True if a token ended the text, not its length."""
    version: str | None
    """Version of the weights, as the server reports it; None: it reports none."""
    among: list[list[int]] = field(default_factory=list)
    """The tokens that each was drawn among; empty: not reported."""
    routes: object = None
    """The experts of its tokens, as the server reports them."""


class Dialect(Protocol):
    """A way to request one answer."""

    path: str
    tempered: bool
    """True if log-probabilities are those of the temperature that was drawn with."""

    reports: bool
    """True if a server reports the tokens that each one was drawn among."""

    def body(self, model: str, asked: Asked, sampling: Sampling) -> dict[str, Any]:
        """Return the request."""
        ...

    def read(self, answer: Mapping[str, Any], asked: Asked) -> Answered:
        """Return the answer.

        Raises:
            BadAnswer: it is no answer to this request.
            LookupError, TypeError, ValueError: it has another form.
        """
        ...


class OpenAI:
    """OpenAI's completions, with token ids."""

    path = "/v1/completions"
    tempered = False
    reports = False

    def body(self, model: str, asked: Asked, sampling: Sampling) -> dict[str, Any]:
        """Return the request."""
        return {
            "model": model,
            "prompt": list(asked.ids),
            "max_tokens": asked.tokens,
            "temperature": sampling.temperature,
            # Servers take a signed number of 32 bits.
            "seed": asked.seed % 2**31,
            "n": 1,
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
            # The end of a text is the trainer's, not one of the server's files.
            "ignore_eos": True,
            "stop_token_ids": sorted(asked.ends),
            "request_id": asked.name,
        }

    def read(self, answer: Mapping[str, Any], asked: Asked) -> Answered:
        """Return the answer."""
        (choice,) = answer["choices"]
        require(asked.name in str(answer["id"]), f"it answers {str(answer['id'])[:80]!r}")
        prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        require(prompt == list(asked.ids), "it continues another prompt")
        reason = choice["finish_reason"]
        require(reason in ("stop", "length"), f"it ended with {str(reason)[:40]!r}")
        metadata = answer.get("metadata") or {}
        version = metadata.get("weight_version", answer.get("weight_version"))
        values = choice["logprobs"]["token_logprobs"]
        routes = choice.get("routed_experts")
        tokens = choice["token_ids"]
        return Answered(tokens, values, reason == "stop", version, routes=routes)


class SGLang:
    """SGLang's own route."""

    path = "/generate"
    tempered = True
    reports = False

    def body(self, model: str, asked: Asked, sampling: Sampling) -> dict[str, Any]:
        """Return the request."""
        return {
            "input_ids": list(asked.ids),
            "sampling_params": {
                "max_new_tokens": asked.tokens,
                "temperature": sampling.temperature,
                "sampling_seed": asked.seed % 2**31,
                "ignore_eos": True,
                "stop_token_ids": sorted(asked.ends),
                # The end of a text is a token that is learned, too.
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            **({"return_routed_experts": True} if asked.routed else {}),
            "rid": asked.name,
        }

    def read(self, answer: Mapping[str, Any], asked: Asked) -> Answered:
        """Return the answer."""
        meta = answer["meta_info"]
        require(meta["id"] == asked.name, f"it answers {str(meta['id'])[:80]!r}")
        require(meta["prompt_tokens"] == len(asked.ids), "it continues another prompt")
        reason = meta["finish_reason"]["type"]
        require(reason in ("stop", "length"), f"it ended with {str(reason)[:40]!r}")
        drawn = meta["output_token_logprobs"]
        ids = answer["output_ids"]
        require([one[1] for one in drawn] == ids, "its log-probabilities are of other tokens")
        values = [one[0] for one in drawn]
        routes = meta.get("routed_experts")
        version = meta["weight_version"]
        return Answered(ids, values, reason == "stop", version, routes=routes)


class Transformers(OpenAI):
    """The form of `openai`, of our own process, whose log-probabilities have the temperature."""

    tempered = True
    reports = True

    def body(self, model: str, asked: Asked, sampling: Sampling) -> dict[str, Any]:
        """Return the request, with limits of the draws."""
        names = ("top_k", "top_p", "min_p", "reports")
        limits = {name: getattr(sampling, name) for name in names}
        return super().body(model, asked, sampling) | limits

    def read(self, answer: Mapping[str, Any], asked: Asked) -> Answered:
        """Return the answer, with the tokens that each one was drawn among."""
        found = super().read(answer, asked)
        return replace(found, among=answer["choices"][0]["among"])


DIALECTS: dict[str, Dialect] = {
    "openai": OpenAI(),
    "sglang": SGLang(),
    "transformers": Transformers(),
}


def require(holds: bool, why: str) -> None:
    """Raise BadAnswer unless something holds."""
    if not holds:
        raise BadAnswer(why)


def checked(found: Answered, asked: Asked, vocabulary: int) -> Answered:
    """Return an answer that can be one to this request.

    Raises:
        BadAnswer: it cannot.
    """
    ids = found.ids
    values = found.log_probabilities
    require(isinstance(ids, list) and isinstance(values, list), "it has no lists of tokens")
    require(0 < len(ids) <= asked.tokens, f"it has {len(ids)} tokens, not 1 to {asked.tokens}")
    require(len(values) == len(ids), f"{len(values)} log-probabilities are of {len(ids)} tokens")
    # JSON's true is an int of Python.
    whole = all(type(token) is int and 0 <= token < vocabulary for token in ids)
    require(whole, f"a token is not below {vocabulary}")
    finite = all(type(v) in (int, float) and math.isfinite(v) and v < ROUNDED for v in values)
    require(finite, "a log-probability is no number below 0")
    if found.among:
        drawn = [token in kept for token, kept in zip(ids, found.among, strict=True)]
        require(all(drawn), "a token is not among those that it was drawn from")
    require(not asked.ends & set(ids[:-1]), "it goes on after the end of a text")
    require(found.ends == (ids[-1] in asked.ends), "its last token is not that of its end")
    require(found.ends or len(ids) == asked.tokens, f"it was cut after {len(ids)} tokens")
    return found


ROUNDED = 1e-2
"""Limit of log-probabilities: of a certain token, rounding may leave a little above 0."""
