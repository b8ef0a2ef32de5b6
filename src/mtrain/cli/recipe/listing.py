"""`recipe list` and `recipe show`."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain import strict_json
from mtrain.cli import show as show_verb
from mtrain.cli.options import needed, read_options
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import display, recipe_names
from mtrain.config.compose.recipe import find_recipe
from mtrain.config.compose.yaml_reader import load, parse
from mtrain.config.disk.files import read_text
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.errors import say, say_page
from mtrain.layout.grid import RankGrid
from mtrain.recipes.diff import overrides_of

WORDS = ("title", "purpose", "hardware", "source", "verified")


def list_(argv: Sequence[str]) -> int:
    """Print every shared recipe in a line: name, layout, title; as JSON all that it says of
    itself.
    """
    options = read_options(argv)
    cards = [_card(name) for name in recipe_names()]
    if options.as_json:
        say_page(strict_json.dumps(cards, indent=2))
        return 0
    widths = [max(len(card[key]) for card in cards) for key in ("name", "layout")]
    for card in cards:
        say(f"{card['name']:<{widths[0]}}  {card['layout']:<{widths[1]}}  {card['title']}")
    return 0


def _card(name: str) -> dict[str, str]:
    block = load(find_recipe(name)).values.get("recipe", {})
    run = resolve(compose([f"recipe={name}"]).run, Machine.here())
    grid = RankGrid.of(run)
    words = {key: str(block.get(key, "")) for key in WORDS}
    said = "auto" if run.parallel.auto else grid
    layout = f"{said} on {grid.world} rank{'s' if grid.world > 1 else ''}"
    return {"name": name, **words, "model": run.model.name, "layout": layout}


def show(argv: Sequence[str]) -> int:
    """Print a recipe as it is written, or with `--resolved` the file that `run=` reads."""
    options = read_options(argv, ("--resolved",))
    name = needed(options.words, "recipe show NAME [--resolved]")
    if "--resolved" in options.flags or options.as_json or len(options.words) > 1:
        words = overrides_of(options.words)
        return show_verb.run(words, bare="--resolved" in options.flags, as_json=options.as_json)
    path = find_recipe(name)
    text = read_text(path, display(path))
    parse(text, display(path))  # what cannot be read as data is not put on a terminal either
    say_page(text)
    return 0
