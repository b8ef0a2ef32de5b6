"""Signals that ask a run to stop: noted where they are named, and left as they were where a process
ignores them.
"""

from __future__ import annotations

import signal

from mtrain.config.schema.trainer import UnresolvedTrainer
from tests.support.forked import run_alone


def test_stop_signals_named_are_noted_ignored_stay_ignored() -> None:
    def job() -> tuple[list[str], bool]:
        from mtrain.train.loop.interruptions import StopRequest

        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        # which a shell ignores in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)
        noted = []
        for name in UnresolvedTrainer().stop_signals:
            request = StopRequest()
            request.listen(UnresolvedTrainer().stop_signals)
            signal.raise_signal(signal.Signals[name])
            noted += [name] * request.requested
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        StopRequest().listen(("SIGTERM",))
        return noted, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    assert run_alone(job) == (["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], True)
