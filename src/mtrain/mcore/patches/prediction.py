"""Patches of multi-token prediction (MTP)."""

from __future__ import annotations

import functools
from typing import Any

from mtrain.config.engine.release import SINCE_0_19
from mtrain.mcore.patches.patch import core, patch


@patch(
    "mtp-tied-output",
    "models/gpt/gpt_model.py:248",
    "Where a stage predicts several tokens with tied embeddings, the output layer has a weight"
    " of its own next to the embedding that it uses: AssertionError when the state is split into"
    " shards.",
    "everywhere",
)
def mtp_tied_output() -> None:
    """Take the unused weight out of a tied output layer."""
    cls = core("models.gpt.gpt_model").GPTModel
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.share_embeddings_and_output_weights and self.mtp_process and self.post_process:
            self.output_layer.weight = None

    cls.__init__ = __init__


@patch(
    "mtp-without-labels",
    "models/gpt/gpt_model.py:605",
    "A model that was trained with multi-token prediction asks for labels when it generates:"
    " AttributeError; since 0.19 it makes all further tokens' logits, too, and does not know"
    " where its cache is: RuntimeError.",
    "everywhere",
)
def mtp_without_labels() -> None:
    """Leave MTP layers out where there are no labels."""
    cls = core("models.gpt.gpt_model").GPTModel
    original = cls._postprocess

    @functools.wraps(original)
    def _postprocess(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        predictions = self.config.mtp_num_layers
        if labels is not None or not predictions:
            return original(self, *args, labels=labels, **kwargs)
        # The original has no argument for this: it asks the config.
        self.config.mtp_num_layers = None
        try:
            kwargs["mtp_in_postprocess"] = False
            return original(self, *args, labels=None, **kwargs)
        finally:
            self.config.mtp_num_layers = predictions

    cls._postprocess = _postprocess


@patch(
    "mtp-names",
    "transformer/multi_token_prediction.py:622",
    "Since 0.19 the weights of multi-token prediction have other names (mtp_model_layer):"
    " another release's checkpoints lack them, and initial weights, which are drawn by name,"
    " are silently others.",
    "everywhere",
    SINCE_0_19,
)
def mtp_names() -> None:
    """Hold the layer under the name that it had."""
    cls = core("transformer.multi_token_prediction").MultiTokenPredictionLayer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        parts = {
            name.replace("mtp_model_layer", "transformer_layer"): part
            for name, part in self._modules.items()
        }
        # Refilled in the same order: buffers of data parallelism hold weights in that order.
        self._modules.clear()
        self._modules.update(parts)

    cls.__init__ = __init__
    # 0.19's forward reads the layer by its new name.
    cls.mtp_model_layer = property(lambda self: self.transformer_layer)
