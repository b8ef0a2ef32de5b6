"""`show`: the resolved configuration with the origin of each key, or a file for `run=FILE`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mtrain import strict_json
from mtrain.config.compose.composer import Composed
from mtrain.config.compose.dump import override, run_yaml
from mtrain.config.compose.origins import is_provided
from mtrain.config.compose.paths import recipes_dir
from mtrain.config.messages.suggestions import default_choices
from mtrain.config.schema.run import RunConfig
from mtrain.errors import say_page, visible
from mtrain.launching import environment
from mtrain.launching.environment import Place, Setting
from mtrain.loading import checkpoints
from mtrain.loading.configuration import load, say_replaced

# The source of a choice that is not the default one.
CHOSEN = "a choice"


def run(
    words: Sequence[str], *, resolved: bool = False, changed: bool = False, as_json: bool = False
) -> int:
    """Print the configuration, and the environment that each of its ranks gets; return the exit
    code.

    With `changed` only what differs from the defaults: choices, and keys that a recipe, a file or
    the command line set.

    Raises:
        ConfigError: the configuration has errors.
    """
    loaded = load(words, to_run=False)
    say_replaced(loaded)
    if changed:
        found = changes(loaded)
        page = "\n".join(
            f"{override(key, value)}  # {visible(source)}" for key, (value, source) in found.items()
        )
        as_data = {
            key: {"value": value, "source": source} for key, (value, source) in found.items()
        }
        say_page(strict_json.dumps(as_data, indent=2) if as_json else page or "nothing is changed")
        return 0
    if as_json:
        body = {
            "run": loaded.run.to_dict(),
            "origins": loaded.origins,
            "digest": loaded.run.digest(),
        }
        variables = {name: asdict(setting) for name, setting in _environment(loaded.run).items()}
        say_page(strict_json.dumps({**body, "environment": variables}))
    elif resolved:
        say_page(run_yaml(loaded.run.without_launcher()))
    else:
        say_page(run_yaml(loaded.run, {k: visible(v) for k, v in loaded.origins.items()}))
        rows = (f"#   {visible(line)}" for line in environment.lines(_environment(loaded.run)))
        say_page("\n".join(("# environment of each rank:", *rows)))
    return 0


def changes(loaded: Composed) -> dict[str, tuple[Any, str]]:
    """Return groups and keys that somebody chose or set, each with its value and who did.

    Omit the model that comes with `checkpoint.init_from`.
    """
    usual = default_choices()[0]
    from_weights = {"model"} if checkpoints.brought(loaded) is not None else set()
    chosen = {
        g: (c, CHOSEN)
        for g, c in loaded.choices.items()
        if usual.get(g) != c and g not in from_weights
    }
    files = tuple(
        f"{source}:"
        for source in loaded.files
        if source.startswith(("recipes/", f"{recipes_dir()}"))
    )
    keys = loaded.run.flat()
    set_by = {key: loaded.origins[key] for key in keys if is_provided(loaded.origins[key])}
    set_by |= {
        key: origin for key, origin in loaded.origins.items() if files and origin.startswith(files)
    }
    return chosen | {key: (keys[key], set_by[key]) for key in keys if key in set_by}


def _environment(run: RunConfig) -> Mapping[str, Setting]:
    ranks = run.parallel.ranks
    nodes = run.cluster.nodes
    here = -(-ranks // nodes)
    return environment.environment(run, Place.here(here, on_one_machine=nodes == 1), os.environ)
