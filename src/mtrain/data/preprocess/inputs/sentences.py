"""Sentences of a text, as Megatron-LM cuts them: Punkt, by nltk, which is in the extra
`sentences`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mtrain.data.preprocess.encoders.base import library, named_faults
from mtrain.errors import BadEnvironment, ConfigError, Problem

Splitter = Callable[[str], list[str]]
LONGEST = 1_000_000
"""Letters that are cut at once; of a longer text each so many by themselves."""


def splitter(language: str, keep_newlines: bool) -> Splitter:
    """Return the splitter of a language; with `keep_newlines`, a sentence keeps its line ends.

    Raises:
        BadEnvironment: nltk, or its data of the language, is not installed.
        ConfigError: the language is no name.
        CorruptData: nltk cannot read its data.
    """
    if not re.fullmatch(r"[a-z_]+", language):
        rule = "is no name of a language, such as english"
        raise ConfigError(
            [Problem("MT003", "sentences", language, rule, "sentences=english", "command line")]
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
