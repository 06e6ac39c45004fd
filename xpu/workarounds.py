"""Runs one class of operations another way, where the preflight found that only that way is right.

Owns which operators belong to a class and what each way does to a call. Used only on a device that
was judged ``degraded``; chooses nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .counting import decomposed, is_fused_attention, op_name, tensors
from .device import host_region

OPERATORS: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "reductions": "sum mean amax amin max min aminmax prod any all argmax argmin std var std_mean "
        "var_mean norm linalg_vector_norm logsumexp cumsum nansum count_nonzero",
        "dense": "mm addmm bmm baddbmm baddbmm_ addmv mv dot addbmm convolution _convolution "
        "convolution_overrideable",
        "norms": "native_group_norm native_layer_norm native_batch_norm _softmax _log_softmax "
        "_safe_softmax silu silu_ gelu gelu_ sigmoid sigmoid_",
    }.items()
}
"""Operators of each class whose members have names of their own."""

CASTS = frozenset(("_to_copy", "copy_"))
"""Operators that change a dtype; with ``index`` they are the class ``index_cast``."""

WAYS = ("contiguous", "dtype", "cpu_block")
HALVES = (torch.bfloat16, torch.float16)
JUDGED = ("reductions", "dense", "norms", "attention")
"""Classes in which a dropped dtype is computed in float32 instead."""

OnDevice = Callable[[torch.Tensor], bool]


def class_of(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the class of a call's operator, or an empty text."""
    if is_fused_attention(name):
        return "attention"
    for op_class, names in OPERATORS.items():
        if name in names:
            return op_class
    if name == "index" or (name in CASTS and _casts_strided(name, args, kwargs)):
        return "index_cast"
    return ""


def _casts_strided(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for a cast of a tensor whose values do not lie one behind the other."""
    source = args[1] if name == "copy_" else args[0]
    wanted = args[0].dtype if name == "copy_" else kwargs.get("dtype")
    if not isinstance(source, torch.Tensor) or wanted is None:
        return False
    return wanted != source.dtype and not source.is_contiguous()


class Workarounds(TorchDispatchMode):
    """Within its ``with`` block, operators of the given classes take the given ways.

    Args:
        ways: class -> ``contiguous``, ``dtype`` (float32) or ``cpu_block`` (on the processor).
            Others are carried out elsewhere and ignored here.
        dropped: names of dtypes that give wrong results; float32 takes their place in every class.
        on_device: tells tensors of the device from those of the host.
    ``used`` counts the calls that took another way, by (class, way).
    """

    def __init__(
        self, ways: Mapping[str, str], dropped: Iterable[str], on_device: OnDevice
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.dropped = tuple(dtype for dtype in HALVES if str(dtype)[6:] in tuple(dropped))
        known = {name: way for name, way in ways.items() if way in WAYS}
        self.ways = {**dict.fromkeys(JUDGED if self.dropped else (), "dtype"), **known}
        self.used: Counter[tuple[str, str]] = Counter()
        self._on_device = on_device

    @property
    def is_needed(self) -> bool:
        """True if any operator takes another way."""
        return bool(self.ways)

    def lines(self) -> list[str]:
        """Return what was done another way, one line per class."""
        words = {"contiguous": "on contiguous tensors", "dtype": "in float32",
                 "cpu_block": "on the processor"}  # fmt: skip
        return [f"workaround: {n} calls of {c} {words[w]}" for (c, w), n in self.used.items()]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator; composite ones are taken apart first, except attention."""
        kwargs = kwargs or {}
        parts = decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        op_class = class_of(op_name(func), func, args, kwargs)
        way = self.ways.get(op_class, "")
        given = [t for t in tensors((args, kwargs)) if self._on_device(t)]
        idle = not given or (way == "dtype" and not self._wants_float(given))
        if not way or idle or not _result_is_ours(func):
            return func(*args, **kwargs)
        self.used[op_class, way] += 1
        return self._run(way, func, args, kwargs, given[0].device)

    def _wants_float(self, given: list[torch.Tensor]) -> bool:
        return any(t.dtype in (self.dropped or HALVES) for t in given)

    def _run(
        self, way: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], home: torch.device
    ) -> Any:
        """Prepare the inputs, run, and give the results back as the plain call would."""
        target = kwargs.get("device") or home
        dtypes = {t.dtype for t in tensors((args, kwargs)) if t.dtype in HALVES}
        half = next(iter(dtypes), None) if way == "dtype" else None

        def prepare(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not self._on_device(value):
                return _at(value, home, "cpu") if way == "cpu_block" else value
            if way == "contiguous":
                return value.contiguous()
            if way == "cpu_block":
                return value.to("cpu")
            return value.float() if value.dtype in HALVES else value

        changed_args, changed_kwargs = tree_map(prepare, (args, kwargs))
        if way == "cpu_block":
            with host_region():
                result = func(*changed_args, **changed_kwargs)
        else:
            result = func(*changed_args, **changed_kwargs)

        def give_back(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            back = value.to(target) if way == "cpu_block" else value
            return back.to(half) if half is not None and back.dtype == torch.float32 else back

        if func._schema.is_mutable:  # what was asked for is written where it was asked for
            first = args[0]
            return first if changed_args[0] is first else first.copy_(give_back(result))
        return tree_map(give_back, result)


def _result_is_ours(func: Any) -> bool:
    """True if the operator makes a new result or writes to its first argument, not to ``out``."""
    first = next(iter(func._schema.arguments), None)
    alias = None if first is None else first.alias_info
    return not func._schema.is_mutable or (alias is not None and bool(alias.is_write))


def _at(value: Any, home: torch.device, place: str) -> Any:
    """Return ``place`` for the device itself, as in ``t.to(device)``; anything else as it is."""
    is_home = isinstance(value, torch.device) and value.type == home.type
    return torch.device(place) if is_home else value
