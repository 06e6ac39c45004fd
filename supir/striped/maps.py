"""Where the stripes of a map live: bookkeeping (integers, shared with the plan) and tensors.

Stripes are freed as soon as nothing reads them any more. When a budget is set, a stripe that
would exceed it waits in host memory; only the rows that are read come back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .geometry import pieces

EDGE_ROWS = 2  # rows a neighbour may still need of a stripe that is done


class Ledger:
    """Bytes of stored stripes, on the device and spilled.

    Args:
        budget_bytes: most bytes on the device; None for no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.device_bytes = 0
        self.host_bytes = 0
        self.device_peak = 0
        self.host_peak = 0

    def place(self, size: int) -> bool:
        """Book a stripe; return True when it has to wait in host memory."""
        spilled = self.budget_bytes is not None and self.device_bytes + size > self.budget_bytes
        if spilled:
            self.host_bytes += size
            self.host_peak = max(self.host_peak, self.host_bytes)
        else:
            self.device_bytes += size
            self.device_peak = max(self.device_peak, self.device_bytes)
        return spilled

    def release(self, size: int, spilled: bool) -> None:
        """Strike a stripe off."""
        if spilled:
            self.host_bytes -= size
        else:
            self.device_bytes -= size


class StripeBook:
    """Accounting of one map: which stripes exist, and where.

    Args:
        bounds: the cuts, see geometry.
        row_bytes: bytes of one row over all channels.
    """

    def __init__(self, bounds: tuple[int, ...], row_bytes: int, ledger: Ledger) -> None:
        self.bounds = bounds
        self.row_bytes = row_bytes
        self.ledger = ledger
        self.spilled = [False] * (len(bounds) - 1)
        self.starts = list(bounds[:-1])  # first row each stripe still holds
        self._next_free = 0

    def stripe_bytes(self, index: int) -> int:
        """Bytes of one stripe, or of what is left of it."""
        return (self.bounds[index + 1] - self.starts[index]) * self.row_bytes

    def is_whole(self, index: int, lo: int, hi: int) -> bool:
        """True when rows lo to hi are everything the stripe holds."""
        return (lo, hi) == (self.starts[index], self.bounds[index + 1])

    def book(self, index: int) -> bool:
        """Account for a new stripe; return True when it is spilled."""
        self.spilled[index] = self.ledger.place(self.stripe_bytes(index))
        return self.spilled[index]

    def free_below(self, row: int) -> int:
        """Drop every stripe that ends at or above ``row``; of the next keep only what is needed.

        Returns: 1 when a rest was copied out of a stripe (only rests of EDGE_ROWS or less, so
            that no row is copied twice), else 0.
        """
        while self._next_free < len(self.spilled) and self.bounds[self._next_free + 1] <= row:
            index = self._next_free
            self.ledger.release(self.stripe_bytes(index), self.spilled[index])
            self._drop(index)
            self._next_free += 1
        index = self._next_free
        if index == len(self.spilled) or row <= self.starts[index]:
            return 0
        rest = self.bounds[index + 1] - row
        if rest > EDGE_ROWS:
            return 0
        before = self.stripe_bytes(index)
        self._trim(index, row)
        self.starts[index] = row
        self.ledger.release(before - self.stripe_bytes(index), self.spilled[index])
        return 1

    def free(self) -> None:
        """Drop every stripe."""
        self.free_below(self.bounds[-1])

    def _drop(self, index: int) -> None:
        """Hook for the map that holds tensors."""

    def _trim(self, index: int, row: int) -> None:
        """Hook for the map that holds tensors: keep the rows from ``row`` on."""


class StripeMap(StripeBook):
    """A map [1, C, H, W] held as stripes [1, C, rows, W].

    Args:
        device: where stripes are computed.
        host_device: where spilled stripes wait.
    """

    def __init__(
        self,
        bounds: tuple[int, ...],
        row_bytes: int,
        ledger: Ledger,
        device: torch.device,
        host_device: torch.device,
    ) -> None:
        super().__init__(bounds, row_bytes, ledger)
        self.device = device
        self.host_device = host_device
        self._stripes: list[torch.Tensor | None] = [None] * (len(bounds) - 1)

    @classmethod
    def borrowed(cls, x: torch.Tensor) -> StripeMap:
        """Wrap a tensor of the caller, [1, C, H, W], as a map of one stripe that costs nothing."""
        made = cls((0, x.shape[2]), 0, Ledger(), x.device, x.device)
        made.put(0, x)
        return made

    def put(self, index: int, stripe: torch.Tensor) -> None:
        """Store a stripe, or send it to host memory when the budget is spent."""
        if self.book(index):
            stripe = stripe.to(self.host_device, copy=True)
        self._stripes[index] = stripe

    def read(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (offset from start, rows on the device) until rows start to stop are covered."""
        for index, lo, hi in pieces(self.bounds, start, stop):
            yield lo - start, self._rows(index, lo, hi)

    def gather(self, start: int, stop: int) -> torch.Tensor:
        """Return rows start to stop as one tensor without gaps; a whole stripe as it is."""
        cuts = list(pieces(self.bounds, start, stop))
        parts = [self._rows(*cut) for cut in cuts]
        if len(parts) > 1:
            return torch.cat(parts, dim=2)
        return parts[0] if self.is_whole(*cuts[0]) else parts[0].contiguous()

    def whole(self) -> torch.Tensor:
        """Return the whole map as one tensor."""
        return self.gather(0, self.bounds[-1])

    def stripes(self) -> Iterator[torch.Tensor]:
        """Yield every stripe, on the device."""
        for index, (lo, hi) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            yield self._rows(index, lo, hi)

    def _rows(self, index: int, lo: int, hi: int) -> torch.Tensor:
        stripe = self._stripes[index]
        assert stripe is not None, "a stripe was read before it was made or after it was freed"
        if not self.is_whole(index, lo, hi):
            first = self.starts[index]
            stripe = stripe[:, :, lo - first : hi - first]
        return stripe.to(self.device, copy=True) if self.spilled[index] else stripe

    def _drop(self, index: int) -> None:
        self._stripes[index] = None

    def _trim(self, index: int, row: int) -> None:
        stripe = self._stripes[index]
        assert stripe is not None, "a stripe was trimmed before it was made"
        rest = stripe[:, :, row - self.starts[index] :]
        self._stripes[index] = rest.clone(memory_format=torch.contiguous_format)
