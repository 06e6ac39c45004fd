"""Counts what a PyTorch callable would submit to a device, without a device.

Owns the rule what one launch is: one ATen operator that is neither a view nor a bare allocation, a
lower bound of the kernels an eager backend starts. Works on meta tensors and on real ones, inside
and outside inference mode. A run uses its helpers for operators only (``workarounds.py``).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .device import in_host_region

T = TypeVar("T")

_VIEWS = (
    "_unsafe_view _reshape_alias detach alias lift_fresh set_ resize_ sym_size sym_stride sym_numel"
)
_EMPTY = "empty empty_strided empty_like new_empty new_empty_strided"
NO_LAUNCH = frozenset(name for names in (_VIEWS, _EMPTY) for name in names.split())
"""Operators that make a view or reserve memory only."""

KINDS = {
    "matmul": "mm addmm bmm baddbmm baddbmm_ addmv mv dot",
    "conv": "convolution _convolution convolution_overrideable",
    "norm": "native_group_norm native_layer_norm native_batch_norm",
    "softmax": "softmax _softmax _log_softmax _safe_softmax",
    "copy": "clone copy_ _to_copy contiguous",
    "cat": "cat stack",
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "exp", "exp_")
ATTENTION = "scaled_dot_product_attention"


def op_name(func: Any) -> str:
    """Return the bare name of an ATen operator."""
    return str(func._schema.name).split("::")[-1]


def is_fused_attention(name: str) -> bool:
    """True for every operator that is one whole attention call."""
    return name.startswith((ATTENTION, "_scaled_dot_product_")) and not name.endswith("_math")


def is_view(func: Any) -> bool:
    """True if the operator returns a view of its input and writes nothing."""
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_launch(func: Any) -> bool:
    """True if the operator does work on a device. Reading one number back is a wait, not a launch."""
    if op_name(func) in NO_LAUNCH or is_view(func):
        return False
    return any("Tensor" in str(r.type) for r in func._schema.returns)


def tensors(tree: object) -> Iterable[torch.Tensor]:
    """Yield every tensor in a nest of lists, tuples and dicts."""
    return (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def nbytes(t: torch.Tensor) -> int:
    """Return the bytes of the elements of t."""
    return t.numel() * t.element_size()


def traffic(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> int:
    """Return bytes read plus bytes written. A pure destination is not read."""
    moved = 0
    write_only = op_name(func) in ("copy_", "fill_", "zero_")
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_out = argument.is_out or (write_only and position == 0)
        if value is not None and not is_out:
            moved += sum(map(nbytes, tensors(value)))
    return moved + sum(map(nbytes, tensors(result)))


def flops(func: Any, args: tuple[Any, ...], result: object) -> int:
    """Return 2 per multiply-add of matmuls, convolutions and fused attention; 0 for the rest."""
    name = op_name(func)
    if is_fused_attention(name):
        q, k, v = args[:3]
        lines = math.prod(q.shape[:-1])
        return 2 * lines * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if name in ("mm", "bmm"):
        return 2 * args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "baddbmm", "baddbmm_"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if "convolution" in name:
        first = next(iter(tensors(result)))
        return 2 * first.numel() * math.prod(args[1].shape[1:])
    return 0


@dataclass
class LiveBytes:
    """Bytes of tensors created and not yet freed, by storage."""

    current: int = 0
    peak: int = 0
    _live: dict[int, tuple[StorageWeakRef, int]] = field(
        default_factory=lambda: dict[int, tuple[StorageWeakRef, int]](), repr=False
    )

    def born(self, t: torch.Tensor) -> None:
        """Count a new tensor, once per storage."""
        storage = t.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        known = self._live.get(key)
        if known is not None:
            if not known[0].expired():
                return
            self.current -= known[1]
        self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        self.current += storage.nbytes()
        if self.current > self.peak:
            self.sweep()
            self.peak = max(self.peak, self.current)

    def sweep(self) -> None:
        """Drop freed storages. They only ever make ``current`` too large."""
        for key in [key for key, (ref, _) in self._live.items() if ref.expired()]:
            self.current -= self._live.pop(key)[1]


@dataclass
class Count:
    """What was counted.

    scores: elements of the largest tensor a softmax went over.
    largest: (bytes, operator, shape) of the biggest tensor created.
    """

    ops: Counter[str] = field(default_factory=lambda: Counter[str]())
    bytes_moved: int = 0
    flops: int = 0
    attention: Counter[tuple[int, ...]] = field(default_factory=lambda: Counter[tuple[int, ...]]())
    scores: int = 0
    largest: tuple[int, str, tuple[int, ...]] = (0, "", ())
    live: LiveBytes = field(default_factory=LiveBytes)
    dtypes: set[torch.dtype] = field(default_factory=lambda: set[torch.dtype]())

    @property
    def launches(self) -> int:
        """Operators that do work on a device."""
        return self.ops.total()

    @property
    def kinds(self) -> Counter[str]:
        """Launches by kind of operator."""
        kinds: Counter[str] = Counter()
        for name, n in self.ops.items():
            kind = "attention" if is_fused_attention(name) else _KIND_OF.get(name, "elementwise")
            kinds[kind] += n
        return kinds

    def add(self, name: str, moved: int, work: int) -> None:
        """Count one launch by hand, for a kernel that is replaced while counting."""
        self.ops[name] += 1
        self.bytes_moved += moved
        self.flops += work


class CountOps(TorchDispatchMode):
    """Sees every ATen operator inside its ``with`` block and fills ``count``."""

    def __init__(self, track_live: bool = True) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.count = Count()
        self._track_live = track_live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count one operator; composite ones are taken apart first, except attention."""
        kwargs = kwargs or {}
        parts = decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        name, result = op_name(func), func(*args, **kwargs)
        if in_host_region():
            return result
        if is_launch(func):
            self._note(func, name, args, kwargs, result)
        if not is_view(func):
            self._born(func, name, result)
        return result

    def _note(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        self.count.add(name, traffic(func, args, kwargs, result), flops(func, args, result))
        if is_fused_attention(name):
            q, k = args[:2]
            self.count.attention[(*q.shape[:-1], k.shape[-2], q.shape[-1])] += 1
        if name in SOFTMAX:
            self.count.scores = max(self.count.scores, *(t.numel() for t in tensors(result)))

    def _born(self, func: Any, name: str, result: object) -> None:
        if any(r.alias_info is not None for r in func._schema.returns):
            return
        for t in tensors(result):
            self.count.dtypes.add(t.dtype)
            if nbytes(t) > self.count.largest[0]:
                self.count.largest = (nbytes(t), name, tuple(t.shape))
            if self._track_live:
                self.count.live.born(t)


@functools.cache
def is_composite(func: Any) -> bool:
    """True if the operator is only a recipe of others and starts nothing itself."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
    return bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


def decomposed(
    mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a composite operator as its parts under ``mode``, or return NotImplemented.

    In inference mode composite operators arrive whole, because the layer that takes them apart is
    switched off. Attention stays whole: it is a kernel of its own, and its parts are another way.
    """
    if op_name(func) == ATTENTION or not is_composite(func):
        return NotImplemented
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # pyright: ignore[reportPrivateUsage]
    with mode:
        return func._op_dk(key, *args, **kwargs)


def count(run: Callable[[], T], track_live: bool = True) -> tuple[Count, T]:
    """Run a callable without gradients and return what it would submit, and its result."""
    mode = CountOps(track_live)
    with torch.no_grad(), mode:
        result = run()
    return mode.count, result
