"""`watch`: runs as they go, from their folders."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mtrain.cli.goodput import is_owned, run_folder
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import program
from mtrain.errors import say, say_page
from mtrain.views.terminal import UNICODE, Facts, Screen, fitted, plain, redraws
from mtrain.views.watched import Watched

FRAME_S = 1.0
LINE_S = 10.0
"""Seconds between two looks where lines are printed."""
WIDTH = 200


def run(words: Sequence[str], *, once: bool) -> int:
    """Show run folders until all runs have ended, or one frame of them.

    Raises:
        ConfigError: a word names no run folder, or there are none.
    """
    usage = f"{program()} watch runs/NAME"
    if not words:
        raise refusal("cannot watch a run because no run folder is named", usage, "MT002")
    runs = [Watched(run_folder(word, usage), is_owned) for word in words]
    if once:
        for one in runs:
            one.look()
        say_page(plain(runs, shutil.get_terminal_size().columns, sys.stdout.encoding))
        return 0
    try:
        _follow(runs)
    except KeyboardInterrupt as stop:
        # Ctrl-C is the usual end; other signals keep their exit code.
        return getattr(stop, "exit_code", 0)
    return 0


def _follow(runs: Sequence[Watched]) -> None:
    if not redraws():
        _print_lines(runs)
        return
    screen = Screen()
    screen.start()
    try:
        while True:
            for one in runs:
                one.look()
            screen.show(runs)
            if all(one.over for one in runs):
                return
            time.sleep(FRAME_S)
    finally:
        screen.stop()


def _print_lines(runs: Sequence[Watched]) -> None:
    """Print a line of each run that has changed."""
    printed: dict[Path, tuple[int, str]] = {}
    while True:
        for one in runs:
            one.look()
            now = (one.step, one.state)
            if printed.get(one.home) != now:
                printed[one.home] = now
                facts = Facts(one, WIDTH, UNICODE)
                parts = (*facts.gradient(), *facts.rate())
                loss = next(facts.loss(), "no loss yet")
                head = f"{one.name} {one.state}: step {one.step}/{one.goal or '?'}  loss {loss}"
                say(fitted([head, *parts], WIDTH))
        if all(one.over for one in runs):
            return
        time.sleep(LINE_S)
