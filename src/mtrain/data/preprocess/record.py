"""The text of a record: the value of a key, or a template of keys.

A record without the text is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from mtrain.data.preprocess.encoder import library, named_faults
from mtrain.data.records import FLAGS, says_learned_or_not, shown
from mtrain.errors import BadEnvironment, ConfigError

# A text, or its sentences
Text = str | list[str]


@dataclass(frozen=True)
class Rejected:
    """A record that is left out."""

    number: int
    """Of the line or row, from 1; 0: the file itself."""
    why: str
    by: tuple[str, ...] = ()
    """The keys with which it says itself that it is not learned."""
    misread: tuple[str, str] | None = None
    """A key that should say whether it is learned, and its value, which says something else: it
    ends the command.
    """


class NotLearned(ValueError):
    """A record says of itself, with the keys `by`, that it is not learned."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.by = tuple(said)
        fix = " ".join(f"ignored_keys={key}" for key in said)
        super().__init__(
            f"it says that it is not learned ({shown(said)}); {fix} where that says something else"
        )


class Misread(ValueError):
    """A key that says whether a record is learned has a value that says something else, such as a
    measured loss.
    """

    def __init__(self, key: str, value: Any) -> None:
        self.key = key
        self.value = str(value)[:40]
        super().__init__(f"its {key} is {self.value!r}")


def rejected(number: int, error: Exception, why: str) -> Rejected:
    """Return the rejected record of an error of `Reading.text`."""
    misread = (error.key, error.value) if isinstance(error, Misread) else None
    return Rejected(number, why, error.by if isinstance(error, NotLearned) else (), misread)


def refuse_misread(one: Rejected, file: str, line: int) -> None:
    """Pass what is left out for a reason of its own.

    Raises:
        ConfigError: it is not known whether the record is to be left out. All records of such a
            column would be.
    """
    if one.misread is None:
        return
    key, value = one.misread
    rule = (
        f"a record says with {key} whether it is learned, by 1 or true and 0 or false, and this is"
        " neither"
    )
    fix = f"ignored_keys={key}, where {key} says something else; or 1 or 0 for it"
    raise ConfigError.of("MT624", key, value, rule, fix, f"{file}:{line}" if line else file)


@dataclass(frozen=True)
class Reading:
    """The settings that turn a record into text."""

    parts: tuple[tuple[str, str | None], ...]
    """(constant text, key after it) of the template; a single key is `(("", key),)`."""
    by_line: bool = False
    """A line of a text file is a document."""
    max_bytes: int = 64 << 20
    """A document with more is left out."""
    ignored: tuple[str, ...] = ()
    """Keys that say nothing of what is learned, though they are named as those that do."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that are read."""
        return tuple(key for _, key in self.parts if key is not None)

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the keys that say whether a record is learned."""
        return tuple(key for key in FLAGS if key not in (*self.keys, *self.ignored))

    def text(self, record: Any) -> Text:
        """Return the text of a record.

        Raises:
            ValueError: says why it has none, or that it is not to be learned.
        """
        if isinstance(record, Mapping):
            self._is_learned(record)
        if len(self.parts) == 1 and not self.parts[0][0]:
            return self._value(record, self.parts[0][1] or "", sentences=True)
        out = [
            before + (str(self._value(record, key, sentences=False)) if key else "")
            for before, key in self.parts
        ]
        return "".join(out)

    def _is_learned(self, record: Mapping[Any, Any]) -> None:
        """Raise ValueError for a record that says with a key, which is not read as text, that it
        is not learned.
        """
        said = {key: record[key] for key in self.flags if record.get(key) is not None}
        for key, value in said.items():
            if not says_learned_or_not(value):
                raise Misread(key, value)
        if said and not any(said.values()):
            raise NotLearned(said)
        if not all(said.values()):
            fix = "ignored_keys=KEY for the one that says something else"
            raise ValueError(
                f"it says both that it is learned and that it is not: {shown(said)}; {fix}"
            )

    def _value(self, record: Any, key: str, *, sentences: bool) -> Text:
        found = record.get(key, record) if isinstance(record, Mapping) else None
        if found is record or found is None:
            found = _walk(record, key)
        if isinstance(found, bytes):
            found = found.decode()
        if isinstance(found, str):
            return found
        if sentences and isinstance(found, list) and all(isinstance(one, str) for one in found):
            return found
        raise ValueError(f"{key} is {_kind(found)}, and no text")


def _walk(record: Any, key: str) -> Any:
    """Return the value at a key with dots, of records in records."""
    for name in [key] if isinstance(record, Mapping) and key in record else key.split("."):
        if not isinstance(record, Mapping):
            raise ValueError(f"it is {_kind(record)}, and no object with the key {key}")
        if name not in record:
            raise ValueError(
                f"it has no key {key}; keys:"
                f" {', '.join(map(str, list(record)[:8]))[:120] or 'none'}"
            )
        record = record[name]
    return record


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(
        type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__
    )


def reading(key: str, template: str | None, **options: Any) -> Reading:
    """Return a reading of a key, or of a template such as `{title}\\n{text}`, in which `\\n` and
    `\\t` may be written.

    Raises:
        ConfigError: the template has no key, or more in its braces than one.
    """
    if template is None:
        return Reading((("", key),), **options)
    try:
        parts = tuple(_parts(template.replace("\\n", "\n").replace("\\t", "\t")))
    except ValueError as error:
        parts = ()
        rule = str(error)
    else:
        rule = "has no key in braces"
    if not any(name for _, name in parts):
        raise ConfigError.of(
            "MT003", "template", template, rule, "template='{title}\\n{text}'", "command line"
        )
    return Reading(parts, **options)


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    for before, name, form, conversion in Formatter().parse(template):
        if name == "" or form or conversion or (name or "").strip("_") != (name or "").strip("_ "):
            raise ValueError("braces hold the name of a key, and nothing else")
        yield before, name


def roots(keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns of a table that contain one of the keys."""
    return [
        column
        for column in columns
        if any(key == column or key.startswith(f"{column}.") for key in keys)
    ]


Splitter = Callable[[str], list[str]]
# Letters that are cut at once; of a longer text each so many by themselves
LONGEST = 1_000_000


def splitter(language: str, keep_newlines: bool) -> Splitter:
    """Return the splitter of a language; with `keep_newlines`, a sentence keeps its line ends.

    Raises:
        BadEnvironment: nltk, or its data of the language, is not installed.
        ConfigError: the language is no name.
        CorruptData: nltk cannot read its data.
    """
    if not re.fullmatch(r"[a-z_]+", language):
        rule = "is no name of a language, such as english"
        raise ConfigError.of(
            "MT003", "sentences", language, rule, "sentences=english", "command line"
        )
    punkt = library("nltk.tokenize.punkt", "sentences", "sentences")
    data = library("nltk.data", "sentences", "sentences")
    try:
        folder = data.find(f"tokenizers/punkt_tab/{language}/")
    except (LookupError, ValueError) as error:
        said = (
            f"sentences={language}: nltk has no data of this language here"
            f" (tokenizers/punkt_tab/{language})"
        )
        raise BadEnvironment(
            said, "  fix: python -m nltk.downloader punkt_tab, or NLTK_DATA=FOLDER with it"
        ) from error
    with named_faults(f"{folder}", "nltk cannot read this data of Punkt"):
        tokenizer = punkt.PunktSentenceTokenizer(
            train_text=punkt.load_punkt_params(folder),
            lang_vars=_variables(punkt) if keep_newlines else None,
        )

    def cut(text: str) -> list[str]:
        return [
            one
            for i in range(0, len(text), LONGEST)
            for one in tokenizer.tokenize(text[i : i + LONGEST])
        ]

    return cut


def _variables(punkt: Any) -> Any:
    """Return Punkt's rules with white space after a sentence as a part of it, as in Megatron-LM."""
    form = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
    return type("KeepNewlines", (punkt.PunktLanguageVars,), {"_period_context_fmt": form})()
