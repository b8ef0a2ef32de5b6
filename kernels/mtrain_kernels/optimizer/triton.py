"""AdamW on a GPU: one launch over many tensors, found through a table of pointers and a table of
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel, kernel_for_any
from mtrain_kernels.optimizer.reference import Hyper, Lists
from mtrain_kernels.optimizer.rounding import MOMENT_BLOCK
from mtrain_kernels.optimizer.tables import address, tables
from mtrain_kernels.quantize.triton import decode, encode, finite, scales
from mtrain_kernels.runtime import INTERPRETED, cast, on_device_of

BLOCK = 2048  # elements in the registers of one program
CHUNK = 1 << 16  # elements that one program walks over
TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
}


@triton.jit
def array(
    table_ptr,
    tensor,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the pointer to list `LIST` of a tensor, which may promise 16 bytes of alignment so
    that loads are wide.
    """
    address = tl.load(table_ptr + tensor * LISTS + LIST)
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def chunk(
    table_ptr,
    chunks_ptr,
    SIZE: tl.constexpr,
    LISTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return tensor, first element and length of this program's chunk; a multiple of 16 where the
    tensors' sizes are.
    """
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0)).to(tl.int64)
    begin = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.minimum(tl.load(table_ptr + tensor * LISTS + SIZE) - begin, CHUNK).to(tl.int32)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return tensor, begin, size


@triton.jit
def words(seed, first, stream, step, BLOCK: tl.constexpr):
    """Return three times 16 random bits for each of `BLOCK` elements from `first` on, as
    `rounding.words`.
    """
    # a multiple of half a block, so that its low 32 bits take the sum without a carry
    pair = first >> 1
    low = (pair & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, BLOCK // 2).to(tl.uint32)
    zero = low * 0
    high = zero + (pair >> 32).to(tl.uint32)
    w0, w1, w2, _ = tl.philox(
        seed, low, high, zero + stream.to(tl.uint32), zero + step.to(tl.uint32)
    )
    return halves(w0, BLOCK), halves(w1, BLOCK), halves(w2, BLOCK)


@triton.jit
def halves(word, BLOCK: tl.constexpr):
    """Return the low and the high 16 bits of each word, side by side."""
    return tl.reshape(tl.join(word & 0xFFFF, word >> 16), (BLOCK,))


@triton.jit
def stochastic(x, word):
    """Round fp32 to bf16: 16 random bits are added before the low half of the bits is dropped; `x`
    is a sum or product.

    What a GPU works out is never a negative NaN (PTX ISA, `add`), so that a minimum keeps NaN from
    a carry.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits, 0x7FC00000) if INTERPRETED else tl.minimum(bits, 0x7FC00000)
    upper = (bits.to(tl.uint32, bitcast=True) + word) >> 16
    return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_moment(
    ptr,
    scale_ptr,
    at,
    inside,
    SECOND: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Load a moment in fp32 from fp32, bf16 or eight bits with a scale for `SHARED` elements."""
    kept = tl.load(ptr + at, mask=inside, other=0)
    if tl.uint8 == TYPE:
        block = tl.min(at, axis=0) // SHARED + tl.arange(0, BLOCK // SHARED)
        # Blocks behind the tensor's last one have no scale to read.
        last = tl.max(tl.where(inside, at, 0), axis=0) // SHARED
        scale = tl.load(scale_ptr + block, mask=block <= last, other=0.0)
        x = tl.reshape(
            tl.reshape(decode(kept, 3, 7), (BLOCK // SHARED, SHARED)) * scale[:, None], (BLOCK,)
        )
        if SECOND:
            x = x * x
    else:
        x = kept.to(tl.float32)
    return x


@triton.jit
def store_moment(
    ptr,
    scale_ptr,
    at,
    inside,
    x,
    word,
    SECOND: tl.constexpr,
    TYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Store a moment in its format; eight bits hold the root of the second one, and nothing above
    zero becomes zero.
    """
    if tl.uint8 == TYPE:
        if SECOND:
            x = tl.sqrt_rn(x)
        blocks = tl.reshape(tl.where(inside, x, 0.0), (BLOCK // SHARED, SHARED))
        m, scale = scales(tl.max(finite(blocks), axis=1), 448.0, 8, "power_of_two")
        code = encode(tl.reshape(blocks * m[:, None], (BLOCK,)), 3, 7, 448.0)
        if SECOND:
            code = tl.where(x > 0, tl.maximum(code, 1), code)
        tl.store(ptr + at, code, mask=inside)
        block = tl.min(at, axis=0) // SHARED + tl.arange(0, BLOCK // SHARED)
        last = tl.max(tl.where(inside, at, 0), axis=0) // SHARED
        tl.store(scale_ptr + block, scale, mask=block <= last)
    elif STOCHASTIC and tl.bfloat16 == TYPE:
        tl.store(ptr + at, stochastic(x, word), mask=inside)
    else:
        tl.store(ptr + at, cast(x, TYPE), mask=inside)


@triton.jit
def load_weight(p_ptr, master_ptr, at, inside, MASTER: tl.constexpr):
    """Load the fp32 weight: the parameter, its fp32 master, or bf16 bits and a signed remainder put
    together.
    """
    if MASTER == "remainder":
        upper = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        bits = (upper << 16) + tl.load(master_ptr + at, mask=inside, other=0).to(tl.int32)
        weight = bits.to(tl.float32, bitcast=True)
    elif MASTER == "fp32":
        weight = tl.load(master_ptr + at, mask=inside, other=0.0)
    else:
        weight = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return weight


@triton.jit
def store_weight(
    p_ptr,
    master_ptr,
    at,
    inside,
    x,
    word,
    MASTER: tl.constexpr,
    P: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Store the weight and its master, if any; the remainder is of the nearest bf16, ties away from
    zero.
    """
    if MASTER == "remainder":
        bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits.to(tl.uint32, bitcast=True) + 0x8000) >> 16
        tl.store(p_ptr + at, upper.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(
            master_ptr + at, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=inside
        )
    elif STOCHASTIC and MASTER == "none" and tl.bfloat16 == P:
        tl.store(p_ptr + at, stochastic(x, word), mask=inside)
    else:
        tl.store(p_ptr + at, cast(x, P), mask=inside)
        if MASTER == "fp32":
            tl.store(master_ptr + at, x, mask=inside)


@triton.jit
def over(x, by, inverse):
    """Return `x / by` for the same `by` in all calls, rounded once, with `inverse` = 1 / by rounded
    once; x is not negative.

    The remainder of a quotient that is off by an ulp is exact in one operation, so that two
    corrections give the nearest number (Markstein 1990, IBM Journal of Research and Development
    34), in half the instructions of a division by any number. The interpreter has no fused
    operation, and divides.
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.zeros_like(x) + by)
    q = x * inverse
    q = tl.fma(tl.fma(-q, by, x), inverse, q)
    q = tl.fma(tl.fma(-q, by, x), inverse, q)
    return tl.where(x < float("inf"), q, x)


# Both change between calls, and a kernel specialised on their values would be compiled again.
@kernel_for_any("seed", "step")
def adamw_kernel(
    table_ptr,
    chunks_ptr,
    grad_scale_ptr,
    numbers_ptr,
    step_ptr,
    beta1,
    beta2,
    eps,
    weight_decay,
    kept,
    lr_over_bias1,
    root_bias2,
    rest1,
    rest2,
    seed,
    step,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    MASTER: tl.constexpr,
    SCALED: tl.constexpr,
    CLOCKED: tl.constexpr,
    DECOUPLED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Update one chunk of one tensor per program.

    A table row: p, g, m, v, master, two lists of scales, size, stream.

    With `CLOCKED` the numbers that change from step to step are read from the device, as in a
    captured graph.
    """
    tensor, begin, size = chunk(table_ptr, chunks_ptr, 7, 9, ALIGNED, CHUNK)
    if CLOCKED:
        kept = tl.load(numbers_ptr)
        lr_over_bias1 = tl.load(numbers_ptr + 1)
        root_bias2 = tl.load(numbers_ptr + 2)
        step = tl.load(step_ptr).to(tl.int64)
    p_ptr = array(table_ptr, tensor, 0, 9, P, ALIGNED) + begin
    g_ptr = array(table_ptr, tensor, 1, 9, G, ALIGNED) + begin
    m_ptr = array(table_ptr, tensor, 2, 9, M, ALIGNED) + begin
    v_ptr = array(table_ptr, tensor, 3, 9, V, ALIGNED) + begin
    master_ptr = (
        array(table_ptr, tensor, 4, 9, tl.int16 if MASTER == "remainder" else tl.float32, ALIGNED)
        + begin
    )
    m_scale_ptr = array(table_ptr, tensor, 5, 9, tl.float32, False) + begin // SHARED
    v_scale_ptr = array(table_ptr, tensor, 6, 9, tl.float32, False) + begin // SHARED
    stream = tl.load(table_ptr + tensor * 9 + 8)
    inverse = root_bias2
    if not INTERPRETED:
        inverse = tl.div_rn(root_bias2 * 0.0 + 1.0, root_bias2)
    if SCALED:
        scale = tl.load(grad_scale_ptr)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            g *= scale
        w = load_weight(p_ptr, master_ptr, at, inside, MASTER)
        m = load_moment(m_ptr, m_scale_ptr, at, inside, False, M, BLOCK, SHARED)
        v = load_moment(v_ptr, v_scale_ptr, at, inside, True, V, BLOCK, SHARED)
        if DECOUPLED:
            w *= kept
        else:
            g += weight_decay * w
        m = m * beta1 + rest1 * g
        v = v * beta2 + rest2 * (g * g)
        w -= lr_over_bias1 * tl.div_rn(m, over(tl.sqrt_rn(v), root_bias2, inverse) + eps)
        # Placeholders, which nobody reads without stochastic rounding.
        w0 = at
        w1 = at
        w2 = at
        if STOCHASTIC:
            w0, w1, w2 = words(seed, begin + start, stream, step, BLOCK)
        store_weight(p_ptr, master_ptr, at, inside, w, w0, MASTER, P, STOCHASTIC)
        store_moment(m_ptr, m_scale_ptr, at, inside, m, w1, False, M, STOCHASTIC, BLOCK, SHARED)
        store_moment(v_ptr, v_scale_ptr, at, inside, v, w2, True, V, STOCHASTIC, BLOCK, SHARED)


@kernel
def norm_kernel(
    table_ptr,
    chunks_ptr,
    out_ptr,
    factor_ptr,
    G: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum a chunk's squares, or with `SCALE` multiply the chunk by a factor, in place."""
    tensor, begin, size = chunk(table_ptr, chunks_ptr, 1, 2, ALIGNED, CHUNK)
    g_ptr = array(table_ptr, tensor, 0, 2, G, ALIGNED) + begin
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        if SCALE:
            tl.store(g_ptr + at, cast(g * tl.load(factor_ptr), G), mask=at < size)
        squares += g * g
    if not SCALE:
        tl.store(out_ptr + tl.program_id(0), tl.sum(squares, axis=0))


def adamw_(
    lists: Lists,
    streams: Sequence[int],
    grad_scale: Tensor | None,
    clock: Tensor | None,
    hyper: Hyper,
) -> None:
    """Launch the kernel on all tensors that have elements; arguments as in the reference."""
    empty = [None] * len(lists.params)
    columns = [tuple(column) if column else tuple(empty) for column in lists]
    rows = [
        (*(0 if t is None else address(t) for t in row), row[0].numel(), streams[i])
        for i, row in enumerate(zip(*columns, strict=True))
    ]
    p = lists.params[0]
    numbers = None if clock is None else device_numbers(clock, hyper)
    if lists.masters:
        master = {torch.int16: "remainder", torch.float32: "fp32"}[lists.masters[0].dtype]
    else:
        master = "none"
    for table, chunks, aligned in tables(rows, 5, 7, CHUNK, p.device):
        with on_device_of(p):
            adamw_kernel[(len(chunks),)](
                table,
                chunks,
                grad_scale,
                numbers,
                None if clock is None else clock[1:],
                hyper.beta1,
                hyper.beta2,
                hyper.eps,
                hyper.weight_decay,
                1 - hyper.lr * hyper.weight_decay,
                hyper.lr / hyper.bias1,
                hyper.bias2**0.5,
                1 - hyper.beta1,
                1 - hyper.beta2,
                hyper.seed,
                hyper.step,
                P=TYPES[p.dtype],
                G=TYPES[lists.grads[0].dtype],
                M=TYPES[lists.exp_avgs[0].dtype],
                V=TYPES[lists.exp_avg_sqs[0].dtype],
                MASTER=master,
                SCALED=grad_scale is not None,
                CLOCKED=clock is not None,
                DECOUPLED=hyper.decoupled,
                STOCHASTIC=hyper.stochastic,
                ALIGNED=aligned,
                BLOCK=BLOCK,
                CHUNK=CHUNK,
                SHARED=MOMENT_BLOCK,
                num_warps=8,
            )


def device_numbers(clock: Tensor, hyper: Hyper) -> Tensor:
    """Return the factors of the weight, `lr / bias1` and the root of `bias2`, from `clock` (lr,
    step) in fp64.
    """
    lr, step = clock
    beta1, beta2 = (torch.full_like(step, beta) for beta in (hyper.beta1, hyper.beta2))
    corrected = not hyper.bias1 == hyper.bias2 == 1
    bias1, bias2 = (
        1 - beta**step if corrected else torch.ones_like(step) for beta in (beta1, beta2)
    )
    return torch.stack((1 - lr * hyper.weight_decay, lr / bias1, bias2.sqrt())).float()


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements of all tensors of one dtype, a scalar in fp32."""
    partial = [_gradients(grads, *part) for part in _tables_of(grads)]
    if not partial:
        return torch.zeros((), device=grads[0].device)
    # fp64 costs nothing for one number a chunk, and there may be many chunks.
    return torch.cat(partial).sum(dtype=torch.float64).sqrt().float()


def scale_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors of one dtype by `factor`, in place."""
    for part in _tables_of(grads):
        _gradients(grads, *part, factor=factor)


def _tables_of(grads: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, bool]]:
    return tables([(address(g), g.numel()) for g in grads], 1, 1, CHUNK, grads[0].device)


def _gradients(
    grads: Sequence[Tensor],
    table: Tensor,
    chunks: Tensor,
    aligned: bool,
    factor: Tensor | None = None,
) -> Tensor:
    """Launch the norm kernel: the sum of squares of each chunk, or with a `factor` nothing of
    use.
    """
    partial = torch.empty(len(chunks), dtype=torch.float32, device=chunks.device)
    with on_device_of(grads[0]):
        norm_kernel[(len(chunks),)](
            table,
            chunks,
            partial,
            factor,
            G=TYPES[grads[0].dtype],
            SCALE=factor is not None,
            ALIGNED=aligned,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            num_warps=8,
        )
    return partial
