"""The rule about capabilities of the installed megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine import release as engine
from mtrain.config.engine.capabilities import CAPABILITIES, is_here, keys
from mtrain.config.messages.problem import value_at
from mtrain.config.resolve.condition import condition
from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig


@rule(
    Code(
        "MT045",
        "The installed release of megatron-core cannot do what a key says.",
        "Install a release that can (`engines` lists what each can do), or take the key away.",
        says=(
            "megatron-core 0.16.1 is installed, and this needs >=0.19.0: an update is skipped where"
            " the gradient norm is too large"
        ),
    ),
    reads=" ".join(keys()),
)
def release_capability(run: RunConfig) -> Iterator[Finding]:
    """A feature of some releases of megatron-core needs one of those releases."""
    found = engine.release()
    for row in CAPABILITIES:
        if (
            found is not None
            and not is_here(row, found)
            and condition(row.when).holds(lambda key: value_at(run, key))
        ):
            says = (
                f"megatron-core {engine.words(found)} is installed, and this needs {row.versions}:"
                f" {row.about}"
            )
            yield Finding("MT045", row.keys[0], says, (dict(row.without),), also=row.keys[1:])


RULES = (release_capability,)
