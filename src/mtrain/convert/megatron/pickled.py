"""Pickles read as data: nothing in them is imported or called; an unexpected name is refused.

A pickle is a program for a small stack machine. This machine makes only texts, numbers, lists and
records, and stops at a name that the reader did not admit.

Source: the opcodes are those of Python's `pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from mtrain.errors import CorruptData
from mtrain.processes import without_collecting

MAX_STEPS = 32_000_000
MAX_HEIGHT = 100_000
"""The most values on the stack; writers of pickles store a thousand at a time."""
MAX_INTEGER_BYTES = 16
MAX_SHOWN = 200
_AT_ONCE = 1000
PROTOCOLS = range(2, 6)


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant that a pickle names, kept as the text `module.name`."""

    text: str


@dataclass(eq=False, slots=True)
class Mapped:
    """A dict: its keys and values in their order, none of them hashed."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Record:
    """A call that the pickle asks for, with its arguments and the state for its result."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    more: list[Any] = field(default_factory=list)
    """Items and pairs that were to be added to it."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A persistent id: data outside the pickle, which its writer named by a value."""

    value: Any


class _Mark:
    pass


_MARK = _Mark()


def read(data: bytes, admitted: Container[str], where: str) -> Any:
    """Return the content of a pickle in `Name`, `Mapped`, `Record`, `Reference`, lists, tuples,
    texts, bytes and numbers.

    Args:
        data: the whole pickle. Memory and time are at most proportional to its size, and bounded by
            `MAX_STEPS`.
        admitted: the names that it may hold.
        where: the begin of error messages.

    Raises:
        CorruptData: no pickle, one that is cut, or one that names something else; nothing of it was
            run.
    """
    machine = _Machine(data, admitted, where)
    try:
        with without_collecting():
            return machine.run()
    except (IndexError, UnicodeDecodeError, TypeError, struct.error):
        raise machine.refused("it is no pickle, or it is cut or altered") from None


class _Machine:
    """The stack machine that reads one pickle."""

    def __init__(self, data: bytes, admitted: Container[str], where: str) -> None:
        self.data = data
        self.admitted = admitted
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def refused(self, why: str) -> CorruptData:
        """Return an error for whoever reads the file."""
        return CorruptData(f"{self.where}: {why}")

    def run(self) -> Any:
        """Go through the pickle to its end."""
        for _ in range(MAX_STEPS // _AT_ONCE):
            if self.some_steps():
                if len(self.stack) != 1:
                    raise self.refused("it is no pickle: it ends with something left over")
                return self.stack[0]
            # looked at once in a thousand steps, as each adds few values
            if len(self.stack) > MAX_HEIGHT:
                raise self.refused(
                    f"it is no checkpoint's: more than {MAX_HEIGHT} values wait in it"
                )
        raise self.refused(f"it has more than {MAX_STEPS} steps")

    def some_steps(self) -> bool:
        """Run the next steps; return whether the last was the end.

        The most frequent ones are inlined for speed.
        """
        data = self.data
        stack = self.stack
        memo = self.memo
        table = _STEPS
        at = self.at
        for _ in range(_AT_ONCE):
            code = data[at]
            at += 1
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _BINGET and data[at] in memo:
                stack.append(memo[data[at]])
                at += 1
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _TUPLE1 and stack[-1] is not _MARK:
                stack[-1] = (stack[-1],)
            elif code == _STOP:
                return True
            else:
                step = table.get(code)
                if step is None:
                    raise self.refused(f"it has the opcode 0x{code:02x}, which no checkpoint needs")
                self.at = at
                step(self)
                at = self.at
        self.at = at
        return False

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.at
        self.at = self.at + count
        if not 0 <= count <= len(self.data) - start:
            raise self.refused(
                f"a part of it says that it has {count} bytes, and {len(self.data) - start} are"
                " left"
            )
        return self.data[start : self.at]

    def number(self, count: int) -> int:
        """Return the next `count` bytes as a number without sign."""
        start = self.at
        self.at = self.at + count
        data = self.data[start : self.at]
        if len(data) < count:
            raise self.refused("it is no pickle, or it is cut or altered")
        return int.from_bytes(data, "little")

    def line(self) -> str:
        """Return the text up to the next end of a line."""
        # no admitted name is as long
        stop = self.data.find(b"\n", self.at, self.at + 2 * MAX_SHOWN)
        if stop < 0:
            raise self.refused("it is no pickle, or it is cut or altered")
        start = self.at
        self.at = stop + 1
        return self.data[start:stop].decode()

    def marked(self) -> list[Any]:
        """Pop the values above the newest mark, and the mark."""
        stack = self.stack
        place = len(self.stack) - 1
        while stack[place] is not _MARK:
            if place == 0:
                raise self.refused("it is no pickle: it ends a group that did not begin")
            place -= 1
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def pop(self) -> Any:
        """Return the value on top, taken off."""
        value = self.stack.pop()
        if value is _MARK:
            raise self.refused("it is no pickle: a value is missing")
        return value

    def named(self, module: Any, name: Any) -> Name:
        """Return a name that is admitted."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.refused("it names a class by something that is no text")
        text = f"{module}.{name}"
        if text not in self.admitted:
            shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
            raise self.refused(
                f"it names {shown}, which is no part of a checkpoint; nothing of it was run"
            )
        return Name(text)

    def add(self, items: list[Any]) -> None:
        """Put items into the list, set or record on top."""
        top = self.stack[-1]
        if not isinstance(top, list | Record):
            raise self.refused("it is no pickle: it fills something that is no list")
        (top.more if isinstance(top, Record) else top).extend(items)

    def set_pairs(self, items: list[Any]) -> None:
        """Put keys and values into the dict or record on top."""
        top = self.stack[-1]
        if not isinstance(top, Mapped | Record) or len(items) % 2:
            raise self.refused("it is no pickle: it fills something that is no dict")
        pairs = zip(items[::2], items[1::2], strict=True)
        (top.more if isinstance(top, Record) else top.pairs).extend(pairs)

    def make(self) -> None:
        """Replace a callable and its arguments on the stack by a record of the call."""
        arguments = self.pop()
        called = self.pop()
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise self.refused("it calls something that is no admitted name")
        self.stack.append(Record(called.text, arguments))

    def build(self) -> None:
        """Give the record on top its state."""
        state = self.pop()
        top = self.stack[-1]
        # a second state would hide the first
        if not isinstance(top, Record) or top.state is not None:
            raise self.refused("it gives a state to something that takes none")
        top.state = state

    def integer(self, size: int) -> int:
        """Return an integer of `size` bytes with a sign."""
        if size > MAX_INTEGER_BYTES:
            raise self.refused(f"it has an integer of {size} bytes")
        return int.from_bytes(self.take(size), "little", signed=True)

    def frame(self) -> None:
        """Pass over the size of a frame, which has to be there."""
        size = self.number(8)
        if size > len(self.data) - self.at:
            raise self.refused(
                f"a part of it says that it has {size} bytes, and {len(self.data) - self.at} are"
                " left"
            )

    def protocol(self) -> None:
        """Pass over the number of the protocol."""
        if self.number(1) not in PROTOCOLS:
            raise self.refused("it is a pickle of a protocol that checkpoints do not have")

    def recall(self, size: int) -> Any:
        """Return a value of the memo, whose number has `size` bytes."""
        place = self.number(size)
        # a KeyError would not be taken for damage
        if place not in self.memo:
            raise self.refused("it is no pickle: it refers to what is not there")
        return self.memo[place]

    def remember(self, place: int) -> None:
        """Keep the value on top under a number."""
        self.memo[place] = self.stack[-1]


Step = Callable[[_Machine], Any]


def _push(make: Callable[[_Machine], Any]) -> Step:
    return lambda m: m.stack.append(make(m))


def _tuple(count: int) -> Step:
    def step(m: _Machine) -> None:
        values = tuple(m.stack[-count:])
        if len(values) < count or _MARK in values:
            raise m.refused("it is no pickle: a value is missing")
        m.stack[-count:] = [values]

    return step


def _global(m: _Machine) -> Name:
    module = m.line()
    return m.named(module, m.line())


def _stack_global(m: _Machine) -> Name:
    name = m.pop()
    module = m.pop()
    return m.named(module, name)


def _item(m: _Machine) -> None:
    value = m.pop()
    key = m.pop()
    m.set_pairs([key, value])


_STOP, _MEMOIZE, _BINGET, _BININT1, _TUPLE1 = b".\x94hK\x85"
_STEPS: dict[int, Step] = {
    ord(code): step
    for code, step in {
        b"\x80": _Machine.protocol,
        b"\x95": _Machine.frame,
        b"(": _push(lambda m: _MARK),
        b"0": _Machine.pop,
        b"N": _push(lambda m: None),
        b"\x88": _push(lambda m: True),
        b"\x89": _push(lambda m: False),
        b"K": _push(lambda m: m.number(1)),
        b"M": _push(lambda m: m.number(2)),
        b"J": _push(lambda m: m.integer(4)),
        b"\x8a": _push(lambda m: m.integer(m.number(1))),
        b"\x8b": _push(lambda m: m.integer(m.number(4))),
        b"G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
        b"\x8c": _push(lambda m: m.take(m.number(1)).decode("utf-8", "surrogatepass")),
        b"X": _push(lambda m: m.take(m.number(4)).decode("utf-8", "surrogatepass")),
        b"\x8d": _push(lambda m: m.take(m.number(8)).decode("utf-8", "surrogatepass")),
        b"C": _push(lambda m: m.take(m.number(1))),
        b"B": _push(lambda m: m.take(m.number(4))),
        b"\x8e": _push(lambda m: m.take(m.number(8))),
        b"]": _push(lambda m: []),
        # a set, whose items need not be hashed
        b"\x8f": _push(lambda m: []),
        b"}": _push(lambda m: Mapped()),
        b")": _push(lambda m: ()),
        b"t": _push(lambda m: tuple(m.marked())),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"a": lambda m: m.add([m.pop()]),
        b"e": lambda m: m.add(m.marked()),
        b"\x90": lambda m: m.add(m.marked()),
        b"\x91": _push(lambda m: m.marked()),
        b"s": _item,
        b"u": lambda m: m.set_pairs(m.marked()),
        b"c": _push(_global),
        b"\x93": _push(_stack_global),
        b"R": _Machine.make,
        # a class is called like a function
        b"\x81": _Machine.make,
        b"b": _Machine.build,
        b"Q": _push(lambda m: Reference(m.pop())),
        b"h": _push(lambda m: m.recall(1)),
        b"j": _push(lambda m: m.recall(4)),
        b"q": lambda m: m.remember(m.number(1)),
        b"r": lambda m: m.remember(m.number(4)),
        b"\x94": lambda m: m.remember(len(m.memo)),
    }.items()
}
