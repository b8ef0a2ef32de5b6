"""AdamW over many tensors in one call, gradient norm and clipping: contract and registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtrain_kernels.operators import operator
from mtrain_kernels.optimizer import reference
from mtrain_kernels.optimizer.reference import Hyper, Lists, clip_factor
from mtrain_kernels.optimizer.rounding import MOMENT_BLOCK, scales_of, store_moment
from mtrain_kernels.registry import Case, Cost, Model, Op, pick

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)


def adamw_(
    lists: Lists,
    hyper: Hyper,
    *,
    streams: Sequence[int] = (),
    grad_scale: Tensor | None = None,
    clock: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Take one step of AdamW on every tensor of `lists`, in place and in one launch; see
    `reference.adamw_`.

    `streams` name the tensors to the random numbers of stochastic rounding (their places in the
    lists by default); `grad_scale` [] or [1] fp32 multiplies all gradients. `clock` [2] fp64 on the
    device holds learning rate and step in place of `hyper`'s, so that a captured graph follows
    them. Raises `ValueError` where shapes, dtypes or layouts do not fit, `Unavailable` where the
    named implementation cannot run.
    """
    if not lists.params:
        return
    _require(lists, hyper, grad_scale, clock)
    streams = list(streams or range(len(lists.params)))
    if len(streams) != len(lists.params):
        raise ValueError(f"{len(streams)} streams for {len(lists.params)} params")
    backend = pick("optimizer", impl, lists.params[0].device)
    _adamw(*map(list, lists), streams, grad_scale, clock, *hyper, backend)


def grad_norm(grads: Sequence[Tensor], *, impl: str = "auto") -> Tensor:
    """Return the Euclidean norm of all elements of all contiguous tensors, a scalar in fp32 on
    their device; 0 for none.
    """
    grads = [g.detach() for g in grads]
    if not grads:
        return torch.zeros(())
    norms = [_grad_norm(same, pick("optimizer", impl, same[0].device)) for same in _by_dtype(grads)]
    # The norm of norms is the norm of all elements.
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_grad_norm_(
    grads: Sequence[Tensor], max_norm: float, *, norm: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """Scale all contiguous tensors in place so that their norm is at most `max_norm`; return the
    norm from before.

    `norm` is theirs unless given, as where it is reduced over ranks. Nothing waits for the device.
    To save a pass, hand `reference.clip_factor(norm, max_norm)` to `adamw_` as `grad_scale`
    instead.
    """
    norm = grad_norm(grads, impl=impl) if norm is None else norm
    factor = clip_factor(norm, max_norm)
    for same in _by_dtype([g.detach() for g in grads]):
        _scale(same, factor, pick("optimizer", impl, same[0].device))
    return norm


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for x in tensors:
        if not x.is_contiguous() or x.dtype not in FLOATS:
            raise ValueError(
                f"gradients must be contiguous fp32, fp16 or bf16, not {x.dtype} with {x.stride()}"
            )
        kinds.setdefault((x.device, x.dtype), []).append(x)
    return list(kinds.values())


def _require(lists: Lists, hyper: Hyper, grad_scale: Tensor | None, clock: Tensor | None) -> None:
    count = len(lists.params)
    eight = {name: getattr(lists, name) for name in ("exp_avgs", "exp_avg_sqs")}
    allowed = {
        "params": FLOATS,
        "grads": FLOATS,
        "exp_avgs": MOMENTS,
        "exp_avg_sqs": MOMENTS,
        "masters": (torch.float32, torch.int16),
        "exp_avg_scales": (torch.float32,),
        "exp_avg_sq_scales": (torch.float32,),
    }
    for name, tensors in lists._asdict().items():
        scaled = name.endswith("scales")
        # exp_avg_scales belong to exp_avgs and exist only for eight bits.
        if not tensors and (
            name == "masters" or (scaled and eight[name[:-7] + "s"][0].dtype != torch.uint8)
        ):
            continue
        if len(tensors) != count:
            raise ValueError(f"{len(tensors)} {name} for {count} params")
        if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in allowed[name]:
            raise ValueError(
                f"{name} must have one dtype of {allowed[name]}, not"
                f" {sorted({str(t.dtype) for t in tensors})}"
            )
        for t, p in zip(tensors, lists.params, strict=True):
            size = scales_of(p.numel()) if scaled else p.numel()
            if t.numel() != size or not t.is_contiguous() or t.device != p.device:
                raise ValueError(
                    f"{name}: {tuple(t.shape)} {t.stride()} on {t.device} for {tuple(p.shape)} on"
                    f" {p.device}"
                )
    if (
        lists.masters
        and lists.masters[0].dtype == torch.int16
        and lists.params[0].dtype != torch.bfloat16
    ):
        raise ValueError(
            f"16-bit remainders belong to bf16 parameters, not {lists.params[0].dtype}"
        )
    if hyper.step < 1 or not 0 <= hyper.seed < 1 << 63:
        raise ValueError(f"step {hyper.step} must be at least 1, seed {hyper.seed} in 0 .. 2^63")
    if grad_scale is not None and (grad_scale.numel() != 1 or grad_scale.dtype != torch.float32):
        raise ValueError(
            f"grad_scale must be one number in fp32, not {tuple(grad_scale.shape)}"
            f" {grad_scale.dtype}"
        )
    if clock is not None and (clock.shape != (2,) or clock.dtype != torch.float64):
        raise ValueError(
            f"clock must be lr and step in fp64, not {tuple(clock.shape)} {clock.dtype}"
        )


MUTATED = ("params", "exp_avgs", "exp_avg_sqs", "masters", "exp_avg_scales", "exp_avg_sq_scales")


@operator("adamw_", mutates=MUTATED)
def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    streams: list[int],
    grad_scale: Tensor | None,
    clock: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias1: float,
    bias2: float,
    decoupled: bool,
    stochastic: bool,
    seed: int,
    step: int,
    backend: str,
) -> None:
    lists = Lists(params, grads, exp_avgs, exp_avg_sqs, masters, exp_avg_scales, exp_avg_sq_scales)
    hyper = Hyper(
        lr, beta1, beta2, eps, weight_decay, bias1, bias2, decoupled, stochastic, seed, step
    )
    if backend == "reference":
        return reference.adamw_(lists, streams, grad_scale, clock, hyper)
    from mtrain_kernels.optimizer import triton

    return triton.adamw_(lists, streams, grad_scale, clock, hyper)


@operator("grad_norm", shapes=lambda grads: grads[0].new_empty((), dtype=torch.float32))
def _grad_norm(grads: list[Tensor], backend: str) -> Tensor:
    if backend == "reference":
        return reference.grad_norm(grads)
    from mtrain_kernels.optimizer import triton

    return triton.grad_norm(grads)


@operator("scale_", mutates=("tensors",))
def _scale(tensors: list[Tensor], factor: Tensor, backend: str) -> None:
    if backend == "reference":
        torch._foreach_mul_(tensors, factor)
        return
    from mtrain_kernels.optimizer import triton

    triton.scale_(tensors, factor)


# Dtypes of master, moments and gradients, and the bytes moved for each parameter: the weight
# written (and read where it is half of the master), the gradient read, master and moments read and
# written.
KINDS = {
    "fp32_master": (torch.float32, torch.float32, torch.float32, 2 + 4 + 3 * 8),
    "remainder_bf16": (torch.int16, torch.bfloat16, torch.bfloat16, 4 + 2 + 4 + 2 * 4),
    "remainder_8bit": (torch.int16, torch.uint8, torch.bfloat16, 4 + 2 + 4 + 2 * 2),
}


def _weights(model: Model) -> list[tuple[int, ...]]:
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    hidden = model.hidden
    return [
        (qkv, hidden),
        (hidden, model.heads * model.head_dim),
        (2 * model.ffn, hidden),
        (hidden, model.ffn),
        (hidden,),
    ]


def tensors(model: Model, kind: str, device: torch.device) -> Lists:
    """Return the tensors of a step on one layer of `model`, kept as `kind` (a key of
    `KINDS`) says.
    """
    master, moment, grad, _ = KINDS[kind]

    def make(dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in _weights(model)]

    if moment == torch.uint8:
        scales = [torch.ones(scales_of(p.numel()), device=device) for p in make(grad)]
    else:
        scales = []
    again = [s.clone() for s in scales]
    return Lists(
        make(torch.bfloat16), make(grad), make(moment), make(moment), make(master), scales, again
    )


HYPER = Hyper(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05, True, False, 0, 1)


def _launch(model: Model) -> None:
    from mtrain_kernels.optimizer import triton

    for kind in ("remainder_bf16", "remainder_8bit"):
        triton.adamw_(tensors(model, kind, torch.device("meta")), range(5), None, None, HYPER)
    lists = tensors(model, "remainder_bf16", torch.device("meta"))
    one = torch.empty((), device="meta")
    clock = torch.empty(2, dtype=torch.float64, device="meta")
    triton.adamw_(
        lists._replace(masters=[]),
        range(5),
        one,
        clock,
        HYPER._replace(stochastic=True, decoupled=False),
    )
    triton.grad_norm(lists.grads)
    triton.scale_(lists.grads, one)


def _drawn(lists: Lists) -> Lists:
    """Return tensors as these with numbers drawn at random; what is in eight bits has scales
    of its own.
    """
    p = lists.params[0]
    generator = torch.Generator(p.device).manual_seed(0)

    def draw(like: Sequence[Tensor], size: float) -> list[Tensor]:
        return [size * torch.randn(x.shape, generator=generator, device=p.device) for x in like]

    moments = draw(lists.params, 1e-3), [x.square() for x in draw(lists.params, 1e-3)]
    kept: list[list[Tensor]] = []
    scales: list[list[Tensor]] = []
    for second, (old, new) in enumerate(
        zip((lists.exp_avgs, lists.exp_avg_sqs), moments, strict=True)
    ):
        stored = [
            store_moment(x.view(-1), a.dtype, bool(second)) for a, x in zip(old, new, strict=True)
        ]
        kept.append([x.view(a.shape).contiguous() for a, (x, _) in zip(old, stored, strict=True)])
        scales.append([scale for _, scale in stored if scale is not None])
    params = [x.to(p.dtype) for x in draw(lists.params, 0.02)]
    masters = [
        torch.zeros_like(old) if old.dtype == torch.int16 else x.to(old.dtype)
        for old, x in zip(lists.masters, params, strict=True)
    ]
    grads = [x.to(g.dtype) for g, x in zip(lists.grads, draw(lists.grads, 1e-3), strict=True)]
    return Lists(params, grads, kept[0], kept[1], masters, scales[0], scales[1])


def _checked(inputs: dict[str, Any], impl: str) -> tuple[Tensor, ...]:
    """Return how much a step changes weights, and mean sizes of moments in blocks, where one
    flipped rounding counts little.

    Weights change by moments that are not yet rounded, and decay enough to be seen.
    """
    lists = _drawn(inputs["lists"])
    before = [x.clone() for x in reference._read(lists)[0]]
    adamw_(lists, HYPER._replace(weight_decay=100.0), impl=impl)
    after, *moments = reference._read(lists)
    changes = (new - old for new, old in zip(after, before, strict=True))
    blocks = (
        pad(x, (0, -len(x) % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
        for found in moments
        for x in found
    )
    return *changes, *(block.abs().mean(1) for block in blocks)


def _case(kind: str) -> Case:
    def cost(model: Model) -> Cost:
        return Cost(
            bytes=KINDS[kind][3] * sum(torch.Size(shape).numel() for shape in _weights(model))
        )

    return Case(
        f"adamw_{kind}",
        lambda model, device, dtype: {"lists": tensors(model, kind, device)},
        lambda inputs, impl: adamw_(inputs["lists"], HYPER, impl=impl),
        forward=cost,
        checked=_checked,
    )


OPS = (Op("optimizer", cases=tuple(map(_case, KINDS)), launch=_launch),)
