"""The arithmetic of one stripe: fill a padded buffer from neighbouring stripes, then convolve.

Zero padding belongs after norm and SiLU, so rows outside the picture are zero in the buffer,
and rows of a neighbour are normalised like the stripe's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from .geometry import Task
from .maps import StripeMap
from .sweeps import query_chunk

Affine = tuple[torch.Tensor, torch.Tensor]  # scale and shift, fp32 [1, C, 1, 1]


class Buffer:
    """One allocation per sweep, viewed in the shape each stripe needs."""

    def __init__(self, like: torch.Tensor, elements: int) -> None:
        self._flat = torch.empty(elements, dtype=like.dtype, device=like.device)

    def view(self, channels: int, rows: int, width: int) -> torch.Tensor:
        """Return the first elements as a contiguous [1, channels, rows, width]."""
        return self._flat[: channels * rows * width].view(1, channels, rows, width)


@dataclass
class Weights:
    """A borrowed convolution: kernel, bias."""

    kernel: torch.Tensor
    bias: torch.Tensor | None


def normalise(x: torch.Tensor, affine: Affine, out: torch.Tensor) -> None:
    """Write x * scale + shift to out: fp32 arithmetic, one rounding to out's dtype."""
    torch.addcmul(affine[1], x, affine[0], out=out)


def conv_same(
    source: StripeMap,
    task: Task,
    buffer: Buffer,
    size: tuple[int, int],
    conv: Weights,
    affine: Affine | None,
) -> torch.Tensor:
    """Compute rows of a 3x3 convolution with padding 1, after norm and SiLU if affine is given.

    Args:
        size: channels and width of the source.
    Returns: [1, C_out, task.rows, W].
    """
    padded = buffer.view(size[0], task.rows + 2, size[1])
    for offset, part in source.read(task.first, task.last):
        lo = task.top + offset
        rows = padded[:, :, lo : lo + part.shape[2]]
        if affine is None:
            rows.copy_(part)
        else:
            normalise(part, affine, rows)
    if affine is not None:
        functional.silu(padded[:, :, task.top : task.rows + 2 - task.bottom], inplace=True)
    _zero_borders(padded, task)
    return functional.conv2d(padded, conv.kernel, conv.bias, padding=(0, 1))


def conv_down(
    source: StripeMap, task: Task, buffer: Buffer, size: tuple[int, int], conv: Weights
) -> torch.Tensor:
    """Compute rows of the 3x3 stride-2 convolution padded by one at the bottom and right."""
    channels, width = size
    padded = buffer.view(channels, 2 * task.rows + 1, width + 1)
    for offset, part in source.read(task.first, task.last):
        padded[:, :, offset : offset + part.shape[2], :width].copy_(part)
    padded[..., width].zero_()
    _zero_borders(padded, task)
    return functional.conv2d(padded, conv.kernel, conv.bias, stride=2)


def conv_up(
    source: StripeMap, task: Task, buffer: Buffer, size: tuple[int, int], conv: Weights
) -> torch.Tensor:
    """Compute rows of "nearest 2x, then 3x3": the doubled rows are written straight to the buffer."""
    channels, width = size
    padded = buffer.view(channels, task.rows + 2, 2 * width)
    first, last = task.start // 2, task.stop // 2
    for row, at in ((task.first, 0), (task.last - 1, task.rows + 1)):
        if row < first or row >= last:  # the half of a doubled row that the kernel's edge sees
            for _, part in source.read(row, row + 1):
                padded[:, :, at].view(1, channels, width, 2).copy_(part[:, :, 0, :, None])
    for offset, part in source.read(first, last):
        rows = padded[:, :, 1 + 2 * offset : 1 + 2 * (offset + part.shape[2])]
        doubled = rows.view(1, channels, part.shape[2], 2, width, 2)
        doubled.copy_(part[:, :, :, None, :, None])
    _zero_borders(padded, task)
    return functional.conv2d(padded, conv.kernel, conv.bias, padding=(0, 1))


def phase_kernel(kernel: torch.Tensor) -> torch.Tensor:
    """Fold a 3x3 kernel that follows nearest 2x into four 2x2 kernels on the small map.

    An even output row sees rows (i-1, i, i) of the small map, an odd one (i, i, i+1), and the
    same holds for columns, so equal rows' weights are summed (in fp32).

    Args:
        kernel: [C_out, C_in, 3, 3].
    Returns: [4 * C_out, C_in, 2, 2], phases (row, column) = (0,0), (0,1), (1,0), (1,1).
    """
    cout, cin = kernel.shape[:2]
    folded = kernel.new_empty((4 * cout, cin, 2, 2))
    wide = kernel.to(torch.float32, copy=True)
    for down in (0, 1):
        rows = _fold(wide, 2, down)
        for right in (0, 1):
            first = (2 * down + right) * cout
            folded[first : first + cout].copy_(_fold(rows, 3, right))
    return folded


def conv_up_phases(
    source: StripeMap, task: Task, buffer: Buffer, size: tuple[int, int], conv: Weights
) -> torch.Tensor:
    """Compute the rows of conv_up with the kernels of phase_kernel, on the small map.

    Args:
        conv: kernel [4 * C_out, C_in, 2, 2] and bias [4 * C_out].
    """
    channels, width = size
    half = task.rows // 2
    padded = buffer.view(channels, half + 2, width + 2)
    for offset, part in source.read(task.first, task.last):
        lo = task.top + offset
        padded[:, :, lo : lo + part.shape[2], 1:-1].copy_(part)
    padded[..., :: width + 1].zero_()
    _zero_borders(padded, task)
    phases = functional.conv2d(padded, conv.kernel, conv.bias)
    cout = phases.shape[1] // 4
    out = phases.new_empty((1, cout, task.rows, 2 * width))
    for phase in range(4):
        down, right = divmod(phase, 2)
        part = phases[:, phase * cout : (phase + 1) * cout, down : down + half]
        out[:, :, down::2, right::2].copy_(part[..., right : right + width])
    return out


def pointwise(
    source: StripeMap, task: Task, buffer: Buffer, channels: int, width: int, affine: Affine
) -> torch.Tensor:
    """Return the normalised rows of a stripe, [1, C, rows, W], for 1x1 convolutions."""
    rows = buffer.view(channels, task.rows, width)
    for offset, part in source.read(task.start, task.stop):
        normalise(part, affine, rows[:, :, offset : offset + part.shape[2]])
    return rows


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, check_cancel: Callable[[], None] | None
) -> torch.Tensor:
    """Run SDPA over all keys, a bounded number of queries at a time.

    Args:
        q: [1, 1, n, C], contiguous; k, v: [1, 1, N, C], contiguous. A transposed q would make
            SDPA store n x N scores.
    Returns: [1, 1, n, C].
    """
    queries = q.shape[2]
    step = query_chunk(queries, k.shape[2])
    if step >= queries:
        return functional.scaled_dot_product_attention(q, k, v)
    out = torch.empty_like(q)
    for start in range(0, queries, step):
        if check_cancel is not None:
            check_cancel()
        part = functional.scaled_dot_product_attention(q[:, :, start : start + step], k, v)
        out[:, :, start : start + step].copy_(part)
    return out


def to_tokens(x: torch.Tensor) -> torch.Tensor:
    """[1, C, rows, W] -> [1, 1, rows * W, C], contiguous."""
    tokens = x.flatten(2).transpose(1, 2)
    return tokens.clone(memory_format=torch.contiguous_format)[None]


def from_tokens(tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """[1, 1, rows * W, C] -> [1, C, rows, W], contiguous."""
    x = tokens[0].transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return x.view(1, x.shape[1], rows, -1)


def _fold(kernel: torch.Tensor, dim: int, odd: int) -> torch.Tensor:
    """Sum the two taps that fall on one small row (dim 2) or column (dim 3)."""
    first, middle, last = (kernel.narrow(dim, tap, 1) for tap in range(3))
    return torch.cat((first + middle, last) if odd else (first, middle + last), dim)


def _zero_borders(padded: torch.Tensor, task: Task) -> None:
    if task.top:
        padded[:, :, : task.top].zero_()
    if task.bottom:
        padded[:, :, -task.bottom :].zero_()
