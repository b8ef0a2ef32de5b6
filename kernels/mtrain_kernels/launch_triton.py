"""Launches of Triton kernels that cost the host little.

Triton binds, specialises and hashes each argument of each launch in Python, and reads a dozen
settings; that takes longer than a small kernel runs. Arguments of the same kinds need the same
binary, so here a launch looks that up by their kinds and calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mtrain_kernels import compilations

MOST = 4096
"""Binaries and kinds of arguments that a kernel remembers; past that it starts again."""
ALIGNED = 16
"""Bytes of alignment, and the factor of an integer, that Triton compiles for."""
INT32_BITS = 31


class _Known(NamedTuple):
    """A binary that has been launched with some kinds of arguments."""

    kernel: Any
    constants: tuple[Any, ...]
    """Constants that follow the arguments of the launch in the kernel's signature."""


class Recorded(JITFunction[Any]):
    """A Triton kernel whose binaries are recorded, and compiled by one process at a time."""

    def _do_compile(self, *given: Any, **named: Any) -> Any:
        return compilations.looked_up(self, super()._do_compile, *given, **named)


class Kernel(Recorded):
    """A Triton kernel that remembers which binary it launched for which kinds of arguments.

    The kind of a tensor is its dtype and whether its address is a multiple of 16 bytes; of an
    integer, whether it is 1, a multiple of 16, and how many bits it needs: what Triton specialises
    for. Constants and options are compared by value and type. Settings of Triton that change after
    a kernel's first launch (`TRITON_DEBUG`) do not reach it. Launches that Triton has to see
    itself, with descriptors or with arguments by keyword, go through `JITFunction.run`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._variables = min(self.constexprs, default=len(self.params))
        """Leading parameters that are not constants: a constant among them has no kind."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return the function that launches on a grid of one to three axes."""

        def launch(*args: Any, **constants: Any) -> Any:
            return self.launch(grid, args, constants)

        return launch

    def launch(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> Any:
        """Launch the binary for these arguments, which Triton compiles if it is the first time.

        Returns the `CompiledKernel`. Raises Triton's errors.
        """
        active = driver.active
        device = active.get_current_device()
        kinds = _kinds(args) if len(args) <= self._variables else None
        key = None
        if kinds is not None:
            key = (device, *kinds, *constants, *constants.values(), *map(type, constants.values()))
            known = self._known.get(key)
            if known is not None and not self.pre_run_hooks:
                kernel = known.kernel
                stream = active.get_current_stream(device)
                given = args + known.constants
                enter = _called(knobs.runtime.launch_enter_hook)
                leave = _called(knobs.runtime.launch_exit_hook)
                metadata = None
                if enter is not None or leave is not None:
                    metadata = kernel.launch_metadata(grid, stream, *given)
                kernel.run(
                    *grid,
                    *(1,) * (3 - len(grid)),
                    stream,
                    kernel.function,
                    kernel.packed_metadata,
                    metadata,
                    enter,
                    leave,
                    *given,
                )
                return kernel
        kernel = self.run(*args, grid=grid, warmup=False, **constants)
        # A kernel that was only compiled has no module yet, and cannot be called directly.
        if key is not None and getattr(kernel, "module", None) is not None:
            tail = self._tail(len(args), constants)
            if tail is not None:
                if len(self._known) >= MOST:
                    self._known.clear()
                self._known[key] = _Known(kernel, tail)
        return kernel

    def _tail(self, given: int, constants: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return the constants behind `given` arguments, in the order of the signature; None if
        one of those parameters is no constant.
        """
        rest = self.params[given:]
        if not all(parameter.is_constexpr for parameter in rest):
            return None
        return tuple(constants.get(each.name, each.default) for each in rest)


def _called(hook: Any) -> Any:
    """Return a hook of Triton's, or None where it is a chain without links, which would be called
    for nothing.
    """
    return hook if getattr(hook, "calls", True) else None


def _kinds(args: tuple[Any, ...]) -> list[Any] | None:
    """Return Triton's specialisation of a kernel, one value for each argument; None if an argument
    is neither a tensor nor a number.
    """
    kinds: list[Any] = []
    add = kinds.append
    for value in args:
        if isinstance(value, Tensor):
            # Two kinds of keys for one dtype cost less than a tuple.
            add(value.dtype if value.data_ptr() % ALIGNED == 0 else str(value.dtype))
        elif value is None:
            add(None)
        else:
            kind = type(value)
            if kind is int:
                if value == 1 or value == 0:
                    add(value)
                elif value.bit_length() > INT32_BITS:
                    # So large a number is rare, and its type depends on its sign, too.
                    add(value)
                else:
                    add(2 if value % ALIGNED == 0 else 3)
            elif kind is float or kind is bool:
                add(kind)
            else:
                return None
    return kinds


def kernel(function: Callable[..., Any]) -> Any:
    """Declare a Triton kernel that is launched from Python; in the interpreter, as Triton does.

    Functions that kernels call are declared with `triton.jit`.
    """
    if knobs.runtime.interpret:
        return triton.jit(function)
    return Kernel(function)


def kernel_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel that is not compiled for values of the arguments `names`, which change from
    launch to launch.
    """

    def declare(function: Callable[..., Any]) -> Any:
        if knobs.runtime.interpret:
            return triton.jit(function, do_not_specialize=names)
        return Recorded(function, do_not_specialize=names)

    return declare
