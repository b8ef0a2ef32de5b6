"""The roll call: ranks enter their cards in a store, one of them compares all, and every one reads its verdict.

A store may outlive a start (torchrun restarts its workers on the same one, and not every machine counts the restarts
alike), so each roll call has a number of its own: the newest is the one that counts, and who came to a roll call that
is over waits for the next.
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

from torch.distributed import PrefixStore, Store

from mtrain.world.verdict import Card, Roll, absence, faults, unreadiness

FAULT_GRACE = 0.5
"""Once something is wrong, the share of the join timeout in which further ranks may come: all is said at once."""
LEAST_GRACE = 0.2
"""The share of the join timeout that the others have to answer a roll call in rank 0's place."""
IMPORT_FACTOR = 12
"""How many times longer a rank that came and still imports is waited for than one that nobody has heard of."""

Config = dict[str, Any]
"""A flat configuration, which only travels where digests differ."""


def newest(root: Store) -> int | None:
    """Number of the newest roll call in a store; None: there was none yet."""
    return int(root.get("newest")) if root.check(["newest"]) else None


def started_before(root: Store) -> bool:
    """Whether the newest roll call found a world."""
    key = f"{newest(root)}/verdict"
    return root.check([key]) and json.loads(root.get(key))["problem"] is None


def _pages(store: Store, name: str, known: int) -> list[bytes]:
    """What was added to a list in the store after its first `known` pages."""
    keys = [f"{name}/{i}" for i in range(known + 1, store.add(name, 0) + 1)]
    while keys and not store.check(keys):  # the last of them is numbered, but not written yet
        keys.pop()
    return store.multi_get(keys) if keys else []


def _add_page(store: Store, name: str, text: str) -> int:
    """Add to a list in the store; returns its number there, from 1."""
    number = store.add(name, 1)
    store.set(f"{name}/{number}", text)
    return number


class Member:
    """This rank in one roll call."""

    def __init__(self, root: Store, number: int, card: Card, config: Config) -> None:
        self.number, self.store = number, PrefixStore(str(number), root)
        if card.digest and self.store.get("digest").decode() != card.digest:
            self.store.set(f"config/{card.digest}", zlib.compress(json.dumps(config).encode()))
        self.place = _add_page(self.store, "cards", card.text())
        self.reported = False

    def report(self, failure: str | None) -> None:
        """Say once that this rank is ready, or why it will not be."""
        if not self.reported:
            self.reported = True
            page = {"place": self.place, "failure": failure}
            _add_page(self.store, "reports", json.dumps(page))

    def verdict(self) -> dict[str, Any] | None:
        """What was found: `problem` (None: none), `speaker` (a rank), `count` of ranks that came and `able` of those
        that did not fail; None while it is not known."""
        if not self.store.check(["verdict"]):
            return None
        verdict: dict[str, Any] = json.loads(self.store.get("verdict"))
        return verdict

    def came_late(self, verdict: dict[str, Any] | None) -> bool:
        """Whether the roll call was over before this rank came."""
        return verdict is not None and self.place > verdict["count"]

    def acknowledge(self) -> None:
        """Tell the rank that serves the store that this one needs it no more."""
        self.store.add("read", 1)

    def all_read(self, others: int) -> bool:
        """Whether as many `others` have read the verdict."""
        return self.store.add("read", 0) >= others


class Judge:
    """Compares all ranks: rank 0 does, or, where it does not come, the first that has waited for it in vain."""

    def __init__(self, root: Store, card: Card, config: Config, join_timeout_s: float, waited_s: float = 0.0) -> None:
        self.card, self.config, self.join_timeout_s = card, config, join_timeout_s
        self.absent_s = max(LEAST_GRACE * join_timeout_s, join_timeout_s - waited_s)
        self.roll, self.reports = Roll(), 0
        self.first_ready: float | None = None
        self.wrong_since: float | None = None
        self.done = False
        self.number = root.add("count", 1)
        self.store = PrefixStore(str(self.number), root)
        self.store.set("digest", card.digest)

    def open(self, root: Store, instead_of: int | None) -> None:
        """Make this the newest roll call, unless another rank made one in place of `instead_of` first."""
        root.compare_set("newest", str(instead_of or ""), str(self.number))

    def look(self) -> None:
        """Read what is new, and give the verdict once it is certain."""
        if self.done:
            return
        self._read()
        now = time.monotonic()
        if self.roll.ready:
            self.first_ready = self.first_ready or now
        if self.roll.is_wrong():
            self.wrong_since = self.wrong_since or now
        size, absent = self.card.size, self.roll.absent(self.card.size)
        waited = now - (self.first_ready or now)
        if self.roll.is_world(size):
            self._give(None)
        elif self.wrong_since and (not absent or now - self.wrong_since > FAULT_GRACE * self.join_timeout_s):
            self._give("\n".join(faults(self.roll, self._config_of)))
        elif absent and waited > self.absent_s:
            self._give(absence(self.roll, size, self.join_timeout_s))
        elif waited > self.join_timeout_s * IMPORT_FACTOR:
            self._give(unreadiness(self.roll, self.join_timeout_s * IMPORT_FACTOR))

    def _read(self) -> None:
        reports = [json.loads(page) for page in _pages(self.store, "reports", self.reports)]
        self.reports += len(reports)
        # A rank's card is there before its report: read in this order, no report is without its card.
        self.roll.cards += [Card.of(page) for page in _pages(self.store, "cards", len(self.roll.cards))]
        for report in reports:
            if report["failure"] is None:
                self.roll.ready.add(report["place"] - 1)
            else:
                self.roll.failed[report["place"] - 1] = report["failure"]

    def _config_of(self, digest: str) -> Config | None:
        if digest == self.card.digest:
            return self.config if digest else None
        key = f"config/{digest}"
        if not digest or not self.store.check([key]):
            return None
        flat: Config = json.loads(zlib.decompress(self.store.get(key)))
        return flat

    def _give(self, problem: str | None) -> None:
        self.done = True
        able = [card.rank for i, card in enumerate(self.roll.cards) if i not in self.roll.failed]
        verdict = {
            "problem": problem,
            "speaker": min(able, default=self.card.rank),
            "count": len(self.roll.cards),
            "able": len(able),
        }
        self.store.set("verdict", json.dumps(verdict))
