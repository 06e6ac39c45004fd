"""Rows: how a map is cut into stripes and which rows of its source a stripe reads.

Integers only. A map of height H is cut at ``bounds`` (0, ..., H); stripe i is rows
``bounds[i]`` to ``bounds[i + 1]`` (half-open).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

MIN_ROWS = 2  # an upsampled stripe starts and ends between two source rows


class Reach(str, Enum):
    """How output rows depend on source rows."""

    SAME = "same"  # 3x3, padding 1: one row above and below
    UP = "up"  # nearest 2x, then 3x3
    DOWN = "down"  # 3x3, stride 2, padding at the bottom only
    POINT = "point"  # 1x1


@dataclass(frozen=True)
class Task:
    """One stripe of work.

    Args:
        start, stop: output rows, half-open.
        first, last: source rows read, half-open, inside the source map.
        top, bottom: rows read beyond the source map, which are zero.
        keep: source rows below this one are not read by any later stripe.
    """

    start: int
    stop: int
    first: int
    last: int
    top: int
    bottom: int
    keep: int

    @property
    def rows(self) -> int:
        """Output rows of this stripe."""
        return self.stop - self.start


def partition(height: int, rows: int) -> tuple[int, ...]:
    """Cut a height into equal stripes of an even number of rows; only the last may be shorter.

    Args:
        height: rows of the map, >= 1.
        rows: most rows a stripe may have; values below MIN_ROWS count as MIN_ROWS.
    Returns: the bounds, from 0 to height.
    """
    limit = max(MIN_ROWS, rows - rows % 2)
    count = -(-height // limit)
    size = -(-height // count)
    size += size % 2
    return (*range(0, height, size), height)


def pieces(bounds: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (stripe index, first row, last row) of every stripe that rows start to stop touch."""
    index = bisect_right(bounds, start) - 1
    while start < stop:
        end = min(stop, bounds[index + 1])
        yield index, start, end
        start, index = end, index + 1


def tasks(reach: Reach, bounds: tuple[int, ...], source_height: int) -> tuple[Task, ...]:
    """List the stripes of a sweep, top to bottom."""
    wanted = [_reads(reach, lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    made: list[Task] = []
    for i, (first, last) in enumerate(wanted):
        keep = max(0, wanted[i + 1][0]) if i + 1 < len(wanted) else source_height
        made.append(
            Task(
                start=bounds[i],
                stop=bounds[i + 1],
                first=max(0, first),
                last=min(source_height, last),
                top=max(0, -first),
                bottom=max(0, last - source_height),
                keep=keep,
            )
        )
    return tuple(made)


def _reads(reach: Reach, start: int, stop: int) -> tuple[int, int]:
    """Return the source rows behind output rows start to stop, padding included."""
    if reach is Reach.SAME:
        return start - 1, stop + 1
    if reach is Reach.UP:
        return start // 2 - 1, stop // 2 + 1
    if reach is Reach.DOWN:
        return 2 * start, 2 * stop + 1
    return start, stop


def out_size(reach: Reach, height: int, width: int) -> tuple[int, int]:
    """Return the height and width a layer makes of a map."""
    if reach is Reach.UP:
        return 2 * height, 2 * width
    if reach is Reach.DOWN:
        return height // 2, width // 2
    return height, width
