"""The rendezvous: ranks describe themselves in a store, one of them compares all, and each reads
the outcome.

A store may outlive a start: torchrun restarts its workers on the same store, and not every machine
counts restarts alike. So each rendezvous has its own number and the newest one counts; a rank that
joins one that is over waits for the next.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from mtrain.world.rank_info import RankInfo, RendezvousState, absence, faults, unreadiness

# The share of the join timeout in which further ranks may join after a fault, so that one message
# reports all faults.
FAULT_GRACE = 0.5
# The share of the join timeout in which the others can answer a rendezvous that replaces rank 0's
LEAST_GRACE = 0.2
# How many join timeouts a rank that has joined and still imports gets
IMPORT_FACTOR = 12

# The key of the number of ranks 0 that have reached the store and do not yet have a configuration
DECIDING = "deciding"
# The time between two signs of life of a rank that works for all ranks before it is ready
BEAT_S = 1.0
# How long such a rank counts as alive after a sign of life, without its pauses
LIFE_S = 10.0

# A flat configuration, which is sent only where digests differ
Config = dict[str, Any]


@dataclass(frozen=True)
class Offer:
    """The configuration of rank 0, for the ranks that have none yet."""

    run: str
    """The resolved configuration as JSON; empty where rank 0 has no configuration."""
    words: tuple[str, ...]
    """The command-line words of rank 0."""
    failure: str = ""
    """The reason why rank 0 has no configuration; empty where it has one."""


def offer_of(root: Store, number: int) -> Offer | None:
    """Return the offer of a rendezvous; None: it has no offer, or is over."""
    run = f"{number}/run"
    outcome = f"{number}/outcome"
    if not root.check([run]) or root.check([outcome]):
        return None
    body = json.loads(zlib.decompress(root.get(run)))
    return Offer(body["run"], tuple(body["words"]), body["failure"])


def pause_of(size: int) -> float:
    """Return the seconds between a rank's reads of the store, longer in large worlds."""
    # All ranks together read the store at most 2,000 times a second.
    return max(0.02, size / 2_000)


def newest(root: Store) -> int | None:
    """Return the number of the newest rendezvous in a store; None if there was none yet."""
    return int(root.get("newest")) if root.check(["newest"]) else None


def started_before(root: Store) -> bool:
    """Return whether the newest rendezvous made a world."""
    key = f"{newest(root)}/outcome"
    return root.check([key]) and json.loads(root.get(key))["problem"] is None


def _pages(store: Store, name: str, known: int) -> list[bytes]:
    """Return the entries of a list in the store after its first `known` ones."""
    keys = [f"{name}/{i}" for i in range(known + 1, store.add(name, 0) + 1)]
    while keys and not store.check(keys):  # the last one has a number, but is not written yet
        keys.pop()
    return store.multi_get(keys) if keys else []


def _add_page(store: Store, name: str, text: str) -> int:
    """Append to a list in the store, and return the position, from 1."""
    # The counter gives each writer a position of its own before the entry exists.
    number = store.add(name, 1)
    store.set(f"{name}/{number}", text)
    return number


class Liveness:
    """The liveness, in one rendezvous, of ranks that work for all before they are ready."""

    def __init__(self, store: Store, size: int) -> None:
        self.store = store
        self.life_s = LIFE_S + 4 * pause_of(size)
        self.count = 0
        self.given_at = float("-inf")
        self.heard_at = float("-inf")

    def beat(self) -> None:
        """Give a sign of life, at most one per `BEAT_S`."""
        if time.monotonic() - self.given_at > BEAT_S:
            self.given_at = time.monotonic()
            self.store.add("beats", 1)

    def is_alive(self) -> bool:
        """Return whether a working rank has given a sign of life lately."""
        count = self.store.add("beats", 0)
        if count > self.count:
            self.count = count
            self.heard_at = time.monotonic()
        return time.monotonic() - self.heard_at < self.life_s


class Member:
    """This rank in one rendezvous."""

    def __init__(self, root: Store, number: int, info: RankInfo, config: Config) -> None:
        self.number = number
        self.store = PrefixStore(str(number), root)
        if info.digest and self.store.get("digest").decode() != info.digest:
            # Equal configurations are not sent: thousands of copies would delay the store.
            packed = zlib.compress(json.dumps(config).encode())
            self.store.set(f"config/{info.digest}", packed)  # type: ignore[arg-type]
        self.place = _add_page(self.store, "infos", info.text())
        self.came_at = time.monotonic()
        self.reported = False
        self.liveness = Liveness(self.store, info.size)

    def report(self, failure: str | None) -> None:
        """Report, once, that this rank is ready, or why it will not be."""
        if not self.reported:
            self.reported = True
            page = {"place": self.place, "failure": failure}
            _add_page(self.store, "reports", json.dumps(page))

    def outcome(self) -> dict[str, Any] | None:
        """Return the outcome; None: it is not known yet.

        It holds `problem` (None: no problem), `speaker` (a rank), the `count` of ranks that joined,
        and the number of those that did not fail, `able`.
        """
        if not self.store.check(["outcome"]):
            return None
        outcome: dict[str, Any] = json.loads(self.store.get("outcome"))
        return outcome

    def came_late(self, outcome: dict[str, Any] | None) -> bool:
        """Return whether the rendezvous was over before this rank joined."""
        return outcome is not None and self.place > outcome["count"]

    def is_forsaken(self, ready_at: float, limit_s: float) -> bool:
        """Return whether no rank has worked too long, seen from this one since `ready_at`."""
        waited_s = time.monotonic() - max(ready_at, self.came_at)
        return waited_s > limit_s and not self.liveness.is_alive()

    def acknowledge(self) -> None:
        """Report to the rank that serves the store that this one no longer needs it."""
        self.store.add("read", 1)

    def all_read(self, others: int) -> bool:
        """Return whether as many `others` have read the outcome."""
        return self.store.add("read", 0) >= others


class Coordinator:
    """The rank that compares all ranks: rank 0, or the first that has waited for it in vain."""

    def __init__(
        self,
        root: Store,
        info: RankInfo,
        config: Config,
        join_timeout_s: float,
        waited_s: float = 0.0,
        offer: Offer | None = None,
    ) -> None:
        self.info = info
        self.config = config
        self.join_timeout_s = join_timeout_s
        self.absent_s = max(LEAST_GRACE * join_timeout_s, join_timeout_s - waited_s)
        self.state = RendezvousState()
        self.reports = 0
        self.first_ready: float | None = None
        self.wrong_since: float | None = None
        self.done = False
        self.number = root.add("count", 1)
        self.store = PrefixStore(str(self.number), root)
        self.liveness = Liveness(self.store, info.size)
        self.store.set("digest", info.digest)
        if offer is not None:
            packed = zlib.compress(json.dumps(asdict(offer)).encode())
            self.store.set("run", packed)  # type: ignore[arg-type]

    def open(self, root: Store) -> None:
        """Make this the newest rendezvous."""
        root.set("newest", str(self.number))

    def open_instead_of(self, known: int | None, root: Store) -> None:
        """Make this the newest rendezvous, unless a newer one than `known` exists."""
        # Several ranks may lose patience at once; only the first of them opens a rendezvous.
        root.compare_set("newest", str(known or ""), str(self.number))

    def look(self) -> None:
        """Read new entries, and publish the outcome once it is certain."""
        if self.done:
            return
        self._read()
        now = time.monotonic()
        # The wait for absent ranks begins with the first rank that is ready, not with its imports.
        if self.state.ready:
            self.first_ready = self.first_ready or now
        if self.state.is_wrong():
            self.wrong_since = self.wrong_since or now
        size = self.info.size
        absent = self.state.absent(self.info.size)
        waited = now - (self.first_ready or now)
        if self.state.is_world(size):
            self._publish(None)
        elif self.wrong_since and (
            not absent or now - self.wrong_since > FAULT_GRACE * self.join_timeout_s
        ):
            self._publish("\n".join(faults(self.state, self._config_of)))
        elif absent and waited > self.absent_s:
            self._publish(absence(self.state, size, self.join_timeout_s))
        elif waited > self.join_timeout_s * IMPORT_FACTOR and not self.liveness.is_alive():
            self._publish(unreadiness(self.state, self.join_timeout_s * IMPORT_FACTOR))

    def _read(self) -> None:
        reports = [json.loads(page) for page in _pages(self.store, "reports", self.reports)]
        self.reports += len(reports)
        # A rank writes its info before its report. Reading in the opposite order ensures that
        # every report has its info.
        self.state.infos += [
            RankInfo.of(page) for page in _pages(self.store, "infos", len(self.state.infos))
        ]
        for report in reports:
            if report["failure"] is None:
                self.state.ready.add(report["place"] - 1)
            else:
                self.state.failed[report["place"] - 1] = report["failure"]

    def _config_of(self, digest: str) -> Config | None:
        if digest == self.info.digest:
            return self.config if digest else None
        key = f"config/{digest}"
        if not digest or not self.store.check([key]):
            return None
        flat: Config = json.loads(zlib.decompress(self.store.get(key)))
        return flat

    def _publish(self, problem: str | None) -> None:
        self.done = True
        able = [info.rank for i, info in enumerate(self.state.infos) if i not in self.state.failed]
        outcome = {
            "problem": problem,
            "speaker": min(able, default=self.info.rank),
            "count": len(self.state.infos),
            "able": len(able),
        }
        self.store.set("outcome", json.dumps(outcome))
