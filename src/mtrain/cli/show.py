"""`show`: the resolved configuration, each key with who set it, or the bare file that `run=FILE` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mtrain import strict_json
from mtrain.cli.setup import load, say_replaced
from mtrain.config.dump import run_yaml
from mtrain.config.run import RunConfig
from mtrain.errors import say_page, visible
from mtrain.launching import environment
from mtrain.launching.environment import Place, Setting


def run(argv: Sequence[str], *, bare: bool = False, as_json: bool = False) -> int:
    """Print the configuration, and the environment that each of its ranks gets; return the exit code.

    Raises:
        ConfigError: the configuration has errors.
    """
    loaded = load(argv, to_run=False)
    say_replaced(loaded)
    if as_json:
        body = {"run": loaded.run.to_dict(), "origins": loaded.origins, "digest": loaded.run.digest()}
        variables = {name: asdict(setting) for name, setting in _environment(loaded.run).items()}
        say_page(strict_json.dumps({**body, "environment": variables}))
    elif bare:
        say_page(run_yaml(loaded.run))
    else:
        say_page(run_yaml(loaded.run, {k: visible(v) for k, v in loaded.origins.items()}))
        rows = (f"#   {visible(line)}" for line in environment.lines(_environment(loaded.run)))
        say_page("\n".join(("# environment of each rank:", *rows)))
    return 0


def _environment(run: RunConfig) -> Mapping[str, Setting]:
    ranks = run.parallel.ranks or 1
    nodes = run.cluster.nodes
    here = -(-ranks // nodes)
    return environment.environment(run, Place.here(here, alone=nodes == 1), os.environ)
