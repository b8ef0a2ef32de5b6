"""The state of a run from the files of its folder: read-only, and only new bytes."""

from __future__ import annotations

import json
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import METRICS, RUN_FILE
from mtrain.config.compose.yaml_reader import load
from mtrain.config.disk.files import read_bytes
from mtrain.errors import ConfigError, CorruptData
from mtrain.events import log
from mtrain.events.read import Event, Place, following
from mtrain.goodput.account import KILLED, RUNNING, Account, account
from mtrain.plan.compare import MOST_BYTES, PLAN, lines_of, peaks_in
from mtrain.units import GIB

RECENT_BYTES = 8 << 20
"""Bytes of the event stream that a first look reads: about 15,000 steps."""
POINTS = 1024
"""Losses that are kept; beyond, every second one is dropped, again and again."""
RECENT_STEPS = 100
"""Steps that the time of one step, and the time left, are taken from."""
ALERTS = 3
QUIET_S = 5.0
"""Seconds without an event after which the owner of the folder is looked up: looking takes the
folder's lock for an instant, which a run may want at that time.
"""
LOST_S = 180.0
"""Seconds without a sign of life after which a run without an owner has ended; its signs are at
most 60 s apart.
"""
GOODPUT_SHARE = 50
"""An account is read again after this many times the seconds that it took."""
GOODPUT_S = 5.0
STARTING = "starting"


@dataclass
class Series:
    """Numbers of steps in order, thinned out so that their number stays bounded."""

    points: list[tuple[int, float | None]] = field(default_factory=list)
    stride: int = 1

    def add(self, step: int, value: float | None) -> None:
        """Add the number of a step; None: it was not finite."""
        if step % self.stride and value is not None:
            return
        self.points.append((step, value))
        if len(self.points) > POINTS:
            self.stride *= 2
            self.points = self.points[::2]

    def drop_after(self, step: int) -> None:
        """Forget the steps after one: they are made again."""
        while self.points and self.points[-1][0] > step:
            self.points.pop()


class Watched:
    """A run folder that is looked at again and again.

    `is_owned` returns whether a process owns a folder, as far as this machine can see.
    """

    def __init__(self, home: Path, is_owned: Callable[[Path], bool] = lambda home: True) -> None:
        self.home = home
        self.is_owned = is_owned
        self.name = home.resolve().name
        self.config = _config(home)
        self.plan = _plan(home)
        self.place = _recent(home)
        self.values: Mapping[str, Any] = {}
        """The numbers of the last step."""
        self.step = 0
        self.losses = Series()
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Steps of this attempt, and the wall clock at their ends."""
        self.took: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of steps that were not profiled."""
        self.evaluation: tuple[int, float] | None = None
        self.saved: tuple[int, float] | None = None
        """The step of the last checkpoint, and the wall clock then."""
        self.peak: float | None = None
        """The largest peak of a rank in the last sample of all ranks."""
        self.alerts: deque[tuple[int, str]] = deque(maxlen=ALERTS)
        self.slow: dict[str, tuple[int, str]] = {}
        """Rank and machine -> the step of its last mention, and its time over the usual one."""
        self.streams = False
        """True once an event was read; older versions have none."""
        self.end = ""
        self.fault = ""
        """Why the folder could not be read at the last look."""
        self.seen = time.monotonic()
        """The time of the last new event, by this machine's clock."""
        self.owned: bool | None = None
        """None: nobody has looked."""
        self.life: Account | None = None
        self._life_due = 0.0
        self._metrics_size = 0

    @property
    def goal(self) -> int | None:
        """Return the steps of the run; None: unknown."""
        goal = _of(self.config, "trainer", "train_iters")
        return goal if isinstance(goal, int) and goal > 0 else None

    @property
    def state(self) -> str:
        """Return how the run is: starting, running, finished, stopped, failed or killed."""
        if self.end:
            return self.end
        if self.over:
            return KILLED
        return RUNNING if self.step else STARTING

    @property
    def over(self) -> bool:
        """Return whether the run has ended: nobody owns the folder, and its last attempt ended or
        gave no sign of life for long.
        """
        if self.owned is not False:
            return False
        last = self.life.attempts[-1] if self.life else None
        if self.end or last is None or last.facts.get("machine") == platform.node():
            return True
        # Another machine's locks may not be seen here.
        return time.time() - last.last > LOST_S

    @property
    def step_s(self) -> float | None:
        """Return the median time of the last steps in seconds."""
        took = sorted(self.took)
        return took[len(took) // 2] if took else None

    @property
    def left_s(self) -> float | None:
        """Return the seconds to the last step, with evaluations and saves as of late."""
        if self.goal is None or not self.recent:
            return None
        first, begun = self.recent[0]
        last, ended = self.recent[-1]
        each = (ended - begun) / (last - first) if last > first else self.step_s
        return None if each is None else max(0.0, each * (self.goal - last))

    @property
    def next_save(self) -> tuple[int | None, float | None] | None:
        """Return the step of the next checkpoint, and the seconds until then, each None where
        unknown; None: the run saves at its end at most.
        """
        every = _of(self.config, "checkpoint", "save_interval")
        minutes = _of(self.config, "checkpoint", "save_minutes")
        found: list[tuple[int | None, float | None]] = []
        if isinstance(every, int) and every > 0:
            step = (self.step // every + 1) * every
            each = self.step_s
            found.append((step, None if each is None else each * (step - self.step)))
        if number(minutes) is not None and self.saved is not None:
            found.append((None, max(0.0, 60 * minutes - (time.time() - self.saved[1]))))
        goal = self.goal
        if goal is not None and _of(self.config, "checkpoint", "save_final") is True:
            found.append((goal, self.left_s))
        found = [one for one in found if one[0] is None or goal is None or one[0] <= goal]
        return min(found, key=lambda one: (one[1] is None, one[1] or 0.0), default=None)

    @property
    def memory(self) -> tuple[float | None, float | None, float | None]:
        """Return the peak of a rank, the planned one, and the memory of a device in bytes."""
        peak = self.peak or number(self.values.get("peak_bytes"))
        planned = number(self.values.get("planned_peak_bytes"))
        if peak is None:
            with suppress(CorruptData, OSError):
                peaks = peaks_in(self.home).get("peak_bytes", [])
                peak = max((one for one in peaks if one is not None), default=None)
        if planned is None:
            stages = _of(self.plan, "planned", "peak_bytes_by_stage")
            known = [number(one) for one in stages] if isinstance(stages, list) else []
            planned = max((one for one in known if one is not None), default=None)
        size = number(_of(self.config, "cluster", "device_memory_gib"))
        return peak, planned, None if size is None else size * GIB

    def look(self) -> None:
        """Read new bytes. A file that cannot be read now is read at the next look."""
        self.fault = ""
        before = (self.place.attempt, self.place.offset)
        try:
            while found := following(self.home, self.place, 1000):
                for event in found:
                    self._take(event)
            if not self.streams:
                self._take_metrics()
        except OSError as error:
            self.fault = error.strerror or type(error).__name__
        if before != (self.place.attempt, self.place.offset):
            self.seen = time.monotonic()
        quiet = time.monotonic() - self.seen > QUIET_S
        if self.owned is None or self.end or quiet:
            self.owned = self.is_owned(self.home)
        if time.monotonic() >= self._life_due:
            self._account()

    def _account(self) -> None:
        begun = time.monotonic()
        with suppress(ConfigError, CorruptData, OSError):
            self.life = account(self.home, alive=bool(self.owned))
        took = time.monotonic() - begun
        self._life_due = time.monotonic() + max(GOODPUT_S, GOODPUT_SHARE * took)

    def _take(self, event: Event) -> None:
        self.streams = True
        kind = event["kind"]
        step = event["step"]
        values = event.get("values")
        at = _clock(event.get("time"))
        if kind == log.START:
            self._start(step)
        elif kind == log.STEP and isinstance(values, Mapping):
            self._take_step(step, values, at)
        elif kind == log.EVALUATION and isinstance(values, Mapping):
            loss = number(values.get("valid_loss"))
            self.evaluation = self.evaluation if loss is None else (step, loss)
        elif kind == log.CHECKPOINT:
            self.saved = (step, at)
        elif kind == log.END:
            self.end = str(event.get("how", ""))
            self._life_due = 0.0
            if event.get("why"):
                self.alerts.append((step, str(event["why"])))
        elif kind == log.MEMORY and isinstance(ranks := _of(event, "by_rank", "peak_bytes"), list):
            peaks = map(number, ranks)
            self.peak = max((peak for peak in peaks if peak is not None), default=self.peak)
        elif kind == log.STRAGGLER:
            self._name_slow(event)
        elif kind in (log.WARNING, log.ALERT):
            self.alerts.append((step, _text(event)))

    def _start(self, step: int) -> None:
        self.end = ""
        self.recent.clear()
        self.took.clear()
        self.losses.drop_after(step)
        self.step = min(self.step, step)

    def _take_step(self, step: int, values: Mapping[str, Any], at: float) -> None:
        if "lr" not in values and "loss" not in values:
            return
        self.step = step
        self.values = values
        self.losses.add(step, number(values.get("loss")))
        if at:
            self.recent.append((step, at))
        took = number(values.get("step_s"))
        if took is not None and not values.get("profiled"):
            self.took.append(took)

    def _take_metrics(self) -> None:
        """Read `metrics.jsonl` of a version without a stream of events."""
        file = self.home / METRICS
        size = file.stat().st_size if file.is_file() else 0
        if size == self._metrics_size:
            return
        self._metrics_size = size
        self.losses = Series()
        for line in lines_of(file):
            loss = number(line.get("valid_loss"))
            if loss is not None:
                self.evaluation = (line["step"], loss)
            self._take_step(line["step"], line, _clock(line.get("time")))

    def _name_slow(self, event: Event) -> None:
        own = number(event.get("own_s"))
        usual = number(event.get("usual_s"))
        if own is not None and usual:
            where = f"rank {event.get('rank')} on {event.get('machine')}"
            self.slow[where] = (event["step"], f"{own / usual:.1f}")


def number(value: object) -> float | None:
    """Return a finite number; None: the value is another one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e300 else None


def _text(event: Event) -> str:
    words = [event.get("name"), event.get("text") or event.get("message")]
    return ": ".join(str(word) for word in words if word) or event["kind"]


def _clock(text: object) -> float:
    """Return the seconds of the epoch at a time of the stream, 0 if it is no time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _of(body: object, *keys: str) -> Any:
    """Return a value of nested mappings; None: there is none."""
    for key in keys:
        body = body.get(key) if isinstance(body, Mapping) else None
    return body


def _config(home: Path) -> Mapping[str, Any]:
    """Return the values of the run's file; another version's has other keys, so none is needed."""
    try:
        return load(home / RUN_FILE).values
    except ConfigError:
        return {}


def _plan(home: Path) -> object:
    try:
        return json.loads(read_bytes(home / PLAN, PLAN, MOST_BYTES).decode(errors="replace"))
    except (ConfigError, ValueError, RecursionError):
        return {}


def _recent(home: Path) -> Place:
    """Return the place in the stream from which `RECENT_BYTES` are left."""
    left = RECENT_BYTES
    place = Place()
    with suppress(OSError):
        for file in reversed(log.attempts(home)):
            size = file.stat().st_size
            place = Place(int(file.stem), max(0, size - left))
            left -= size
            if left <= 0:
                break
    return place
