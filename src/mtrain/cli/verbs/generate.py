"""`generate`: text from a trained model."""

from __future__ import annotations

import click

from mtrain.cli.command import RUN, Verb, as_json
from mtrain.cli.offers import run_then

ARGUMENTS = (
    RUN,
    ("prompt=TEXT", "the start of the text (def )"),
    (
        "prompts=FILE",
        "a prompt a line; in a .jsonl a JSON string, or an object with `prompt` or `messages`",
    ),
    ("chat=true", "prompts are messages of a user, in the chat template of the tokenizer"),
    ("tokens=N", "at most so many new tokens (64)"),
    ("temperature=T", "0 takes the most likely token (0.8)"),
    ("top_k=K", "draw from the K most likely tokens (0: from all)"),
    ("top_p=P", "draw from the most likely tokens that together have this probability (1)"),
    ("min_p=P", "draw from tokens with at least this share of the largest probability (0)"),
    ("seed=N", "of the draws after each prompt (trainer.seed)"),
    ("stop=TEXT", "end before this text; several times, or a JSON list of texts"),
    ("batch=N", "so many prompts at once (8)"),
    ("cache=false", "recompute all keys and values for every token"),
    ("KEY=VALUE", "another layout, kernel or number format"),
)
OWN = [f"{name.partition('=')[0]}=" for name, _ in ARGUMENTS if name[0].islower()]


@click.command(
    "generate",
    cls=Verb,
    short_help="write text with a trained model: generate RUN_FOLDER",
    usage="generate RUN [prompt=TEXT] [tokens=N] [temperature=T] [KEY=VALUE ...] [FLAGS]",
    help="Print how a trained model continues a text, in any layout.",
    arguments=ARGUMENTS,
    examples=(
        ("generate runs/NAME prompt=import tokens=100", "from its newest checkpoint"),
        (
            "generate runs/NAME prompts=questions.txt temperature=0 parallel=tp2 --json",
            "many, sharded",
        ),
        ("generate runs/NAME chat=true prompt=hello top_p=0.9 stop=END", "an answer"),
    ),
    path_at=0,
    offers=run_then(OWN),
)
@as_json
def generate(words: list[str], as_json: bool) -> int:
    """Print how the model continues each prompt."""
    from mtrain.cli import generate as verb

    return verb.run(words, as_json=as_json)
