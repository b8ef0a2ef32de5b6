"""Rollouts from a server that gets the weights after every update. Rank 0 talks to it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, TrainingError
from mtrain.train.generate.request import Continuation, Sampling
from mtrain.train.rollouts import weight_folder
from mtrain.train.rollouts.client import BEAT_S, NAMED, Client
from mtrain.train.rollouts.engine import Prompt, Rollout
from mtrain.train.rollouts.exchange import packed, seed_of, unpacked, whole_routes
from mtrain.train.rollouts.http_json import ServerFault
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World

Sampled = tuple[list[Continuation] | None, str]
"""Texts, None on a request to stop, and the problem of a server or ""."""


@dataclass
class ServerEngine:
    """An engine that requests answers from a server of vLLM, SGLang or of OpenAI's completions
    with token ids.
    """

    run: RunConfig
    world: World
    client: Client
    """Used by rank 0 only."""
    folder: Path | None = None
    """Folder of a disk that the server reads, too, which gets the weights; None: the server keeps
    its weights.
    """
    base: Path | None = None
    """Hugging Face folder whose JSON files stand next to the weights."""
    probe: tuple[str, Sequence[int]] | None = None
    """A text and its ids, which the server has to encode in the same way; None: it has no
    tokenizer.
    """
    stop: Callable[[], bool] = lambda: False
    own: subprocess.Popen[bytes] | None = None
    """The process of the server if it ends with the run; on rank 0."""
    kept: Sequence[int] = ()
    """Versions whose folders stay: a resumed run needs them."""
    stale: int = field(default=0, init=False)
    """Answers of other weights than those that were pushed last, sampled anew in the last call."""
    _known: bool = field(default=False, init=False)
    _begun: list[Prompt] | None = field(default=None, init=False)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    _ahead: Future[Sampled] | None = field(default=None, init=False)
    _cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.client.stop = lambda: self._cancelled or self.stop()

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Request answers, which the next call of `generate` with these prompts returns.

        Raises ConfigError as `generate` does.
        """
        self._require(sampling)
        self._drop()
        self._begun = list(prompts)
        if self.world.is_rank0:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts ahead")
            self._ahead = self._pool.submit(self._sampled, self._begun, sampling)

    def under_way(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether answers to these prompts were requested by `begin`."""
        return self._begun == list(prompts)

    def _drop(self) -> None:
        """End the requests that were begun, and their threads."""
        self._begun = None
        if self._pool is not None and self._ahead is not None:
            self._cancelled = True
            while not wait([self._ahead], BEAT_S).done:
                self.client.abort()
            self._pool.shutdown()
            self._cancelled = False
        self._pool = None
        self._ahead = None

    def _sampled(self, prompts: Sequence[Prompt], sampling: Sampling) -> Sampled:
        """Return the texts, None on a request to stop, and the problem of a server; on rank 0."""
        seeds = [seed_of(self.run, sampling, prompt) for prompt in prompts]
        pairs = [(prompt.ids, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        try:
            if not self._known and self.probe is not None:
                self.client.require_same(*self.probe)
                self._known = True
            return self.client.sampled(pairs, sampling), ""
        except ServerFault as error:
            return None, f"{self.client.url}: {error}"

    def _awaited(self, prompts: Sequence[Prompt], sampling: Sampling) -> Sampled:
        """Return what was begun, or sample now; on rank 0."""
        if self._ahead is None or not self.under_way(prompts):
            self._drop()
            return self._sampled(prompts, sampling)
        begin_phase("generation")
        while not wait([self._ahead], BEAT_S).done:
            begin_phase("generation")
        return self._ahead.result()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        """Return an answer to each prompt; see `Engine`.

        Raises:
            ConfigError: the server's log-probabilities are not of the distribution drawn from.
            TrainingError: the server fails for too long, or gives wrong answers.
        """
        self._require(sampling)
        texts: list[Continuation] | None = None
        problem = ""
        stale = 0
        if self.world.is_rank0:
            # One that fails here is known to all ranks below, before they wait for its answers.
            texts, problem = self._awaited(prompts, sampling)
            stale = self.client.stale
        self._drop()
        self._agree(problem, "sample answers")
        longest = max((len(text.ids) for text in texts or ()), default=0)
        stops = self.stop() or (self.world.is_rank0 and texts is None)
        facts = torch.tensor([longest, stops, stale], dtype=torch.int64)
        facts = facts.to(self.world.torch_device)
        with waiting():
            dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        longest, stops, self.stale = facts.tolist()
        if stops:
            return None
        kept = sampling.top_k if sampling.reports else 0
        sent = packed(dict(enumerate(texts or ())), len(prompts), longest, kept)
        sent = sent.to(self.world.torch_device)
        with waiting():
            dist.broadcast(sent, src=0)
        version = self.client.version
        answers = [
            Rollout(
                prompt,
                tuple(text.ids),
                tuple(text.log_probabilities),
                text.ended,
                version,
                among=tuple(map(tuple, text.among)),
            )
            for prompt, text in zip(prompts, unpacked(sent, kept), strict=True)
        ]
        expected = self.client.expected
        if expected is None:
            return answers
        own = {i: torch.from_numpy(text.routes) for i, text in enumerate(texts or ())}
        tokens = [len(one.prompt.ids) + len(one.ids) - 1 for one in answers]
        shape = len(expected.layers), expected.topk
        routes = whole_routes(own, tokens, range(shape[0]), shape, self.world.torch_device)
        return [replace(one, routes=found) for one, found in zip(answers, routes, strict=True)]

    def _require(self, sampling: Sampling) -> None:
        limits = sampling.limited and not self.client.how.reports
        tempered = self.client.how.tempered and sampling.temperature > 0
        if limits or not (tempered or sampling.temperature == 1):
            key = "rollout.temperature"
            why = f"a server of the kind {self.client.dialect} reports those of temperature 1"
            if self.client.how.tempered:
                why = "a server reports those of all tokens, above temperature 0"
            raise ConfigError.of("MT335", key, sampling.temperature, why, f"{key}=1")

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Give the server the weights after step `version`; see `Engine`.

        Raises:
            TrainingError: they cannot be written, or the server does not take them.
        """
        problem = ""
        if self.world.is_rank0 and self.folder is not None:
            try:
                self._push(weights, version)
            except (ServerFault, OSError, ValueError) as error:
                problem = f"{self.client.url}: {error}"
        # Ranks make each tensor together.
        for _ in weights:
            pass
        self._agree(problem, "push weights")
        if self.folder is not None:
            self.client.version = version

    def _push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        to = self._place(version)
        weight_folder.write(weights, to, self.base)
        self._read(version)
        kept = {to.name, *(self._place(one).name for one in self.kept)}
        for other in to.parent.glob("step_*"):
            if other.name not in kept:
                shutil.rmtree(other, ignore_errors=True)

    def _place(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"step_{version:08d}"

    def _read(self, version: int) -> None:
        """Make the server read the weights of a version, with no request under way."""
        self._drop()
        read = weight_folder.READ_BY[self.client.dialect]
        name = read(self.client, self._place(version), f"{NAMED}{version}")
        self.client.has(version, name)

    def restore(self, version: int) -> bool:
        """Give the server the weights after an earlier step again; return whether the folder still
        has them.

        Raises:
            TrainingError: the server does not take them.
        """
        problem = ""
        there = False
        if self.world.is_rank0 and self._place(version).is_dir():
            try:
                self._read(version)
                there = True
            except ServerFault as error:
                problem = f"{self.client.url}: {error}"
        self._agree(problem, "push weights")
        there = bool(self.world.first_problem("there" if there else ""))
        if there:
            self.client.version = version
        return there

    def _agree(self, problem: str, what: str) -> None:
        problem = self.world.first_problem(problem)
        if problem:
            raise TrainingError(
                f"rollout.url: cannot {what} because the server failed ({problem}). The step was"
                " not made. Restart the server with the weights of the last checkpoint, and resume"
            )

    def pause(self) -> None:
        """Do nothing: `push` ends the requests under way, and pauses the server."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def close(self) -> None:
        """End the requests under way, their threads, and a server that belongs to the run."""
        self._drop()
        if self.own is not None:
            self.own.kill()
            self.own.wait()
