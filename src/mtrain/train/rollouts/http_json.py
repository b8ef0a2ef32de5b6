"""Requests of JSON to a server of rollouts, each on a connection of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

VARIABLE = "MTRAIN_ROLLOUT_KEY"
"""The environment variable with the key of the server, which no message, file or event has."""
MOST_BYTES = 64 << 20
"""The largest answer that is read."""
PART_BYTES = 1 << 20
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of a server that may answer the same request later."""


class ServerFault(Exception):
    """An exchange with a server failed."""

    def __init__(self, text: str, *, again: bool, gone: bool = False) -> None:
        super().__init__(text)
        self.again = again
        """True if the same request may succeed later."""
        self.gone = gone
        """True if no server listened: it may have started anew, with other weights."""


class Endpoint:
    """The URL of a server."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        variable: str = VARIABLE,
        end: str = "/v1",
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Take a URL of http or https, without the `end` that it may have; `variable` is that of
        the key.

        Raises:
            ValueError: it is another text, or has a user, a query or a fragment.
        """
        parts = urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise ValueError("is no URL of http or https")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(f"has more than a place; a key belongs in {variable}")
        self._kind = kinds[parts.scheme]
        self._host = parts.hostname
        self._port = parts.port
        # Users know the URL of OpenAI's routes; those of weights are next to it.
        self._path = parts.path.rstrip("/").removesuffix(end)
        self._variable = variable
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._open: set[http.client.HTTPConnection] = set()

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = 0.0,
        headers: Mapping[str, str] = {},
    ) -> dict[str, Any]:
        """Return the JSON object that the server answers with; `timeout_s` 0 is the usual limit of
        the whole exchange. A redirect is not followed.

        Raises:
            ServerFault: there is no such answer.
        """
        until = time.monotonic() + (timeout_s or self._timeout_s)
        connection = self._kind(self._host, self._port, timeout=timeout_s or self._timeout_s)
        self._open.add(connection)
        try:
            return self._exchanged(connection, method, path, body, until, headers)
        except ConnectionRefusedError as error:
            raise ServerFault(f"{path}: nothing listens", again=True, gone=True) from error
        except TimeoutError as error:
            raise ServerFault(f"{path}: no whole answer in time", again=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerFault(f"{path}: {type(error).__name__}", again=True) from error
        finally:
            self._open.discard(connection)
            connection.close()

    def abort(self) -> None:
        """End all exchanges of other threads, each of which raises an error; servers then end their
        requests, too.
        """
        for connection in list(self._open):
            sock = connection.sock
            with suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)

    def _exchanged(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        until: float,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        kinds = {"Content-Type": "application/json", "Accept": "application/json"}
        headers = kinds | dict(headers)
        if key := os.environ.get(self._variable):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        # A connection that is used again could carry a late answer of an earlier request.
        connection.request(method, self._path + path, data, headers)
        response = connection.getresponse()
        held = bytearray()
        while part := response.read(PART_BYTES):
            held += part
            if len(held) > self._most_bytes:
                raise ServerFault(f"{path}: more than {self._most_bytes} bytes", again=False)
            # A socket's limit is that of one read: a server may send a byte at a time.
            if time.monotonic() > until:
                raise TimeoutError
        status = response.status
        if status != http.client.OK:
            text = held[:300].decode(errors="replace")
            # A server may repeat what it was sent.
            text = text.replace(key, "***") if key else text
            raise ServerFault(f"{path}: status {status}: {text}", again=status in BUSY)
        if not held.strip():
            return {}
        try:
            found = json.loads(held)
        except (ValueError, RecursionError) as error:
            raise ServerFault(f"{path}: no JSON", again=True) from error
        if not isinstance(found, dict):
            raise ServerFault(f"{path}: no JSON object", again=False)
        return found
