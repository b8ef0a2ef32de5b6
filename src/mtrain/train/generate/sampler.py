"""Text from a model in any layout: the same pipeline schedule as training, forward only, one token
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mtrain.config.rules.precision import MULTIPLES
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.layout.grid import RankGrid
from mtrain.mcore import api as mcore
from mtrain.mcore.layers.padding import padding_is
from mtrain.mcore.layers.routes import Record
from mtrain.train.generate.decoder import BLOCK, Decoder
from mtrain.train.generate.request import ENDINGS, LENGTH, Continuation, Sampling
from mtrain.train.generate.sampling import draw, draw_among, noise_of
from mtrain.world.heartbeat import begin_phase
from mtrain.world.heartbeat import waiting as waiting_for_others
from mtrain.world.init import World

MOST_DECODERS = 4
"""Decoders that are kept, each with a cache."""
CAPACITY = 256
"""Tokens by which caches of decoders differ in capacity, so that prompts of other lengths share
captured steps.
"""


@dataclass(frozen=True)
class Sampler:
    """This rank's chunks of a model, to sample tokens from together with all other ranks."""

    run: RunConfig
    world: World
    chunks: list[Any]
    cache: bool = True
    """Cache keys and values of tokens that were read, unless `obstacle_to` has a reason."""
    captures: bool = False
    """Capture the steps of single tokens, where the device can."""
    blocks: bool = True
    """Draw several tokens between two reads of the host, unless `block_obstacle` has a reason."""
    record: Record | None = None
    """The experts of the tokens that are read; see `continued`. None: they are not recorded."""
    decoders: dict[tuple[int, int, Sampling], Decoder] = field(default_factory=dict, repr=False)
    """Decoders by rows, capacity of the cache and sampling: a capture serves many prompts."""

    @property
    def multiple(self) -> int:
        """Return the divisor of every sequence's length: sequence parallelism splits it,
        low-precision GEMMs take it in blocks.
        """
        recipe = self.run.precision.quantized
        parts = self.grid.tp if self.run.parallel.sequence_parallel else 1
        return parts * (MULTIPLES.get(recipe, 16) if recipe is not None else 1)

    @property
    def context(self) -> int:
        """Return the tokens that the model looks back at: `data.seq_length`, or fewer if it has
        fewer learned positions.

        Raises:
            ConfigError: there are fewer positions than the shortest sequence that this layout can
                compute.
        """
        model = self.run.model
        if model.position_embedding_type != "learned_absolute":
            return self.run.data.length
        positions = model.max_position_embeddings
        whole = positions // self.multiple * self.multiple
        if not whole:
            rule = (
                f"sequences of this layout are multiples of {self.multiple} tokens, and {positions}"
                " have a position"
            )
            raise ConfigError(
                [
                    Problem(
                        "MT508", "model.max_position_embeddings", positions, rule, "parallel=single"
                    )
                ]
            )
        return min(self.run.data.length, whole)

    def obstacle_to(self, tokens: int) -> str:
        """Return why a text of so many tokens is computed without a cache of keys and values, so
        that every token reads all tokens before it again; empty: the cache is used.
        """
        model = self.run.model
        if (
            model.rope_scaling is not None
            and min(self.context, tokens) + self.multiple > model.rotary_constant_to
        ):
            kind = model.rope_scaling.rope_type
            return (
                f"{kind} frequencies change beyond {model.rotary_constant_to} tokens, and kept keys"
                " would not"
            )
        mixers = ""
        if model.linear_attention is not None:
            mixers = "linear attention"
        elif model.hybrid:
            mixers = "Mamba-2 layers"
        if mixers and self.multiple > 1:
            return (
                f"states of {mixers} take no padding back, and texts are padded to {self.multiple}"
                " tokens"
            )
        return mcore.cache_obstacle(self.chunks[0].config, self.run.kernels.attention)

    def block_obstacle(self) -> str:
        """Return why the host takes part in each token after a prompt; empty: it does not."""
        if self.world.size > 1:
            return "ranks agree on each token"
        if self.multiple > 1:
            return f"texts are padded to {self.multiple} tokens"
        if self.run.model.linear_attention is not None or self.run.model.hybrid:
            return "states of linear attention or Mamba-2 layers are new tensors for each token"
        return mcore.decoding_obstacle(self.chunks[0])

    def graph_obstacle(self) -> str:
        """Return why single tokens are not captured, or were not; empty: they are, or this device
        captures nothing.
        """
        if self.world.device.captured is None:
            return ""
        failed = (decoder.why_not for decoder in self.decoders.values() if decoder.why_not)
        return self.block_obstacle() or next(failed, "")

    def steady_tokens_per_s(self) -> float | None:
        """Return the speed of single tokens without compilation and captures; None: unknown."""
        tokens = sum(decoder.steady_tokens for decoder in self.decoders.values())
        seconds = sum(decoder.steady_s for decoder in self.decoders.values())
        return tokens / seconds if tokens else None

    @property
    def independent(self) -> bool:
        """Return whether a text is independent of other rows, which share capacity of experts."""
        moe = self.run.model.moe
        return moe is None or moe.expert_capacity_factor is None

    @property
    def grid(self) -> RankGrid:
        """Return the degrees of the layout."""
        return self.world.grid

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        *,
        temperature: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[int] | None:
        """Return `prompt` followed by `tokens` sampled token ids; otherwise like `continued`."""
        texts = self.continued([prompt], Sampling(tokens, temperature), stop=stop)
        return None if texts is None else prompt + texts[0].ids

    @torch.no_grad()
    def continued(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        ending: Callable[[list[int]], str] = lambda ids: LENGTH,
        stop: Callable[[], bool] = lambda: False,
        seeds: Sequence[int] | None = None,
    ) -> list[Continuation] | None:
        """Return the text sampled after each prompt, the same on every rank; None as soon as `stop`
        is true on one.

        The prompts are computed together, in step: all are read up to the end of the shortest, then
        one token at a time, where longer prompts supply their own tokens. So the text of a prompt
        does not depend on the others. `ending` returns after each new token whether its
        continuation has ended, by a word of `ENDINGS`. Sampling has a generator of its own for each
        prompt, so the training state is left as it was; `seeds` has the seed of each, None:
        that of `sampling` for all.

        Where more than `context` tokens are known, the oldest ones are dropped, half a context at a
        time.

        Raises:
            ConfigError: see `context`.
        """
        seed = self.run.trainer.seed if sampling.seed is None else sampling.seed
        seeds = [seed] * len(prompts) if seeds is None else seeds
        texts = [
            Text(list(prompt), sampling, torch.Generator().manual_seed(own), ending)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        longest = max(len(text.ids) for text in texts) + sampling.tokens
        begin = -1
        cache = None
        decoder = self._decoder(len(texts), longest, sampling)
        with evaluated(self.chunks):
            while going := [i for i, text in enumerate(texts) if not text.done]:
                begin_phase("generation")
                known = min(len(texts[i].ids) for i in going)
                if begin != (start := self._start(known)):
                    begin = start
                    cache = self._cache(len(texts), longest, decoder)
                if decoder is not None and (count := self._block(texts, begin, known, decoder)):
                    if stop():
                        return None
                    _add_block(texts, decoder, count)
                    continue
                logits = self._next_logits([text.part(begin, known) for text in texts], cache)
                waiting = {i: texts[i] for i in going if len(texts[i].ids) == known}
                if not self._add_next(waiting, logits, stop()):
                    return None
        return [
            Continuation(text.added, text.ended, text.log_probabilities, text.among)
            for text in texts
        ]

    def _start(self, known: int) -> int:
        """Return the first token of the context of the next one, if so many are known."""
        # Half a context at a time: dropping one token would rebuild the cache for each new one.
        half = max(1, self.context // 2)
        return max(0, -(-(known - self.context) // half)) * half

    def _cache(self, rows: int, longest: int, decoder: Decoder | None) -> Any:
        if decoder is not None:
            # Captured steps know the addresses of its memory.
            decoder.cache.forget()
            return decoder.cache
        if not self.cache or self.obstacle_to(longest):
            return None
        return mcore.Cache(rows, self._capacity(longest), last_only=self.multiple == 1)

    def _capacity(self, longest: int) -> int:
        return min(self.context, longest) + self.multiple

    def _decoder(self, rows: int, longest: int, sampling: Sampling) -> Decoder | None:
        """Return the decoder of texts of at most `longest` tokens; None: the host takes part."""
        if not (self.blocks and self.cache) or self.obstacle_to(longest) or self.block_obstacle():
            return None
        rounded = -(-longest // CAPACITY) * CAPACITY
        # Rotary frequencies may change with the capacity.
        tokens = longest if self.obstacle_to(rounded) else rounded
        key = (rows, self._capacity(tokens), sampling)
        if key not in self.decoders:
            if len(self.decoders) == MOST_DECODERS:
                del self.decoders[next(iter(self.decoders))]
            self.decoders[key] = Decoder(
                self.chunks[0],
                mcore.Cache(rows, key[1], last_only=True),
                sampling,
                vocabulary=self.run.model.vocab_size,
                positions=self.context,
                device=self.world.device,
                torch_device=self.world.torch_device,
                captures=self.captures,
            )
        return self.decoders[key]

    def _block(self, texts: list[Text], begin: int, known: int, decoder: Decoder) -> int:
        """Return how many tokens to draw in a block; 0: the prompts are not read yet."""
        going = [text for text in texts if not text.done]
        read = decoder.cache.read
        if not read or read != known - begin - 1 or any(len(t.ids) != known for t in going):
            return 0
        most = min(BLOCK, max(text.remaining for text in going))
        return next((n for n in range(1, most) if self._start(known + n) != begin), most)

    def _add_next(self, waiting: dict[int, Text], logits: torch.Tensor | None, stops: bool) -> bool:
        """Add the next token to each text that waits for one, by its row; return False if a rank
        stops.
        """
        # Every rank of the last stage could draw; the first of them does.
        draws = self.world.rank == self.grid.rank_of(pp=self.grid.pp - 1)
        return self.add_drawn(waiting, logits if draws else None, stops)

    def add_drawn(
        self,
        waiting: dict[int, Text],
        logits: torch.Tensor | None,
        stops: bool,
        group: Any = None,
    ) -> bool:
        """Add the next token to each text, by its row of `logits`, which one rank of a group has;
        None: of all ranks. Return False if a rank stops.
        """
        # Choices, endings and log-probabilities of the texts, and in the last column the requests
        # to stop: all ranks sum the draws of one of them. All are exact in this type.
        device = self.world.torch_device
        kept = max((text.reported for text in waiting.values()), default=0)
        sent = torch.zeros((3 + kept, len(waiting) + 1), dtype=torch.float64, device=device)
        sent[0, -1] = stops
        if logits is not None and waiting:
            known = logits[:, : self.run.model.vocab_size].float().cpu()
            found = [text.draw(known[row]) for row, text in waiting.items()]
            sent[:, :-1] = torch.tensor(found, dtype=torch.float64).T
        with waiting_for_others():
            if dist.get_world_size(group) > 1:
                dist.all_reduce(sent, group=group)
            choices, endings, values, *among = sent.tolist()
        for place, (text, choice, ended, value) in enumerate(
            zip(waiting.values(), choices, endings, values, strict=False)
        ):
            text.add(int(choice), ENDINGS[int(ended)])
            text.log_probabilities.append(value)
            if kept:
                # Sent as ids + 1: 0 is a place without a token.
                text.among.append([int(row[place]) - 1 for row in among if row[place]])
        return not choices[-1]

    def _next_logits(self, rows: Sequence[list[int]], cache: Any = None) -> torch.Tensor | None:
        """Return logits [rows, padded vocabulary] after the last id of each row on ranks of the
        last stage, None elsewhere.

        Rows have one length. Tokens in `cache` are not read again. Sequences are padded on the
        right to a `multiple`; causal attention hides the padding.
        """
        device = self.world.torch_device
        begin = 0 if cache is None else cache.read
        count = len(rows[0]) - begin
        length = -(-count // self.multiple) * self.multiple
        padded = torch.tensor([row[begin:] + [0] * (length - count) for row in rows], device=device)
        positions = torch.arange(begin, begin + length, device=device).clamp(max=self.context - 1)
        if self.record is not None:
            numbers = torch.arange(len(rows), device=device)
            starts, counts = (torch.full_like(numbers, value) for value in (begin, count))
            self.record.expect(numbers, starts, length, counts)
        logits = self.forward(
            padded,
            positions,
            lambda logits: logits[:, min(count, logits.shape[1]) - 1],
            {} if cache is None else {"inference_context": cache, "runtime_gather_output": True},
            [count] * len(rows),
        )
        if cache is not None:
            cache.advance(count)
            return logits
        return None if logits is None else mcore.gather_from_tensor_model_parallel_region(logits)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        take: Callable[[torch.Tensor], torch.Tensor],
        options: dict[str, Any],
        lengths: Sequence[int],
    ) -> torch.Tensor | None:
        """Run the model forward.

        Args:
            tokens: ids [rows, length]; each row has padding after its first `lengths` tokens, which
                takes no capacity of experts.
            positions: [length].
            take: maps the logits [rows, length, vocabulary] to the result.
            options: further arguments of the model.
            lengths: tokens of each row.

        Returns:
            The result of `take` on ranks of the last stage, None elsewhere.
        """
        ends = torch.tensor(lengths, device=tokens.device)[:, None]
        if self.independent:
            padding = None
        else:
            padding = torch.arange(tokens.shape[1], device=tokens.device) >= ends

        def step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            # Routers with capacity would give padding the places of tokens.
            with padding_is(padding):
                output = model(tokens, positions.expand_as(tokens), None, **options)
            return output, lambda logits, non_loss_data=True: take(logits)

        # The interleaved schedule needs a micro-batch per stage; the others are repeated and
        # ignored.
        interleaved = len(self.chunks) > 1
        outputs = mcore.get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(()) for _ in self.chunks] if interleaved else iter(()),
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=self.grid.pp if interleaved else 1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
        return outputs[0] if outputs else None


def _add_block(texts: list[Text], decoder: Decoder, count: int) -> None:
    """Draw `count` tokens of each text, and add those up to its end."""
    noise = None
    if decoder.noise is not None:
        noise = torch.ones((count, len(texts), decoder.vocabulary))
        for row, text in enumerate(texts):
            if not text.done:
                for each in noise:
                    each[row] = text.noise(decoder.vocabulary)
    last = [text.ids[-1] for text in texts]
    for ids in decoder.draw(last, count, noise):
        for text, choice in zip(texts, ids, strict=True):
            if not text.done:
                text.add(choice, text.ending(choice))


class Text:
    """A prompt and the tokens added to it so far."""

    routes: torch.Tensor | None = None
    """int16 [tokens, layers, k]: the experts of all tokens but the last, in this rank's layers."""
    log_probabilities: list[float]
    """Nats of each token that was drawn by `draw`."""

    def __init__(
        self,
        ids: list[int],
        sampling: Sampling,
        generator: torch.Generator,
        ending: Callable[[list[int]], str],
    ) -> None:
        self.ids = ids
        self.log_probabilities = []
        self.among: list[list[int]] = []
        self.ended = LENGTH
        self.done = sampling.tokens <= 0
        self._begin = len(ids)
        self._last = len(ids) + sampling.tokens
        self._ending = ending
        self._sampling = sampling
        self._generator = generator

    def part(self, start: int, end: int) -> list[int]:
        """Return the tokens from `start` to `end`; a text that ended before is filled with zeros,
        as its logits are not read.
        """
        return (self.ids[start:end] + [0] * (end - len(self.ids)))[: end - start]

    @property
    def added(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.ids[self._begin :]

    @property
    def remaining(self) -> int:
        """Return how many tokens may follow."""
        return self._last - len(self.ids)

    @property
    def reported(self) -> int:
        """Return the most tokens that are reported for each draw."""
        return self._sampling.top_k if self._sampling.reports else 0

    def draw(self, logits: torch.Tensor) -> list[float]:
        """Return the next token, the number of the ending that it causes, and its
        log-probability; then, if they are reported, the tokens that it was drawn among, each plus
        1, and zeros.
        """
        ids: list[int] = []
        if self.reported:
            choice, value, ids = draw_among(logits, self._sampling, self._generator)
        else:
            choice, value = draw(logits, self._sampling, self._generator)
        among = [one + 1 for one in ids] + [0] * (self.reported - len(ids))
        return [choice, ENDINGS.index(self.ending(choice)), value, *among]

    def noise(self, vocabulary: int) -> torch.Tensor:
        """Return the random numbers of the next token."""
        return noise_of(vocabulary, self._generator)

    def ending(self, choice: int) -> str:
        """Return whether the text ends with its next token, by a word of `ENDINGS`."""
        return self._ending([*self.added, choice])

    def add(self, choice: int, ended: str) -> None:
        """Add the token that was drawn."""
        self.ids.append(choice)
        self.ended = ended
        self.done = ended != LENGTH or len(self.ids) == self._last


@contextmanager
def evaluated(chunks: list[Any]) -> Iterator[None]:
    """Turn dropout off inside, and on again afterwards."""
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()
