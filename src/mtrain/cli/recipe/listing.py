"""`recipe list` and `recipe show`."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain import strict_json
from mtrain.cli import show as show_verb
from mtrain.cli.command import needed
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


def list_(*, as_json: bool) -> int:
    """Print every shared recipe in a line: name, layout, title; as JSON its whole description."""
    cards = [_card(name) for name in recipe_names()]
    if as_json:
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


def show(words: Sequence[str], *, resolved: bool, as_json: bool) -> int:
    """Print a recipe as it is written, or if `resolved` the file that `run=` reads."""
    name = needed(words, "recipe show NAME [--resolved]")
    if resolved or as_json or len(words) > 1:
        return show_verb.run(overrides_of(words), bare=resolved, as_json=as_json)
    path = find_recipe(name)
    text = read_text(path, display(path))
    parse(text, display(path))  # what cannot be read as data is not put on a terminal either
    say_page(text)
    return 0
