"""Sentences of a text, as Megatron-LM cuts them: Punkt, by nltk, which is in the extra `sentences`."""

from __future__ import annotations

from collections.abc import Callable

from mtrain.data.preprocess.encoder import library
from mtrain.errors import BadEnvironment

Splitter = Callable[[str], list[str]]
LONGEST = 1_000_000
"""Letters that are cut at once; of a longer text each so many by themselves."""


def splitter(language: str, keep_newlines: bool) -> Splitter:
    """What cuts texts of a language; `keep_newlines`: line ends stay with the sentence before them.

    Raises:
        BadEnvironment: nltk, or its data of the language, is not installed.
    """
    punkt = library("nltk.tokenize.punkt", "sentences", "sentences")
    data = library("nltk.data", "sentences", "sentences")
    try:
        folder = data.find(f"tokenizers/punkt_tab/{language}/")
    except (LookupError, ValueError) as error:
        said = f"sentences={language}: nltk has no data of this language here (tokenizers/punkt_tab/{language})"
        raise BadEnvironment(
            said, "  fix: python -m nltk.downloader punkt_tab, or NLTK_DATA=FOLDER with it"
        ) from error
    tokenizer = punkt.PunktSentenceTokenizer(
        train_text=punkt.load_punkt_params(str(folder)), lang_vars=_variables(punkt) if keep_newlines else None
    )

    def cut(text: str) -> list[str]:
        return [one for i in range(0, len(text), LONGEST) for one in tokenizer.tokenize(text[i : i + LONGEST])]

    return cut


def _variables(punkt: object) -> object:
    """Punkt's rules, where a sentence may end in front of no white space, which is then its own."""
    base = punkt.PunktLanguageVars  # type: ignore[attr-defined]
    form = base._period_context_fmt.replace(r"\s+(?P<next_tok>", r"(?P<next_tok>", 1)
    form = form.replace(r"%(SentEndChars)s", r"%(SentEndChars)s\s*", 1)
    return type("KeepNewlines", (base,), {"_period_context_fmt": form})()
