"""Cross entropy over logits whose vocabulary may be split over ranks: contract, gradients,
registration.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_kernels.cross_entropy import reference
from mtrain_kernels.cross_entropy.reference import Terms
from mtrain_kernels.cross_entropy.vocabulary import Vocabulary, name_of, size_of
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import Case, Cost, Model, Op, pick


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the loss of each token, with the vocabulary on one rank or in equal parts over the
    ranks of `group`.

    `logits` [..., v_local], in fp32, fp16, bf16 (or fp64 in the reference), `labels` [...] int64
    over the whole vocabulary, the same on every rank; the result is [...] in fp32 and the same on
    every rank, which its gradient must be too. Columns from `vocab_size` on are padding, on
    whatever rank they lie: they have no probability, and their gradient is 0. With `x = soft_cap
    tanh(logits / soft_cap)` and `lse` the log-sum-exp of x, the loss is `lse - (1 -
    label_smoothing) x_label - label_smoothing mean(x) + z_loss lse^2`, or 0 where the label is
    `ignore_index`; any other label outside the vocabulary makes it NaN. Raises `ValueError` where
    shapes, dtypes or numbers do not fit, `Unavailable` where the named implementation cannot run.
    """
    columns = logits.shape[-1] * size_of(group)
    terms = Terms(
        columns if vocab_size is None else vocab_size,
        label_smoothing,
        z_loss,
        soft_cap or 0.0,
        ignore_index,
    )
    _require(logits, labels)
    reference.valid_terms(terms, columns)
    backend = pick("cross_entropy", impl, logits.device, float_obstacle(logits))
    rows = logits.reshape(labels.numel(), logits.shape[-1])
    losses, _ = _cross_entropy(rows, labels.reshape(-1), name_of(group), *terms, backend)
    return losses.view(labels.shape)


def mark_foreign(statistics: Tensor, labels: Tensor, terms: Terms) -> Tensor:
    """Return the statistics, in place, with NaN for tokens whose label is neither in the vocabulary
    nor to be ignored.
    """
    foreign = ((labels < 0) | (labels >= terms.vocab)) & (labels != terms.ignore_index)
    statistics[0].masked_fill_(foreign, torch.nan)
    return statistics


def _require(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape or logits.shape[-1] == 0:
        raise ValueError(
            f"labels {tuple(labels.shape)} must be one for each row of logits {tuple(logits.shape)}"
        )
    if labels.dtype != torch.int64 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"labels must be int64 and logits floating point, not {labels.dtype} and {logits.dtype}"
        )
    if labels.device != logits.device:
        raise ValueError(f"logits are on {logits.device}, labels on {labels.device}")


def _cross_entropy_shapes(logits, labels):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(labels.shape, dtype=dtype), logits.new_empty(labels.shape, dtype=dtype)


@operator("cross_entropy", shapes=_cross_entropy_shapes)
def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: str,
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    ignore_index: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    terms = Terms(vocab, label_smoothing, z_loss, soft_cap, ignore_index)
    vocabulary = Vocabulary(group)
    first = vocabulary.rank * logits.shape[1]
    # Padding never reaches a kernel: no mask is needed there, and it has no probability.
    logits = logits[:, : reference.real_columns(logits.shape[1], first, terms)]
    if backend == "reference":
        statistics = reference.row_statistics(logits, labels, first, terms)
    else:
        from mtrain_kernels.cross_entropy import triton

        statistics = triton.row_statistics(_dense(logits), labels.contiguous(), first, terms)
    statistics = mark_foreign(vocabulary.merge(statistics), labels, terms)
    # A clone, since results of an operator must not share memory.
    return reference.token_losses(statistics, labels, terms)[0], statistics[0].clone()


@operator("cross_entropy_backward", shapes=lambda logits: logits.new_empty(logits.shape))
def _cross_entropy_backward(
    dlosses: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    group: str,
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    ignore_index: int,
    backend: str,
) -> Tensor:
    terms = Terms(vocab, label_smoothing, z_loss, soft_cap, ignore_index)
    first = Vocabulary(group).rank * logits.shape[1]
    real = reference.real_columns(logits.shape[1], first, terms)
    padding = logits.shape[1] - real
    logits = logits[:, :real]
    if backend == "reference":
        gradient = reference.logits_gradient(logits, labels, lse, dlosses, first, terms)
        return torch.nn.functional.pad(gradient, (0, padding)) if padding else gradient.contiguous()
    from mtrain_kernels.cross_entropy import triton

    out = logits.new_empty((logits.shape[0], real + padding))
    out[:, real:] = 0
    triton.logits_gradient(
        _dense(logits), labels.contiguous(), lse, dlosses.contiguous(), first, terms, out[:, :real]
    )
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, *ctx.settings = inputs
    # The log-sum-exp is a result only because the backward needs it.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1])


def _gradients(ctx: Any, dlosses: Tensor, _: Tensor) -> dict[str, Any]:
    return {"logits": _cross_entropy_backward(dlosses, *ctx.saved_tensors, *ctx.settings)}


differentiable(_cross_entropy, save=_save, gradients=_gradients)


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _launch(model: Model) -> None:
    from mtrain_kernels.cross_entropy import triton

    logits = torch.empty((1024, model.vocab), dtype=torch.bfloat16, device="meta")
    labels = torch.empty(1024, dtype=torch.int64, device="meta")
    lse = torch.empty(1024, dtype=torch.float32, device="meta")
    # every option at once; linear_cross_entropy launches the usual ones
    terms = Terms(model.vocab, 0.1, 1e-4, 30.0)
    triton.row_statistics(logits, labels, 0, terms)
    triton.logits_gradient(logits, labels, lse, lse, 0, terms, logits)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    logits = torch.randn((model.tokens, model.vocab), device=device, dtype=dtype).requires_grad_()
    return {
        "logits": logits,
        "labels": torch.randint(0, model.vocab, (model.tokens,), device=device),
    }


def _liger(inputs: dict[str, Any]) -> Any:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return lambda: liger_cross_entropy(inputs["logits"], inputs["labels"], reduction="none")


def _torch(inputs: dict[str, Any]) -> Any:
    return lambda: torch.nn.functional.cross_entropy(
        inputs["logits"], inputs["labels"], reduction="none"
    )


OPS = (
    Op(
        "cross_entropy",
        cases=(
            Case(
                "cross_entropy",
                _make,
                lambda inputs, impl: cross_entropy(**inputs, impl=impl),
                forward=lambda model: Cost(bytes=2 * model.tokens * model.vocab),
                backward=lambda model: Cost(bytes=4 * model.tokens * model.vocab),
                rivals={"torch": _torch, "liger": _liger},
            ),
        ),
        launch=_launch,
    ),
)
