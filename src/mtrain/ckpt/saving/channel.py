"""Messages between a rank and its writer: JSON values, one per line, over a pair of sockets.

Needs no torch.
"""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from typing import Any

from mtrain import strict_json

READ_BYTES = 1 << 20


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(True)
        self._begun = bytearray()
        """A line that has not arrived whole."""
        self._lines: deque[bytes] = deque()
        # not `select`: a rank of a large world has more descriptors than that can name
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, body: dict[str, Any]) -> None:
        """Send a message; waits while the other end is behind.

        Raises:
            Closed: nobody reads it.
        """
        try:
            self._end.sendall(strict_json.dumps(body, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, wait_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None: none came in time. Without `wait_s`, wait for ever.

        Raises:
            Closed: the other end is gone, and has left no further message.
        """
        while not self._lines:
            if not self._poll.poll(None if wait_s is None else 1e3 * wait_s):
                return None
            self._read()
        message: dict[str, Any] = json.loads(self._lines.popleft())
        return message

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _read(self) -> None:
        try:
            data = self._end.recv(READ_BYTES)
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("the other end was closed")
        *lines, rest = (bytes(self._begun) + data).split(b"\n")
        self._lines += lines
        self._begun = bytearray(rest)
