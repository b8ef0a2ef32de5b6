"""Measurements that run in processes of their own, within a time limit.

A dead disk or driver may hold a call for ever; such a process is killed and left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from typing import Any

from mtrain.launching.start import importable, python

PROBES = "mtrain.doctor.probes"
GRACE_S = 1.0


def probe(name: str, *arguments: str, limit_s: float) -> dict[str, Any]:
    """Return the JSON that `python -m mtrain.doctor.probes.NAME ARGUMENTS` prints; with the key
    `error` if it fails or takes longer than `limit_s` seconds.
    """
    try:
        process = subprocess.Popen(
            python(f"{PROBES}.{name}", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=importable(os.environ),
        )
    except OSError as error:
        return {"error": f"no process can be started: {error.strerror}"}
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits for a dead disk does not end even then.
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return {"error": f"no answer within {limit_s:.0f} s"}
    with suppress(ValueError):
        found = json.loads(out)
        if isinstance(found, dict):
            return found
    last = err.strip().splitlines()[-1:] or [f"ended with {process.returncode}"]
    return {"error": last[0][:200]}
