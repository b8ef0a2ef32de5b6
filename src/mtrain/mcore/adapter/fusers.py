"""Functions that megatron-core compiles, compiled at their first call and not while it is imported.

megatron-core decorates some forty small functions with `torch.compile`. The decorator imports the
compiler, which takes most of a second, and most runs call none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def compiled_when_called(*, ever: bool) -> Iterator[None]:
    """Let `torch.compile` return at once for a function that is decorated inside.

    Args:
        ever: whether such a function is compiled at its first call; otherwise it stays as it is,
            for a device on which compilation takes seconds and gains nothing.
    """
    compile_ = torch.compile

    def decorated(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(decorated, **options)
        if isinstance(model, torch.nn.Module):
            return compile_(model, **options)
        return _later(compile_, model, options) if ever else model

    torch.compile = decorated
    try:
        yield
    finally:
        torch.compile = compile_


def _later(
    compile_: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(compile_(function, **options))
        return compiled[0](*args, **kwargs)

    return call
