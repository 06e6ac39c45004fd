"""Attention in planned pieces, for any caller that has q, k and v.

Owns the choice of plan per shape, the adapters to the host's calling conventions and the step down
after a fault. The pieces themselves are in ``pieces.py``, their sizes in ``chunking.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from .chunking import (
    MAX_SCORES,
    AttentionLimits,
    AttentionPlan,
    MaskKind,
    Policy,
    plan_attention,
)
from .device import MAX_SINGLE_ALLOC_BYTES, DeviceFacts
from .faults import FaultBudget, FaultReport, Reaction, run_guarded
from .governor import Governor
from .pieces import (
    Kernel,
    copied,
    dense,
    host_pieces,
    mask_to_4d,
    plain,
    run_fused_pieces,
    run_math,
    run_on_host,
    run_online,
    to_heads,
)

SECONDS_PER_LAUNCH = 0.25
"""An eighth of the 2 s after which Windows resets the device (TDR default)."""

WORKSPACE_FRACTION = 0.25
MIN_WORKSPACE_BYTES = 64 * 2**20
UNKNOWN_WORKSPACE_BYTES = 2**30
CPU_SCORES = 2**21
"""Scores of a piece on a processor: they then stay in its cache (tools/bench_attention.py measures
less than half the time of pieces that do not)."""

FLOPS_DISCRETE = 10e12
FLOPS_INTEGRATED = 1e12
"""Sustained FLOP/s assumed when neither profile nor preflight knows: deliberately low."""

Attention = Callable[..., torch.Tensor]
Finish = Callable[[torch.Tensor], torch.Tensor]


def limits_from_facts(
    facts: DeviceFacts, workspace_bytes: int = 0, half_scores: bool = False
) -> AttentionLimits:
    """Derive what one call may cost from what is known about the device.

    Args:
        workspace_bytes: all temporaries of a call; 0 takes a quarter of the usable memory.
        half_scores: keep scores in the input's dtype.
    """
    if workspace_bytes <= 0:
        usable = int(facts.usable_bytes * WORKSPACE_FRACTION)
        workspace_bytes = max(MIN_WORKSPACE_BYTES, usable) if usable else UNKNOWN_WORKSPACE_BYTES
    weak = facts.is_integrated or not facts.is_supported
    rate = facts.flops_per_s or (FLOPS_INTEGRATED if weak else FLOPS_DISCRETE)
    cap = min(MAX_SINGLE_ALLOC_BYTES, facts.max_alloc_bytes or MAX_SINGLE_ALLOC_BYTES)
    return AttentionLimits(
        workspace_bytes=workspace_bytes,
        alloc_bytes=cap // 2,
        launch_flops=int(SECONDS_PER_LAUNCH * rate),
        max_scores=CPU_SCORES if facts.kind == "cpu" else MAX_SCORES,
        fused=facts.fused_sdpa,
        fused_max_dim_head=facts.fused_max_dim_head,
        half_scores=half_scores,
    )


@dataclass
class AttentionReport:
    """What happened to the attention calls of a run."""

    calls: int = 0
    inert: int = 0
    chained: int = 0
    masked: int = 0
    grouped: int = 0
    pieces: int = 0
    launches: int = 0
    policies: Counter[str] = field(default_factory=lambda: Counter[str]())
    faults: FaultReport = field(default_factory=FaultReport)


@dataclass(frozen=True)
class _Way:
    """How calls of one shape are run: the plan, and what is done to the inputs first."""

    plan: AttentionPlan
    inputs: str = ""  # "", "contiguous" or "float32"


Key = tuple[int, int, int, int, int, torch.dtype, MaskKind, bool, bool]


class PlannedAttention:
    """Exact attention whose pieces stay within a device's limits.

    Inert, that is the plain kernel, on anything but an XPU unless ``limits`` are given.

    Args:
        facts: the device. limits: overrides what the facts imply.
        policy: ``auto`` or a policy to force.
        kernel: called as ``kernel(q, k, v, attn_mask=, scale=)``.
        governor: told about every piece; block hooks must not count attention again.
        budget: faults tolerated; shared with the rest of the run if given.
        cancel_types: exceptions of the host that must pass. release: frees cached memory.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        limits: AttentionLimits | None = None,
        *,
        policy: Policy = "auto",
        kernel: Kernel = torch.nn.functional.scaled_dot_product_attention,
        governor: Governor | None = None,
        budget: FaultBudget | None = None,
        report: AttentionReport | None = None,
        cancel_types: tuple[type[BaseException], ...] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        self.facts = facts
        self.limits = limits or limits_from_facts(facts)
        self.policy: Policy = policy
        self.active = facts.is_xpu or limits is not None
        self.kernel = kernel
        self.budget = budget or FaultBudget()
        self.report = report or AttentionReport()
        self._tick = governor.tick if governor is not None else _no_tick
        self._cancel_types = cancel_types
        self._release = release
        self._ways: dict[Key, _Way] = {}

    def plan(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None
    ) -> AttentionPlan:
        """Return the plan for q [B, H, Nq, D] and k [B, Hk, Nk, D] as it would run now."""
        return self._way(_key(q, k, mask, False)).plan

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: [B, H, Nq, D]. k, v: [B, Hk, Nk, D], H a multiple of Hk.
            mask: bool (True = may be seen) or added to the scores; 2 to 4 axes, broadcast.
            scale: factor on the scores; None means D ** -0.5.
        Returns: [B, H, Nq, D], laid out as [B, Nq, H, D] in memory.
        Raises: DeviceMemoryError, DeviceFaultError or DeviceLostError when no way is left.
        """
        if self._is_inert(q, k, v):
            self.report.inert += 1
            return plain(self.kernel, q, k, v, mask_to_4d(mask), scale)
        return self._guarded(q, k, v, mask_to_4d(mask), scale)

    def as_override(self, previous: Attention | None = None) -> Attention:
        """Return a value for ``transformer_options["optimized_attention_override"]``.

        Args:
            previous: the override found there. It stays the kernel: pieces are cut here and passed
                to it; our own pieces take over only when it faults.
        """

        def override(
            func: Attention,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            heads: int,
            mask: torch.Tensor | None = None,
            attn_precision: torch.dtype | None = None,
            skip_reshape: bool = False,
            skip_output_reshape: bool = False,
            **kwargs: object,
        ) -> torch.Tensor:
            call = func if previous is None else partial(previous, func)

            def host(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
            ) -> torch.Tensor:
                options = dict(
                    kwargs,
                    attn_precision=attn_precision,
                    skip_reshape=skip_reshape,
                    skip_output_reshape=skip_output_reshape,
                )
                return call(q, k, v, heads, mask, **options)

            if self._is_inert(q, k, v):
                self.report.inert += 1
                return host(q, k, v, mask)
            q4, k4, v4 = to_heads(q, k, v, heads, skip_reshape)
            scale = kwargs.get("scale")
            mask4 = mask_to_4d(mask)

            def finish(out: torch.Tensor) -> torch.Tensor:
                # [B, H, N, D] -> [B, N, H*D]
                return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

            def chained() -> torch.Tensor:
                self.report.chained += 1
                rows = self._chained_rows(q4, k4, mask4)
                row_dims = (2 if skip_reshape else 1, 2 if skip_output_reshape else 1)
                return host_pieces(host, q, k, v, mask, rows, row_dims)

            return self._guarded(
                q4, k4, v4, mask4,
                float(scale) if isinstance(scale, (int, float)) else None,
                finish=finish,
                first=None if previous is None else chained,
                full=attn_precision == torch.float32,
            )  # fmt: skip

        return override

    def vae_attention(self, previous: Attention | None = None) -> Attention:
        """Return attention over all pixels of a VAE's middle block.

        The callable takes q, k, v as [B, C, H, W], one head of width C, and returns that shape.
        ``previous`` is called instead while this object is inert.
        """

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            inert = self._is_inert(q, k, v)
            if inert and previous is not None:
                self.report.inert += 1
                return previous(q, k, v)
            # [B, C, H, W] -> [B, 1, N, C]
            q4, k4, v4 = (t.flatten(2).unsqueeze(1).transpose(2, 3) for t in (q, k, v))
            if inert:
                result = self(q4.contiguous(), k4.contiguous(), v4.contiguous())
                return result.transpose(2, 3).reshape(q.shape)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            self._guarded(q4, k4, v4, None, None, out=out.flatten(2).unsqueeze(1).transpose(2, 3))
            return out

        return attend

    def _is_inert(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        if not self.active or 0 in (*q.shape, *k.shape):  # nothing to plan for empty tensors
            return True
        return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)

    def _way(self, key: Key) -> _Way:
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = _Way(self._make_plan(key, self.limits, self.policy))
        return way

    def _make_plan(self, key: Key, limits: AttentionLimits, policy: Policy) -> AttentionPlan:
        batch, heads, n_query, n_key, dim_head, dtype, mask, grouped, full = key
        if full and limits.half_scores:
            limits = replace(limits, half_scores=False)
        return plan_attention(
            batch, heads, n_query, n_key, dim_head, dtype.itemsize, limits, policy, mask, grouped
        )

    def _chained_rows(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Query rows of a piece over all batch items and heads, for a kernel that cuts neither."""
        plan = self._way(_key(q, k, mask, False)).plan
        rows = plan.rows * plan.head_split // (q.shape[0] * q.shape[1])
        return q.shape[2] if plan.pieces == 1 else max(64, rows // 64 * 64)

    def _guarded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        *,
        out: torch.Tensor | None = None,
        finish: Finish | None = None,
        first: Callable[[], torch.Tensor] | None = None,
        full: bool = False,
    ) -> torch.Tensor:
        """Run a call the way its shape has learned; on a known fault, step down and remember."""
        key = _key(q, k, mask, full)
        way = self._way(key)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        self.report.calls += 1
        self.report.masked += mask is not None
        self.report.grouped += key[7]

        def go(way: _Way) -> torch.Tensor:
            result = self._execute(way, q, k, v, mask, factor, out)
            return finish(result) if finish is not None else result

        def learn(way: _Way) -> torch.Tensor:
            result = go(way)
            self._ways[key] = way
            return result

        variants: dict[Reaction, Callable[[int], torch.Tensor]] = {
            "contiguous": lambda _: learn(replace(way, inputs="contiguous")),
            "smaller": lambda n: learn(self._smaller(key, way, n)),
            "cpu_block": lambda _: learn(_Way(self._make_plan(key, self.limits, "cpu"))),
        }
        if q.dtype != torch.float32:
            variants["dtype"] = lambda _: learn(_Way(self._float_plan(key), "float32"))
        return run_guarded(
            "attention",
            first if first is not None and way.inputs == "" else lambda: go(way),
            variants,
            self.budget,
            self.report.faults,
            cancel_types=self._cancel_types,
            release=self._release,
        )

    def _float_plan(self, key: Key) -> AttentionPlan:
        return self._make_plan((*key[:5], torch.float32, *key[6:]), self.limits, "auto")

    def _smaller(self, key: Key, way: _Way, attempt: int) -> _Way:
        """Fused whole, then fused pieces, then math, then math with half of it each time."""
        first = {"fused": 2, "fused_pieces": 1}.get(way.plan.policy, 0)
        if attempt < first:
            return replace(way, plan=self._make_plan(key, self.limits, "fused_pieces"))
        # also a call far below the limits is halved, as less memory is there than was believed
        whole = self._make_plan(key, self.limits, "math")
        limits = replace(self.limits, max_scores=min(self.limits.max_scores, whole.score_elements))
        return replace(way, plan=self._make_plan(key, limits.shrunk(attempt - first), "math"))

    def _execute(
        self, way: _Way, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, scale: float, out: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        plan, dtype = way.plan, q.dtype
        self.report.pieces += plan.pieces
        self.report.launches += plan.launches
        self.report.policies[plan.policy] += 1
        if way.inputs:
            self.report.launches += 3
            inner = torch.float32 if way.inputs == "float32" else dtype
            q, k, v = copied(q, inner), copied(k, inner), copied(v, inner)
            mask = mask.to(inner) if mask is not None and mask.dtype != torch.bool else mask
        if plan.policy == "fused" and out is None:
            result = plain(self.kernel, dense(q), dense(k), dense(v), mask, scale)
            self._tick(plan.launches)
            return result if result.dtype == dtype else result.to(dtype)
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            self._tick(2)
        if out is None:
            shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
            out = torch.empty(shape, dtype=dtype, device=q.device).transpose(1, 2)
        self._fill(plan, q, k, v, mask, scale, out)
        return out

    def _fill(
        self, plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, scale: float, out: torch.Tensor,
    ) -> None:  # fmt: skip
        if plan.policy == "fused":
            out.copy_(self.kernel(dense(q), dense(k), dense(v), attn_mask=mask, scale=scale))
            self._tick(plan.launches)
        elif plan.policy == "fused_pieces":
            run_fused_pieces(plan, q, k, v, mask, scale, out, self.kernel, self._tick)
        elif plan.policy == "cpu":
            run_on_host(q, k, v, mask, scale, out, self._tick)
        else:
            inner = q.dtype if q.dtype.itemsize == plan.inner_bytes else torch.float32
            run = run_online if plan.online else run_math
            run(plan, q, k, v, mask, scale, out, inner, self._tick)


def _no_tick(launches: int) -> None:
    del launches


def _key(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, full: bool) -> Key:
    batch, heads, n_query, dim_head = q.shape
    kind: MaskKind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    return batch, heads, n_query, k.shape[2], dim_head, q.dtype, kind, k.shape[1] != heads, full
