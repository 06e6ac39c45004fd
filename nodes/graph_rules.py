"""Output sizes of ComfyUI's own picture and latent nodes, from their inputs.

One function per kind of node. What a node's size depends on and is not known makes it unknown.
Source: the nodes themselves, ComfyUI 0.16.3 to 0.30.0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, cast

from .graph import Graph
from .picture_file import ImageSize, header_size, picture_path
from .types import Canvas


@dataclass(frozen=True)
class LatentSize:
    """Size of a LATENT in cells, and the canvas it carries if one of our nodes made it."""

    width: int
    height: int
    images: int | None = 1
    canvas: Canvas | None = None


Size = ImageSize | LatentSize | None


class SizesLike(Protocol):
    """What a rule needs of the table of sizes."""

    graph: Graph
    ratio_of: Callable[[str], int | None]

    def at(self, node_id: str, name: str) -> Size: ...


@dataclass(frozen=True)
class Node:
    """One node as its rule sees it."""

    sizes: SizesLike
    id: str

    def image(self, name: str = "image") -> ImageSize | None:
        """Return the size of the IMAGE at an input."""
        size = self.sizes.at(self.id, name)
        return size if isinstance(size, ImageSize) else None

    def latent(self, name: str = "samples") -> LatentSize | None:
        """Return the size of the LATENT at an input."""
        size = self.sizes.at(self.id, name)
        return size if isinstance(size, LatentSize) else None

    def int(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number."""
        return self.sizes.graph.integer(self.id, name, default)

    def float(self, name: str, default: float | None = None) -> float | None:
        """Return a number."""
        return self.sizes.graph.number(self.id, name, default)

    def text(self, name: str, default: str = "") -> str:
        """Return a text; empty when it is not known."""
        value = self.sizes.graph.constant(self.id, name, default)
        return value if isinstance(value, str) else ""

    @property
    def ratio(self) -> int | None:
        """Pixels per cell of the connected VAE."""
        return self.sizes.ratio_of(self.id)


Rule = Callable[[Node], "list[Size]"]


def resized(size: ImageSize | None, width: float | None, height: float | None) -> list[Size]:
    """Return a picture at another size; unknown when it is not one of at least a pixel."""
    if size is None or width is None or height is None or width < 1 or height < 1:
        return [None]
    return [replace(size, width_px=int(width), height_px=int(height))]


def cells(
    size: LatentSize | None, width: float | None, height: float | None, images: int | None = -1
) -> list[Size]:
    """Return a latent of another size, its canvas kept as ComfyUI's nodes keep it."""
    if size is None or width is None or height is None or width < 1 or height < 1:
        return [None]
    count = size.images if images == -1 else images
    return [replace(size, width=int(width), height=int(height), images=count)]


def load_image(node: Node) -> list[Size]:
    """Return the size of the picture file of a LoadImage node."""
    name = node.text("image")
    path = picture_path(name) if name else None
    if path is None:
        return [None]
    try:
        status = os.stat(path)
    except OSError:
        return [None]
    return [header_size(path, status.st_mtime_ns, status.st_size)]


def scale(node: Node) -> list[Size]:
    size, width, height = node.image(), node.int("width"), node.int("height")
    if size is None or width is None or height is None:
        return [None]
    if width == 0 and height == 0:
        return [size]
    if width == 0:
        width = max(1, round(size.width_px * height / size.height_px))
    elif height == 0:
        height = max(1, round(size.height_px * width / size.width_px))
    return resized(size, width, height)


def scale_by(node: Node) -> list[Size]:
    size, by = node.image(), node.float("scale_by")
    if size is None or by is None:
        return [None]
    return resized(size, round(size.width_px * by), round(size.height_px * by))


def scale_to_pixels(node: Node) -> list[Size]:
    size, mega, step = node.image(), node.float("megapixels"), node.int("resolution_steps", 1)
    if size is None or mega is None or step is None or mega <= 0 or step < 1:
        return [None]
    by = math.sqrt(mega * 1024 * 1024 / (size.width_px * size.height_px))
    width, height = (round(side * by / step) * step for side in (size.width_px, size.height_px))
    return resized(size, width, height)


def scale_to_side(node: Node) -> list[Size]:
    size, side = node.image(), node.int("largest_size")
    if size is None or side is None:
        return [None]
    width, height = size.width_px, size.height_px
    if height > width:
        return resized(size, round(width / height * side), side)
    return resized(size, side, round(height / width * side) if width > height else side)


def crop_to(size: ImageSize | None, box: tuple[int | None, ...]) -> list[Size]:
    if size is None or any(side is None for side in box):
        return [None]
    x, y, width, height = (cast("int", side) for side in box)
    if x < 0 or y < 0:
        return [None]
    x, y = min(x, size.width_px - 1), min(y, size.height_px - 1)
    return resized(size, min(width, size.width_px - x), min(height, size.height_px - y))


def crop(node: Node) -> list[Size]:
    return crop_to(node.image(), tuple(node.int(n) for n in ("x", "y", "width", "height")))


BOX = (("x", 0), ("y", 0), ("width", 512), ("height", 512))
"""Parts of a bounding box and what ComfyUI takes where one is missing."""


def crop_region(node: Node) -> list[Size]:
    graph = node.sizes.graph
    link = graph.link(node.id, "crop_region")
    if link is not None:
        if graph.kind(link[0]) != "PrimitiveBoundingBox":
            return [None]
        box = tuple(graph.integer(link[0], name, default) for name, default in BOX)
        return crop_to(node.image(), box)
    region = graph.constant(node.id, "crop_region")
    if not isinstance(region, dict):
        return [None]
    values = [cast("dict[str, object]", region).get(n, d) for n, d in BOX]
    if not all(isinstance(v, int) for v in values):
        return [None]
    return crop_to(node.image(), tuple(cast("list[int]", values)))


def pad(node: Node) -> list[Size]:
    size = node.image()
    sides = [node.int(name) for name in ("left", "right", "top", "bottom")]
    if size is None or any(side is None for side in sides):
        return [None]
    left, right, top, bottom = (cast("int", side) for side in sides)
    return resized(size, size.width_px + left + right, size.height_px + top + bottom)


def rotate(node: Node) -> list[Size]:
    size, by = node.image(), node.text("rotation")
    if size is None or not by:
        return [None]
    if by.startswith(("90", "270")):
        return resized(size, size.height_px, size.width_px)
    return [size]


def repeat_image(node: Node) -> list[Size]:
    size, amount = node.image(), node.int("amount")
    if size is None:
        return [None]
    return [replace(size, images=_times(size.images, amount))]


def _times(images: int | None, amount: int | None) -> int | None:
    return None if images is None or amount is None else max(1, images * amount)


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def image_batch(node: Node) -> list[Size]:
    first, second = node.image("image1"), node.image("image2")
    if first is None:
        return [None]
    return [replace(first, images=_plus(first.images, second.images if second else None))]


def image_from_batch(node: Node) -> list[Size]:
    size = node.image()
    if size is None:
        return [None]
    return [replace(size, images=_part(size.images, node.int("batch_index"), node.int("length")))]


def _part(images: int | None, index: int | None, length: int | None) -> int | None:
    if images is None or index is None or length is None:
        return None
    index = index + images if index < 0 else index
    return max(1, min(images - max(0, min(images - 1, index)), length))


def join_alpha(node: Node) -> list[Size]:
    size = node.image()
    return [None if size is None else replace(size, images=None)]  # masks have batches of their own


def empty_image(node: Node) -> list[Size]:
    count = node.int("batch_size", 1)
    return resized(ImageSize(1, 1, count), node.int("width"), node.int("height"))


def empty_latent(node: Node) -> list[Size]:
    width, height = node.int("width"), node.int("height")
    if width is None or height is None:
        return [None]
    return cells(LatentSize(1, 1, node.int("batch_size", 1)), width // 8, height // 8)


def latent_upscale(node: Node) -> list[Size]:
    size, width, height = node.latent(), node.int("width"), node.int("height")
    if size is None or width is None or height is None:
        return [None]
    if width == 0 and height == 0:
        return [size]
    if width == 0:
        height = max(64, height)
        width = max(64, round(size.width * height / size.height))
    elif height == 0:
        width = max(64, width)
        height = max(64, round(size.height * width / size.width))
    return cells(size, max(64, width) // 8, max(64, height) // 8)


def latent_upscale_by(node: Node) -> list[Size]:
    size, by = node.latent(), node.float("scale_by")
    if size is None or by is None:
        return [None]
    return cells(size, round(size.width * by), round(size.height * by))


def latent_crop(node: Node) -> list[Size]:
    size = node.latent()
    box = [node.int(name) for name in ("x", "y", "width", "height")]
    if size is None or any(side is None for side in box):
        return [None]
    x, y, width, height = (cast("int", side) // 8 for side in box)
    x, y = min(x, size.width - 8), min(y, size.height - 8)
    if min(x, y) < 0:
        return [None]
    return cells(size, min(width, size.width - x), min(height, size.height - y))


def latent_rotate(node: Node) -> list[Size]:
    size, by = node.latent(), node.text("rotation")
    if size is None or not by:
        return [None]
    turned = by.startswith(("90", "270"))
    return cells(size, size.height, size.width) if turned else [size]


def latent_repeat(node: Node) -> list[Size]:
    size = node.latent()
    if size is None:
        return [None]
    return cells(size, size.width, size.height, _times(size.images, node.int("amount")))


def latent_from_batch(node: Node) -> list[Size]:
    size = node.latent()
    if size is None:
        return [None]
    count = _part(size.images, node.int("batch_index"), node.int("length"))
    return cells(size, size.width, size.height, count)


def latent_batch(node: Node) -> list[Size]:
    first, second = node.latent("samples1"), node.latent("samples2")
    if first is None:
        return [None]
    count = _plus(first.images, second.images if second else None)
    return cells(first, first.width, first.height, count)


def core_encode(node: Node) -> list[Size]:
    size, ratio = node.image("pixels"), node.ratio
    if size is None or ratio is None:
        return [None]
    latent = LatentSize(1, 1, size.images)
    return cells(latent, size.width_px // ratio, size.height_px // ratio)


def core_decode(node: Node) -> list[Size]:
    size, ratio = node.latent(), node.ratio
    if size is None or ratio is None:
        return [None]
    return [ImageSize(size.width * ratio, size.height * ratio, size.images)]
