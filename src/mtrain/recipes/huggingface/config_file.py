"""A Hugging Face `config.json` in reading: each key is used, irrelevant, or refused.

The keys that the classes of transformers read, and their meaning of null, are a table that `python
-m tests.support.hf_classes` generates; a test makes it again from the installed release.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.megatron.arguments import Draft, Unplaced, Why

Json = dict[str, Any]
HINTS = 20
"""Unknown keys of a file that get a suggestion: each takes a millisecond."""


@dataclass(frozen=True)
class Family:
    """The rules to read the configurations of one `model_type`."""

    keys: Mapping[str, str]
    """Hugging Face's key -> our key, for keys that are copied."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Our keys with the same value in the whole family."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """The value of a missing key: the default of the family's class in transformers."""
    more: tuple[Callable[[ConfigFile], None], ...] = ()
    """Readers of keys that are more than a copy."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key that transformers also reads -> the key."""
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    """Keys of this family that do not change the numbers -> why."""
    must: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)
    """Key -> the values that mtrain builds, and a sentence for others."""
    idle: Mapping[str, str] = field(default_factory=dict)
    """Keys that published files have and the class does not read -> a sentence."""

    @classmethod
    def of(
        cls, *tables: Mapping[str, Json], more: tuple[Callable[[ConfigFile], None], ...] = ()
    ) -> Family:
        """Return the family of tables, each of fields of it; a later one overrides an earlier."""
        fields: dict[str, Json] = {}
        for table in tables:
            for name, values in table.items():
                fields[name] = fields.get(name, {}) | values
        return cls(more=more, **fields)


def tables_of(module: str) -> Json:
    """Return the tables in the file `hf_config.json` next to a module."""
    tables: Json = json.loads(Path(module).with_name("hf_config.json").read_text("utf-8"))
    return tables


class ConfigFile:
    """A configuration file while it is read.

    A key that the class of transformers leaves unread has no effect here either, and null means
    what that class takes it for.
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
        # keys that another kind of model reads: a file that was copied and edited often has them
        self._unread = [
            key for key in values if read_by and read_by.ignores(key) and not self._kept(key)
        ]
        self.given = {key: value for key, value in values.items() if key not in self._unread}
        for alias, key in family.aliases.items():
            # with two different values, the alias stays and `finish` refuses it
            if alias in self.given and self.given.get(key, values[alias]) == values[alias]:
                self.given[key] = self.given.pop(alias)
        self.original = {**values, **self.given}
        self.values = {**family.absent, **self.given}
        for key, value in self.given.items():
            if value is None and read_by is not None:
                self._null(key, read_by)

    def _kept(self, key: str) -> bool:
        return key in OURS or self._irrelevant(key)

    def _irrelevant(self, key: str) -> bool:
        return key in self.family.irrelevant or key in IRRELEVANT or key in ELSEWHERE

    def _null(self, key: str, read_by: Class) -> None:
        """Replace null by the value that the class takes it for."""
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
        """Return the value of a key, and mark the key as read."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the value of a key as a number; raise TypeError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise TypeError(f"{key} is not a number")
        return value

    def copy(self) -> None:
        """Copy the keys that are no more than a copy, and note values that the family lacks."""
        for theirs, ours in self.family.keys.items():
            value = self.get(theirs)
            if value is not None:
                self.out[ours] = value
        # after the copies: no key of a file changes a value that the family fixes
        self.out |= self.family.fixed
        for key, (allowed, text) in self.family.must.items():
            self.must(key, allowed, text)
        for key, text in self.family.idle.items():
            self.idle((key,), text)

    def refuse(self, key: str, why: Why, text: str, value: Any = ...) -> None:
        """Note that a key could not be imported; `value` is the relevant part of its value."""
        self.read.add(key)
        shown = json.dumps(self.original.get(key, self.values.get(key)) if value is ... else value)
        # a list with a value for each layer would fill the terminal
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        # several readers may look at the same key
        if (key, text) not in self._refused:
            self._refused.add((key, text))
            self.unplaced.append(Unplaced(key, shown, why, text))

    def differs(self, key: str, text: str, value: Any = ...) -> None:
        """Note a value that changes the numbers, and that mtrain does not build."""
        self.refuse(key, "not supported", f"changes the numbers: {text}", value)

    @property
    def layers(self) -> int:
        """Return the bounded number of layers to visit; later checks refuse absurd numbers."""
        return int(min(self.get("num_hidden_layers", 0), 1 << 14))

    def must(self, key: str, allowed: Sequence[Any], text: str) -> None:
        """Note a value that means something mtrain does not build; null is the family's default.

        It is noted even if today's class does not read the key: another release, or the publisher's
        code, does.
        """
        if key in self._unread:
            self._unread.remove(key)
            self.values[key] = self.original[key]
        if self.get(key, self.family.absent.get(key, allowed[0])) not in allowed:
            self.refuse(key, "not supported", text)

    def idle(self, keys: Sequence[str], text: str) -> None:
        """Note keys of the file that transformers does not read together with its other keys."""
        for key in keys:
            self.read.add(key)
            if self.given.get(key) is not None:
                self.refuse(key, "no effect", text)

    def finish(self) -> None:
        """Account for every key that no reader used."""
        known = {*self.read, *self.family.keys, *self.family.irrelevant, *IRRELEVANT, *PLAIN}
        for key in self._unread:
            # null and false switch a feature off, which is the default
            if self.original[key] not in (None, False):
                name = self.read_by.name.removesuffix("Config") if self.read_by else ""
                self.refuse(key, "no effect", f"is read by no layer of {name} in transformers")
        for key, (allowed, text) in PLAIN.items():
            if key in self.given and key not in self.read:  # a family may have its own rule
                self.must(key, allowed, text)
        for key in self.given:
            if key in self.family.aliases:
                self.refuse(
                    key, "not supported", f"has another value than {self.family.aliases[key]}"
                )
            # publishers leave auto_map in files of architectures that transformers has adopted
            # since
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
        """Return whether transformers has all architectures that the file names."""
        names = self.original.get("architectures")
        if self.read_by is None or not isinstance(names, list) or not names:
            return False
        return all(
            str(name).startswith(f"{self.read_by.name.removesuffix('Config')}For") for name in names
        )

    def inside(self, key: str, inner: str, why: Why, text: str, value: Any) -> None:
        """Note a key `inner` of the object that `key` holds."""
        self.refuse(key, why, f"{inner}: {text}", {inner: value})

    def unknown(self, key: str, known: set[str], within: str | None = None) -> None:
        """Note an unknown key, in the file or in the object of another key, with a suggestion."""
        self._hints -= 1
        if self._hints >= 0:
            # keys of a foreign file may be of any length
            suggestions = difflib.get_close_matches(key[:80], sorted(known), n=1, cutoff=0.8)
        else:
            suggestions = []
        text = "is not read for this family"
        if suggestions:
            text += f"; did you mean {suggestions[0]}?"
        if within is None:
            self.refuse(key, "unknown", text)
        else:
            self.inside(within, key, "unknown", text, self.values[within].get(key))


@dataclass(frozen=True)
class Kind:
    """The rules to read and write one `model_type` of Hugging Face."""

    reads: Family
    writes: Callable[[ModelConfig], Json]
    """Returns the keys of a model's `config.json` beyond the copied ones.

    Raises KeyError, ValueError, TypeError or AttributeError for a model that it cannot describe.
    """
    architecture: Callable[[ModelConfig], str]
    """Returns the class of transformers that loads the folder of a model."""

    @property
    def family(self) -> str:
        """Return the `model.family` of the models that it describes."""
        return str(self.reads.fixed.get("model.family", "gpt"))


_REASONS = {
    "names a token: the tokenizer and the data decide": (
        """
        bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    """
    ),
    "sets the output or cache of a call, not what the model computes": (
        """
        use_cache return_dict use_return_dict output_hidden_states output_attentions output_scores
        return_dict_in_generate torchscript output_router_logits keys_to_ignore_at_inference
        """
    ),
    "chooses among implementations of the same mathematics": (
        """
        chunk_size_feed_forward pretraining_tp attn_implementation _attn_implementation
        _attn_implementation_internal experts_implementation _experts_implementation use_bfloat16
        tf_legacy_loss
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
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
        forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens cache_implementation
        """
    ),
    "is read by a model for classification": (
        "id2label label2id num_labels problem_type classifier_dropout"
    ),
    "is always true: the model is causal": "is_decoder",
}
IRRELEVANT: dict[str, str] = {key: why for why, keys in _REASONS.items() for key in keys.split()}
"""Keys that do not change the numbers of training, in any family -> why."""

PLAIN: dict[str, tuple[Sequence[Any], str]] = {
    "is_encoder_decoder": ((False,), "changes the numbers: this family has one stack of layers"),
    "add_cross_attention": ((False,), "changes the numbers: no cross attention is added"),
    "cross_attention_hidden_size": ((None,), "changes the numbers: no cross attention is added"),
    "tie_encoder_decoder": ((False,), "changes the numbers: encoder and decoder share no layers"),
    "pruned_heads": (({}, []), "changes the numbers: every layer has all of its heads"),
}
"""Keys of any family -> the values that mtrain builds, and a sentence for others."""

OURS = ("num_nextn_predict_layers", "num_mtp_layers", "n_positions")
"""Keys that mtrain reads even if transformers does not: those of prediction layers, which it leaves
out, and the length of samples where positions are relative.
"""

ELSEWHERE: dict[str, tuple[Why, str]] = {
    "auto_map": (
        "not supported",
        (
            "names code, which is never loaded: to use the class of transformers, remove it from"
            " config.json"
        ),
    ),
    "torch_dtype": ("derived here", "sets how weights are stored; a run chooses precision=bf16"),
    "dtype": ("derived here", "sets how weights are stored; a run chooses precision=bf16"),
    "quantization_config": ("not supported", "sets how weights are stored"),
}
"""Keys that are refused in every family -> why."""


TABLE = Path(__file__).with_name("classes.json")


@dataclass(frozen=True)
class Class:
    """A configuration class and the models that are made of it."""

    name: str
    read: frozenset[str]
    """Keys that it reads, among those that any class declares."""
    null: Mapping[str, str]
    """Key -> the meaning of null: `refused`, `absent`, `filled`, `false`, or `nothing`."""
    declared: frozenset[str]
    """Keys that the class of any kind declares or reads."""

    def ignores(self, key: str) -> bool:
        """Return whether other classes read a key, and this one does not."""
        return key in self.declared and key not in self.read


@cache
def classes() -> dict[str, Class]:
    """Return every class by its `model_type`."""
    kinds: dict[str, Any] = json.loads(TABLE.read_text("utf-8"))["kinds"]
    declared = frozenset(key for one in kinds.values() for key in one["read"])
    return {
        kind: Class(
            one["class"],
            frozenset(one["read"]),
            {key: meaning for meaning, keys in one["null"].items() for key in keys},
            declared,
        )
        for kind, one in kinds.items()
    }


def class_of(kind: str, values: Mapping[str, Any]) -> Class | None:
    """Return the class that reads a file of a `model_type`; None if the table lacks it."""
    # AutoConfig's own rule: a Mistral with layer_types is a Ministral
    by_layer = kind == "mistral" and (
        "layer_types" in values or values.get("model_type") == "ministral"
    )
    return classes().get("ministral" if by_layer else kind)
