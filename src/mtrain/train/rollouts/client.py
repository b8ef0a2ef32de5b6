"""Answers from a server: requests in flight at once, tried again where they fail, and checked.

Wrong samples are worse than none: an answer counts only if it is to its own request, whole, and of
the weights that were pushed last.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mtrain.train.generate.request import END, LENGTH, Continuation, Sampling
from mtrain.train.rollouts.dialects import DIALECTS, Asked, BadAnswer, Dialect, checked
from mtrain.train.rollouts.http_json import Endpoint, ServerFault
from mtrain.train.rollouts.reported import Expected
from mtrain.world.heartbeat import begin_phase

T = TypeVar("T")
NAMED = "step "
"""Beginning of the names of pushed weights."""
BEAT_S = 0.2
"""Seconds between two looks at requests to stop."""


@dataclass
class Client:
    """A server that continues token ids; no part of torch.distributed."""

    url: str
    vocabulary: int
    """Ids that may be drawn."""
    context: int
    """Tokens that the model reads."""
    ends: frozenset[int]
    """Tokens that end a text."""
    dialect: str = "openai"
    """A name of `DIALECTS`."""
    model: str = ""
    """Name of the model; empty: the only one that the server has."""
    in_flight: int = 64
    """Most requests at once."""
    timeout_s: float = 600.0
    """Limit of one request."""
    tries: int = 5
    """Times that a request is sent, with the same seed. A text is taken from one of them: the
    connections of the others are closed, and their names are others.
    """
    pause_s: float = 0.5
    """Seconds before the second try; each further pause is twice as long. All of them together are
    shorter than the start of a server, so that one that starts anew refuses a connection.
    """
    version: int = 0
    """Step after which the weights of the server are those of the policy."""
    pushed: str | None = None
    """Version that the server got last, as it reports it; None: it has its first weights."""
    stop: Callable[[], bool] = lambda: False
    stale: int = field(default=0, init=False)
    """Answers of weights of another push, which were requested again."""
    expected: Expected | None = None
    """The experts that answers have to name; None: none."""
    _lost: str = field(default="", init=False)
    _numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _ends: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self.endpoint = Endpoint(self.url, self.timeout_s)
        self._name = f"mtrain-{secrets.token_hex(8)}"

    @property
    def how(self) -> Dialect:
        """Return how requests are written."""
        return DIALECTS[self.dialect]

    def require_same(self, text: str, ids: Sequence[int]) -> None:
        """Find the model, and require that the server encodes a text as the run does.

        Raises:
            ServerFault: it does not, or has another model.
        """
        self._ends.clear()
        listed = self._tried(lambda: self.endpoint.call("GET", "/v1/models")).get("data")
        names = [str(one.get("id")) for one in listed or () if isinstance(one, dict)]
        if not self.model and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            known = f"its models are {names[:8]}"
            raise ServerFault(f"{known}; name one" if not self.model else known, again=False)
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        theirs = self._tried(lambda: self.endpoint.call("POST", "/tokenize", body)).get("tokens")
        if theirs != list(ids):
            both = f"{str(theirs)[:80]}, not {str(list(ids))[:80]}"
            raise ServerFault(f"another tokenizer: {text[:40]!r} is {both}", again=False)

    def sampled(
        self, prompts: Sequence[tuple[tuple[int, ...], int]], sampling: Sampling
    ) -> list[Continuation] | None:
        """Return the text after each of (ids, seed); None on a request to stop.

        Raises:
            ServerFault: the server fails for too long, or gives wrong answers.
        """
        self._ends.clear()
        self.stale = 0
        pool = ThreadPoolExecutor(self.in_flight, thread_name_prefix="rollouts")
        try:
            tasks = [pool.submit(self._one, ids, seed, sampling) for ids, seed in prompts]
            left = set(tasks)
            main = threading.current_thread() is threading.main_thread()
            while left:
                # The heartbeat is that of the main thread, which may train meanwhile.
                if main:
                    begin_phase("generation")
                done, left = wait(left, BEAT_S, return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
                if left and self.stop():
                    return None
            return [task.result() for task in tasks]
        except ServerFault as error:
            came = sum(task.done() and task.exception() is None for task in tasks)
            text = f"{error}; {came} of {len(tasks)} answers had arrived"
            raise ServerFault(text, again=False) from error
        finally:
            # Else a process that ends would wait for threads that wait for a server.
            self.abort()
            pool.shutdown(cancel_futures=True)

    def abort(self) -> None:
        """End all requests under way, whose threads raise ServerFault."""
        self._ends.set()
        self.endpoint.abort()

    def _one(self, ids: tuple[int, ...], seed: int, sampling: Sampling) -> Continuation:
        most = min(sampling.tokens, self.context + 1 - len(ids))
        version = self.pushed

        # Each try has a name of its own: a late answer to an earlier one is not taken.
        def once() -> Continuation:
            name = f"{self._name}-{next(self._numbers)}"
            asked = Asked(name, ids, most, seed, self.ends, self.expected is not None)
            body = self.how.body(self.model, asked, sampling)
            answer = self.endpoint.call("POST", self.how.path, body)
            try:
                found = checked(self.how.read(answer, asked), asked, self.vocabulary)
                routes = None
                if self.expected is not None:
                    # The server did not read the last token.
                    routes = self.expected.read(found.routes, len(ids) + len(found.ids) - 1)
            except (BadAnswer, LookupError, TypeError, ValueError, AttributeError) as error:
                raise ServerFault(f"a wrong answer: {error}", again=True) from error
            if version is not None and found.version not in (None, version):
                text = f"an answer has weights {str(found.version)[:40]!r}, not {version!r}"
                # One of several servers may get its weights last.
                pushed = str(found.version).startswith(NAMED)
                self.stale += pushed
                raise ServerFault(text, again=pushed)
            if self._lost and found.version is None:
                raise ServerFault(self._lost, again=False)
            ended = END if found.ends else LENGTH
            values = [float(value) for value in found.log_probabilities]
            return Continuation(found.ids, ended, values, found.among, routes)

        return self._tried(once)

    def _tried(self, once: Callable[[], T]) -> T:
        """Return what a call returns, tried again while that may help."""
        for number in itertools.count(1):
            try:
                return once()
            except ServerFault as error:
                # With the first weights, a server that starts anew is the same again.
                if error.gone and self.version:
                    self._lost = "it did not listen for a time, so it may have started anew"
                if not error.again or number >= self.tries or self._ends.is_set():
                    raise
                self._ends.wait(self.pause_s * 2 ** (number - 1))
        raise AssertionError("a loop without end")

    def call(self, path: str, body: dict[str, Any]) -> None:
        """Post to a route that changes the server, once: whether it took effect is not known
        after a fault.

        Raises:
            ServerFault: it failed, or the server says so.
        """
        found = self.endpoint.call("POST", path, body)
        if found.get("success") is False:
            raise ServerFault(f"{path}: {str(found.get('message'))[:300]}", again=False)

    def has(self, version: int, name: str | None) -> None:
        """Note that the server got the weights of a version, under a name that it reports."""
        self.version = version
        self.pushed = name
        self._lost = ""
