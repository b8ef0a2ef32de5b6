"""A reading of the state of this machine's GPUs, in a process that a dead driver may hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mtrain import strict_json
from mtrain.config.machine import nvml_health
from mtrain.config.machine.nvml_health import GpuHealth, Health
from mtrain.errors import say_page


def main() -> None:
    """Print the state as JSON, `{}` without the driver's library."""
    found = nvml_health.read()
    say_page(strict_json.dumps({} if found is None else asdict(found)))


def parsed(found: dict[str, Any]) -> Health | None:
    """Return the state that `main` printed; None: there is none."""
    if "gpus" not in found:
        return None
    return Health(tuple(GpuHealth(**gpu) for gpu in found["gpus"]), found["farthest"])


if __name__ == "__main__":
    main()
