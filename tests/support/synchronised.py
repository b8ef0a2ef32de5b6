"""Waits of a training step for the device: a program, `python -m tests.support.synchronised`.

It reads JSON, names and the words of each command line, and prints for each the calls for which a
GPU would be awaited, with their counts. The step is the program that trains, on tensors that have
only shapes; Triton's kernels are in the interpreter so that they may be named, and do not run.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from mtrain_kernels.runtime import interpreted

from tests.support.forked import run_alone
from tests.support.interpreted import answer_of


def waits(runs: dict[str, list[str]], timeout_s: float = 200) -> dict[str, dict[str, int]]:
    """Return the waits in rank 0's first step of every run by name: `operation file function` ->
    count.

    A process whose Triton interprets already forks the process that traces.
    """
    if interpreted():
        return run_alone(lambda: _waits(runs), timeout_s)  # type: ignore[no-any-return]
    return answer_of("tests.support.synchronised", runs, timeout_s)  # type: ignore[no-any-return]


def _waits(runs: dict[str, list[str]]) -> dict[str, dict[str, int]]:
    from unittest import mock

    from mtrain import mcore
    from mtrain.api import load
    from mtrain.config.resolve.resolution import Machine
    from mtrain.devices import registry

    mcore.install(registry.get("cpu"))
    from mtrain.mcore.layers.dispatch import SparseDispatcher
    from mtrain.train.trace import recorder, trace

    begin = SparseDispatcher._begin_splits

    def begun(dispatcher: Any, counts: Any) -> None:
        begin(dispatcher, counts)
        dispatcher._splits = _Evenly(dispatcher), None

    big = Machine(cpu_cores=64, memory_bytes=1 << 40, triton=True, triton_interpreted=True)
    found = {}
    for name, words in runs.items():
        with (
            mock.patch.object(trace, "portable", lambda run: run),
            mock.patch.object(trace, "Recorder", _watching()),
            mock.patch.object(SparseDispatcher, "_begin_splits", begun),
            mock.patch.object(
                recorder, "OPDEFS", {}
            ),  # only shapes of our operations are computed, and kernels do not run
        ):
            _Evenly.met = 0
            watched: Any = trace.trace(load(words, big, {}).run, 0).recorder
            found[name] = dict(watched.found)
        if _Evenly.met:
            found[name]["rows that are exchanged"] = _Evenly.met
    return found


class _Evenly:
    """Row counts that are unknown while the host waits for them, taken as equal for all ranks."""

    met = 0

    def __init__(self, dispatcher: Any) -> None:
        rows = dispatcher._sent.source.shape[0]
        ep = dispatcher.ep_size
        self.numbers = [rows // ep] * 2 * ep + [rows] * dispatcher.tp_size

    def tolist(self) -> list[int]:
        _Evenly.met += 1
        return self.numbers


def _watching() -> type:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    from mtrain.train.trace.recorder import Recorder

    aten = torch.ops.aten
    always = {
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.nonzero.default,
        aten.equal.default,
    }
    always |= {aten.masked_select.default, aten._unique2.default, aten.bincount.default}
    indexing = {
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
    }

    class Watching(Recorder):
        """Recorder of operations in a step that would wait for the device."""

        def __init__(self) -> None:
            super().__init__()
            self.found = Counter[str]()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
            waits = func in always or (
                func is aten.repeat_interleave.Tensor and not (kwargs or {}).get("output_size")
            )
            if (
                func in indexing
            ):  # by a mask the places are counted first, unless one number is put there
                one = func is not aten.index.Tensor and args[2].numel() == 1
                waits = not one and any(
                    i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
                )
            if waits and tensors and self._place().phase in ("forward", "backward", "optimizer"):
                self.found[f"{func} {_caller()}"] += 1
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Watching


def _caller() -> str:
    """Return file and function of the innermost frame in mtrain or megatron-core."""
    frames = [
        f
        for f in traceback.extract_stack()
        if "/mtrain" in f.filename or "/megatron/" in f.filename
    ]
    frames = [
        f
        for f in frames
        if not f.filename.endswith(("recorder.py", "synchronised.py", "shapes.py"))
    ]
    return f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "autograd"


if __name__ == "__main__":
    print(json.dumps(_waits(json.load(sys.stdin))))
