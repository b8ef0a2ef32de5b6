"""Registration of kernels as torch operators, which torch.compile and meta tensors know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Formats that the Triton kernels load and store."""


def operator(
    name: str, *, shapes: Callable[..., Any] | None = None, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register the decorated function as `torch.ops.mtrain.NAME`.

    `shapes` returns empty tensors like the results, from those arguments of the function that it
    names as its own; without it the operator returns nothing. `mutates` names the arguments that
    the function changes in place. Raises `TypeError` if `shapes` reads an unknown argument.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        op = torch.library.custom_op(f"mtrain::{name}", function, mutates_args=tuple(mutates))
        arguments = list(inspect.signature(function).parameters)
        read = list(inspect.signature(shapes).parameters) if shapes else []
        unknown = [each for each in read if each not in arguments]
        if unknown:
            raise TypeError(f"shapes of {name} read {', '.join(unknown)}, which it does not take")
        places = [arguments.index(each) for each in read]

        def fake(*values: Any) -> Any:
            return shapes(*(values[place] for place in places)) if shapes else None

        op.register_fake(fake)
        return op

    return register


def differentiable(
    op: CustomOpDef,
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., dict[str, Any]],
) -> None:
    """Give an operator its gradients.

    `save(ctx, inputs, output)` keeps what the backward needs. `gradients(ctx, *of_outputs)`
    returns those of the inputs by argument name; an input that is absent has none.
    """
    arguments = list(inspect.signature(op._init_fn).parameters)
    known = frozenset(arguments)

    def backward(ctx: Any, *of_outputs: Any) -> tuple[Any, ...]:
        found = gradients(ctx, *of_outputs)
        if not found.keys() <= known:
            raise TypeError(f"{op._qualname} takes {arguments}, but has gradients of {list(found)}")
        return tuple(found.get(each) for each in arguments)

    op.register_autograd(backward, setup_context=save)


def float_obstacle(*given: Tensor | torch.dtype | None) -> str | None:
    """Return why Triton kernels cannot load tensors, or numbers of a dtype; None if they can."""
    dtypes = [each.dtype if isinstance(each, Tensor) else each for each in given]
    wrong = {str(dtype) for dtype in dtypes if dtype is not None and dtype not in FLOATS}
    return f"{', '.join(sorted(wrong))} is not fp32, fp16 or bf16" if wrong else None
