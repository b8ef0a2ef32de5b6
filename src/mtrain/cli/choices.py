"""`choices [GROUP]`: the choices of a group, each with the first words of its file."""

from __future__ import annotations

from mtrain import strict_json
from mtrain.cli.options import read_options
from mtrain.config.compose.paths import choices_of_group, find_config, group_names
from mtrain.config.messages.suggestions import near_choice
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem, say, say_page

WIDTH = 100


def run(argv: list[str], *, debug: bool) -> int:
    """Print the choices of the groups that are named, or of all; the exit code.

    Raises:
        ConfigError: there is no such group.
    """
    options = read_options(argv)
    groups = [*dict.fromkeys((*GROUPS, *group_names()))]
    for word in options.words:
        if word not in groups:
            near = near_choice(word, groups) or ["model"]
            rule = f"there is no group {word}; groups: {', '.join(groups)}"
            raise ConfigError(
                [Problem("MT010", "", None, rule, f"choices {near[0]}", "command line")]
            )
    found = {
        group: {c: about(group, c) for c in choices_of_group(group)}
        for group in options.words or groups
    }
    if options.as_json:
        say_page(strict_json.dumps(found, indent=2))
        return 0
    for group, choices in found.items():
        width = max(map(len, choices), default=0)
        lines = [f"  {choice:<{width}}  {text}".rstrip() for choice, text in choices.items()]
        say(group, *(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines))
    return 0


def about(group: str, choice: str) -> str:
    """What the comment at the head of a choice's file says, in one line."""
    out = []
    file = find_config(f"{group}/{choice}")
    for line in file.read_text(encoding="utf-8").splitlines() if file is not None else ():
        if not line.startswith("#"):
            break
        out.append(line.lstrip("# "))
    return " ".join(out)
