"""SOAP on matrices and AdamW on everything else, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.optimizer.fused_adam import FusedAdam

SIDES = ("rows", "columns")
"""Sides of a matrix, each with factors: `gram_<side>`, an average of its products with itself, and
`basis_<side>`.
"""
Factors = dict[str, Tensor]
RESOLVED = 1e-6
"""Smallest eigenvalue of a product, as a part of the largest, that fp32 tells from rounding."""


def new_factors(shape: Sequence[int], largest: int, device: torch.device) -> Factors:
    """Return zero factors of a matrix [r, c]: two [r, r] and two [c, c] in fp32; a side longer than
    `largest` has none.
    """
    lengths = {side: n for side, n in zip(SIDES, shape, strict=True) if n <= largest}
    every = ((f"{kind}_{side}", n) for side, n in lengths.items() for kind in ("gram", "basis"))
    return {name: torch.zeros(n, n, device=device) for name, n in every}


class Soap(FusedAdam):
    """Adam in the eigenbasis of Shampoo's factors, for groups with `matrix`; AdamW for others.

    Of a matrix G of gradients there are averages of G G^T and G^T G with decay `shampoo_beta`, and
    an orthonormal basis of each: eigenvectors in the first step, and after every
    `precondition_frequency` of those that follow one power iteration with a QR decomposition. The
    average `exp_avg` is kept as gradients are, and `exp_avg_sq` in the bases, where Adam divides; a
    side of more than `max_precond_dim` has no basis. As with its authors, the first step makes
    bases and moves no matrix, so that no gradient is rotated by what was made of only it. The
    decay of weights comes before the update. Matrices have no masters here: give fp32 parameters,
    and a gradient of each in every step. All else is as in `FusedAdam`. Source: Vyas et al. 2024,
    arXiv 2409.11321.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        **adam: Any,
    ) -> None:
        if not 0 <= shampoo_beta < 1 or precondition_frequency < 1 or max_precond_dim < 1:
            raise ValueError(
                f"shampoo_beta {shampoo_beta}, a frequency of {precondition_frequency} or sides up"
                f" to {max_precond_dim} out of range"
            )
        if adam.get("capturable"):
            raise ValueError("capturable: the step of a matrix has its learning rate from the host")
        self.shampoo_beta = shampoo_beta
        self.precondition_frequency = precondition_frequency
        self.max_precond_dim = max_precond_dim
        self.factors: dict[int, Factors] = {}
        super().__init__(params, lr, **adam)

    def through(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        given: Callable[[Tensor], Tensor],
        taken: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Pass the result of `given` for each matrix to `rotated`, and the results to `taken`; here
        they are whole.
        """
        for param in params:
            taken(param, self.rotated(group, param, given(param)))

    def rotated(self, group: dict[str, Any], param: Tensor, given: Tensor) -> Tensor:
        """Update and second moment [2, r, c] of a whole matrix, of its gradient and both moments
        [3, r, c].
        """
        if id(param) not in self.factors:
            self.factors[id(param)] = new_factors(
                given.shape[1:], self.max_precond_dim, given.device
            )
        factors = self.factors[id(param)]
        grad, average, square = given
        # The first step only makes bases, so that Adam's count begins with the second.
        step = group["step"] - 1
        if not step:
            self._count(factors, grad)
            self._begin(factors, grad)
            return torch.stack([torch.zeros_like(grad), square])
        beta1, beta2 = group["betas"]
        bias1, bias2 = (
            1 - beta**step if group["bias_correction"] else 1.0 for beta in (beta1, beta2)
        )
        square = square.lerp(_turned(factors, grad).square(), 1 - beta2)
        divided = _turned(factors, average) / bias1 / ((square / bias2).sqrt() + group["eps"])
        update = _turned(factors, divided, back=True)
        self._count(factors, grad)
        if step % self.precondition_frequency == 0:
            square = self._followed(factors, square)
        return torch.stack([update, square])

    def _update(self, group: dict[str, Any], stream: int, grad_scale: Tensor | None) -> None:
        if not group.get("matrix"):
            super()._update(group, stream, grad_scale)
            return
        beta1, _ = group["betas"]
        lr = group["lr"]
        moves = group["step"] > 1
        for param in group["params"]:
            if not self.state[param]:
                self.initialize_state(param)

        def given(param: Tensor) -> Tensor:
            grad = self._gradient(param)
            state = self.state[param]
            if grad is None:
                raise ValueError(f"a matrix {tuple(param.shape)} without a gradient")
            grad = grad.detach().to(param.dtype).view_as(param)
            grad = grad if grad_scale is None else grad * grad_scale
            if moves:
                state["exp_avg"].lerp_(grad, 1 - beta1)
            return torch.stack([grad, state["exp_avg"], state["exp_avg_sq"]])

        def taken(param: Tensor, made: Tensor) -> None:
            if moves:
                self.state[param]["exp_avg_sq"].copy_(made[1])
                param.detach().mul_(1 - lr * group["weight_decay"]).add_(made[0], alpha=-lr)

        self.through(group, [param for param in group["params"] if param.numel()], given, taken)

    def _count(self, factors: Factors, grad: Tensor) -> None:
        """Take a gradient into the averages of its products with itself."""
        for side in _of(factors):
            product = grad @ grad.mT if side == "rows" else grad.mT @ grad
            factors[f"gram_{side}"].lerp_(product, 1 - self.shampoo_beta)

    def _begin(self, factors: Factors, grad: Tensor) -> None:
        """Return the eigenvectors of both products: singular vectors of the gradient.

        What is not finite makes bases of NaN, so that weights say so: a decomposition would
        raise here, in the middle of a step.
        """
        sides = _of(factors)
        if sides and not bool(grad.isfinite().all()):
            for side in sides:
                factors[f"basis_{side}"].fill_(torch.nan)
        elif sides:
            # The gradient's singular vectors keep digits that squaring it would lose.
            rows, values, columns = torch.linalg.svd(grad, full_matrices=False)
            vectors = {"rows": rows, "columns": columns.mT}
            for side in sides:
                factors[f"basis_{side}"].copy_(_orthonormal(vectors[side], values.square()))

    def _followed(self, factors: Factors, square: Tensor) -> Tensor:
        """Return one power iteration of each basis, its vectors in the order of what they find, as
        the second moment's.
        """
        for side in _of(factors):
            gram = factors[f"gram_{side}"]
            basis = factors[f"basis_{side}"]
            product = gram @ basis
            values, order = (basis * product).sum(0).sort(descending=True, stable=True)
            square = square.index_select(SIDES.index(side), order)
            basis.copy_(_orthonormal(product[:, order], values))
        return square


def _of(factors: Factors) -> list[str]:
    """Return the sides of a matrix that have factors."""
    return [side for side in SIDES if f"gram_{side}" in factors]


def _orthonormal(vectors: Tensor, values: Tensor) -> Tensor:
    """Return a basis [n, n] that begins with what [n, k] vectors span, the largest eigenvalue
    first.

    Vectors whose eigenvalue is below `RESOLVED` of the largest are left out: in fp32 they are those
    of rounding. The basis is completed by the reflections of the others, which last digits hardly
    move.
    """
    found = int((values > RESOLVED * values[0]).sum())
    if not found:
        return torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
    return torch.linalg.qr(vectors[:, :found], mode="complete").Q


def _turned(factors: Factors, matrix: Tensor, *, back: bool = False) -> Tensor:
    """Return a matrix in the bases of its sides, or back from there."""
    rows, columns = (factors.get(f"basis_{side}") for side in SIDES)
    if rows is not None:
        matrix = (rows if back else rows.mT) @ matrix
    if columns is not None:
        matrix = matrix @ (columns.mT if back else columns)
    return matrix
