"""Work that goes on while megatron-core is asked what a model is made of, which takes seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SWITCH_S = 0.0005
"""How long an import may keep the work waiting for the interpreter: ten times as long by default, at each read."""
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

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(work, going)
            try:
                answer = ask()
                return answer, made.result() if fits(answer) else None
            finally:
                stopped.set()
    finally:
        sys.setswitchinterval(before)
