"""Statistics of all modules in one computation of a step: the output of each, and its relation to
what it was made of, forward and backward.

A fault that is finite shows in the relation. The gain, the size of the output over that of the
input, finds a factor. A linear prediction of the output, learned in healthy steps from sketches of
the input and of the outputs inside the module, finds a sign: the output then points the other way.
A gated MLP has no linear relation from gradient to gradient. But if its input grows by a share, its
output grows by about twice that share, so the products of gradient and token on both of its sides
are proportional. No other module inside has to be known for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtrain.mcore.state.local_params import unwrap
from mtrain.train.loop.context import TrainContext
from mtrain.train.suspects.judge import BACKWARD, FORWARD, Event, Key
from mtrain.train.trace.activations import SILENT, Mark, global_names

SKETCH = 16
"""Random directions that features are projected on."""
MOST_PARTS = 6
"""Tensors that an output is predicted from: inputs, and the last outputs inside the module."""
FADES = 0.7
"""The weight that what was learned keeps with each further step."""
RIDGE = 1e-3
"""The share of the mean squares of sketches that is added to them in the regression."""
MODEL = "model"
"""The name of a chunk as a whole, whose output on the last stage is the loss."""


@dataclass
class Seen:
    """A tensor at the border of a module."""

    bad: torch.Tensor
    """The number of elements that are not finite."""
    largest: torch.Tensor
    """The largest magnitude of the others."""
    rms: torch.Tensor
    mean: torch.Tensor
    features: torch.Tensor | None
    """Projections of its tokens, fp32 [tokens, SKETCH]; None: its rows are no tokens."""
    shape: tuple[int, ...]
    kind: str
    """Its number format."""


class Relations:
    """The linear relation of each output to what it is made of, learned in healthy steps."""

    def __init__(self) -> None:
        self.known: dict[Key, tuple[torch.Tensor, int]] = {}
        """Second moments of parts and output, and the columns of the parts."""
        self.new: dict[Key, tuple[torch.Tensor, int]] = {}
        """The same of the step that is traced."""
        self.maps: dict[Key, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self.new = {}

    def learn(self) -> None:
        """Keep what the step has shown."""
        for key, (moments, columns) in self.new.items():
            before, width = self.known.get(key, (moments, columns))
            # A call with other parts begins anew.
            if width == columns and before is not moments:
                moments = FADES * before + moments
            self.known[key] = moments, columns
            self.maps[key] = _solved(moments, columns)

    def agreement(
        self, key: Key, parts: torch.Tensor, output: torch.Tensor, whole: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the cosine of an output [tokens, SKETCH] with its prediction from its parts
        [tokens, columns], and the size of the prediction over that of the `whole` output, of which
        the parts may have some tokens only; None before something was learned.
        """
        scale = _rms(output).clamp_min(1e-30)
        # The last column is a constant, for an output that is not only a sum of its parts.
        parts = torch.cat([parts / scale, torch.ones_like(output[:, :1])], 1)
        output = output / scale
        both = torch.cat([parts, output], 1)
        moments = both.t() @ both / len(both)
        # An output of zeros has no direction to learn.
        moments = torch.where(moments.isfinite().all(), moments, 0.0)
        columns = parts.shape[1]
        if key in self.new and self.new[key][1] == columns:
            self.new[key] = self.new[key][0] + moments, columns
        else:
            self.new[key] = moments, columns
        known = self.maps.get(key)
        if known is None or known.shape[0] != columns:
            return None
        predicted = (parts @ known).flatten()
        cosine = torch.nn.functional.cosine_similarity(predicted, output.flatten(), 0)
        # The constant is a share of the output, so it says nothing of the output's size.
        size = _rms(parts[:, :-1] @ known[:-1])
        return torch.stack([cosine, size * (scale / _rms(whole).clamp_min(1e-30))])


def _rms(x: torch.Tensor) -> torch.Tensor:
    # One element of 1e38 must not overflow.
    largest = x.abs().max().clamp_min(1e-30)
    return largest * (x / largest).square().mean().sqrt().clamp_min(1e-30)


def _solved(moments: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the linear map from parts to output of second moments, by ridge regression."""
    exact = moments.double().cpu()
    inside = exact[:columns, :columns]
    # Relative to each column: those of an input may be much larger than those that matter.
    inside = inside + RIDGE * inside.diagonal().clamp_min(1e-30).diag()
    return torch.linalg.solve(inside, exact[:columns, columns:]).to(moments)


class Tracer:
    """Hooks on the modules of this rank's chunks, while `listening`."""

    def __init__(self, context: TrainContext) -> None:
        self.context = context
        self.relations = Relations()
        self.raw: list[tuple[Event, Seen, list[Seen], torch.Tensor]] = []
        self.projections: dict[Any, torch.Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch what is computed inside."""
        self.raw = []
        self.relations.begin()
        chunks = [
            _Chunk(self, unwrap(chunk), place)
            for place, chunk in enumerate(self.context.state.chunks)
        ]
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.leave()

    def events(self) -> list[Event]:
        """Return what was seen, as numbers of the host; waits for the device once."""
        if not self.raw:
            return []
        rows = []
        for _, output, inputs, relations in self.raw:
            rows += [*(_row(seen) for seen in (output, *inputs)), relations]
        numbers = torch.stack(rows).double().cpu().tolist()
        found = []
        at = 0
        for event, output, inputs, _ in self.raw:
            event.output = _facts(output, numbers[at])
            own = [_facts(seen, numbers[at + 1 + i]) for i, seen in enumerate(inputs)]
            at += 2 + len(inputs)
            cosine, event.predicted, *scaling = numbers[at - 1]
            event.agreement = cosine if abs(cosine) < 1.5 else None
            event.scaling = (scaling[0], scaling[1]) if abs(scaling[0]) < 1.5 else None
            # A module is judged by its first input, unless another one is already wrong.
            wrong = [one for one in own if one["not_finite"]]
            event.input = (wrong or own or [{}])[0]
            found.append(event)
        self.raw = []
        return found

    def bad_weights(self, name: str) -> int:
        """Return the number of weights of a module that are not finite on this rank."""
        bad = 0
        for root in map(unwrap, self.context.state.chunks):
            names = global_names(root)
            for path, module in root.named_modules():
                if path and names[path] == name.partition(" ")[0]:
                    weights = [weight.detach() for weight in module.parameters()]
                    bad += sum(int(each.isfinite().logical_not().sum()) for each in weights)
        return bad

    def see(self, x: torch.Tensor) -> Seen:
        """Return statistics of a tensor, all on its device."""
        own = x.detach()
        if not own.is_floating_point():
            one = torch.ones((), device=own.device)
            return Seen(torch.zeros_like(one), one, one, one, None, tuple(x.shape), "ids")
        values = own.float()
        finite = values.isfinite()
        values = torch.where(finite, values, 0.0)
        largest = values.abs().max()
        features = self.sketched(values)
        kind = str(own.dtype).removeprefix("torch.")
        bad = finite.logical_not().sum().float()
        return Seen(bad, largest, _rms(values), values.mean(), features, tuple(own.shape), kind)

    def sketched(self, values: torch.Tensor) -> torch.Tensor:
        """Return random projections of the features of tokens, fp32 [tokens, SKETCH]."""
        rows = values.reshape(_tokens(values), -1)
        return rows @ self.directions(rows.shape[1], values.device)

    def directions(self, size: int, device: Any) -> torch.Tensor:
        """Return random directions of `size` features, the same on every rank and in every run."""
        key = (size, device)
        if key not in self.projections:
            draw = torch.Generator().manual_seed(size)
            made = torch.randn(size, SKETCH, generator=draw) / size**0.5
            self.projections[key] = made.to(device)
        return self.projections[key]

    def keep(
        self,
        event: Event,
        output: Seen,
        inputs: Sequence[Seen],
        parts: Sequence[torch.Tensor],
        scaling: torch.Tensor | None = None,
    ) -> None:
        """Keep an output with its inputs, the `parts` that it is predicted from, and its relation
        by `scaling`.
        """
        agreement = None
        if output.features is not None:
            own, *others = self._aligned([output.features, *parts])
            given = torch.cat(others, 1) if others else own[:, :0]
            agreement = self.relations.agreement(event.key, given, own, output.features)
        # in place of a number that is not there: no cosine is 2
        two = torch.full_like(torch.stack([output.rms, output.rms]), 2.0)
        pairs = [two if pair is None else pair.to(two) for pair in (agreement, scaling)]
        self.raw.append((event, output, list(inputs), torch.cat(pairs)))

    def _aligned(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows of features that are of the same tokens as those of the first, of which
        this rank may hold a part; without features of other tokens.
        """
        tp = self.context.world.grid.tp
        own = len(features[0])
        fits = [x for x in features if len(x) in (own, own * tp) or len(x) * tp == own]
        few = min(map(len, fits))
        begin = self.context.world.coords["tp"] * few
        return [x if len(x) == few else x[begin : begin + few] for x in fits]


class _Chunk:
    """The hooks of one chunk, which know the micro-batch that runs."""

    def __init__(self, tracer: Tracer, root: Any, place: int) -> None:
        self.tracer = tracer
        world = tracer.context.world
        self.stage = place * world.grid.pp + world.coords["pp"]
        self.begun = 0
        self.micro_batch: int | None = None
        """The one of the forward; None: no forward is running."""
        self.behind = 0
        """The one of the backward."""
        self.calls: Counter[str] = Counter()
        self.made: Counter[tuple[int, str]] = Counter()
        self.open: list[_Call] = []
        """Calls of modules that run, the innermost last."""
        names = global_names(root)
        self.handles = []
        for path, module in root.named_modules():
            if path and not isinstance(module, SILENT):
                self.handles += self._watch(module, names[path])
        self.root = root
        self.own = root.__dict__.get("forward")
        # not by hooks: megatron-core's FSDP calls forward itself
        root.forward = self._around(root.forward)

    def leave(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        if self.own is None:
            del self.root.forward
        else:
            self.root.forward = self.own

    def _around(self, forward: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            number = self.begun
            self.micro_batch = number
            self.begun += 1
            self.calls.clear()
            self.open.clear()
            try:
                output = forward(*args, **kwargs)
                if not torch.is_tensor(output):
                    return output
                seen = self.tracer.see(output)
                self.made_event(Event(MODEL, FORWARD, number, "output 0"), seen, [], [])
                return self.marked(output, lambda gradient: self._begin_backward(number))
            finally:
                self.micro_batch = None

        return watched

    def _begin_backward(self, number: int) -> None:
        self.behind = number

    def _watch(self, module: Any, name: str) -> list[Any]:
        # A gradient that other ranks still add to differs from the whole one.
        complete = not getattr(module, "gives_partial_gradients", False)

        def enter(_: Any, args: Any, kwargs: Any) -> Any:
            call = _Call(self, self._key(name), module, kwargs.get("weight"))
            self.open.append(call)
            given = [call.given(x, f"input {i}", complete) for i, x in enumerate(args)]
            named = {word: call.given(x, f"input {word}", complete) for word, x in kwargs.items()}
            return tuple(given), named

        def leave(_: Any, args: Any, output: Any) -> Any:
            call = self.open.pop()
            several = isinstance(output, tuple)
            outputs = [
                call.returned(x, f"output {i}")
                for i, x in enumerate(output if several else (output,))
            ]
            return tuple(outputs) if several else outputs[0]

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def _key(self, name: str) -> str:
        """Return the name of a module with the number of its call from the second one on."""
        if self.micro_batch is None:
            return name
        self.calls[name] += 1
        again = self.calls[name]
        return name if again == 1 else f"{name} ({again})"

    def made_event(
        self,
        event: Event,
        output: Seen,
        inputs: Sequence[Seen],
        parts: Sequence[torch.Tensor],
        scaling: torch.Tensor | None = None,
    ) -> None:
        """Keep an event, in its place in the order of execution."""
        at = (event.micro_batch, event.way)
        self.made[at] += 1
        event.order = (self.stage if event.way == FORWARD else -self.stage, self.made[at])
        self.tracer.keep(event, output, inputs, parts, scaling)

    def marked(self, x: torch.Tensor, tell: Any) -> torch.Tensor:
        """Return a tensor whose gradient `tell` gets."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        marked: torch.Tensor = Mark.apply(x, tell)  # type: ignore[no-untyped-call]
        return marked


class _Call:
    """One call of a module."""

    def __init__(self, chunk: _Chunk, key: str, module: Any, weight: Any) -> None:
        self.chunk = chunk
        self.key = key
        self.module = module
        # An output layer with the weight of the embedding has none of its own.
        self.weight = getattr(module, "weight", None) if weight is None else weight
        self.above = chunk.open[-1] if chunk.open else None
        # Recomputation calls modules again in the backward; only their gradients are new.
        self.counts = chunk.micro_batch is not None
        self.number = chunk.micro_batch if chunk.micro_batch is not None else chunk.behind
        self.inputs: list[Seen] = []
        self.gradients: list[Seen] = []
        self.inside: dict[str, list[torch.Tensor]] = {FORWARD: [], BACKWARD: []}
        """Features of outputs of the modules inside."""
        self.expected: list[torch.Tensor] = []
        """Features of the output by the weights, of a linear layer or an embedding."""
        self.scales = any(True for _ in module.children())
        self.products: torch.Tensor | None = None
        """Products of outputs and their gradients, by token [t]."""

    def given(self, x: Any, side: str, complete: bool) -> Any:
        """See an input; return the tensor to use in its place."""
        if not torch.is_tensor(x) or isinstance(x, torch.nn.Parameter) or not x.dim():
            return x
        if x.dtype == torch.bool or not x.numel():
            return x
        if self.counts:
            if not self.inputs:
                self.expected = self._by_weights(x)
            self.inputs.append(self.chunk.tracer.see(x))
        kept = x.detach() if self.scales and x.is_floating_point() else None
        return self.chunk.marked(x, partial(self._backward, side, kept)) if complete else x

    def returned(self, x: Any, side: str) -> Any:
        """See an output; return the tensor to use in its place."""
        if not torch.is_tensor(x) or not x.is_floating_point() or isinstance(x, torch.nn.Parameter):
            return x
        if not x.dim() or not x.numel():
            return x
        if self.counts:
            self._made(Event(self.key, FORWARD, self.number, side), x, self.inputs, self.expected)
        kept = x.detach() if self.scales or hasattr(self.module, "gating") else None
        return self.chunk.marked(x, partial(self._arrived, kept))

    def _arrived(self, output: torch.Tensor | None, gradient: torch.Tensor) -> None:
        self.gradients.append(self.chunk.tracer.see(gradient))
        self.expected = self._by_weights(gradient, backward=True)
        if output is None:
            return
        if self.scales:
            self.products = _products(output, gradient)
        elif self.expected:
            # The gradient of a router's logits, if the probabilities that are not 0 are a softmax.
            within = output * (gradient - (output * gradient).sum(-1, keepdim=True))
            self.expected += self._by_weights(within, backward=True)

    def _backward(self, side: str, given: torch.Tensor | None, gradient: torch.Tensor) -> None:
        event = Event(self.key, BACKWARD, self.number, side)
        scaling = None
        if given is not None and self.products is not None:
            scaling = _related(_products(given, gradient), self.products)
        self._made(event, gradient, self.gradients, self.expected, scaling)

    def _made(
        self,
        event: Event,
        x: torch.Tensor,
        inputs: list[Seen],
        expected: list[torch.Tensor],
        scaling: torch.Tensor | None = None,
    ) -> None:
        output = self.chunk.tracer.see(x)
        given = [seen.features for seen in inputs if seen.features is not None]
        parts = [*given, *self.inside[event.way][-MOST_PARTS:]][-MOST_PARTS:]
        self.chunk.made_event(event, output, inputs, expected or parts, scaling)
        if self.above is not None and output.features is not None:
            self.above.inside[event.way].append(output.features)

    def _by_weights(self, x: torch.Tensor, *, backward: bool = False) -> list[torch.Tensor]:
        """Return the features of the output of a linear layer or an embedding, by its weight [out,
        in]; none of any other module.
        """
        weight = self.weight
        if not torch.is_tensor(weight) or weight.dim() != 2:
            return []
        weight = weight.detach().float()
        if not x.is_floating_point():
            rows = x.detach() - getattr(self.module, "vocab_start_index", 0)
            here = (rows >= 0) & (rows < len(weight))
            found = self.chunk.tracer.sketched(weight)[rows.clamp(0, len(weight) - 1)]
            found = found * here.unsqueeze(-1)
            # Under sequence parallelism the output has the tokens of a sequence first.
            return [found.flatten(0, 1), found.transpose(0, 1).flatten(0, 1)]
        own = x.detach().float()
        if own.shape[-1] != weight.shape[0 if backward else 1]:
            return []
        across = weight if backward else weight.t()
        directions = self.chunk.tracer.directions(across.shape[1], weight.device)
        return [torch.nan_to_num(own.reshape(_tokens(own), -1)) @ (across @ directions)]


def _products(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the product of each token with its gradient, fp32 [t]."""
    both = x.float() * gradient.detach().float()
    return torch.nan_to_num(both).reshape(_tokens(x), -1).sum(-1)


def _related(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Return the cosine of products of the same tokens, and the size of `other` over that of `own`;
    None: they are of different tokens.
    """
    if own.shape != other.shape:
        return None
    cosine = torch.nn.functional.cosine_similarity(own, other, 0)
    return torch.stack([cosine, _rms(other) / _rms(own)])


def _tokens(x: torch.Tensor) -> int:
    """Return the number of tokens that the leading axes of a tensor count."""
    if x.dim() < 3:
        return x.shape[0] if x.dim() else 1
    return x.shape[0] * x.shape[1]


def _row(seen: Seen) -> torch.Tensor:
    return torch.stack([each.float() for each in (seen.bad, seen.largest, seen.rms, seen.mean)])


def _facts(seen: Seen, numbers: Sequence[float]) -> dict[str, Any]:
    names = ("not_finite", "largest", "rms", "mean")
    facts: dict[str, Any] = dict(zip(names, numbers, strict=True))
    return {**facts, "not_finite": int(numbers[0]), "shape": list(seen.shape), "dtype": seen.kind}
