"""Noting in the heartbeat that the main thread waits for work of torch.distributed, in whichever
library.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import Work

from mtrain.world.heartbeat import waiting


@contextmanager
def noted() -> Iterator[None]:
    """Note every `Work.wait` of the main thread.

    Collectives of torch, the pipeline transfers of megatron-core and our own exchanges all end in
    that method, so one place notes them all, and nobody has to guess from a source line what a rank
    does.
    """
    real = Work.wait

    def wait(work: Work, *args: Any, **kwargs: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return real(work, *args, **kwargs)
        with waiting():
            return real(work, *args, **kwargs)

    Work.wait = wait  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Work.wait = real  # type: ignore[method-assign]
