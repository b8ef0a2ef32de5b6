"""A Triton driver that launches nothing: kernels are compiled for sm_90, and launches are counted.

It replaces Triton's driver below everything that Python does for a launch. `JITFunction.run`, the
cache of compiled kernels, and Triton's own `CudaLauncher` (scratch memory, tensor descriptors) run
as on a GPU; missing is its C extension, which reads the addresses of the arguments and calls CUDA's
`cuLaunchKernelEx`: two to four microseconds a launch on a GPU. A caller that keeps a compiled
kernel and calls `kernel.run`, or the launcher's own `launch`, is counted as well.

Call `install()` before anything imports `mtrain_kernels`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SM_90 = {
    "max_shared_mem": 232448,
    "multiprocessor_count": 132,
    "max_num_regs": 65536,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2600000,
    "mem_bus_width": 5120,
}
"""Properties of a device, as Triton's driver reports them of an H100."""
LAUNCH = "launch "
"""Begins the name of a launch of Triton's in a trace."""
ALLOCATION = "allocate"
"""The name of an allocation in a trace."""
CAPABILITY = (9, 0)
REGISTERS = 64
THREADS = 1024


class Launches:
    """The launches of each kernel since the last `clear`."""

    def __init__(self) -> None:
        self.total = 0
        self.by_kernel: Counter[str] = Counter()
        self.listener: Callable[[str], None] | None = None
        """Called with the kernel's name at each launch."""
        self._names: dict[int, str] = {}

    def name(self, kernel: str) -> int:
        """Return a handle for a kernel that is loaded, as the driver's handle of a function."""
        handle = len(self._names) + 1
        self._names[handle] = kernel
        return handle

    def add(self, handle: int) -> None:
        """Count one launch of the kernel with this handle."""
        self.total += 1
        name = self._names[handle]
        self.by_kernel[name] += 1
        if self.listener is not None:
            self.listener(name)

    def clear(self) -> None:
        """Forget all launches, but not the kernels."""
        self.total = 0
        self.by_kernel.clear()


LAUNCHES = Launches()


class _Argument:
    """An argument of a kernel, as the driver's C extension describes it to its own launcher."""

    def __init__(self, nested_tuple: Any, type: int) -> None:
        self.nested_tuple = nested_tuple
        self.type = type


class _Extension:
    """The driver's C extension, without a device."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Return the handles of a module and its kernel, registers, spills and most threads."""
        handle = self.launches.name(name)
        return handle, handle, REGISTERS, 0, THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties of an H100."""
        return SM_90

    def unload_module(self, *args: Any) -> None:
        """Do nothing: there is no module."""

    def build_signature_metadata(self, signature: list[str]) -> bytes:
        """Return a byte for each argument, as the C extension does."""
        return bytes(len(signature))

    def fill_tma_descriptor_tiled(self, *args: Any) -> object:
        """Return something that stands for a tensor map."""
        return args

    fill_tma_descriptor_im2col = fill_tma_descriptor_tiled

    def launch(
        self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *args: Any
    ) -> None:
        """Count a launch of a kernel, unless the grid is empty, where CUDA is not called either."""
        if grid_x * grid_y * grid_z > 0:
            self.launches.add(function)


class _BareLauncher:
    """A launcher for versions of Triton that compile one in C for each signature (before 3.7)."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.launch = LAUNCHES_EXTENSION.launch

    def __call__(self, *args: Any, **options: Any) -> None:
        """Count a launch."""
        self.launch(*args)


LAUNCHES_EXTENSION = _Extension(LAUNCHES)


def _launcher() -> type:
    """Return Triton's launcher with our extension below it, or one that only counts."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "PyKernelArg"):
        return _BareLauncher
    driver.PyKernelArg = _Argument
    driver.ARG_CONSTEXPR = 0
    driver.ARG_KERNEL = 1
    driver.ARG_TUPLE = 2
    launcher: type = driver.CudaLauncher
    return launcher


class NullDriver:
    """A driver that claims that the CPU is an sm_90 device."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.utils = LAUNCHES_EXTENSION
        self.launcher_cls = _launcher()
        self.target = GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the default stream."""
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return that of an H100."""
        return CAPABILITY

    def get_current_target(self) -> Any:
        """Return what kernels are compiled for."""
        return self.target

    def get_active_torch_device(self) -> Any:
        """Return the device of the tensors."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        import torch

        return torch.cpu


def install() -> Launches:
    """Put the null driver under Triton and `mtrain_kernels`, and return the table of launches.

    Memory that `torch.empty` and its relatives return is zero from here on, because no kernel
    writes it and torch's own operations index by it; that takes 0.2 microseconds a tensor. A
    product in FP8 by cuBLAS is a product in bf16 here, of 16 by 128 by 128: torch's own for a CPU
    converts its operands, which takes it 50 microseconds. Raises `RuntimeError` if Triton's
    interpreter is on.
    """
    import torch
    import triton
    import triton.language
    from triton.runtime.driver import driver

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would be interpreted, not launched")
    driver.set_active(NullDriver())
    import mtrain_kernels.runtime as runtime
    from mtrain_kernels import linear
    from mtrain_kernels.registry import Implementation

    runtime._driver_obstacle = lambda device: None  # type: ignore[assignment]
    runtime.capability = lambda device: 90
    runtime.processors = lambda device: SM_90["multiprocessor_count"]  # type: ignore[assignment]
    # On a GPU cuBLAS multiplies in FP8.
    from mtrain_kernels.fp8_linear.op import OPS

    OPS[0].implementations["torch"] = Implementation("torch", lambda device: None)  # type: ignore[index]
    small = torch.zeros(16, 128, dtype=torch.bfloat16), torch.zeros(128, 128, dtype=torch.bfloat16)

    def scaled(a: Any, b: Any, *more: Any, out_dtype: Any = None, **_: Any) -> Any:
        torch.mm(*small)
        dtype = out_dtype or next(each for each in more if isinstance(each, torch.dtype))
        return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)

    def added(into: Any, dy: Any, x: Any, **_: Any) -> None:
        torch.mm(dy.t(), x)

    # On a GPU one call of cuBLAS adds a weight gradient in fp32; a CPU would widen its operands.
    linear.add_weight_gradient = added
    torch._scaled_mm = scaled
    torch._scaled_mm_v2 = scaled
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.version.cuda = "12.9"
    allocate(torch.zeros, torch.zeros_like, torch.Tensor.new_zeros)
    # mtrain lets Triton run on a CPU in its interpreter only; the driver above stands for that.
    os.environ["TRITON_INTERPRET"] = "1"
    type(triton.knobs.runtime).interpret = False
    return LAUNCHES


def allocate(empty: Any, empty_like: Any, new_empty: Any) -> None:
    """Let `torch.empty` and its relatives be other functions."""
    import torch

    torch.empty = empty
    torch.empty_like = empty_like
    torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


@contextmanager
def traced() -> Iterator[None]:
    """Write each launch of Triton's into the trace of torch's profiler while this is open, and each
    allocation, which zeroes memory for this benchmark only.
    """
    import torch

    named = torch._C._profiler._RecordFunctionFast

    def launched(kernel: str) -> None:
        with named(LAUNCH + kernel):
            pass

    def zeroing(make: Any) -> Any:
        def allocated(*given: Any, **options: Any) -> Any:
            with named(ALLOCATION):
                return make(*given, **options)

        return allocated

    plain = torch.empty, torch.empty_like, torch.Tensor.new_empty
    LAUNCHES.listener = launched
    allocate(*(zeroing(make) for make in plain))
    try:
        yield
    finally:
        LAUNCHES.listener = None
        allocate(*plain)
