"""Rollouts from the trained shards themselves, in the layout of training.

A fixed number of rows is computed together. A request joins when a row is free: its prompt is read
by itself, into that row of the cache. Then all rows read a token each, at places of their own, and
a request leaves when its text ends. Every product so has a shape that does not depend on the
requests, and neither does the rounding of a request, with one exception: an expert computes the
tokens of all rows that go to it together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.ckpt.state import generators_kept
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from mtrain.mcore import api as mcore
from mtrain.mcore.layers.routes import Layers, Record
from mtrain.mcore.state.sharding import gathered
from mtrain.train.generate.request import LENGTH, Continuation, Sampling
from mtrain.train.generate.sampler import Sampler, Text, evaluated
from mtrain.train.rollouts.engine import Prompt, Rollout
from mtrain.train.rollouts.exchange import packed, seed_of, unpacked, whole_routes
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World


@dataclass
class LocalEngine:
    """An engine that samples with this rank's chunks, together with all other ranks.

    Data-parallel ranks sample different prompts. Where they compute each layer together (experts
    that they share, sharded weights), those that have nothing left go on with empty rows.
    """

    run: RunConfig
    world: World
    chunks: list[Any]
    rows: int = 8
    """Requests that a data-parallel rank computes together."""
    ending: Callable[[list[int]], str] = lambda ids: LENGTH
    """Ending that the tokens added so far cause; see `Sampler.continued`."""
    stop: Callable[[], bool] = lambda: False
    """Return whether this rank has a request to stop."""
    layers: Layers | None = None
    """Layers whose experts are recorded; None: they are not."""
    version: int = field(default=0, init=False)
    """Step after which the weights are those that are sampled from."""

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.run, self.world, self.chunks, blocks=False)

    @property
    def topk(self) -> int:
        """Return the experts of a token."""
        return int(self.chunks[0].config.moe_router_topk)

    def _whole_routes(
        self, own: dict[int, torch.Tensor], tokens: list[int], *, grouped: bool
    ) -> Sequence[np.ndarray | None]:
        """Return the experts of each text on every rank, from those that ranks recorded."""
        if self.layers is None:
            return [None] * len(tokens)
        coords = self.world.coords
        # Tensor-parallel ranks read the same tokens or parts of them, context-parallel ones the
        # same, and so do data-parallel ones in groups.
        parts = self.run.parallel.sequence_parallel or coords["tp"] == 0
        first = parts and coords["cp"] == 0 and not (grouped and coords["dp"])
        given = own if first else {}
        shape = self.layers.number, self.topk
        return whole_routes(given, tokens, self.layers.own, shape, self.world.torch_device)

    def _recorded(self, stack: ExitStack) -> None:
        """Record the experts of what is read, until the end of `stack`."""
        if self.layers is None:
            return
        tokens = self.sampler.context + self.sampler.multiple
        own = len(self.layers.own)
        record = Record(self.rows, tokens, own, self.topk, self.world.torch_device)
        stack.enter_context(record.kept())
        stack.callback(setattr, self, "sampler", self.sampler)
        self.sampler = replace(self.sampler, record=record)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        """Return an answer to each prompt; see `Engine`.

        An answer also ends where `data.seq_length` tokens have been read.

        Raises:
            ConfigError: the model keeps no cache in this layout, under context parallelism.
            ValueError: a prompt is empty, or longer than the context.
        """
        context = self.sampler.context
        for prompt in prompts:
            if not 0 < len(prompt.ids) <= context:
                raise ValueError(
                    f"prompt {prompt.number} has {len(prompt.ids)} tokens, not 1 to {context}"
                )
        with ExitStack() as stack:
            for entered in (gathered(self.chunks), evaluated(self.chunks)):
                stack.enter_context(entered)
            stack.enter_context(generators_kept(self.world))
            self._recorded(stack)
            why = self.obstacle()
            if why and self.world.grid.cp > 1:
                cp = self.world.grid.cp
                fix = "parallel.cp=1"
                raise ConfigError.of("MT334", "parallel.cp", cp, f"cp {cp}, and {why}", fix)
            if why:
                texts, own = self._in_groups(prompts, sampling)
            else:
                stack.enter_context(mcore.whole_sequences(self.chunks))
                rows = _Rows(self, prompts, sampling)
                texts = rows.drawn()
                own = {i: text.routes for i, text in rows.texts.items() if text.routes is not None}
        if texts is None:
            return None
        # The last token is not read.
        tokens = [len(p.ids) + len(t.ids) - 1 for p, t in zip(prompts, texts, strict=True)]
        routes = self._whole_routes(own, tokens, grouped=bool(why))
        return [
            Rollout(
                prompt,
                tuple(text.ids),
                tuple(text.log_probabilities),
                text.ended,
                self.version,
                experts,
                among=tuple(map(tuple, text.among)),
            )
            for prompt, text, experts in zip(prompts, texts, routes, strict=True)
        ]

    def obstacle(self) -> str:
        """Return why rows have no places of their own, so that groups of requests are sampled in
        step; empty: they have.

        All ranks call it together.
        """
        model = self.run.model
        # A state has no places: it would need a padding of its own for each row.
        if model.linear_attention is not None or model.hybrid:
            return "states of linear attention or Mamba-2 layers are at one token for all rows"
        why = self.sampler.obstacle_to(self.sampler.context + self.sampler.multiple)
        own = (mcore.places_obstacle(chunk) for chunk in self.chunks)
        # Stages have other layers, and must go the same way.
        return self.world.first_problem(why or next((reason for reason in own if reason), ""))

    def _in_groups(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> tuple[list[Continuation] | None, dict[int, torch.Tensor]]:
        """Return texts of groups of requests, every rank all of them, and the experts recorded here
        by the number of the text.
        """
        rows = self.rows if self.sampler.independent else 1
        texts: list[Continuation] = []
        routes: dict[int, torch.Tensor] = {}
        longest = max((len(prompt.ids) for prompt in prompts), default=0) + sampling.tokens
        if self.layers is not None and longest > self.sampler.context + 1:
            # The places of the experts of tokens are those of the first context.
            raise ValueError(f"an answer may end after {longest} tokens, behind the context")
        for first in range(0, len(prompts), rows):
            group = prompts[first : first + rows]
            found = self.sampler.continued(
                [list(prompt.ids) for prompt in group],
                sampling,
                ending=self.ending,
                stop=self.stop,
                seeds=[seed_of(self.run, sampling, prompt) for prompt in group],
            )
            if found is None:
                return None, {}
            if self.sampler.record is not None:
                for row, (prompt, text) in enumerate(zip(group, found, strict=True)):
                    tokens = len(prompt.ids) + len(text.ids) - 1
                    routes[first + row] = self.sampler.record.taken(row, tokens)
            texts += found
        return texts, routes

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Note the version: the weights are those that are trained."""
        self.version = version

    def pause(self) -> None:
        """Do nothing: nothing runs between two calls."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def close(self) -> None:
        """Do nothing: the cache is freed after each call."""


class _Rows:
    """The rows of one call, and the requests of this data-parallel rank that wait for one."""

    def __init__(self, engine: LocalEngine, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        grid = engine.world.grid
        self.engine = engine
        self.sampler = engine.sampler
        self.device = engine.world.torch_device
        dp = engine.world.coords["dp"]
        # Neighbours stay together: answers to one prompt read it once.
        mine = range(len(prompts) * dp // grid.dp, len(prompts) * (dp + 1) // grid.dp)
        self.texts = {i: self._text(prompts[i], sampling) for i in mine}
        self.waiting = deque(i for i in mine if not self.texts[i].done)
        self.rows: list[Text | None] = [None] * engine.rows
        self.count = len(prompts)
        self.kept = sampling.top_k if sampling.reports else 0
        sharded = engine.run.parallel.fsdp != "none"
        self.in_step = grid.dp > 1 and (sharded or grid.ep * grid.etp > grid.tp * grid.cp)
        self.draws = engine.world.rank == grid.rank_of(
            cp=engine.world.coords["cp"], dp=dp, pp=grid.pp - 1
        )
        # Not the length of these requests: sums over other lengths round differently.
        self.span = self.sampler.context + self.sampler.multiple
        self.cache = mcore.Cache(engine.rows, self.span, last_only=self.sampler.multiple == 1)
        self.record = self.sampler.record
        self.stops = False

    def _text(self, prompt: Prompt, sampling: Sampling) -> Text:
        # The last token need not be read.
        most = min(sampling.tokens, self.sampler.context + 1 - len(prompt.ids))
        seed = seed_of(self.engine.run, sampling, prompt)
        generator = torch.Generator().manual_seed(seed)
        limits = replace(sampling, tokens=most)
        return Text(list(prompt.ids), limits, generator, self.engine.ending)

    def drawn(self) -> list[Continuation] | None:
        """Return the texts of all ranks, in their order; None if a rank stops."""
        while True:
            # Long answers are progress, which the watchdog of a hang has to see.
            begin_phase("generation")
            while self._any(bool(self.waiting) and None in self.rows):
                self._join()
            if not self._any(any(self.rows)):
                break
            going = {row: text for row, text in enumerate(self.rows) if text is not None}
            self._add(going, self._step())
        return self._gathered()

    def _any(self, wish: bool) -> bool:
        """Return whether to make a pass: this rank has to, or another one in step with it."""
        if not self.in_step:
            return wish and not self.stops
        wishes = torch.tensor([wish, self.stops], dtype=torch.int64, device=self.device)
        with waiting():
            dist.all_reduce(wishes, op=dist.ReduceOp.MAX)
        self.stops = bool(wishes[1])
        return bool(wishes[0]) and not self.stops

    def _join(self) -> None:
        """Read the next prompt into a free row, and into others for further answers to it."""
        free = [row for row, text in enumerate(self.rows) if text is None]
        if not free:
            # Another rank reads a prompt: this one repeats its last pass.
            self._step()
            self._add({}, None)
            return
        ids = list(self.texts[self.waiting[0]].ids) if self.waiting else [0]
        # Without other prompts, so that only its own length shapes its products.
        logits = self._read(ids, free[0])
        joined: dict[int, Text] = {}
        while self.waiting and len(joined) < len(free):
            text = self.texts[self.waiting[0]]
            if text.ids != ids:
                break
            row = free[len(joined)]
            if joined:
                self.cache.copy(free[0], row, len(ids))
                if self.record is not None:
                    self.record.copy(free[0], row, len(ids))
            joined[row] = text
            self.waiting.popleft()
        self._add(joined, None if logits is None else logits.expand(len(self.rows), -1))

    def _read(self, ids: list[int], row: int) -> torch.Tensor | None:
        """Read a text into a row; return logits [1, vocabulary] after it, as `Sampler.forward`."""
        length = -(-len(ids) // self.sampler.multiple) * self.sampler.multiple
        tokens = torch.tensor([ids + [0] * (length - len(ids))], device=self.device)
        if self.record is not None:
            own, start, count = torch.tensor([[row], [0], [len(ids)]], device=self.device)
            self.record.expect(own, start, length, count)
        with self.cache.filling(row):
            return self._forward(tokens, torch.arange(length, device=self.device), len(ids))

    def _step(self) -> torch.Tensor | None:
        """Read the last token of each row; return logits [rows, vocabulary], as `_read`."""
        width = self.sampler.multiple
        tokens = torch.zeros((len(self.rows), width), dtype=torch.int64)
        places = torch.zeros(len(self.rows), dtype=torch.int64)
        for row, text in enumerate(self.rows):
            if text is not None:
                tokens[row, 0] = text.ids[-1]
                places[row] = len(text.ids) - 1
        # A free row reads its first place again, which the next prompt writes over.
        places = places.to(self.device)
        positions = places[:, None] + torch.arange(width, device=self.device)
        self.cache.begin_step()
        if self.record is not None:
            rows = torch.arange(len(self.rows), device=self.device)
            self.record.expect(rows, places, width, torch.ones_like(rows))
        with self.cache.decoding(places, self.span):
            return self._forward(tokens.to(self.device), positions, 1)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, count: int
    ) -> torch.Tensor | None:
        return self.sampler.forward(
            tokens,
            # What is behind the context is padding.
            positions.clamp(max=self.sampler.context - 1),
            lambda logits: logits[:, min(count, logits.shape[1]) - 1],
            {"inference_context": self.cache, "runtime_gather_output": True},
            [count] * len(tokens),
        )

    def _add(self, going: dict[int, Text], logits: torch.Tensor | None) -> None:
        """Draw a token of each row, on all ranks that hold this copy of the model."""
        group = mcore.parallel_state.get_model_parallel_group()
        own = logits if self.draws else None
        goes_on = self.sampler.add_drawn(going, own, self.engine.stop(), group)
        self.stops = self.stops or not goes_on
        for row, text in going.items():
            self.rows[row] = None if text.done else text
            if text.done and self.record is not None:
                text.routes = self.record.taken(row, len(text.ids) - 1)

    def _gathered(self) -> list[Continuation] | None:
        """Return the texts of all ranks; None if one stops."""
        longest = max((len(text.added) for text in self.texts.values()), default=0)
        facts = torch.tensor([longest, self.stops], dtype=torch.int64, device=self.device)
        with waiting():
            dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        longest, stops = facts.tolist()
        if stops:
            return None
        own = {}
        if self.draws and self.engine.world.coords["cp"] == 0:
            own = {
                i: Continuation(text.added, text.ended, text.log_probabilities, text.among)
                for i, text in self.texts.items()
            }
        sent = packed(own, self.count, longest, self.kept).to(self.device)
        with waiting():
            dist.all_reduce(sent)
        return unpacked(sent, self.kept)
