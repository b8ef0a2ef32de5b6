"""The text of a record: the value of a key, or a template of keys.

A record without the text is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from mtrain.data.preprocess.encoder import library
from mtrain.data.records import FLAGS, is_learning_flag, shown
from mtrain.data.text.tokenizer import named_faults
from mtrain.errors import BadEnvironment, ConfigError

# A text, or its sentences
Text = str | list[str]


@dataclass(frozen=True)
class Rejected:
    """An excluded record."""

    number: int
    """The number of the line or row, from 1; 0 for the whole file."""
    why: str
    by: tuple[str, ...] = ()
    """The flags that exclude it from learning."""
    misread: tuple[str, str] | None = None
    """The name of a learning flag with a value other than yes and no, which ends the command."""


class NotLearned(ValueError):
    """The error of a record whose own flags, the keys `by`, exclude it from learning."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.by = tuple(flags)
        fix = " ".join(f"ignored_keys={key}" for key in flags)
        super().__init__(
            f"it says that it is not learned ({shown(flags)}); {fix} where that says something else"
        )


class Misread(ValueError):
    """The error of a learning flag that is neither yes nor no, such as a measured loss."""

    def __init__(self, key: str, value: Any) -> None:
        self.key = key
        self.value = str(value)[:40]
        super().__init__(f"its {key} is {self.value!r}")


def rejected(number: int, error: Exception, why: str) -> Rejected:
    """Return the rejected record of an error of `Reading.text`."""
    misread = (error.key, error.value) if isinstance(error, Misread) else None
    return Rejected(number, why, error.by if isinstance(error, NotLearned) else (), misread)


def refuse_misread(one: Rejected, file: str, line: int) -> None:
    """Refuse a record whose learning flag is neither yes nor no.

    Raises:
        ConfigError: the flag is misread.
    """
    if one.misread is None:
        return
    # such a column has a value in every record: to leave them out would leave the corpus empty
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
    """True if each line of a text file is a document."""
    max_bytes: int = 64 << 20
    """The most bytes of a document; a larger one is skipped."""
    ignored: tuple[str, ...] = ()
    """Keys that are no learning flags in this data, though they have the name of one."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that are read."""
        return tuple(key for _, key in self.parts if key is not None)

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the keys of learning flags."""
        return tuple(key for key in FLAGS if key not in (*self.keys, *self.ignored))

    def text(self, record: Any) -> Text:
        """Return the text of a record.

        Raises:
            ValueError: it has no text, or is not to be learned; the message says why.
        """
        if isinstance(record, Mapping):
            self._refuse_unlearned(record)
        if len(self.parts) == 1 and not self.parts[0][0]:
            return self._value(record, self.parts[0][1] or "", sentences=True)
        out = [
            before + (str(self._value(record, key, sentences=False)) if key else "")
            for before, key in self.parts
        ]
        return "".join(out)

    def _refuse_unlearned(self, record: Mapping[Any, Any]) -> None:
        """Raise ValueError for a record whose flags exclude it from learning.

        A key that is read as text is no flag.
        """
        flags = {key: record[key] for key in self.flags if record.get(key) is not None}
        for key, value in flags.items():
            if not is_learning_flag(value):
                raise Misread(key, value)
        if flags and not any(flags.values()):
            raise NotLearned(flags)
        if not all(flags.values()):
            fix = "ignored_keys=KEY for the one that says something else"
            raise ValueError(
                f"it says both that it is learned and that it is not: {shown(flags)}; {fix}"
            )

    def _value(self, record: Any, key: str, *, sentences: bool) -> Text:
        # the key itself first, which may have dots in its name
        found = record.get(key, record) if isinstance(record, Mapping) else None
        if found is record or found is None:
            found = _walk(record, key)
        if isinstance(found, bytes):
            found = found.decode()
        if isinstance(found, str):
            return found
        if sentences and isinstance(found, list) and all(isinstance(one, str) for one in found):
            return found
        raise ValueError(f"{key} is {_kind(found)}, and not a text")


def _walk(record: Any, key: str) -> Any:
    """Return the value at a key with dots, of records in records."""
    for name in [key] if isinstance(record, Mapping) and key in record else key.split("."):
        if not isinstance(record, Mapping):
            raise ValueError(f"it is {_kind(record)}, and not an object with the key {key}")
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
    if type(value) in names:
        return names[type(value)]
    return "a number" if isinstance(value, int | float) else type(value).__name__


def reading(key: str, template: str | None, **options: Any) -> Reading:
    """Return a reading of a key, or of a template such as `{title}\\n{text}`, in which `\\n` and
    `\\t` may be written.

    Raises:
        ConfigError: the template has no key, or its braces hold more than a key.
    """
    if template is None:
        return Reading((("", key),), **options)
    try:
        parts = tuple(_parts(template.replace("\\n", "\n").replace("\\t", "\t")))
    except ValueError as error:
        parts = ()
        rule = f"cannot be read because {error}"
    else:
        rule = "cannot give a text because it has no key in braces"
    if not any(name for _, name in parts):
        raise ConfigError.of(
            "MT003", "template", template, rule, "template='{title}\\n{text}'", "command line"
        )
    return Reading(parts, **options)


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    for before, name, form, conversion in Formatter().parse(template):
        if name == "" or form or conversion or (name or "").strip("_") != (name or "").strip("_ "):
            raise ValueError("braces may hold only the name of a key")
        yield before, name


def roots(keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns of a table that contain one of the keys."""
    return [
        column
        for column in columns
        if any(key == column or key.startswith(f"{column}.") for key in keys)
    ]


Splitter = Callable[[str], list[str]]
# Characters that Punkt gets at once, as in Megatron-LM's tool
LONGEST = 1_000_000


def splitter(language: str, keep_newlines: bool) -> Splitter:
    """Return the splitter of a language; with `keep_newlines`, a sentence keeps its line ends.

    Raises:
        BadEnvironment: nltk, or its data of the language, is not installed.
        ConfigError: the language is not a name.
        CorruptData: nltk cannot read its data.
    """
    # the name becomes a part of a path
    if not re.fullmatch(r"[a-z_]+", language):
        rule = "cannot be used because it is not the name of a language, such as english"
        raise ConfigError.of(
            "MT003", "sentences", language, rule, "sentences=english", "command line"
        )
    punkt = library("nltk.tokenize.punkt", "sentences", "sentences")
    data = library("nltk.data", "sentences", "sentences")
    try:
        folder = data.find(f"tokenizers/punkt_tab/{language}/")
    except (LookupError, ValueError) as error:
        raise BadEnvironment(
            f"sentences={language}: cannot cut sentences because nltk has no data of this language"
            f" here (tokenizers/punkt_tab/{language})",
            "  fix: python -m nltk.downloader punkt_tab, or NLTK_DATA=FOLDER with it",
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
