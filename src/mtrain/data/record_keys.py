"""Keys of records and messages: those that say what is learned, those that say nothing of it, and
all others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.errors import CorruptData

FLAGS = ("weight", "loss", "train", "loss_mask")
"""Keys with which formats in use say whether something is learned: 1 or true, and 0 or false."""
_HARMLESS = """
    id _id uuid guid idx index uid hash sha256 prompt_id conversation_id conversation_hash
    session_id thread_id
    message_id parent_id turn turn_id turns num_turns metadata meta extra info source sources
    dataset
    dataset_name dataset_id origin original_id url file filename path category categories
    subcategory domain
    topic topics task tasks task_type tag tags keywords subset split language lang languages license
    licence
    author annotator user_id created created_at updated_at timestamp time date version model
    model_name model_id
    generator engine provider score_chosen score_rejected chosen_score rejected_score chosen_rating
    rejected_rating chosen_model rejected_model title description comment comments note notes
    quality score
    scores rating ratings difficulty length num_tokens token_count n_tokens usage finish_reason
    stop_reason
    logprobs system_fingerprint object toxicity redacted moderation openai_moderation
    detoxify_moderation
    annotations parallel_tool_calls
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Names, places, counts and judgements: no format in use learns from them or is told by them what
to learn.
"""


@dataclass(frozen=True)
class Keys:
    """What is known of keys beside those that are read: some are named as harmless, some are read
    by a template.
    """

    ignored: frozenset[str] = frozenset()
    """Keys of `data.ignored_keys`, which are not read."""
    template: str = ""
    """The chat templates; of a message they may read any key."""

    def template_reads(self, key: str) -> bool:
        """Return whether a template names a key as one of something: `.key`, `'key'` or `"key"`."""
        word = re.escape(key)
        return re.search(rf"""\.\s*{word}\b|'{word}'|"{word}\"""", self.template) is not None

    def kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that are read: all but the keys that are ignored."""
        return {key: value for key, value in values.items() if key not in self.ignored}

    def refuse_unknown(self, values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
        """Pass what has known keys alone; a key whose value is null says nothing.

        Raises:
            CorruptData: another key might change what is learned, with the known ones that are
                near.
        """
        read = [*known, *FLAGS]
        strange = [
            key
            for key, value in values.items()
            if value is not None
            and key not in read
            and key.lower() not in HARMLESS
            and key not in self.ignored
        ]
        if not strange:
            return
        near = dict.fromkeys(
            one for key in strange for one in difflib.get_close_matches(key, read, n=2, cutoff=0.6)
        )
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        names = ", ".join(key[:60] for key in strange[:8])
        what = "an unknown key" if len(strange) == 1 else "unknown keys"
        if len(strange) == 1:
            does = "which might change what is learned, and nothing reads"
        else:
            does = "which nothing reads"
        them = "it" if len(strange) == 1 else "them"
        fix = f"rename or remove {them}, or data.ignored_keys=[{','.join(strange[:8])}]"
        raise CorruptData(f"{where} has {what}: {names}, {does}{meant}; {fix}")


def says_learned_or_not(value: Any) -> bool:
    """Tell if a value says that something is learned or not."""
    return isinstance(value, bool | int | float) and value in (0, 1)


def shown(said: Mapping[str, Any]) -> str:
    """Return keys and their values as a message shows them."""
    return ", ".join(f"{key}: {str(value).lower()[:40]}" for key, value in said.items())


def learned(values: Mapping[str, Any], where: str) -> bool | None:
    """Return whether a record or message says that it is learned; None: it says nothing.

    Raises:
        CorruptData: it says neither yes nor no, or both.
    """
    said = {key: values[key] for key in FLAGS if values.get(key) is not None}
    for key, value in said.items():
        if not says_learned_or_not(value):
            rule = "learned whole or not at all: 1 or true, 0 or false"
            said_here = (
                f"{where}: its {key} is {str(value)[:40]!r}, and a message or record is {rule}"
            )
            raise CorruptData(
                f"{said_here}; where it says something else, data.ignored_keys=[{key}]"
            )
    if len({bool(value) for value in said.values()}) > 1:
        fix = f"data.ignored_keys=[{next(iter(said))}] where that says something else"
        raise CorruptData(
            f"{where} says both that it is learned and that it is not: {shown(said)}; {fix}"
        )
    return next((bool(value) for value in said.values()), None)


def require_learned(values: Mapping[str, Any], where: str) -> None:
    """Pass a record that does not say of itself that it is not to be learned.

    Raises:
        CorruptData: it does, or as `learned`.
    """
    if learned(values, where) is False:
        key = next(name for name in FLAGS if values.get(name) is not None)
        fix = f"remove the line, or data.ignored_keys=[{key}] where that says something else"
        raise CorruptData(f"{where} is not to be learned ({shown({key: values[key]})}): {fix}")
