"""Definition of the Mamba-2 scan, in plain torch: one step after another, and by chunks; both are
the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ssd_sequential(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the recurrence `S_i = exp(dt_i a) S_(i-1) + dt_i x_i b_i^T`, `y_i = S_i c_i + d x_i`,
    and the last state.

    `x` [n, t, h, p], `dt` [n, t, h], `a` [h] (negative where the state fades), `b` and `c` [n, t,
    g, s] with h a multiple of g: head i reads group i // (h/g). `d` [h] or [h, p], `dt_bias` [h] is
    added to dt, `dt_softplus` then takes its softplus. `state` [n, h, p, s] is what comes before
    (zeros). `segments` [n, t] are integers: the state starts again from zeros where they change.
    Returns y [n, t, h, p] in x's dtype and the state [n, h, p, s] in fp32 (fp64 for fp64 x); half
    input is computed in fp32. Raises `ValueError` where the shapes do not fit.
    Source: Dao and Gu 2024, arXiv:2405.21060, equation 2.
    """
    xw, dtw, aw, bw, cw, s = _prepare(x, dt, a, b, c, d, dt_bias, dt_softplus, state, segments)
    ys = []
    for i in range(x.shape[1]):
        if segments is not None and i:
            s = torch.where((segments[:, i] == segments[:, i - 1])[:, None, None, None], s, 0.0)
        step = dtw[:, i, :, None] * xw[:, i]
        s = (dtw[:, i] * aw).exp()[..., None, None] * s + step[..., None] * bw[:, i, :, None, :]
        ys.append((s * cw[:, i, :, None, :]).sum(-1))
    y = torch.stack(ys, 1) if ys else torch.zeros_like(xw)
    return _skip(y, xw, d).to(x.dtype), s


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute `ssd_sequential` by products of matrices over chunks of `chunk` times; same
    arguments.

    Inside a chunk every time reads the earlier ones through a lower triangle of decays; what lies
    before the chunk comes through its state. Raises `ValueError` where shapes do not fit or `chunk`
    is not positive. Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be positive")
    xw, dtw, aw, bw, cw, s = _prepare(x, dt, a, b, c, d, dt_bias, dt_softplus, state, segments)
    ys = []
    segments = None if segments is None else runs(segments)
    before = None if segments is None else segments[:, :1]
    for i in range(0, x.shape[1], chunk):
        here = slice(i, i + chunk)
        marks = None if segments is None else segments[:, here]
        step = dtw[:, here]
        y, s = _chunk(
            step[..., None] * xw[:, here], step * aw, bw[:, here], cw[:, here], s, marks, before
        )
        ys.append(y)
        before = None if marks is None else marks[:, -1:]
    y = torch.cat(ys, 1) if ys else torch.zeros_like(xw)
    return _skip(y, xw, d).to(x.dtype), s


def runs(segments: Tensor) -> Tensor:
    """Return segments [n, t] counted from 0 in each row: a mark that comes back later is another
    segment than before.
    """
    changed = torch.zeros_like(segments, dtype=torch.int32)
    changed[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return changed.cumsum(1, dtype=torch.int32)


def _chunk(
    u: Tensor,
    fade: Tensor,
    b: Tensor,
    c: Tensor,
    s: Tensor,
    marks: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return one chunk: outputs [n, l, h, p] and the state behind it, from inputs `u`, log decays
    `fade` and state `s`.
    """
    total = fade.cumsum(1).transpose(1, 2)
    length = total.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=u.device).tril()
    into = total
    if marks is not None and before is not None:
        seen = seen & (marks[:, :, None] == marks[:, None, :])[:, None]
        # The state reaches only the times that continue the segment from before the chunk.
        into = total.masked_fill((marks != before)[:, None], float("-inf"))
    # Masked before the exponential: an entry above the diagonal would overflow, and its gradient
    # would be NaN.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    scores = torch.einsum("nihs,njhs->nhij", c, b) * decay
    y = torch.einsum("nhij,njhp->nihp", scores, u)
    y = y + torch.einsum("nihs,nhps,nhi->nihp", c, s, into.exp())
    # The last row of decays leads from each time to the end of the chunk.
    s = into[..., -1].exp()[..., None, None] * s + torch.einsum(
        "nhj,njhp,njhs->nhps", decay[..., -1, :], u, b
    )
    return y, s


def _prepare(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return checked inputs in the dtype of the computation, with one b and c for each head, and
    the first state.
    """
    require_ssd(x, dt, a, b, c, d, dt_bias, state, segments)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n, _, h, p = x.shape
    share = h // b.shape[2]
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    if dt_softplus:
        dt = F.softplus(dt)
    first = x.new_zeros(n, h, p, b.shape[3], dtype=wide) if state is None else state.to(wide)
    b, c = (m.to(wide).repeat_interleave(share, 2) for m in (b, c))
    return x.to(wide), dt, a.to(wide), b, c, first


def _skip(y: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    if d is None:
        return y
    return y + x * (d.to(x.dtype) if d.ndim == 2 else d.to(x.dtype)[:, None])


def require_ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    segments: Tensor | None,
) -> None:
    """Raise `ValueError` unless the arguments of `ssd` belong together."""
    if x.ndim != 4 or dt.shape != x.shape[:3]:
        raise ValueError(
            f"x {tuple(x.shape)} must be [batch, times, heads, size] and dt {tuple(dt.shape)} its"
            " first three"
        )
    n, t, h, p = x.shape
    if b.ndim != 4 or b.shape != c.shape or b.shape[:2] != (n, t):
        raise ValueError(
            f"b {tuple(b.shape)} and c {tuple(c.shape)} must both be [{n}, {t}, groups, state]"
        )
    if b.shape[2] == 0 or h % b.shape[2]:
        raise ValueError(f"{h} heads are no multiple of {b.shape[2]} groups")
    vectors = {"a": (a, ((h,),)), "d": (d, ((h,), (h, p))), "dt_bias": (dt_bias, ((h,),))}
    for name, (value, shapes) in vectors.items():
        if value is not None and tuple(value.shape) not in shapes:
            raise ValueError(f"{name} {tuple(value.shape)} must be {' or '.join(map(str, shapes))}")
    if any(
        other is not None and other.device != x.device
        for other in (dt, a, b, c, d, dt_bias, state, segments)
    ):
        raise ValueError(f"all tensors must be on {x.device}, as x")
    if state is not None and state.shape != (n, h, p, b.shape[3]):
        raise ValueError(f"state {tuple(state.shape)} must be {(n, h, p, b.shape[3])}")
    if segments is not None and (segments.shape != (n, t) or segments.is_floating_point()):
        raise ValueError(f"segments must be integers ({n}, {t}), not {tuple(segments.shape)}")
