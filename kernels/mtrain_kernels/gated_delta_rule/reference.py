"""Definition of the gated delta rule, in plain torch: one time after another, and by chunks; both
are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the sum of squares that queries and keys are divided by the root of."""


def gated_delta_rule_sequential(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    l2norm: bool = False,
    scale: float | None = None,
    state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the recurrence `S = exp(g_i) S`, `S_i = S + beta_i k_i (v_i - k_i^T S)^T`, `y_i =
    scale S_i^T q_i`.

    `q` and `k` [n, t, h, d], `v` [n, t, w, e] with w a multiple of h: head i of v has query and key
    i // (w/h). `g` [n, t, w] is the logarithm of the decay, `beta` [n, t, w] how much of a value is
    written. With `l2norm` queries and keys are first divided by their length; `scale` is 1 /
    sqrt(d) unless given. `state` [n, w, d, e] is what comes before (zeros). `segments` [n, t] are
    integers: the state starts again from zeros where they change. Returns y [n, t, w, e] in v's
    dtype and the last state [n, w, d, e] in fp32 (fp64 for fp64 v); half input is computed in fp32.
    Raises `ValueError` where the shapes do not fit.
    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, equation 10.
    """
    q, k, vw, g, beta, s = _prepare(q, k, v, g, beta, l2norm, scale, state, segments)
    ys = []
    for i in range(v.shape[1]):
        if segments is not None and i:
            s = torch.where((segments[:, i] == segments[:, i - 1])[:, None, None, None], s, 0.0)
        s = g[:, :, i].exp()[..., None, None] * s
        known = torch.einsum("nwde,nwd->nwe", s, k[:, :, i])
        # The delta: only what the state does not yet return for this key is written.
        s = s + torch.einsum("nw,nwd,nwe->nwde", beta[:, :, i], k[:, :, i], vw[:, :, i] - known)
        ys.append(torch.einsum("nwde,nwd->nwe", s, q[:, :, i]))
    y = torch.stack(ys, 1) if ys else v.new_zeros(v.shape, dtype=s.dtype)
    return y.to(v.dtype), s


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    l2norm: bool = False,
    scale: float | None = None,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule_sequential` by products of matrices over chunks of `chunk` times.

    Inside a chunk every time corrects what the earlier ones have written: a triangular system,
    solved for all chunks at once. What lies before a chunk comes through its state. Raises
    `ValueError` where shapes do not fit or `chunk` is not positive. Source: Yang, Kautz and
    Hatamizadeh 2024, arXiv:2412.06464, section 3.3.
    """
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be positive")
    q, k, vw, g, beta, s = _prepare(q, k, v, g, beta, l2norm, scale, state, segments)
    times = v.shape[1]
    q, k, vw, g, beta = (_chunks(x, chunk) for x in (q, k, vw, g, beta))
    total = g.cumsum(-1)
    seen, into, behind = _decays(total, _marks(segments, times, chunk))
    # A unit lower triangle: each write is corrected by the earlier ones in its direction.
    written = torch.eye(chunk, dtype=s.dtype, device=s.device) + (
        beta[..., None] * (k @ k.mT) * seen.tril(-1)
    )
    system = {"upper": False, "unitriangular": True}
    new = torch.linalg.solve_triangular(written, beta[..., None] * vw, **system)
    read = torch.linalg.solve_triangular(written, (beta * into)[..., None] * k, **system)
    scores = (q @ k.mT) * seen
    asked = q * into[..., None]
    kept = k * behind[..., None]
    ys = []
    # Only the states depend on each other; all above was done for every chunk at once.
    for i in range(vw.shape[2]):
        corrected = new[:, :, i] - read[:, :, i] @ s
        ys.append(asked[:, :, i] @ s + scores[:, :, i] @ corrected)
        s = into[:, :, i, -1, None, None] * s + kept[:, :, i].mT @ corrected
    y = torch.cat(ys, 2)[:, :, :times] if ys else vw.new_zeros(*vw.shape[:2], 0, vw.shape[-1])
    return y.transpose(1, 2).to(v.dtype), s


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Return [n, w, t, ...] as [n, w, t / chunk, chunk, ...], with zeros behind the last time: they
    change no state.
    """
    missing = -x.shape[2] % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
    return x.unflatten(2, (-1, chunk))


def _marks(segments: Tensor | None, times: int, chunk: int) -> Tensor | None:
    """Return segments [n, 1, t / chunk, chunk], counted from 0 in each row; the last goes on behind
    the last time.
    """
    if segments is None or not times:
        return None
    changed = torch.zeros_like(segments, dtype=torch.int32)
    changed[:, 1:] = segments[:, 1:] != segments[:, :-1]
    counted = changed.cumsum(1, dtype=torch.int32)
    last = counted[:, -1:].expand(-1, -times % chunk)
    return torch.cat([counted, last], 1).unflatten(1, (-1, chunk))[:, None]


def _decays(total: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of sums of log decays [..., l] in each chunk, the decays between two times of it,
    from the chunk's beginning to each time, and from each time to its end; 0 from one segment to
    another.
    """
    length = total.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=total.device).tril()
    into = total
    behind = total[..., -1:] - total
    if marks is not None:
        seen = seen & (marks[..., :, None] == marks[..., None, :])
        # The mark of the time before each chunk; the first chunk continues itself.
        before = torch.cat([marks[:, :, :1, :1], marks[:, :, :-1, -1:]], 2)
        into = into.masked_fill(marks != before, float("-inf"))
        behind = behind.masked_fill(marks != marks[..., -1:], float("-inf"))
    # Masked before the exponential: an entry above the diagonal would overflow, and its gradient
    # would be NaN.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, float("-inf"))
    return between.exp(), into.exp(), behind.exp()


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    l2norm: bool,
    scale: float | None,
    state: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return checked inputs in the dtype of the computation, heads before times, queries scaled,
    and the first state.
    """
    require_gated_delta_rule(q, k, v, g, beta, state, segments)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    n, _, heads, d = q.shape
    w, e = v.shape[2:]
    q, k, v, g, beta = (x.to(wide).transpose(1, 2).contiguous() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q = q * (d**-0.5 if scale is None else scale)
    if w != heads:
        q, k = (x.repeat_interleave(w // heads, 1) for x in (q, k))
    first = v.new_zeros(n, w, d, e) if state is None else state.to(wide)
    return q, k, v, g, beta, first


def require_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
) -> None:
    """Raise `ValueError` unless the arguments of `gated_delta_rule` belong together."""
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [batch, times, heads, size]"
        )
    n, t, h, d = q.shape
    if v.ndim != 4 or v.shape[:2] != (n, t):
        raise ValueError(f"v {tuple(v.shape)} must be [{n}, {t}, heads, size]")
    w, e = v.shape[2:]
    if h == 0 or w % h:
        raise ValueError(f"{w} heads of v are no multiple of {h} heads of q and k")
    for name, value in (("g", g), ("beta", beta)):
        if value.shape != (n, t, w):
            raise ValueError(f"{name} {tuple(value.shape)} must be {(n, t, w)}")
    if any(
        other is not None and other.device != v.device for other in (q, k, g, beta, state, segments)
    ):
        raise ValueError(f"all tensors must be on {v.device}, as v")
    if state is not None and state.shape != (n, w, d, e):
        raise ValueError(f"state {tuple(state.shape)} must be {(n, w, d, e)}")
    if segments is not None and (segments.shape != (n, t) or segments.is_floating_point()):
        raise ValueError(f"segments must be integers ({n}, {t}), not {tuple(segments.shape)}")
