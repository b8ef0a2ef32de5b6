"""Linear layer and cross entropy in one: contract, gradients, registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_kernels.cross_entropy.reference import Terms, valid_terms
from mtrain_kernels.cross_entropy.vocabulary import name_of, size_of
from mtrain_kernels.linear import WeightGradient
from mtrain_kernels.linear_cross_entropy import tiles
from mtrain_kernels.linear_cross_entropy.chunks import chunk_rows, run
from mtrain_kernels.linear_cross_entropy.reference import MOST_PARTS
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import WITH_CPU, Case, Cost, Model, Op, pick
from mtrain_kernels.runtime import ceil_div


class Buffer(NamedTuple):
    """Memory for the gradient of a weight, and the promise that the gradient of the sum is 1."""

    into: Tensor
    """[v_local, h], in fp32 for a weight in half precision."""
    added: Callable[[Tensor], Tensor]
    """A function of the weight, whose gradient is in the buffer: returns autograd's placeholder."""


class Losses(NamedTuple):
    """The result of `linear_cross_entropy`; only the sum has a gradient.

    `total` is the weighted sum of `losses` [t], and `z_losses` [t] are the part of these that is
    z-loss. `hits` [t] are 1 where the label counts and has the largest logit, the first one of
    several; None unless `ranked`. In fp32.
    """

    total: Tensor
    losses: Tensor
    z_losses: Tensor
    hits: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    *,
    class_weights: Tensor | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    ignore_index: int = -100,
    ranked: bool = False,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk: int | None = None,
    logits: int | None = None,
    gradient: WeightGradient | Buffer | None = None,
    impl: str = "auto",
) -> Losses:
    """Return the sum of `token_weights_i loss_i` and the losses of the logits `hidden weight^T`,
    which are never held whole.

    The weights of the tokens (a mask, or a mask divided by its count) are known before the
    backward, so that the forward makes the gradients with three matrix products, and the backward
    only multiplies them by the gradient of the sum: once, as another call raises `RuntimeError`.
    Where the factor of each token is known only in the backward, use `token_cross_entropy`.

    `hidden` [t, h], `weight` [v_local, h] in the same dtype, `labels` [t] int64, `token_weights`
    [t] fp32; all of the result is the same on every rank of `group`, over which the vocabulary is
    split in equal parts. The gradient of `hidden` is summed over the ranks. With
    `sequence_parallel` `hidden` is this rank's [t / ranks, h], gathered here, and its gradient this
    rank's part. `chunk` is how many tokens are done at a time, by default as many as make `logits`
    logits (2^27, or 2^22 on a CPU). The gradient of a weight in half precision is added up over
    more than three chunks in fp32, at 4 bytes an element until it is rounded: the error is below
    two roundings of the sum, however many chunks there are. `gradient(weight, dweight, factor)`
    makes what autograd gets as the weight's gradient of one in fp32 and the scalar that it is to be
    multiplied by: it may add both to where those are kept. To a `Buffer` the forward adds the
    gradient, chunk by chunk; a sum whose gradient is not 1 then raises `RuntimeError`, on a GPU as
    an assertion of the device. `class_weights` [vocab_size] weigh classes, as in torch's cross
    entropy; the sum is not divided by them. `ranked` asks for `hits`. The loss and the remaining
    arguments, also the errors raised, are those of `cross_entropy`; rows of the weight from
    `vocab_size` on are padding, take no part, and have a gradient of 0.
    """
    _require(hidden, weight, labels, size_of(group) if sequence_parallel else 1)
    terms = _terms(
        vocab_size,
        weight.shape[0] * size_of(group),
        label_smoothing,
        z_loss,
        soft_cap,
        ignore_index,
    )
    if token_weights.shape != labels.shape or token_weights.device != hidden.device:
        raise ValueError(
            f"token_weights {tuple(token_weights.shape)} must be one for each label, on"
            f" {hidden.device}"
        )
    class_weights = _weights_of(class_weights, terms, hidden)
    _require_parts(chunk, logits)
    backend = pick("linear_cross_entropy", impl, hidden.device, float_obstacle(hidden, weight))
    accumulated = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    grad = torch.is_grad_enabled()
    given = (
        labels, token_weights.to(accumulated), class_weights, name_of(group), sequence_parallel,
        *terms, chunk or 0, logits or 0, ranked,
        grad and hidden.requires_grad, grad and weight.requires_grad,
        not torch.compiler.is_compiling(), gradient is not None, backend,
    )  # fmt: skip
    learns = grad and weight.requires_grad
    if learns and isinstance(gradient, Buffer):
        _require_buffer(gradient.into, weight, accumulated)
        total, *rest = _Added.apply(hidden, weight, *gradient, *given[:-4], backend)
    elif learns and gradient is not None:
        total, *rest = _Given.apply(hidden, weight, gradient, *given)
    else:
        total, *rest = _linear_cross_entropy(hidden, weight, *given)[:4]
    losses, z_losses, hits = rest
    return Losses(total, losses, z_losses, hits if ranked else None)


class _Given(torch.autograd.Function):
    """The same with the weight's gradient given to somebody, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, gradient: WeightGradient, *given: Any
    ) -> Any:
        total, *for_reading, dhidden, dweight, scale = _linear_cross_entropy(hidden, weight, *given)
        losses = for_reading[0]
        ctx.mark_non_differentiable(*for_reading)
        ctx.gradient = gradient
        # Not in saved tensors: the gradients are given away, and the graph must not keep them
        # alive.
        ctx.given = (weight, dhidden, dweight, scale)
        ctx.save_for_backward(losses)
        return total, *for_reading

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Any, ...]:
        if ctx.given is None:
            raise RuntimeError(
                "linear_cross_entropy made its gradients once and has given them away"
            )
        weight, dhidden, dweight, scale = ctx.given
        ctx.given = None
        factor = dtotal * scale
        given = ctx.gradient(weight, dweight, factor)
        (losses,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_tokens = losses * dtotal if wanted[4] else None
        return (
            dhidden.mul_(factor) if wanted[0] else None,
            given,
            None,
            None,
            d_tokens,
            *[None] * 16,
        )


class _Added(torch.autograd.Function):
    """The same with the weight's gradient added to a buffer in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        into: Tensor,
        added: Callable[[Tensor], Tensor],
        *given: Any,
    ) -> Any:
        total, *for_reading, dhidden = _linear_cross_entropy_into(into, hidden, weight, *given)
        ctx.mark_non_differentiable(*for_reading)
        ctx.added = added
        ctx.weight = weight
        ctx.dhidden = dhidden
        ctx.save_for_backward(for_reading[0])
        return total, *for_reading

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Any, ...]:
        if ctx.dhidden is None:
            raise RuntimeError(
                "linear_cross_entropy made its gradients once and has given them away"
            )
        dhidden = ctx.dhidden
        ctx.dhidden = None
        torch._assert_async(
            dtotal == 1, "the gradient of linear_cross_entropy's sum must be 1 with a `Buffer`"
        )
        (losses,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            dhidden if wanted[0] else None,
            ctx.added(ctx.weight),
            None,
            None,
            None,
            losses if wanted[5] else None,
            *[None] * 13,
        )


def token_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    class_weights: Tensor | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the loss of each token [t] in fp32, differentiable with any gradient per token; see
    `linear_cross_entropy`.

    The backward makes the logits again, a chunk at a time: four matrix products in all instead of
    three.
    """
    _require(hidden, weight, labels, size_of(group) if sequence_parallel else 1)
    terms = _terms(
        vocab_size,
        weight.shape[0] * size_of(group),
        label_smoothing,
        z_loss,
        soft_cap,
        ignore_index,
    )
    _require_parts(chunk, None)
    backend = pick("linear_cross_entropy", impl, hidden.device, float_obstacle(hidden, weight))
    return _token_cross_entropy(
        hidden,
        weight,
        labels,
        _weights_of(class_weights, terms, hidden),
        name_of(group),
        sequence_parallel,
        *terms,
        chunk or 0,
        backend,
    )


def _terms(
    vocab: int | None,
    columns: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    ignore_index: int,
) -> Terms:
    terms = Terms(
        columns if vocab is None else vocab, label_smoothing, z_loss, soft_cap or 0.0, ignore_index
    )
    valid_terms(terms, columns)
    return terms


def _weights_of(class_weights: Tensor | None, terms: Terms, hidden: Tensor) -> Tensor | None:
    if class_weights is None:
        return None
    if class_weights.shape != (terms.vocab,) or class_weights.device != hidden.device:
        raise ValueError(
            f"class_weights {tuple(class_weights.shape)} must be one for each of {terms.vocab}"
            f" classes, on {hidden.device}"
        )
    return class_weights.detach().to(torch.promote_types(hidden.dtype, torch.float32)).contiguous()


def _require(hidden: Tensor, weight: Tensor, labels: Tensor, parts: int) -> None:
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or hidden.shape[1] != weight.shape[1]
        or weight.shape[0] == 0
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [t, h] and"
            " [v, h]"
        )
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}: they must have one floating dtype"
        )
    if labels.shape != (hidden.shape[0] * parts,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels {tuple(labels.shape)} {labels.dtype} must be int64 for the {hidden.shape[0]} x"
            f" {parts} tokens"
        )
    if len({hidden.device, weight.device, labels.device}) > 1:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight.device}, labels on {labels.device}"
        )


def _require_buffer(into: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    if into.shape != weight.shape or into.dtype != dtype:
        raise ValueError(
            f"into {tuple(into.shape)} of {into.dtype} must be {dtype} and as large as weight"
            f" {tuple(weight.shape)}"
        )


def _require_parts(chunk: int | None, logits: int | None) -> None:
    if (chunk or 0) < 0 or (logits or 0) < 0:
        raise ValueError(
            f"chunk {chunk} and logits {logits} must be positive, or None for as many as suit"
        )


def _linear_cross_entropy_shapes(
    hidden, weight, labels, token_weights, ranked, need_hidden, need_weight, wide
):
    return (
        token_weights.new_empty(()),
        token_weights.new_empty(labels.shape),
        token_weights.new_empty(labels.shape),
        token_weights.new_empty(labels.shape if ranked else (0,)),
        hidden.new_empty(hidden.shape if need_hidden else (0, hidden.shape[1])),
        weight.new_empty(
            weight.shape if need_weight else (0, weight.shape[1]),
            dtype=torch.promote_types(weight.dtype, torch.float32) if wide else weight.dtype,
        ),
        token_weights.new_empty(()),
    )


@operator("linear_cross_entropy", shapes=_linear_cross_entropy_shapes)
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    class_weights: Tensor | None,
    group: str,
    sequence_parallel: bool,
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    ignore_index: int,
    chunk: int,
    logits: int,
    ranked: bool,
    need_hidden: bool,
    need_weight: bool,
    in_place: bool,
    wide: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss and its gradients; `in_place` lets the backward multiply the gradients where
    they lie, which a traced graph could not express.
    """
    terms = Terms(vocab, label_smoothing, z_loss, soft_cap, ignore_index)
    found = run(
        hidden, weight, labels, token_weights, class_weights, group, sequence_parallel, terms,
        chunk, logits, ranked,
        need_hidden, need_weight, wide, backend,
    )  # fmt: skip
    return (found.losses * token_weights).sum(), *found


@operator(
    "linear_cross_entropy_into",
    shapes=lambda hidden, labels, token_weights, ranked, need_hidden: (
        token_weights.new_empty(()),
        token_weights.new_empty(labels.shape),
        token_weights.new_empty(labels.shape),
        token_weights.new_empty(labels.shape if ranked else (0,)),
        hidden.new_empty(hidden.shape if need_hidden else (0, hidden.shape[1])),
    ),
    mutates=("into",),
)
def _linear_cross_entropy_into(
    into: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    class_weights: Tensor | None,
    group: str,
    sequence_parallel: bool,
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    ignore_index: int,
    chunk: int,
    logits: int,
    ranked: bool,
    need_hidden: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    terms = Terms(vocab, label_smoothing, z_loss, soft_cap, ignore_index)
    found = run(
        hidden, weight, labels, token_weights, class_weights, group, sequence_parallel, terms,
        chunk, logits, ranked,
        need_hidden, True, True, backend, into,
    )  # fmt: skip
    total = (found.losses * token_weights).sum()
    return total, found.losses, found.z_losses, found.hits, found.hidden


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, _, _, dhidden, dweight, scale = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.need_hidden, ctx.need_weight, ctx.in_place, *_ = inputs[15:]
    ctx.spent = False
    ctx.save_for_backward(losses, dhidden, dweight, scale)


def _gradients(ctx: Any, dtotal: Tensor, *_: Tensor) -> dict[str, Any]:
    if ctx.spent:
        raise RuntimeError(
            "linear_cross_entropy made its gradients once and has given them away: no second"
            " backward"
        )
    # Scaled in place they are spent, and a second backward would scale them again.
    ctx.spent = ctx.in_place
    losses, dhidden, dweight, scale = ctx.saved_tensors
    times = Tensor.mul_ if ctx.in_place else Tensor.mul
    return {
        "hidden": times(dhidden, dtotal * scale) if ctx.need_hidden else None,
        "weight": times(dweight, dtotal * scale) if ctx.need_weight else None,
        "token_weights": losses * dtotal if ctx.needs_input_grad[3] else None,
    }


differentiable(_linear_cross_entropy, save=_save, gradients=_gradients)


@operator(
    "token_cross_entropy",
    shapes=lambda hidden, labels: torch.empty_like(_token_ones(hidden, labels)),
)
def _token_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    class_weights: Tensor | None,
    group: str,
    sequence_parallel: bool,
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    ignore_index: int,
    chunk: int,
    backend: str,
) -> Tensor:
    terms = Terms(vocab, label_smoothing, z_loss, soft_cap, ignore_index)
    # Only the backward knows the factor of a token; here each counts as 1.
    ones = _token_ones(hidden, labels)
    return run(
        hidden, weight, labels, ones, class_weights, group, sequence_parallel, terms, chunk, 0,
        False, False, False,
        False, backend,
    ).losses  # fmt: skip


def _token_ones(hidden: Tensor, labels: Tensor) -> Tensor:
    return hidden.new_ones(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, labels, class_weights, *ctx.settings = inputs
    ctx.save_for_backward(hidden, weight, labels, class_weights)


def _token_gradients(ctx: Any, dlosses: Tensor) -> dict[str, Any]:
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    *settings, backend = ctx.settings
    hidden, weight, labels, class_weights = ctx.saved_tensors
    *_, dhidden, dweight, scale = _linear_cross_entropy(
        hidden, weight, labels, dlosses.contiguous(), class_weights, *settings, 0, False,
        need_hidden, need_weight,
        False, False, backend,
    )  # fmt: skip
    # Fresh tensors that nobody else sees may change in place, though not in a traced graph.
    times = Tensor.mul if torch.compiler.is_compiling() else Tensor.mul_
    return {
        "hidden": times(dhidden, scale) if need_hidden else None,
        "weight": times(dweight, scale) if need_weight else None,
    }


differentiable(_token_cross_entropy, save=_save_tokens, gradients=_token_gradients)


def _launch(model: Model) -> None:
    from mtrain_kernels.cross_entropy import triton as by_rows
    from mtrain_kernels.linear_cross_entropy import triton

    rows = chunk_rows(0, model.tokens, model.vocab, torch.device("meta"))
    hidden = torch.empty((rows, model.hidden), dtype=torch.bfloat16, device="meta")
    weight = torch.empty((model.vocab, model.hidden), dtype=torch.bfloat16, device="meta")
    logits = torch.empty((rows, model.vocab), dtype=torch.bfloat16, device="meta")
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    terms = Terms(model.vocab, 0.0, 1e-4)
    for ranked in (False, True):
        statistics = by_rows.row_statistics(logits, labels, 0, terms, ranked=ranked)
    by_rows.logits_gradient(logits, labels, statistics[0], statistics[0], 0, terms, logits)
    tile = next(way for way in tiles.candidates(hidden, kept=False) if isinstance(way, tiles.Tile))
    triton.product_statistics(hidden, weight, labels, 0, terms, tile, logits=logits, ranked=True)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden": (
            torch.randn((model.tokens, model.hidden), device=device, dtype=dtype).requires_grad_()
        ),
        "weight": (
            (torch.randn((model.vocab, model.hidden), device=device) * 0.02)
            .to(dtype)
            .requires_grad_()
        ),
        "labels": torch.randint(0, model.vocab, (model.tokens,), device=device),
        "token_weights": torch.full((model.tokens,), 1 / model.tokens, device=device),
    }


def _cost(model: Model) -> Cost:
    weight = model.vocab * model.hidden
    logits = model.tokens * model.vocab
    chunks = ceil_div(model.tokens, chunk_rows(0, model.tokens, model.vocab, torch.device("meta")))
    # a chunk: logits written, read, read and replaced, read twice; weight read twice, its gradient
    # added to, which is written, read, and added in fp32 where there are many chunks
    passes = 8 if chunks > MOST_PARTS else 4
    return Cost(bytes=2 * (6 * logits + passes * chunks * weight), flops=6 * model.tokens * weight)


def _liger(inputs: dict[str, Any]) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda: liger_fused_linear_cross_entropy(
        inputs["hidden"], inputs["weight"], inputs["labels"]
    )


def _torch(inputs: dict[str, Any]) -> Any:
    functional = torch.nn.functional
    return lambda: functional.cross_entropy(
        functional.linear(inputs["hidden"], inputs["weight"]), inputs["labels"]
    )


OPS = (
    Op(
        "linear_cross_entropy",
        cases=(
            Case(
                "linear_cross_entropy",
                _make,
                lambda inputs, impl: linear_cross_entropy(**inputs, impl=impl).total,
                forward=_cost,
                backward=lambda model: Cost(bytes=4 * model.hidden * (model.vocab + model.tokens)),
                rivals={"torch": _torch, "liger": _liger},
            ),
        ),
        launch=_launch,
        implementations=WITH_CPU,
    ),
)
