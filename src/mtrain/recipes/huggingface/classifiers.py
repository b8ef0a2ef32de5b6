"""Classes of transformers that give a text one number: classifiers of one label."""

from __future__ import annotations

import re

from mtrain.errors import ConfigError, Problem
from mtrain.recipes.huggingface.config_file import Json

CLASSIFIER = "ForSequenceClassification"
"""The end of the name of such a class."""
WITHOUT = ("minimax_m2", "deepseek_v32", "glm4_moe")
"""Kinds of models that have no such class; a test asks the installed release."""
OTHERWISE = {"gemma3_text": f"Gemma3Text{CLASSIFIER}"}
"""`model_type` -> a class that is not called as that of the language model."""


def as_classifier(kind: str, body: Json) -> Json:
    """Return the `config.json` of a language model as that of a classifier of one label.

    Raises:
        ConfigError: transformers has no such class for a `model_type`.
    """
    if kind in WITHOUT:
        rule = f"cannot write a model of rewards because transformers has no {CLASSIFIER} of {kind}"
        fix = "`export`, which writes weights under mtrain's own names"
        raise ConfigError([Problem("MT378", "", None, rule, fix)])
    (name, *_) = body["architectures"]
    own = re.sub(f"(ForCausalLM|LMHeadModel|{CLASSIFIER})$", CLASSIFIER, name)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**body, "architectures": [OTHERWISE.get(kind, own)], **labels}
