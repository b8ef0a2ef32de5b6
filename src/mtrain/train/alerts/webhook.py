"""The webhook that alerts are sent to, by a thread of its own."""

from __future__ import annotations

import http.client
import queue
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mtrain import strict_json
from mtrain.errors import warn

VARIABLE = "MTRAIN_WEBHOOK"
"""The environment variable with the URL, a secret of many services that nothing prints."""
MOST_HELD = 100
"""Alerts that wait for a slow server; further ones are not sent."""
TIMEOUT_S = 10.0
"""Seconds that a server may take for each step of an exchange."""
CLOSE_S = 5.0
"""Seconds that the end of a run waits for the thread."""


class Webhook:
    """A thread that posts JSON to a URL. What fails is dropped, with one warning."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_HELD)
        self._warned = False
        self._ends = False
        """Whatever still waits is not sent."""
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a body, some time later; never waits."""
        try:
            self._queue.put_nowait(body)
        except queue.Full:
            self._fail("the server is too slow")

    def close(self) -> None:
        """Wait for a while until everything is sent."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._ends = True
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._ends and (body := self._queue.get()) is not None:
            try:
                status = post(self._url, strict_json.dumps(body).encode())
            except (OSError, ValueError, http.client.HTTPException) as error:
                # The text of an error may have the host or the whole URL.
                self._fail(type(error).__name__)
            else:
                if status >= 300:
                    self._fail(f"the server answers {status}")

    def _fail(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warn(f"{VARIABLE}: cannot send an alert because of {why}; training goes on")


def post(url: str, body: bytes) -> int:
    """Post JSON, and return the status; a redirect is not followed.

    Raises:
        OSError: the server does not answer.
        ValueError: the URL is not of HTTP.
        http.client.HTTPException: the answer is not of HTTP.
    """
    parts = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise ValueError("no URL of http or https")
    connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()
