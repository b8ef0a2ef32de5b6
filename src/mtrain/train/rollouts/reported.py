"""Experts that a server reports for the tokens of an answer, next to its log-probabilities.

SGLang 0.5 reports them on request (`return_routed_experts`), in `meta_info.routed_experts`: base64
of int32. vLLM 0.33 does so for each answer, in `routed_experts` of a choice: base64 of a .npy file.
Both have to be started with --enable-return-routed-experts.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np

from mtrain.config.schema.run import RunConfig

FIX = "Start the server with --enable-return-routed-experts, or set rollout.replay_routes=false"


class BadRoutes(ValueError):
    """Experts that are not those of an answer."""


@dataclass(frozen=True)
class Expected:
    """The experts that an answer has to name."""

    layers: tuple[int, ...]
    """Layers with experts."""
    every: int
    """All layers; servers report these, or those with experts."""
    experts: int
    topk: int

    @classmethod
    def of(cls, run: RunConfig) -> Expected | None:
        """Return those of a run; None: it replays none."""
        moe = run.model.moe
        if moe is None or not run.rollout.replay_routes:
            return None
        m = run.model
        return cls(m.expert_layers, m.num_layers, moe.num_experts, moe.router_topk)

    def read(self, reported: object, tokens: int) -> np.ndarray:
        """Return what a server reported of the `tokens` that it read, int16 [tokens, layers, k].

        Raises:
            BadRoutes: it is something else.
        """
        if not isinstance(reported, str):
            raise BadRoutes(f"rollout.replay_routes=true: an answer names no experts. {FIX}")
        data = base64.b64decode(reported, validate=True)
        held = len(self.layers)
        if data.startswith(b"\x93NUMPY"):
            found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        else:
            flat = np.frombuffer(data, "<i4")
            layers = len(flat) // max(1, tokens * self.topk)
            shaped = len(flat) == tokens * layers * self.topk
            found = flat.reshape(tokens, layers, self.topk) if shaped else flat
        shapes = [(tokens, layers, self.topk) for layers in (held, self.every)]
        if found.shape not in shapes or found.dtype.kind not in "iu":
            raise BadRoutes(
                f"rollout.replay_routes=true: experts of an answer are {found.dtype}"
                f" {found.shape}, not integers {shapes[0]} (tokens, layers, k). {FIX}"
            )
        if found.shape[1] != held:
            found = found[:, list(self.layers)]
        ordered = np.sort(found, axis=-1)
        if found.size and (ordered[..., 0].min() < 0 or ordered[..., -1].max() >= self.experts):
            raise BadRoutes(
                f"rollout.replay_routes=true: experts of an answer are {found.min()} to"
                f" {found.max()}, not 0 to {self.experts - 1}. {FIX}"
            )
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise BadRoutes(
                f"rollout.replay_routes=true: a token of an answer has less than {self.topk}"
                f" experts. {FIX}"
            )
        return found.astype(np.int16)
