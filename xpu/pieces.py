"""Carries out attention plans, one function per policy.

Owns the loops over pieces. Every operator here is accounted for in ``chunking.py``: a change in one
is a change in both. No decision is taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .chunking import AttentionPlan
from .device import host_region

Kernel = Callable[..., torch.Tensor]
Tick = Callable[[int], None]

TINY = 1e-30
"""Smallest softmax sum divided by; only rows without any allowed key have less."""


def copied(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous copy, always exactly one launch."""
    return torch.empty(t.shape, dtype=dtype or t.dtype, device=t.device).copy_(t)


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return t with a last stride of 1, which every fused kernel requires."""
    return t if t.stride(-1) == 1 else copied(t)


def mask_to_4d(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Add the missing leading axes: [Nq, Nk] and [B, Nq, Nk] become [B|1, H|1, Nq|1, Nk|1]."""
    if mask is None:
        return None
    if mask.ndim == 2:
        mask = mask.unsqueeze(0)
    return mask.unsqueeze(1) if mask.ndim == 3 else mask


def cut_mask(mask: torch.Tensor | None, *ranges: tuple[int, int]) -> torch.Tensor | None:
    """Cut a 4-D mask to (batch, heads, rows[, keys]); axes of size 1 are left to broadcast."""
    if mask is None:
        return None
    for dim, (start, stop) in enumerate(ranges):
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, start, stop - start)
    return mask


def spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over 0..total."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


def groups(
    plan: AttentionPlan, q: torch.Tensor
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the (batch, heads) ranges of a plan."""
    for batch in spans(q.shape[0], plan.batch_step):
        for heads in spans(q.shape[1], plan.head_step):
            yield batch, heads


def run_fused_pieces(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, scale: float, out: torch.Tensor, kernel: Kernel, tick: Tick,
) -> None:  # fmt: skip
    """Fused kernel per piece: contiguous queries in, result copied into ``out``."""
    k, v = dense(k), dense(v)
    for (b0, b1), (h0, h1) in groups(plan, q):
        kg, vg = k[b0:b1, h0:h1], v[b0:b1, h0:h1]
        for r0, r1 in spans(q.shape[2], plan.rows):
            piece = kernel(
                copied(q[b0:b1, h0:h1, r0:r1]), kg, vg,
                attn_mask=cut_mask(mask, (b0, b1), (h0, h1), (r0, r1)), scale=scale,
            )  # fmt: skip
            out[b0:b1, h0:h1, r0:r1].copy_(piece)
            del piece
            tick(3)


def run_math(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, scale: float, out: torch.Tensor, inner: torch.dtype, tick: Tick,
) -> None:  # fmt: skip
    """Exact attention per piece: scale folded into q, k and v flattened once, softmax in ``inner``."""
    nq, nk, d, dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    lines, rows = plan.batch_step * plan.head_step, min(plan.rows, nq)

    def buffer(width: int) -> torch.Tensor:
        return torch.empty(lines * rows * width, dtype=inner, device=q.device)

    scores, probs, product = buffer(nk), buffer(nk), buffer(dv)
    for (b0, b1), (h0, h1) in groups(plan, q):
        shape = (b1 - b0, h1 - h0)
        g = shape[0] * shape[1]
        qf = copied(q[b0:b1, h0:h1], inner).mul_(scale).view(g, nq, d)
        kt = copied(k[b0:b1, h0:h1], inner).view(g, nk, d).transpose(1, 2)
        vf = copied(v[b0:b1, h0:h1], inner).view(g, nk, dv)
        tick(4)
        for r0, r1 in spans(nq, rows):
            n = r1 - r0
            s = scores[: g * n * nk].view(g, n, nk)
            p = probs[: g * n * nk].view(g, n, nk)
            o = product[: g * n * dv].view(g, n, dv)
            torch.bmm(qf[:, r0:r1], kt, out=s)
            dead = _mask_scores(s.view(*shape, n, nk), cut_mask(mask, (b0, b1), (h0, h1), (r0, r1)))
            torch.softmax(s, -1, out=p)
            torch.bmm(p, vf, out=o)
            o4 = o.view(*shape, n, dv)
            if dead is not None:
                o4.masked_fill_(dead, 0.0)
            out[b0:b1, h0:h1, r0:r1].copy_(o4)
            tick(4 if dead is None else 8)
        del qf, kt, vf


def _mask_scores(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Mask scores in place; return which rows have no allowed key, as scaled_dot_product_attention
    gives 0 there and softmax would give NaN."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        hidden = mask.logical_not()
        scores.masked_fill_(hidden, float("-inf"))
        return hidden.all(-1, keepdim=True)
    scores.add_(mask)
    return mask.amax(-1, keepdim=True) == float("-inf")


def run_online(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, scale: float, out: torch.Tensor, inner: torch.dtype, tick: Tick,
) -> None:  # fmt: skip
    """Exact attention with the softmax carried over key blocks: running maximum, sum, result.

    Source: Milakov and Gimelshein 2018, online normaliser calculation for softmax.
    """
    extra = 0 if mask is None else 2 if mask.dtype == torch.bool else 1
    for (b0, b1), (h0, h1) in groups(plan, q):
        for r0, r1 in spans(q.shape[2], plan.rows):
            shape = (b1 - b0, h1 - h0, r1 - r0)
            g, n = shape[0] * shape[1], shape[2]
            qf = copied(q[b0:b1, h0:h1, r0:r1], inner).mul_(scale).view(g, n, -1)
            acc = torch.zeros(g, n, v.shape[3], dtype=inner, device=q.device)
            total = torch.zeros(g, n, 1, dtype=inner, device=q.device)
            peak = torch.full((g, n, 1), torch.finfo(inner).min, dtype=inner, device=q.device)
            tick(5)
            for j0, j1 in spans(k.shape[2], plan.key_step):
                kb = copied(k[b0:b1, h0:h1, j0:j1], inner).view(g, j1 - j0, -1)
                vb = copied(v[b0:b1, h0:h1, j0:j1], inner).view(g, j1 - j0, -1)
                s = torch.bmm(qf, kb.transpose(1, 2))
                part = cut_mask(mask, (b0, b1), (h0, h1), (r0, r1), (j0, j1))
                _mask_block(s.view(*shape, j1 - j0), part)
                risen = torch.maximum(peak, s.amax(-1, keepdim=True))
                s.sub_(risen).exp_()
                decay = peak.sub_(risen).exp_()
                total.mul_(decay).add_(s.sum(-1, keepdim=True))
                acc.mul_(decay).baddbmm_(s, vb)
                peak = risen
                tick(14 + extra)
                del s, kb, vb
            acc.div_(total.clamp_min_(TINY if inner != torch.float16 else 1e-7))
            out[b0:b1, h0:h1, r0:r1].copy_(acc.view(*shape, -1))
            tick(3)


def _mask_block(scores: torch.Tensor, mask: torch.Tensor | None) -> None:
    if mask is None:
        return
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), float("-inf"))
    else:
        scores.add_(mask)


def run_on_host(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    scale: float, out: torch.Tensor, tick: Tick,
) -> None:  # fmt: skip
    """This call on the host processor in float32; inputs copied out, the result copied back."""
    host = [torch.empty(t.shape, dtype=t.dtype, device="cpu").copy_(t) for t in (q, k, v)]
    host_mask = None
    if mask is not None:
        host_mask = torch.empty(mask.shape, dtype=mask.dtype, device="cpu").copy_(mask)
    with host_region():
        if host_mask is not None and host_mask.dtype != torch.bool:
            host_mask = host_mask.float()
        result = torch.nn.functional.scaled_dot_product_attention(
            *(t.float() for t in host), attn_mask=host_mask, scale=scale
        ).to(out.dtype)
    out.copy_(result)
    tick(4 if mask is None else 5)


def plain(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """One kernel call; grouped keys are expanded first when there is a mask, as the host does."""
    if k.shape[1] == q.shape[1]:
        return kernel(q, k, v, attn_mask=mask, scale=scale)
    if mask is None:
        return kernel(q, k, v, attn_mask=None, scale=scale, enable_gqa=True)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return kernel(q, k, v, attn_mask=mask, scale=scale)


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, split: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, N, H*D] -> [B, H, N, D], or as is if split; k and v may have fewer heads."""
    if split:
        return q, k, v
    batch, dim_head = q.shape[0], q.shape[-1] // heads
    kv_heads = k.shape[-1] // dim_head
    return (
        q.reshape(batch, -1, heads, dim_head).transpose(1, 2),
        k.reshape(batch, -1, kv_heads, dim_head).transpose(1, 2),
        v.reshape(batch, -1, kv_heads, v.shape[-1] // kv_heads).transpose(1, 2),
    )


def host_pieces(
    host: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, rows: int, row_dims: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Cut queries and mask by rows, pass each piece to another pack's override, join the results."""
    in_dim, out_dim = row_dims
    total = q.shape[in_dim]
    if rows >= total:
        return host(q, k, v, mask)
    out: torch.Tensor | None = None
    mask4 = mask_to_4d(mask)
    for start, stop in spans(total, rows):
        part = mask4
        if mask4 is not None and mask4.shape[2] > 1:
            part = mask4.narrow(2, start, stop - start)
        piece = host(q.narrow(in_dim, start, stop - start).contiguous(), k, v, part)
        if out is None:
            shape = list(piece.shape)
            shape[out_dim] = total
            out = torch.empty(shape, dtype=piece.dtype, device=piece.device)
        out.narrow(out_dim, start, stop - start).copy_(piece)
    assert out is not None
    return out
