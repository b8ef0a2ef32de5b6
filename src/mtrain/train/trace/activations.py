"""Inputs and outputs of every module in a step, and their gradients, recorded for comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain import strict_json
from mtrain.config.resolve.batches import size_after
from mtrain.mcore.layers.context import context_positions
from mtrain.mcore.state.local_params import unwrap
from mtrain.mcore.state.shard_specs import shard_specs_of
from mtrain.train.loop.context import TrainContext

EVENTS = "events_{:05d}.json"
ARRAYS = "arrays_{:05d}.f32"
_EXPERTS = re.compile(r"\.experts(\.|$)")
SILENT = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Identity)
"""Modules that compute nothing; a list of layers has another border on every stage."""
_ROWS = "mtrain_feature_rows"
"""Noted on a tensor: which features of the whole tensor its last axis holds."""


class Recorder:
    """Hooks on the modules of this rank's chunks that keep what passes them, by place among the
    step's tokens.

    A module's tensors are kept where their leading axes count tokens: [s, b, ...], [b, s, ...] or
    [s * b, ...], with the tokens of this rank, or its part of them under sequence parallelism. Of
    the layers of experts the sums over their rows are kept, of scalars (a loss) the values. A
    forward that recomputation makes again is not.
    """

    def __init__(self, context: TrainContext, *, by_document: bool) -> None:
        self.by_document = by_document
        self.events: list[dict[str, Any]] = []
        self.arrays: list[np.ndarray] = []
        self.follow(context)

    def follow(self, context: TrainContext) -> None:
        """Watch the chunks of `context`, from its next step on."""
        self.context = context
        for chunk in context.state.chunks:
            _Chunk(self, unwrap(chunk))

    def keep(self, event: dict[str, Any], values: torch.Tensor) -> None:
        """Keep the values of an event."""
        # fp32 whatever the format: the comparison is of the numbers, not of their storage.
        own = values.detach().float().cpu().contiguous().numpy()
        # A copy: the memory may be reused by the next operation.
        self.arrays.append(own.ravel().copy())
        self.events.append({**event, "shape": list(own.shape), "step": self.context.state.step + 1})

    def save(self, folder: Path) -> None:
        """Write what this rank kept, as JSON and plain fp32 numbers."""
        rank = self.context.world.rank
        world = self.context.world
        facts = {"coords": world.coords, "sizes": world.grid.sizes, "events": self.events}
        (folder / EVENTS.format(rank)).write_text(strict_json.dumps(facts))
        np.concatenate([np.zeros(0, np.float32), *self.arrays]).tofile(folder / ARRAYS.format(rank))


class _Chunk:
    """The hooks of one chunk, which know the running micro-batch and its tokens."""

    def __init__(self, recorder: Recorder, root: Any) -> None:
        self.recorder = recorder
        self.step = -1
        self.number = 0
        self.start = 0
        self.places: torch.Tensor | None = None
        """Place of each token [b, s] of the micro-batch among those of the step, -1 of padding and
        ends of documents that are run one by one; None: no forward is running.
        """
        self.calls: dict[str, int] = {}
        self.rows = _feature_rows(root)
        self.packed = recorder.context.run.data.packed
        self.embeds = getattr(root, "pre_process", True)
        names = global_names(root)
        # not by hooks: megatron-core's FSDP calls forward itself
        root.forward = self._around(root.forward)
        for path, module in root.named_modules():
            if (
                path
                and not isinstance(module, SILENT)
                and not isinstance(getattr(module, "layers", None), SILENT)
            ):
                self._watch(module, names[path], path)

    def _around(self, forward: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._begin(args, kwargs)
            try:
                return forward(*args, **kwargs)
            finally:
                self.places = None

        return watched

    def _begin(self, args: Any, kwargs: Any) -> None:
        context = self.recorder.context
        # A new step: count micro-batches from its first one.
        if self.step != context.state.step:
            self.step = context.state.step
            self.number = 0
            self.start = 0
        self.calls = {}
        length = context.run.data.length
        if self.recorder.by_document:
            tokens = args[0].shape[1]
            counted = kwargs["loss_mask"].cpu() > 0
            self.places = torch.where(counted, torch.arange(self.start, self.start + tokens), -1)
            self.start += tokens
        else:
            consumed = context.state.consumed_samples
            batches = context.train_data
            rows = torch.from_numpy(
                batches.numbers(consumed, size_after(context.batch_sizes, consumed))[self.number]
                - consumed
            )
            places = rows[:, None] * length + torch.arange(length)
            self.places = self._part_of_context(places, kwargs.get("packed_seq_params"))
        self.number += 1

    def _part_of_context(self, places: torch.Tensor, packed: Any) -> torch.Tensor:
        world = self.recorder.context.world
        if packed is not None:
            places = places.reshape(1, -1)
        if world.grid.cp == 1:
            return places
        bounds = None if packed is None else packed.cu_seqlens_q_padded.cpu()
        return places[
            :, context_positions(places.shape[1], world.grid.cp, bounds)[world.coords["cp"]]
        ]

    def _watch(self, module: Any, name: str, path: str) -> None:
        if _EXPERTS.search(path):
            # Experts receive tokens in an order of their own: only sums over rows are comparable.
            if hasattr(module, "num_gemms"):
                module.register_forward_hook(self._experts(name))
            return

        def enter(_: Any, args: Any, kwargs: Any) -> Any:
            if self.places is None:
                return None
            self.calls[name] = (
                self.calls.get(name, -1 if self.embeds or not name.startswith("embedding") else 0)
                + 1
            )
            key = self._key(name)
            kept = [self._pass(x, key, f"input {i}", name) for i, x in enumerate(args)]
            return tuple(kept), {
                word: self._pass(x, key, f"input {word}", name) for word, x in kwargs.items()
            }

        def leave(_: Any, args: Any, output: Any) -> Any:
            if self.places is None:
                return None
            key = self._key(name)
            rows = self.rows.get(path)
            several = isinstance(output, tuple)
            outputs = output if several else (output,)
            # A gradient that other ranks still add to differs from the whole one.
            complete = not getattr(module, "gives_partial_gradients", False)
            kept = [
                self._pass(x, key, f"output {i}", name, rows if i == 0 else None, backward=complete)
                for i, x in enumerate(outputs)
            ]
            return tuple(kept) if several else kept[0]

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def _key(self, name: str) -> str:
        again = self.calls[name]
        return f"{name} ({again + 1})" if again else name

    def _experts(self, name: str) -> Any:
        coords = self.recorder.context.world.coords

        def leave(module: Any, args: Any, output: Any) -> None:
            if self.places is None:
                return
            x = args[0]
            rows = [int(count) for count in args[1]]
            first = coords["ep"] * module.num_gemms
            for side, values in (
                ("input 0", x if coords["etp"] == 0 else None),
                ("output 0", output[0]),
            ):
                if values is not None:
                    sums = torch.stack(
                        [part.detach().double().sum(0) for part in values.split(rows)]
                    )
                    self.recorder.keep(
                        {"key": name, "side": side, "way": "forward", "experts": first}, sums
                    )

        return leave

    def _pass(
        self,
        x: Any,
        key: str,
        side: str,
        name: str,
        rows: list[int] | None = None,
        *,
        backward: bool = True,
    ) -> Any:
        """Keep a tensor, and later its gradient; return the tensor to use in its place."""
        if not torch.is_tensor(x) or not x.is_floating_point() or isinstance(x, torch.nn.Parameter):
            return x
        if (
            self.packed and "rotary" in f"{name} {side}"
        ):  # frequencies of positions, whatever tokens have them
            return x
        if rows is not None and x.dim() and x.shape[-1] == len(rows):
            rows = rows
        else:
            rows = getattr(x, _ROWS, None)
        places = self._places_of(x)
        if places is None:
            return x
        event: dict[str, Any] = {"key": key, "side": side, "places": places, "rows": rows}
        self.recorder.keep({**event, "way": "forward"}, _by_token(x, self.places))
        if not (x.requires_grad and torch.is_grad_enabled()) or not backward or not x.dim():
            return x
        owner = self.places
        # A copy with a hook of its own: the tensor itself may have other uses, whose gradients add
        # up.
        marked = Mark.apply(
            x, lambda g: self.recorder.keep({**event, "way": "backward"}, _by_token(g, owner))
        )
        if rows is not None:
            setattr(marked, _ROWS, rows)
        return marked

    def _places_of(self, x: torch.Tensor) -> list[int] | None:
        """Return the place of each row of `_by_token`; [] of a scalar; None with other axes."""
        if not x.dim():
            return []
        assert self.places is not None
        order = _token_axes(x, self.places)
        if order is None:
            return None
        own = self.places
        world = self.recorder.context.world
        tokens = order[1]
        whole = own.shape[1]
        if tokens != whole:
            if tokens * world.grid.tp != whole:
                return None
            own = own[:, world.coords["tp"] * tokens :][:, :tokens]
        token_places: list[int] = own.t().flatten().tolist()
        return token_places


def _token_axes(x: torch.Tensor, places: torch.Tensor) -> tuple[str, int] | None:
    """Return how the leading axes of a tensor count tokens, and its tokens of a sequence."""
    batch, length = places.shape
    shape = x.shape

    def counts(size: int) -> bool:
        return size == length or (1 < size < length and length % size == 0)

    if x.dim() >= 2 and shape[1] == batch and counts(shape[0]):
        return "sb", shape[0]
    if x.dim() >= 2 and shape[0] == batch and counts(shape[1]):
        return "bs", shape[1]
    if shape[0] % batch == 0 and counts(shape[0] // batch):
        return "flat", shape[0] // batch
    return None


def _by_token(x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor with one leading axis that counts tokens, sequence position first."""
    x = x.detach()
    if not x.dim():
        return x
    assert places is not None
    order = _token_axes(x, places)
    assert order is not None
    if order[0] == "flat":
        return x
    return (x if order[0] == "sb" else x.transpose(0, 1)).flatten(0, 1)


class Mark(torch.autograd.Function):
    """A copy of a tensor that reports its gradient to `tell`: only that of uses of the copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Any) -> torch.Tensor:
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell(grad)
        return grad, None


def global_names(root: Any) -> dict[str, str]:
    """Return the name of each module with layers numbered over all stages."""
    names: dict[str, str] = {}
    for path, _ in root.named_modules():
        above, _, last = path.rpartition(".")
        name = f"{names[above]}.{last}" if above else path
        if last.isdigit():
            number = getattr(root.get_submodule(path), "layer_number", None)
            name = f"{names[above]}.{int(last) if number is None else number - 1}"
        names[path] = name
    return names


def _feature_rows(root: Any) -> dict[str, list[int]]:
    """Return the features of the whole output that a layer's output has, for weights that are
    sharded by rows: the two halves of a gated MLP are not contiguous.
    """
    rows_of = {}
    for name, specs in shard_specs_of(root).items():
        path, _, last = name.rpartition(".")
        if last != "weight" or any(len(spec.shape) - spec.lead != 2 for spec in specs):
            continue
        rows: list[int] = []
        for spec in specs:
            first = spec.offset[spec.lead]
            rows += range(first, first + spec.shape[spec.lead])
        if len(specs) > 1 or len(rows) < specs[0].global_shape[specs[0].lead]:
            rows_of[path] = rows
    return rows_of


def read(folder: Path) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
    """Yield what each rank recorded: its facts, and the values of each event."""
    for path in sorted(folder.glob("events_*.json")):
        facts = json.loads(path.read_text())
        shapes = [event["shape"] for event in facts["events"]]
        numbers = np.fromfile(
            path.with_name(path.name.replace("events", "arrays")).with_suffix(".f32"), np.float32
        )
        cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])
        parts = np.split(numbers, cuts[:-1]) if shapes else []
        yield facts, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
