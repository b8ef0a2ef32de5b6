"""`show`: the resolved configuration, each key with who set it, or the bare file that `run=FILE` reads."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain import strict_json
from mtrain.cli.setup import load
from mtrain.config.dump import run_yaml
from mtrain.errors import say_page, visible


def run(argv: Sequence[str], *, bare: bool = False, as_json: bool = False) -> int:
    """Prints the configuration; the exit code.

    Raises:
        ConfigError: the configuration has errors.
    """
    loaded = load(argv, to_run=False)
    if as_json:
        say_page(
            strict_json.dumps({"run": loaded.run.to_dict(), "origins": loaded.origins, "digest": loaded.run.digest()})
        )
    else:
        say_page(run_yaml(loaded.run, None if bare else {k: visible(v) for k, v in loaded.origins.items()}))
    return 0
