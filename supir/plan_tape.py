"""A tape of launches: tensors without data, and the operators the plan counts on them.

The mirrors of the networks are written like the networks themselves, so Python's own reference
counting frees a symbolic tensor exactly where it frees the real one. What one launch is, and what
it reads and writes, follows the dispatch count of PyTorch in inference mode: one operator that is
neither a view nor an allocation. Tests hold the tape to that count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

FLOAT_BYTES = 4
NORM_GROUPS = 32
"""Groups of every GroupNorm in the SDXL family."""

HOST = "host"
"""Kind of an operator on the host processor (noise, tables): no launch on the device."""

TRANSFER = "transfer"
"""Kind of a copy between host and device: no kernel, and nothing at all where both are one."""

ASIDE = (HOST, TRANSFER)
"""Kinds that are noted, but are neither launches nor traffic of the device."""


class AttentionNumbers(Protocol):
    """What one attention call costs; an attention plan of the device layer fits.

    launches, flops, bytes_moved: from q, k, v [B, N, H * D] to the result, layout copies included.
    temp_bytes: peak of temporaries besides the result; largest_bytes: the largest of them.
    score_elements: most scores held at once.
    """

    @property
    def launches(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def temp_bytes(self) -> int: ...
    @property
    def largest_bytes(self) -> int: ...
    @property
    def score_elements(self) -> int: ...


@dataclass(frozen=True)
class AttentionCost:
    """``AttentionNumbers`` as plain numbers."""

    launches: int
    flops: int
    bytes_moved: int
    temp_bytes: int = 0
    largest_bytes: int = 0
    score_elements: int = 0


Attention = Callable[[int, int, int, int, int], AttentionNumbers]
"""``attention(batch, heads, n_query, n_key, dim_head)``: the cost of one call."""


def fused_attention(dtype_bytes: int) -> Attention:
    """Return the cost of attention as one fused kernel that leaves the result in q's layout."""

    def cost(batch: int, heads: int, n_query: int, n_key: int, dim_head: int) -> AttentionCost:
        line = batch * heads * dim_head
        return AttentionCost(
            1, 4 * line * n_query * n_key, 2 * line * (n_query + n_key) * dtype_bytes
        )

    return cost


class _Storage:
    """Bytes that are alive until the last symbolic tensor over them is gone."""

    __slots__ = ("_nbytes", "_tape")

    def __init__(self, tape: Tape, nbytes: int) -> None:
        self._tape, self._nbytes = tape, nbytes
        tape.live += nbytes

    def __del__(self) -> None:
        self._tape.live -= self._nbytes


class Sym:
    """A tensor of which only shape and element size are known."""

    __slots__ = ("_storage", "element_bytes", "nbytes", "numel", "shape")

    def __init__(
        self, shape: Sequence[int], element_bytes: int, storage: _Storage | None = None
    ) -> None:
        self.shape = tuple(shape)
        self.element_bytes = element_bytes
        self.numel = math.prod(self.shape)
        self.nbytes = self.numel * element_bytes
        self._storage = storage

    def view(self, *shape: int) -> Sym:
        """Return another shape (or a part) of the same memory."""
        return Sym(shape, self.element_bytes, self._storage)


@dataclass
class Tape:
    """Counts launches by kind, arithmetic, traffic and live bytes.

    Attributes:
        attention: cost of an attention call; None = one fused kernel.
        weight_bytes: element size of weights; 0 = that of the activations. Where they differ,
            every weight and bias is cast on use. casts: how many were.
        weights: weights and biases used; parameters: their elements.
        live, peak: bytes of tensors made on this tape; inputs are not.
        calls: attention calls by (batch, heads, n_query, n_key, dim_head).
    """

    attention: Attention | None = None
    kinds: Counter[str] = field(default_factory=lambda: Counter[str]())
    flops: int = 0
    bytes_moved: int = 0
    largest: int = 0
    live: int = 0
    peak: int = 0
    weight_bytes: int = 0
    casts: int = 0
    weights: int = 0
    parameters: int = 0
    scores: int = 0
    calls: Counter[tuple[int, int, int, int, int]] = field(
        default_factory=lambda: Counter[tuple[int, int, int, int, int]]()
    )
    _times: int = 1

    @contextmanager
    def times(self, count: int) -> Generator[None]:
        """Count what happens inside ``count`` times over; memory is that of one time."""
        before, self._times = self._times, self._times * count
        try:
            yield
        finally:
            self._times = before

    @property
    def factor(self) -> int:
        """How often what happens now is counted."""
        return self._times

    # -- tensors

    def make(self, shape: Sequence[int], element_bytes: int) -> Sym:
        """Allocate a tensor."""
        made = Sym(shape, element_bytes)
        made._storage = _Storage(self, made.nbytes)
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, made.nbytes)
        return made

    def touch(self, temp_bytes: int) -> None:
        """Note temporaries that are gone again when the operator returns."""
        self.peak = max(self.peak, self.live + temp_bytes)

    # -- operators

    def count(self, kind: str, reads: int, writes: int, flops: int = 0, launches: int = 1) -> None:
        """Count launches that read and write so many bytes."""
        self.kinds[kind] += launches * self._times
        if kind not in ASIDE:
            self.bytes_moved += (reads + writes) * self._times
        self.flops += flops * self._times

    def run(
        self, kind: str, inputs: Sequence[Sym], shape: Sequence[int], element_bytes: int = 0
    ) -> Sym:
        """Launch one operator; the result has the element size of its first input, or the given."""
        made = self.make(shape, element_bytes or inputs[0].element_bytes)
        self.count(kind, sum(t.nbytes for t in inputs), made.nbytes)
        return made

    def point(self, *inputs: Sym) -> Sym:
        """Element by element, broadcast to the first input's shape."""
        return self.run("elementwise", inputs, inputs[0].shape)

    def points(self, x: Sym, count: int) -> Sym:
        """``count`` operators in a row, each over the whole of the one before."""
        for _ in range(count):
            x = self.point(x)
        return x

    def aside(self, kind: str, count: int = 1) -> None:
        """Note operators on the host processor, or copies between host and device."""
        self.count(kind, 0, 0, launches=count)

    def inplace(self, target: Sym, *inputs: Sym) -> None:
        """Element by element into ``target``."""
        self.count("elementwise", target.nbytes + sum(t.nbytes for t in inputs), target.nbytes)

    def copy(self, x: Sym) -> Sym:
        """A copy in another memory layout."""
        return self.run("copy", [x], x.shape)

    def cast(self, x: Sym, element_bytes: int, moves: bool = False) -> Sym:
        """To another element size, or (``moves``) to the device; x itself if neither."""
        if x.element_bytes != element_bytes:
            return self.run("copy", [x], x.shape, element_bytes)
        if moves:
            self.aside(TRANSFER)
        return x

    def cat(self, inputs: Sequence[Sym], dim: int) -> Sym:
        """Join along one dimension."""
        shape = list(inputs[0].shape)
        shape[dim] = sum(t.shape[dim] for t in inputs)
        return self.run("cat", inputs, shape)

    # -- layers

    @contextmanager
    def weights_of(self, weight_bytes: int) -> Generator[None]:
        """Use weights of this element size."""
        before, self.weight_bytes = self.weight_bytes, weight_bytes
        try:
            yield
        finally:
            self.weight_bytes = before

    def _borrow(self, element_bytes: int, *shapes: tuple[int, ...]) -> list[Sym]:
        """Return a layer's weight and bias in the activations' dtype; casts live until dropped."""
        stored = [Sym(shape, self.weight_bytes or element_bytes) for shape in shapes]
        self.weights += len(stored) * self._times
        self.parameters += sum(w.numel for w in stored) * self._times
        if self.weight_bytes not in (0, element_bytes):
            self.casts += len(stored) * self._times
        return [self.cast(w, element_bytes) for w in stored]

    def linear(self, x: Sym, width: int, bias: bool = True, per_item: bool = False) -> Sym:
        """A linear layer on [..., C]. ``per_item``: a batched product that reads the weight anew
        for every item, as PyTorch does for a transposed input without bias."""
        shapes = [(width, x.shape[-1]), (width,)]
        weights = self._borrow(x.element_bytes, *shapes[: 1 + bias])
        made = self.make((*x.shape[:-1], width), x.element_bytes)
        read = sum(w.nbytes for w in weights)
        if per_item and math.prod(x.shape[1:-1]) > 1:
            read *= x.shape[0]
        self.count("matmul", x.nbytes + read, made.nbytes, 2 * x.numel * width)
        return made

    def conv(self, x: Sym, width: int, kernel: int = 3, stride: int = 1) -> Sym:
        """A convolution with bias that keeps the size, or halves it rounded up."""
        batch, channels, height, wide = x.shape
        shapes = (width, channels, kernel, kernel), (width,)
        weights = self._borrow(x.element_bytes, *shapes)
        made = self.make((batch, width, -(-height // stride), -(-wide // stride)), x.element_bytes)
        read = sum(w.nbytes for w in weights)
        self.count(
            "conv", x.nbytes + read, made.nbytes, 2 * made.numel * channels * kernel * kernel
        )
        return made

    def group_norm(self, x: Sym) -> Sym:
        """GroupNorm with weight and bias."""
        return self._norm(x, x.shape[1], 2 * x.shape[0] * NORM_GROUPS * x.element_bytes)

    def layer_norm(self, x: Sym) -> Sym:
        """LayerNorm over the last dimension, statistics in float32."""
        width = x.shape[-1]
        return self._norm(x, width, 2 * x.numel // width * FLOAT_BYTES)

    def _norm(self, x: Sym, width: int, statistics: int) -> Sym:
        weights = self._borrow(x.element_bytes, (width,), (width,))
        made = self.make(x.shape, x.element_bytes)
        read = sum(w.nbytes for w in weights)
        self.count("norm", x.nbytes + read, made.nbytes + statistics)
        self.touch(statistics)
        return made

    def attend(self, q: Sym, k: Sym, v: Sym, heads: int) -> Sym:
        """One attention call on [B, N, H * D]."""
        batch, n_query, width = q.shape
        call = (batch, heads, n_query, k.shape[1], width // heads)
        cost = (self.attention or fused_attention(q.element_bytes))(*call)
        made = self.make(q.shape, q.element_bytes)
        self.calls[call] += self._times
        self.count("attention", cost.bytes_moved, 0, cost.flops, cost.launches)
        self.touch(cost.temp_bytes)
        self.largest = max(self.largest, cost.largest_bytes)
        self.scores = max(self.scores, cost.score_elements)
        return made
