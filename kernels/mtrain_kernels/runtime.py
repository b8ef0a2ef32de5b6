"""The surroundings of a Triton kernel: availability, interpreter, rounding, grids and rows."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
H200_PROCESSORS = 132
HERE: AbstractContextManager[None] = nullcontext()
"""Leaves the current device as it is."""
GRID = 65535
"""Programs along the second and the third axis of a grid, at most: CUDA's limit."""

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.target_info import cuda_capability_geq

    INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
    ROUND_BF16 = tl.constexpr(
        "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both,"
        " 0xffff0000; }"
    )

    @triton.constexpr_function
    def converts_fp8():
        """Return whether kernels are compiled for a GPU that converts to and from FP8 itself."""
        return not INTERPRETED and cuda_capability_geq(8, 9)

    @triton.constexpr_function
    def converts_fp4():
        """Return whether kernels are compiled for a GPU that converts to and from FP4 itself."""
        return not INTERPRETED and cuda_capability_geq(10, 0)

    @triton.jit
    def cast(x, dtype: tl.constexpr):
        """Return fp32 `x` rounded to nearest even in `dtype`; the interpreter would truncate to
        bfloat16.
        """
        if INTERPRETED and dtype == tl.bfloat16:
            bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
            # Half of the last kept bit, less one unless that bit is odd: ties go to even.
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            # the carry would turn some NaN into infinity or zero
            rounded = tl.where(x == x, rounded, 0x7FC0)
            return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return x.to(dtype)

    @triton.jit
    def rounded(x, dtype: tl.constexpr):
        """Return fp32 `x` as `dtype` has it, in fp32; in pairs for bfloat16: a single one takes the
        slow unit on sm_90.
        """
        if not INTERPRETED and dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                ROUND_BF16, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2
            )
        return cast(x, dtype).to(tl.float32)

    @triton.jit
    def exp2(x):
        """Return 2^x of fp32, right to 2 ulp; on a GPU 0 below 2^-126, which saves the handling of
        subnormal numbers.
        """
        if INTERPRETED:
            return tl.exp2(x)
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )

    @triton.jit
    def reciprocal(x):
        """Return 1 / x of fp32, right to 1 ulp; on a GPU 0 where it would be below 2^-126, and a
        subnormal x counts as 0.

        Nobody gives it one: sigmoids and caps ask for that of 1 + e^x, `quotient` for that of at
        least 2^-125. A division would ask of each number whether it is too small.
        """
        if INTERPRETED:
            return 1.0 / x
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )

    @triton.jit
    def quotient(x, y):
        """Return x / y of fp32, right to the last bit where y is at least 2^-121 and the result of
        2^-126 to 2^126.

        That is the compiler's own `div_rn` without its question whether numbers are too small or
        large for it; the sixteenth of both keeps the reciprocal of a large y normal.
        """
        if INTERPRETED:
            return tl.div_rn(x, y)
        x = x * 0.0625
        y = y * 0.0625
        near = reciprocal(y)
        # A Newton step on the reciprocal; then the remainder corrects the quotient.
        near = tl.fma(near, tl.fma(-y, near, 1.0), near)
        found = x * near
        return tl.fma(tl.fma(-y, found, x), near, found)

    @triton.jit
    def sigmoid(x):
        """Return 1 / (1 + e^-x) of fp32; below -87, where it is less than 2^-126, it may be 0."""
        return reciprocal(1.0 + exp2(x * -1.4426950408889634))

    @triton.jit
    def dot(a, b, total, EXACT: tl.constexpr):
        """Return `total + a b` in fp32; the interpreter's product of bfloat16 is wrong, so it gets
        fp32.
        """
        if INTERPRETED:
            return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        if EXACT:
            return tl.dot(a, b, total, input_precision="ieee")
        return tl.dot(a, b, total)

    @triton.jit
    def to_bf16(x):
        """Return fp32 `x` rounded to nearest even in bfloat16."""
        return cast(x, tl.bfloat16)


def interpreted() -> bool:
    """Return whether Triton kernels run in the interpreter; decided by TRITON_INTERPRET when this
    module is imported.
    """
    return HAS_TRITON and INTERPRETED.value


def triton_obstacle(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on tensors of `device`, or None; on meta tensors only
    shapes are worked out.
    """
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "meta" or interpreted():
        return None
    return _driver_obstacle(device)


@functools.cache
def _driver_obstacle(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "the tensors are on the CPU, where Triton runs only with TRITON_INTERPRET=1"
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    try:
        served = triton.runtime.driver.active.get_active_torch_device().type
    except Exception as error:
        return f"triton has no driver here: {error}"
    if served == device.type:
        return None
    return f"triton serves {served} here, the tensors are on {device.type}"


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many programs run side by side on `device`; an H200's number for meta tensors, 2
    in the interpreter.
    """
    if device.type == "meta":
        return H200_PROCESSORS
    if device.type == "cpu":
        return 2
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


_meta = "meta"


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Let tensors without memory be taken for those of a kind of device inside, so that a library
    is chosen for them as there.
    """
    global _meta
    before = _meta
    _meta = kind
    try:
        yield
    finally:
        _meta = before


def kind_of(device: torch.device) -> str:
    """Return the type of a device; of meta tensors, that which they stand for."""
    return _meta if device.type == "meta" else device.type


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device whose `kind_of` is `cuda`."""
    if device.type == "meta":
        major, minor = divmod(capability(device), 10)
        return major, minor
    return torch.cuda.get_device_capability(device)


def capability(device: torch.device) -> int:
    """Return the compute capability of an NVIDIA GPU without its dot, else 0; of meta tensors that
    which is compiled for.
    """
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if (
        device.type == "meta"
        and HAS_TRITON
        and (active := triton.runtime.driver._active) is not None
    ):
        target = active.get_current_target()
        return int(target.arch) if target.backend == "cuda" else 0
    return 0


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make x's GPU the current one, where Triton launches; does nothing for other tensors."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return HERE
    return torch.cuda.device_of(x)


def ceil_div(a: int, b: int) -> int:
    """Return `a / b` rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` and 1."""
    return 1 << max(n - 1, 0).bit_length()


def as_rows(x: Tensor, width: int) -> Tensor:
    """Return `x` [..., width] as [rows, width] with unit stride along the row; copies only where no
    view does it.
    """
    rows = x.reshape(-1, width) if x.numel() else x.new_empty((x.numel() // max(width, 1), width))
    return rows if rows.stride(-1) == 1 or width == 1 else rows.contiguous()


def tile(width: int, elements: int = 4096, per_warp: int = 1024) -> tuple[int, int, int]:
    """Return rows, columns and warps of a tile of whole rows of `width`: about `elements` of them,
    `per_warp` to a warp.
    """
    columns = power_of_two(width)
    rows = max(1, elements // columns)
    return rows, columns, min(32, max(4, rows * columns // per_warp))
