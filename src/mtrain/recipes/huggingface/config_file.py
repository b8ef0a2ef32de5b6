"""A Hugging Face `config.json` while it is read: each of its keys is used, irrelevant for a reason,
or refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.recipes.huggingface.classes import Class
from mtrain.recipes.megatron.arguments import Draft, Unplaced, Why

Json = dict[str, Any]
HINTS = 20
"""Unknown keys of a file whose nearest known one is looked for: it takes a millisecond each."""


@dataclass(frozen=True)
class Family:
    """How the configurations of one `model_type` are read."""

    keys: Mapping[str, str]
    """Their key -> ours, copied."""
    fixed: Mapping[str, Any]
    """Our keys that hold for the whole family."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What leaving out a key means: the default of the family's class in transformers."""
    more: tuple[Callable[[ConfigFile], None], ...] = ()
    """Readers of what is more than a copy."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key that transformers reads as well -> the key."""
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    """Keys of this family that say nothing of the numbers -> why."""


class ConfigFile:
    """A configuration file while it is read.

    What the class of transformers that would read it leaves unread says nothing here either, and
    null is what that class takes it for.
    """

    def __init__(self, values: Json, family: Family, read_by: Class | None = None) -> None:
        self.out: Draft = {}
        self.read = {"model_type"}
        self.unplaced: list[Unplaced] = []
        self._refused: set[tuple[str, str]] = set()
        self._hints = HINTS
        self.notes: list[str] = []
        self.family = family
        self.read_by = read_by
        self._unread = [
            key for key in values if read_by and read_by.ignores(key) and not self._kept(key)
        ]
        self.given = {key: value for key, value in values.items() if key not in self._unread}
        for alias, key in family.aliases.items():
            if alias in self.given and self.given.get(key, values[alias]) == values[alias]:
                self.given[key] = self.given.pop(alias)
        self.said = {**values, **self.given}
        self.values = {**family.absent, **self.given}
        for key, value in self.given.items():
            if value is None and read_by is not None:
                self._null(key, read_by)

    def _kept(self, key: str) -> bool:
        return key in OURS or self._irrelevant(key)

    def _irrelevant(self, key: str) -> bool:
        return key in self.family.irrelevant or key in IRRELEVANT or key in ELSEWHERE

    def _null(self, key: str, read_by: Class) -> None:
        """Put what the class takes null for in its place."""
        meaning = read_by.null.get(key)
        if meaning == "false":
            self.values[key] = False
        elif meaning == "absent":
            self.values[key] = self.family.absent.get(key)
        elif meaning == "refused" and not self._irrelevant(key):
            self.refuse(
                key,
                "unreadable",
                f"{read_by.name} of transformers takes no null here; leave it out",
            )
            self.values[key] = self.family.absent.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is thereby read."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the value of a key that others are multiplied with; `TypeError` for a text, which
        would be repeated.
        """
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise TypeError(f"{key} is no number")
        return value

    def refuse(self, key: str, why: Why, text: str, value: Any = ...) -> None:
        """Note that a key could not be taken over; `value` is the part of what it holds that
        counts.
        """
        self.read.add(key)
        shown = json.dumps(self.said.get(key, self.values.get(key)) if value is ... else value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        if (key, text) not in self._refused:
            self._refused.add((key, text))
            self.unplaced.append(Unplaced(key, shown, why, text))

    @property
    def layers(self) -> int:
        """Return how many layers to go through; a number that no model has is left to the checks of
        the configuration.
        """
        return int(min(self.get("num_hidden_layers", 0), 1 << 14))

    def must(self, key: str, allowed: Sequence[Any], text: str) -> None:
        """Note a value that means something that is not there here; null is the family's default.

        It is noted even where today's class does not read the key: another release, or the
        publisher's code, does.
        """
        if key in self._unread:
            self._unread.remove(key)
            self.values[key] = self.said[key]
        if self.get(key, self.family.absent.get(key, allowed[0])) not in allowed:
            self.refuse(key, "not supported", text)

    def idle(self, keys: Sequence[str], text: str) -> None:
        """Note keys that the file says and transformers does not read beside the others."""
        for key in keys:
            self.read.add(key)
            if self.given.get(key) is not None:
                self.refuse(key, "no effect", text)

    def finish(self) -> None:
        """Accounts for every key that no reader asked for."""
        known = {*self.read, *self.family.keys, *self.family.irrelevant, *IRRELEVANT, *PLAIN}
        for key in self._unread:
            if self.said[key] not in (None, False):
                name = self.read_by.name.removesuffix("Config") if self.read_by else ""
                self.refuse(key, "no effect", f"is read by no layer of {name} in transformers")
        for key, (allowed, text) in PLAIN.items():
            if key in self.given and key not in self.read:  # a family may judge it for itself
                self.must(key, allowed, text)
        for key in self.given:
            if key in self.family.aliases:
                self.refuse(
                    key, "not supported", f"says another value than {self.family.aliases[key]}"
                )
            elif key == "auto_map" and self._is_of_transformers():
                self.refuse(
                    key,
                    "no effect",
                    "names code, which is never loaded: transformers has that architecture",
                )
            elif key in ELSEWHERE:
                self.refuse(key, *ELSEWHERE[key])
            elif key not in known:
                self.unknown(key, known)

    def _is_of_transformers(self) -> bool:
        """Tell if the file's architectures are those of the class of transformers that reads it."""
        names = self.said.get("architectures")
        if self.read_by is None or not isinstance(names, list) or not names:
            return False
        return all(
            str(name).startswith(f"{self.read_by.name.removesuffix('Config')}For") for name in names
        )

    def inside(self, key: str, inner: str, why: Why, text: str, value: Any) -> None:
        """Note a key `inner` of the object that `key` holds."""
        self.refuse(key, why, f"{inner}: {text}", {inner: value})

    def unknown(self, key: str, known: set[str], within: str | None = None) -> None:
        """Note a key, in the object of another one or in the file, with the nearest one that is
        known.
        """
        self._hints -= 1
        if self._hints >= 0:
            near = difflib.get_close_matches(key[:80], sorted(known), n=1, cutoff=0.8)
        else:
            near = []
        text = "is not read for this family" + (f"; did you mean {near[0]}?" if near else "")
        if within is None:
            self.refuse(key, "unknown", text)
        else:
            self.inside(within, key, "unknown", text, self.values[within].get(key))


_REASONS = {
    "names a token: the tokenizer and the data decide": (
        """
        bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    """
    ),
    "says what a call returns or keeps, not what the model computes": (
        """
        use_cache return_dict use_return_dict output_hidden_states output_attentions output_scores
        return_dict_in_generate torchscript output_router_logits keys_to_ignore_at_inference
    """
    ),
    "chooses among implementations of the same mathematics": (
        """
        chunk_size_feed_forward pretraining_tp attn_implementation _attn_implementation
        _attn_implementation_internal
        experts_implementation _experts_implementation use_bfloat16 tf_legacy_loss
    """
    ),
    "names a file, a program or a person's task": (
        """
        architectures transformers_version _name_or_path name_or_path _commit_hash finetuning_task
        task_specific_params tokenizer_class prefix
    """
    ),
    "is read when text is generated": (
        """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k
        top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size
        bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
        remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens cache_implementation
    """
    ),
    "is read by a model for classification": (
        "id2label label2id num_labels problem_type classifier_dropout"
    ),
    "is so in any case: the model is causal": "is_decoder",
}
IRRELEVANT: dict[str, str] = {key: why for why, keys in _REASONS.items() for key in keys.split()}
"""Keys that say nothing of the numbers of training, in any family -> why."""

PLAIN: dict[str, tuple[Sequence[Any], str]] = {
    "is_encoder_decoder": ((False,), "changes the numbers: this family has one stack of layers"),
    "add_cross_attention": ((False,), "changes the numbers: no cross attention is added"),
    "cross_attention_hidden_size": ((None,), "changes the numbers: no cross attention is added"),
    "tie_encoder_decoder": ((False,), "changes the numbers: encoder and decoder share no layers"),
    "pruned_heads": (({}, []), "changes the numbers: every layer has all of its heads"),
}
"""Keys that any family may hold -> the values that are so here, and a sentence for the others."""

OURS = ("num_nextn_predict_layers", "num_mtp_layers", "n_positions")
"""Keys that say something here whatever transformers reads: of layers that predict further, which
it leaves out, and the length of samples where positions are relative.
"""

ELSEWHERE: dict[str, tuple[Why, str]] = {
    "auto_map": (
        "not supported",
        (
            "names code, which is never loaded: where the class of transformers is meant, leave it"
            " out of config.json"
        ),
    ),
    "torch_dtype": ("derived here", "says how weights are stored; a run chooses precision=bf16"),
    "dtype": ("derived here", "says how weights are stored; a run chooses precision=bf16"),
    "quantization_config": ("not supported", "says how weights are stored"),
}
"""Keys that are refused wherever they stand -> why."""
