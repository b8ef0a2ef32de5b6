"""`choices [GROUP]`: the choices of a group, each with the comment at the head of its file."""

from __future__ import annotations

import click

from mtrain import strict_json
from mtrain.cli.command import WIDTH, Verb, as_json, refusal
from mtrain.cli.offers import groups
from mtrain.config.compose.paths import choices_of_group, find_config, group_names
from mtrain.errors import say, say_page


@click.command(
    "choices",
    cls=Verb,
    short_help="the choices of a group, each a file: choices model",
    usage="choices [GROUP]",
    help="Print the choices of a group, each a file under conf/; without a group, those of all.",
    arguments=(
        (
            "GROUP",
            "model, parallel, precision, data, optim, trainer, kernels, checkpoint, log or cluster",
        ),
    ),
    examples=(("choices", "all of them"), ("choices cluster", "clusters, and what each is")),
    offers=groups,
)
@as_json
def choices(words: list[str], as_json: bool) -> int:
    """Print the choices of the named groups, or of all.

    Raises:
        ConfigError: there is no such group.
    """
    from mtrain.config.messages.suggestions import near_choice
    from mtrain.config.schema.run import GROUPS

    known = [*dict.fromkeys((*GROUPS, *group_names()))]
    for word in words:
        if word not in known:
            near = near_choice(word, known) or ["model"]
            raise refusal(
                f"there is no group {word}; groups: {', '.join(known)}", f"choices {near[0]}"
            )
    listed = {
        group: {choice: about(group, choice) for choice in choices_of_group(group)}
        for group in words or known
    }
    if as_json:
        say_page(strict_json.dumps(listed, indent=2))
        return 0
    for group, texts in listed.items():
        width = max(map(len, texts), default=0)
        lines = [f"  {choice:<{width}}  {text}".rstrip() for choice, text in texts.items()]
        say(group, *(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines))
    return 0


def about(group: str, choice: str) -> str:
    """Return the comment at the head of a choice's file, in one line."""
    comment = []
    file = find_config(f"{group}/{choice}")
    for line in file.read_text(encoding="utf-8").splitlines() if file is not None else ():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment)
