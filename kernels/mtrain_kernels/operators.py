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


class Operator:
    """A function that is also `torch.ops.mtrain.NAME`.

    A call in eager mode runs the function itself: registration with torch costs the host about as
    much as everything else around a small kernel. Compilers, exporters, dispatch modes, meta
    tensors and `torch.func` see the operator.
    """

    def __init__(self, op: CustomOpDef, mutated: Sequence[int]) -> None:
        self.op = op
        self.function = op._init_fn
        self.arguments = list(inspect.signature(self.function).parameters)
        self.mutated = tuple(mutated)
        self.direct: Callable[..., Any] | None = None
        """Computes the operator with the gradients that are registered, in eager mode."""

    def __call__(self, *args: Any) -> Any:
        """Compute the operator; arguments are given by position."""
        if torch.compiler.is_compiling() or _observed(args):
            return self.op(*args)
        if torch.is_grad_enabled():
            if self.direct is not None:
                return self.direct(*args)
            if _differentiated(args):
                # The registered operator refuses to be differentiated, as it should.
                return self.op(*args)
        result = self.function(*args)
        for place in self.mutated:
            _written(args[place])
        return result


def _observed(args: tuple[Any, ...]) -> bool:
    """Return whether somebody has to see an operator instead of what it does."""
    first = args[0]
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (isinstance(first, Tensor) and first.is_meta)
    )


def _differentiated(args: tuple[Any, ...]) -> bool:
    for value in args:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor) and one.requires_grad:
                return True
    return False


def _written(value: Tensor | Sequence[Tensor]) -> None:
    """Tell autograd that memory has changed, so that it refuses to use what it saved of it."""
    for tensor in (value,) if isinstance(value, Tensor) else value:
        torch.autograd.graph.increment_version(tensor)


def operator(
    name: str, *, shapes: Callable[..., Any] | None = None, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as `torch.ops.mtrain.NAME`.

    `shapes` returns empty tensors like the results, from those arguments of the function that it
    names as its own; without it the operator returns nothing. `mutates` names the arguments that
    the function changes in place. Raises `TypeError` if `shapes` reads an unknown argument.
    """

    def register(function: Callable[..., Any]) -> Operator:
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
        return Operator(op, [arguments.index(each) for each in mutates])

    return register


def differentiable(
    operator: Operator,
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., dict[str, Any]],
) -> None:
    """Give an operator its gradients.

    `save(ctx, inputs, output)` keeps what the backward needs. `gradients(ctx, *of_outputs)`
    returns those of the inputs by argument name; an input that is absent has none.
    """
    arguments = operator.arguments
    known = frozenset(arguments)

    def backward(ctx: Any, *of_outputs: Any) -> tuple[Any, ...]:
        found = gradients(ctx, *of_outputs)
        if not found.keys() <= known:
            name = operator.op._qualname
            raise TypeError(f"{name} takes {arguments}, but has gradients of {list(found)}")
        return tuple(map(found.get, arguments))

    operator.op.register_autograd(backward, setup_context=save)
    # autograd.Function does not look into lists of tensors.
    if any(argument.type.kind() == "ListType" for argument in _schema(operator).arguments):
        return

    def forward(ctx: Any, *args: Any) -> Any:
        result = operator.function(*args)
        save(ctx, args, result)
        return result

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    direct = type(f"{operator.function.__name__}_direct", (torch.autograd.Function,), body)
    operator.direct = apply_of(direct)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without the Python around it, which serves `torch.func` only.

    Call it where no transformation of `torch.func` is active.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


def _schema(operator: Operator) -> Any:
    return operator.op._opoverload._schema


def float_obstacle(*given: Tensor | torch.dtype | None) -> str | None:
    """Return why Triton kernels cannot load tensors, or numbers of a dtype; None if they can."""
    wrong = set()
    for each in given:
        dtype = each.dtype if isinstance(each, Tensor) else each
        if dtype is not None and dtype not in FLOATS:
            wrong.add(str(dtype))
    return f"{', '.join(sorted(wrong))} is not fp32, fp16 or bf16" if wrong else None
