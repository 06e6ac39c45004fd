"""Run a KL encoder or decoder layer by layer over row stripes: the untiled result, bounded memory.

The modules are read, never changed: weights are borrowed once per layer sweep and given back
on every way out. See sweeps for what is run in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import functional

from ..errors import ShapeError
from . import layers
from .geometry import Task
from .layers import Affine, Buffer, Weights
from .layout import Kind, describe
from .maps import Ledger, StripeMap
from .moments import Moments
from .options import StripeOptions
from .plan import StripePlan, plan_steps
from .sweeps import Limits, Pass, Sweep


def encode(encoder: Any, x: torch.Tensor, options: StripeOptions) -> torch.Tensor:
    """Compute ``encoder(x)`` over row stripes.

    Args:
        encoder: a network that ``recognise`` accepts; not changed.
        x: image, [B, C, H, W], -1 to 1; fp32, bf16 or fp16; any size ``encoder`` accepts.
    Returns: moments of the latent, [B, C_out, h, w], in x's dtype.
    Raises: ShapeError if x is not four-dimensional or too small; whatever check_cancel raises.
    """
    return _walk(encoder, x, options)


def decode(decoder: Any, z: torch.Tensor, options: StripeOptions) -> torch.Tensor:
    """Compute ``decoder(z)`` over row stripes. Arguments and errors as in ``encode``."""
    return _walk(decoder, z, options)


def limits_of(options: StripeOptions, dtype: torch.dtype) -> Limits:
    """Return the numbers of the options that shape a plan for maps of a dtype."""
    return Limits(
        workspace_bytes=options.workspace_bytes,
        element_bytes=dtype.itemsize,
        polyphase=options.polyphase,
        store_budget_bytes=options.store_budget_bytes,
        own_attention=options.attention is not None,
    )


def _walk(net: Any, x: torch.Tensor, options: StripeOptions) -> torch.Tensor:
    steps = describe(net)
    if x.ndim != 4 or x.shape[1] != steps[0].cin:
        raise ShapeError(
            f"The VAE got a tensor of shape {tuple(x.shape)}, but it reads "
            f"[batch, {steps[0].cin}, height, width]. Connect an image or latent of this VAE's kind."
        )
    plan = plan_steps(steps, x.shape[2], x.shape[3], limits_of(options, x.dtype))
    out = x.new_empty((x.shape[0], steps[-1].cout, plan.out_height, plan.out_width))
    total = plan.ticks * x.shape[0]
    if any(sweep.work is not Pass.NATIVE for sweep in plan.sweeps):
        x = x.contiguous()  # left as it is, the host's blocks see what they would see untiled
    for item in range(x.shape[0]):
        walker = _Walker(net, plan, options, out[item : item + 1], item * plan.ticks, total)
        walker.run(x[item : item + 1])
    return out


class _Walker:
    """One item's way through the network. ``self._map`` is the current map."""

    def __init__(
        self,
        net: Any,
        plan: StripePlan,
        options: StripeOptions,
        out: torch.Tensor,
        done: int,
        total: int,
    ) -> None:
        self._net = net
        self._plan = plan
        self._options = options
        self._out = out
        self._done = done
        self._total = total
        self._ledger = Ledger(options.store_budget_bytes)
        self._moments: Moments | None = None
        self._side: StripeMap | None = None
        self._attended: tuple[Affine, torch.Tensor, torch.Tensor] | None = None

    def run(self, x: torch.Tensor) -> None:
        """Fill the output from x, [1, C, H, W]."""
        self._like = x
        self._map = StripeMap.borrowed(x)
        works: dict[Pass, Callable[[Sweep], None]] = {
            Pass.NATIVE: self._native,
            Pass.CONV1: self._residual_first,
            Pass.CONV2: self._residual_second,
            Pass.KEYS: self._make_keys,
            Pass.QUERIES: self._query,
        }
        for sweep in self._plan.sweeps:
            works.get(sweep.work, self._plain)(sweep)

    # ---- small services -----------------------------------------------------------------

    def _block(self, sweep: Sweep) -> Any:
        return self._net.get_submodule(sweep.step.name)

    def _begin(self) -> None:
        if self._options.check_cancel is not None:
            self._options.check_cancel()

    def _end(self) -> None:
        self._done += 1
        if self._options.tick is not None:
            self._options.tick(self._done, self._total)

    def _new(self, sweep: Sweep) -> StripeMap:
        row = sweep.cout * sweep.width * self._like.dtype.itemsize
        device, host = self._like.device, self._options.host_device
        return StripeMap(sweep.bounds, row, self._ledger, device, host)

    def _borrow(self, stack: ExitStack, module: Any) -> Weights:
        return Weights(*stack.enter_context(self._options.borrow_weights(module, self._like)))

    def _become(self, made: StripeMap, moments: Moments | None) -> None:
        self._map.free()
        self._map, self._moments = made, moments

    def _collect(self, sweep: Sweep) -> Moments | None:
        return Moments(sweep.stat_groups, sweep.height) if sweep.stat_groups else None

    def _norm(self, norm: Any) -> Affine:
        """Return scale and shift of a group norm over the current map."""
        moments = self._moments
        if moments is None:
            moments = Moments(norm.num_groups, self._map.bounds[-1])
            for stripe in self._map.stripes():
                self._begin()
                moments.add(stripe)
        with self._options.borrow_weights(norm, self._like) as (weight, bias):
            assert bias is not None, "recognise accepts norms with weight and bias only"
            return moments.affine(weight, bias, norm.eps)

    # ---- passes -------------------------------------------------------------------------

    def _native(self, sweep: Sweep) -> None:
        """Run the host's own block on the whole map: bit-identical, and fewer launches."""
        self._begin()
        x = self._map.whole()
        if sweep.step.kind is Kind.OUT:
            y = self._net.conv_out(functional.silu(self._net.norm_out(x)))
            self._write(y, sweep.tasks[0])
            self._map.free()
        else:
            made = self._new(sweep)
            made.put(0, self._block(sweep)(x))
            self._become(made, None)
        self._end()

    def _plain(self, sweep: Sweep) -> None:
        """Run a sweep of one convolution: first, last, up or down."""
        final = sweep.work is Pass.OUT
        affine = self._norm(self._net.norm_out) if final else None
        conv = self._net.conv_out if final else self._block(sweep)
        made = None if final else self._new(sweep)
        moments = self._collect(sweep)
        with ExitStack() as stack:
            weights = self._borrow(stack, getattr(conv, "conv", conv))
            if sweep.work is Pass.UP and self._options.polyphase:
                weights = _phases(weights)
            buffer = self._buffer(sweep)
            for i, task in enumerate(sweep.tasks):
                self._begin()
                y = self._convolve(sweep, task, buffer, weights, affine)
                if moments is not None:
                    moments.add(y)
                if made is None:
                    self._write(y, task)
                else:
                    made.put(i, y)
                del y
                self._map.free_below(task.keep)
                self._end()
        if made is None:
            self._map.free()
        else:
            self._become(made, moments)

    def _residual_first(self, sweep: Sweep) -> None:
        """norm1, SiLU, conv1, and the 1x1 shortcut so that a wide input can go early."""
        block, source = self._block(sweep), self._map
        affine = self._norm(block.norm1)
        made, moments = self._new(sweep), self._collect(sweep)
        side = self._new(sweep) if sweep.step.shortcut else None
        with ExitStack() as stack:
            weights = self._borrow(stack, block.conv1)
            shortcut = self._borrow(stack, block.nin_shortcut) if side is not None else None
            buffer = self._buffer(sweep)
            for i, task in enumerate(sweep.tasks):
                self._begin()
                y = self._convolve(sweep, task, buffer, weights, affine)
                if moments is not None:
                    moments.add(y)
                made.put(i, y)
                del y
                if side is not None and shortcut is not None:
                    x = source.gather(task.start, task.stop)
                    side.put(i, functional.conv2d(x, shortcut.kernel, shortcut.bias))
                    del x
                    source.free_below(task.keep)
                self._end()
        if side is not None:
            source.free()
        self._side = source if side is None else side
        self._map, self._moments = made, moments

    def _residual_second(self, sweep: Sweep) -> None:
        """norm2, SiLU, conv2, plus the residual; input and residual go row by row."""
        block, side = self._block(sweep), self._side
        assert side is not None
        affine = self._norm(block.norm2)
        made, moments = self._new(sweep), self._collect(sweep)
        with ExitStack() as stack:
            weights = self._borrow(stack, block.conv2)
            buffer = self._buffer(sweep)
            for i, task in enumerate(sweep.tasks):
                self._begin()
                y = self._convolve(sweep, task, buffer, weights, affine)
                self._map.free_below(task.keep)
                _add_rows(y, side, task)
                side.free_below(task.stop)
                if moments is not None:
                    moments.add(y)
                made.put(i, y)
                del y
                self._end()
        self._side = None
        self._become(made, moments)

    def _make_keys(self, sweep: Sweep) -> None:
        """Compute keys and values of every token."""
        block = self._block(sweep)
        affine = self._norm(block.norm)
        tokens = sweep.height * sweep.width
        keys = self._like.new_empty((1, 1, tokens, sweep.cin))
        values = torch.empty_like(keys)
        with ExitStack() as stack:
            pairs = [
                (self._borrow(stack, block.k), keys),
                (self._borrow(stack, block.v), values),
            ]
            buffer = self._buffer(sweep)
            for task in sweep.tasks:
                self._begin()
                x = self._rows(sweep, task, buffer, affine)
                for conv, store in pairs:
                    y = functional.conv2d(x, conv.kernel, conv.bias)
                    part = store[0, :, task.start * sweep.width : task.stop * sweep.width]
                    part.copy_(y.flatten(2).transpose(1, 2))
                    del y
                self._end()
        self._attended = (affine, keys, values)

    def _query(self, sweep: Sweep) -> None:
        """Attend from every stripe to all tokens, project, add the residual."""
        block, source = self._block(sweep), self._map
        assert self._attended is not None
        affine, keys, values = self._attended
        made, moments = self._new(sweep), self._collect(sweep)
        with ExitStack() as stack:
            query, project = self._borrow(stack, block.q), self._borrow(stack, block.proj_out)
            buffer = self._buffer(sweep)
            for i, task in enumerate(sweep.tasks):
                self._begin()
                x = self._rows(sweep, task, buffer, affine)
                q = layers.to_tokens(functional.conv2d(x, query.kernel, query.bias))
                q = self._attend(q, keys, values)
                y = functional.conv2d(
                    layers.from_tokens(q, task.rows), project.kernel, project.bias
                )
                del q
                _add_rows(y, source, task)
                source.free_below(task.stop)
                if moments is not None:
                    moments.add(y)
                made.put(i, y)
                del y
                self._end()
        self._attended = None
        self._become(made, moments)

    # ---- one stripe ---------------------------------------------------------------------

    def _buffer(self, sweep: Sweep) -> Buffer:
        """Allocate the padded input of the tallest stripe, the first."""
        rows, width = sweep.bounds[1] + 2, sweep.width
        if sweep.work in (Pass.KEYS, Pass.QUERIES):
            rows -= 2
        elif sweep.work is Pass.DOWN:
            rows, width = 2 * sweep.bounds[1] + 1, sweep.width_in + 1
        elif sweep.work is Pass.UP and self._options.polyphase:
            rows, width = sweep.bounds[1] // 2 + 2, sweep.width_in + 2
        return Buffer(self._like, sweep.cin * rows * width)

    def _convolve(
        self, sweep: Sweep, task: Task, buffer: Buffer, conv: Weights, affine: Affine | None
    ) -> torch.Tensor:
        size = (sweep.cin, sweep.width_in)
        if sweep.work is Pass.DOWN:
            return layers.conv_down(self._map, task, buffer, size, conv)
        if sweep.work is Pass.UP:
            up = layers.conv_up_phases if self._options.polyphase else layers.conv_up
            return up(self._map, task, buffer, size, conv)
        return layers.conv_same(self._map, task, buffer, size, conv, affine)

    def _rows(self, sweep: Sweep, task: Task, buffer: Buffer, affine: Affine) -> torch.Tensor:
        return layers.pointwise(self._map, task, buffer, sweep.cin, sweep.width, affine)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._options.attention is not None:
            return self._options.attention(q, k, v)
        return layers.attend(q, k, v, self._options.check_cancel)

    def _write(self, y: torch.Tensor, task: Task) -> None:
        """Put finished rows into the output."""
        if getattr(self._net, "tanh_out", False):
            y = torch.tanh(y)
        self._out[:, :, task.start : task.stop].copy_(y)


def _add_rows(y: torch.Tensor, side: StripeMap, task: Task) -> None:
    """Add the residual's rows to y in place."""
    for offset, part in side.read(task.start, task.stop):
        y[:, :, offset : offset + part.shape[2]].add_(part)


def _phases(conv: Weights) -> Weights:
    bias = None if conv.bias is None else conv.bias.repeat(4)
    return Weights(layers.phase_kernel(conv.kernel), bias)
