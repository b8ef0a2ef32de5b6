"""Work that goes on while megatron-core is asked what a model is made of, which takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")


class Stopped(Exception):
    """What ends the work where its result is of no use."""


def meanwhile(
    work: Callable[[Callable[[], None]], T], ask: Callable[[], A], fits: Callable[[A], bool]
) -> tuple[A, T | None]:
    """What `ask` gives, and what `work` made beside it in a thread; None where the answer does not fit the work.

    `work` calls what it is given before each of its steps: it ends the work once it is of no use. An error of `ask`
    comes first, for it says what is wrong with the whole.
    """
    stopped = threading.Event()

    def going() -> None:
        if stopped.is_set():
            raise Stopped

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(work, going)
        try:
            answer = ask()
            return answer, made.result() if fits(answer) else None
        finally:
            stopped.set()
