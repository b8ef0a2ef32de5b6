"""The pages of `data` and of its subverbs; a new subverb is a line of `SUBVERBS`, a module and a page here."""

from __future__ import annotations

from mtrain.cli.page import JSON, OVERRIDES, SETTINGS, Page

DATA_PAGES: dict[str, Page] = {
    "preview": Page(
        f"data preview {OVERRIDES} [samples=N] [split=NAME] [--html FILE]",
        "The first samples of any configuration as a person reads them: tokens, which of them carry loss, where\n"
        "documents begin and end, positions, padding. In colours on a terminal.",
        (
            ("samples=N", "how many (3)"),
            ("split=NAME", "train, validation or test (train)"),
            ("--html FILE", "one page that needs nothing else"),
            *SETTINGS,
        ),
        (JSON,),
        (
            ("data preview", "of the default run"),
            ("data preview data=sft data.path=chats.jsonl data.tokenizer=HF_DIR/tokenizer.json", "chats"),
            ("data preview run=runs/NAME/run.yaml samples=10 split=validation", "what a run is evaluated on"),
        ),
    ),
}
"""Subverb -> page."""
DATA = Page(
    "data SUBVERB ...",
    "What becomes of text before training. `data SUBVERB --help` says more. `--name VALUE` and `name=VALUE` are the\n"
    "same.",
    tuple((name, page.text.partition("\n")[0]) for name, page in DATA_PAGES.items()),
    (),
    tuple(page.examples[0] for page in DATA_PAGES.values()),
)
