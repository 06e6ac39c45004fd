"""What a striped run will do, before it does it: stripes, launches and bytes as integers.

The sweeps planned here are the ones the walk executes. Launches are those of an accelerator
(ATen calls that compute or copy; views and allocations are none); on the CPU statistics take
one more call per norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .geometry import Task, pieces
from .layout import Kind, KLLayout, Step
from .maps import Ledger, StripeBook
from .moments import COMBINE_LAUNCHES, moment_launches
from .sweeps import Limits, Pass, Sweep, make_sweeps, query_chunk

SDXL_VAE = KLLayout()
PHASE_WEIGHT_LAUNCHES = 18  # making the four 2x2 kernels of an upsampling convolution


@dataclass(frozen=True)
class StripePlan:
    """The numbers of one striped encode or decode of one batch item.

    Args:
        sweeps: in running order.
        ticks: progress steps.
        launches: ATen calls on an accelerator, without those of a passed-in attention (one
            each is counted) and without layer casts.
        maps_peak_bytes: most bytes of stored stripes on the device at once.
        host_peak_bytes: most bytes of stripes waiting in host memory.
        workspace_bytes: transient bytes of the most demanding stripe.
        kv_bytes: keys and values of the largest attention.
        output_bytes: the result.
        live_peak_bytes: bytes the run never exceeds on the device, weights and input excluded.
        largest_tensor_bytes: the largest single tensor.
        out_height, out_width: size of the result.
    """

    sweeps: tuple[Sweep, ...]
    ticks: int
    launches: int
    maps_peak_bytes: int
    host_peak_bytes: int
    workspace_bytes: int
    kv_bytes: int
    output_bytes: int
    live_peak_bytes: int
    largest_tensor_bytes: int
    out_height: int
    out_width: int

    @cached_property
    def stripes(self) -> tuple[int, ...]:
        """Stripes of each sweep."""
        return tuple(len(sweep.tasks) for sweep in self.sweeps)


def plan_encode(
    height: int, width: int, limits: Limits, layout: KLLayout | Sequence[Step] = SDXL_VAE
) -> StripePlan:
    """Plan the encoding of an image of height x width px. See plan_steps."""
    steps = layout.encoder_steps() if isinstance(layout, KLLayout) else layout
    return plan_steps(steps, height, width, limits)


def plan_decode(
    height: int, width: int, limits: Limits, layout: KLLayout | Sequence[Step] = SDXL_VAE
) -> StripePlan:
    """Plan the decoding of a latent of height x width. See plan_steps."""
    steps = layout.decoder_steps() if isinstance(layout, KLLayout) else layout
    return plan_steps(steps, height, width, limits)


def plan_steps(steps: Sequence[Step], height: int, width: int, limits: Limits) -> StripePlan:
    """Plan a network over an input of height x width.

    Raises: ShapeError when a side is too short for the network.
    """
    sweeps = make_sweeps(steps, height, width, limits)
    last, size = sweeps[-1], limits.element_bytes
    replay = _Replay(limits)
    for sweep in sweeps:
        replay.run(sweep)
    attention = [s for s in sweeps if s.work is Pass.KEYS]
    output_bytes = last.cout * last.height * last.width * size
    return StripePlan(
        sweeps=sweeps,
        ticks=sum(len(s.tasks) for s in sweeps),
        launches=replay.launches,
        maps_peak_bytes=replay.ledger.device_peak,
        host_peak_bytes=replay.ledger.host_peak,
        workspace_bytes=max(s.workspace_bytes for s in sweeps),
        kv_bytes=max((2 * s.cin * s.height * s.width * size for s in attention), default=0),
        output_bytes=output_bytes,
        live_peak_bytes=replay.live_peak + output_bytes,
        largest_tensor_bytes=max(_largest(s, limits) for s in sweeps),
        out_height=last.height,
        out_width=last.width,
    )


class _Replay:
    """Run sweeps on the books: the same places and frees as the walk, no tensors."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ledger = Ledger(limits.store_budget_bytes)
        self.launches = 0
        self.live_peak = 0
        self._kv = 0
        self._map: StripeBook | None = None  # None: the caller's input
        self._side: StripeBook | None = None  # what a residual block adds at its end
        self._measured = False

    def run(self, sweep: Sweep) -> None:
        if sweep.work is Pass.NATIVE:
            self._native(sweep)
        elif sweep.work is Pass.CONV1:
            self._residual_first(sweep)
        elif sweep.work is Pass.CONV2:
            self._residual_second(sweep)
        elif sweep.work is Pass.KEYS:
            self._keys(sweep)
        elif sweep.work is Pass.QUERIES:
            self._queries(sweep)
        else:
            self._plain(sweep)

    def _new(self, sweep: Sweep) -> StripeBook:
        row = sweep.cout * sweep.width * self.limits.element_bytes
        return StripeBook(sweep.bounds, row, self.ledger)

    def _read(self, book: StripeBook | None, start: int, stop: int, each: int = 1) -> None:
        """Count reading rows: ``each`` launch per piece, one more where it was spilled."""
        if book is None:
            self.launches += each
            return
        for index, _, _ in pieces(book.bounds, start, stop):
            self.launches += each + book.spilled[index]

    def _put(self, book: StripeBook, index: int) -> None:
        self.launches += book.book(index)

    def _hold(self, sweep: Sweep) -> None:
        """Note what is alive while a stripe of the sweep is computed."""
        live = self.ledger.device_bytes + sweep.workspace_bytes + self._kv
        self.live_peak = max(self.live_peak, live)

    def _measure(self) -> None:
        """Count the statistics pass over a map written without them, and their combination."""
        book = self._map
        if not self._measured:
            assert book is not None
            self.launches += moment_launches(self.limits.element_bytes) * len(book.spilled)
            self.launches += sum(book.spilled)
        self.launches += COMBINE_LAUNCHES

    def _gather(self, book: StripeBook | None, start: int, stop: int) -> None:
        """Count StripeMap.gather: nothing for a whole stripe, else one copy."""
        if book is None:
            return
        parts = list(pieces(book.bounds, start, stop))
        self._read(book, start, stop, each=0)
        index, lo, hi = parts[0]
        whole = book.is_whole(index, lo, hi) or book.spilled[index]
        self.launches += len(parts) > 1 or not whole

    def _stats(self, sweep: Sweep) -> None:
        if sweep.stat_groups:
            self.launches += moment_launches(self.limits.element_bytes)

    def _native(self, sweep: Sweep) -> None:
        step = sweep.step
        self._gather(self._map, 0, sweep.height_in)
        self._hold(sweep)
        self.launches += {
            Kind.CONV_IN: 1,
            Kind.RES: 7 + step.shortcut,
            Kind.ATTN: 11,
            Kind.UP: 2,
            Kind.DOWN: 2,
            Kind.OUT: 4,
        }[step.kind]
        if step.kind is Kind.OUT:
            self._finish()
            return
        made = self._new(sweep)
        self._put(made, 0)
        self._become(made, measured=False)

    def _plain(self, sweep: Sweep) -> None:
        if sweep.work is Pass.OUT:
            self._measure()
        elif sweep.work is Pass.UP and self.limits.polyphase:
            self.launches += PHASE_WEIGHT_LAUNCHES
        made = None if sweep.work is Pass.OUT else self._new(sweep)
        for i, task in enumerate(sweep.tasks):
            self._hold(sweep)
            self._convolve(sweep, task, self._map)
            self._stats(sweep)
            if made is None:
                self.launches += 1
            else:
                self._put(made, i)
            if self._map is not None:
                self.launches += self._map.free_below(task.keep)
        if made is None:
            self._finish()
        else:
            self._become(made, bool(sweep.stat_groups))

    def _convolve(self, sweep: Sweep, task: Task, source: StripeBook | None) -> None:
        inner = sweep.work is Pass.UP and not self.limits.polyphase
        if inner:  # border rows are written apart from the doubled ones
            for lo, hi in ((task.first, task.start // 2), (task.stop // 2, task.last)):
                if lo < hi:
                    self._read(source, lo, hi)
            self._read(source, task.start // 2, task.stop // 2)
        else:
            self._read(source, task.first, task.last)
        self.launches += (task.top > 0) + (task.bottom > 0) + sweep.normed + 1
        self.launches += sweep.work is Pass.DOWN  # the zero column
        self.launches += 5 * (sweep.work is Pass.UP and self.limits.polyphase)

    def _residual_first(self, sweep: Sweep) -> None:
        self._measure()
        source, made = self._map, self._new(sweep)
        assert source is not None
        side = self._new(sweep) if sweep.step.shortcut else None
        for i, task in enumerate(sweep.tasks):
            self._hold(sweep)
            self._convolve(sweep, task, source)
            self._stats(sweep)
            self._put(made, i)
            if side is not None:
                self._gather(source, task.start, task.stop)
                self.launches += 1
                self._put(side, i)
                self.launches += source.free_below(task.keep)
        self._side = source if side is None else side
        self._map, self._measured = made, True

    def _residual_second(self, sweep: Sweep) -> None:
        self._measure()
        source, made, side = self._map, self._new(sweep), self._side
        assert source is not None
        assert side is not None
        for i, task in enumerate(sweep.tasks):
            self._hold(sweep)
            self._convolve(sweep, task, source)
            self.launches += source.free_below(task.keep)
            self._read(side, task.start, task.stop)
            self.launches += side.free_below(task.stop)
            self._stats(sweep)
            self._put(made, i)
        self._become(made, bool(sweep.stat_groups))

    def _keys(self, sweep: Sweep) -> None:
        self._measure()
        self._kv = 2 * sweep.cin * sweep.height * sweep.width * self.limits.element_bytes
        for task in sweep.tasks:
            self._hold(sweep)
            self._read(self._map, task.start, task.stop)
            self.launches += 4

    def _queries(self, sweep: Sweep) -> None:
        source, made = self._map, self._new(sweep)
        assert source is not None
        keys = sweep.height * sweep.width
        for i, task in enumerate(sweep.tasks):
            self._hold(sweep)
            tokens = task.rows * sweep.width
            chunks = -(-tokens // query_chunk(tokens, keys))
            calls = 1 if self.limits.own_attention or chunks == 1 else 2 * chunks
            self._read(source, task.start, task.stop)
            self.launches += 4 + calls
            self._read(source, task.start, task.stop)
            self.launches += source.free_below(task.stop)
            self._stats(sweep)
            self._put(made, i)
        self._kv = 0
        self._become(made, bool(sweep.stat_groups))

    def _become(self, made: StripeBook, measured: bool) -> None:
        if self._map is not None:
            self._map.free()
        self._map, self._measured = made, measured

    def _finish(self) -> None:
        if self._map is not None:
            self._map.free()


def _largest(sweep: Sweep, limits: Limits) -> int:
    """Return the bytes of the largest tensor of a sweep."""
    size = limits.element_bytes
    rows = sweep.bounds[1]
    sizes = [sweep.cout * rows * sweep.width * max(size, 4 if sweep.stat_groups else 0)]
    if sweep.work is Pass.NATIVE:
        pad = sweep.step.kind is Kind.DOWN
        source = (sweep.height_in + pad) * (sweep.width_in + pad)
        sizes.append(sweep.cin * max(source, sweep.height * sweep.width) * size)
    elif sweep.work is Pass.KEYS:
        sizes.append(sweep.cin * sweep.height * sweep.width * size)
    elif sweep.work is Pass.DOWN:
        sizes.append(sweep.cin * (2 * rows + 1) * (sweep.width_in + 1) * size)
    elif sweep.work is Pass.UP and limits.polyphase:
        sizes.append(4 * sweep.cout * (rows // 2 + 1) * (sweep.width_in + 1) * size)
        sizes.append(sweep.cout * sweep.cin * max(16 * size, 9 * 4))  # kernels, folded in fp32
    else:
        sizes.append(sweep.cin * (rows + 2) * sweep.width * size)
    if sweep.work is Pass.OUT or sweep.step.kind is Kind.OUT:
        sizes.append(sweep.cout * sweep.height * sweep.width * size)
    return max(sizes)
