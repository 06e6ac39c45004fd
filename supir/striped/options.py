"""What a striped run is told: its budgets and the callables the host side passes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

MIB = 1 << 20

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attention(q, k, v) -> out``: q and out [1, 1, n, C], k and v [1, 1, N, C], all contiguous."""


class BorrowWeights(Protocol):
    """Lend a layer's weight and bias, cast and placed like a tensor, for the length of a block."""

    def __call__(
        self, module: Any, like: torch.Tensor, /
    ) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield (weight, bias) in the dtype and on the device of ``like``; give back on exit."""
        ...


@dataclass(frozen=True)
class StripeOptions:
    """Settings of one striped encode or decode.

    Args:
        workspace_bytes: bytes the transient tensors of one stripe may take. A stripe is never
            shorter than two rows, so a very wide picture may need more; the plan says how much.
        borrow_weights: entered once per layer and sweep, never once per stripe.
        attention: replaces the query-chunked SDPA, and keeps the host's own attention unused.
        tick: called as ``tick(done, total)`` after every stripe.
        check_cancel: called before every stripe and attention chunk; raises to stop the run.
        store_budget_bytes: bytes of stored stripes that may stay on the device; what exceeds it
            waits on ``host_device``. None keeps everything on the device.
        host_device: where spilled stripes wait.
        polyphase: compute "nearest 2x, then 3x3" as four 2x2 kernels on the small map: 4/9 of
            the multiplications, about 2 % more rounding error in bf16.
    """

    workspace_bytes: int
    borrow_weights: BorrowWeights
    attention: Attention | None = None
    tick: Callable[[int, int], None] | None = None
    check_cancel: Callable[[], None] | None = None
    store_budget_bytes: int | None = None
    host_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    polyphase: bool = False
