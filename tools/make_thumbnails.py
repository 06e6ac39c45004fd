"""Draw the thumbnails of the example workflows: ``.venv/bin/python tools/make_thumbnails.py``.

Most are a collage of the bundled photograph: left a damaged copy, right the photograph itself. They
say what a workflow is for. No model made them, and they say so. The demo's shows what the demo model
did, from the pictures ``run.py demo`` left in ``output/``.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont

ROOT = Path(__file__).resolve().parents[1]
PHOTO = ROOT / "tools" / "photo" / "chelsea.jpg"
TARGET = ROOT / "example_workflows"
WIDTH, HEIGHT, BAR, FOOT = 512, 384, 44, 24
LARGEST_BYTES = 60_000
HONEST = "Illustration: the photograph and a damaged copy of it. Not made by a model."
DEMO = "demo_restore"
DEMO_HONEST = "What the bundled toy model makes of a damaged photograph. Not SUPIR's quality."
DEMO_PICTURES = tuple(ROOT / "output" / f"demo_{name}.png" for name in ("degraded", "restored"))
Box = tuple[float, float, float, float]
"""Left, top, right, bottom as fractions of the photograph."""

FACE: Box = (0.16, 0.0, 0.86, 1.0)


@dataclass(frozen=True)
class Thumbnail:
    """What one workflow's thumbnail shows.

    Attributes:
        shrink: by how much the damaged copy was made smaller before it was enlarged again.
        cells: columns and rows of a grid drawn over the right half.
        repeat: how many times the pair is shown, for batches.
    """

    title: str
    shrink: int = 6
    crop: Box = FACE
    cells: tuple[int, int] = (1, 1)
    repeat: int = 1


THUMBNAILS = {
    "restore_photo": Thumbnail("Restore a photo"),
    "upscale_4k_tiled": Thumbnail("Upscale to 4K in tiles", 8, cells=(5, 5)),
    "low_vram": Thumbnail("Little memory, 8 steps", 5, (0.1, 0.05, 0.75, 1.0)),
    "portrait_captions_per_tile": Thumbnail("A caption for every tile", 6, cells=(2, 2)),
    "custom_sampler": Thumbnail("Any sampler and schedule", 6, (0.3, 0.1, 0.8, 0.8)),
    "batch_of_pictures": Thumbnail("Several pictures in one run", 7, repeat=3),
    "polish_with_sdxl": Thumbnail("Restore, then polish", 4, (0.25, 0.0, 0.95, 1.0)),
    DEMO: Thumbnail("Demo: does it run here?", crop=(0.0, 0.0, 1.0, 1.0)),
}
"""One for each workflow, by its stem."""


def damaged(picture: Image.Image, shrink: int) -> Image.Image:
    """Return a small, blurred, hard-compressed copy at the size of the original."""
    small = picture.resize(
        (picture.width // shrink, picture.height // shrink), Image.Resampling.BOX
    )
    packed = io.BytesIO()
    small.filter(ImageFilter.GaussianBlur(0.6)).save(packed, "JPEG", quality=25)
    return Image.open(packed).convert("RGB").resize(picture.size, Image.Resampling.BILINEAR)


def cropped(photo: Image.Image, crop: Box, size: tuple[int, int]) -> Image.Image:
    """Return a part of the photograph that fills a size without being stretched."""
    sides = (photo.width, photo.height, photo.width, photo.height)
    part = photo.crop(tuple(round(c * s) for c, s in zip(crop, sides, strict=True)))  # pyright: ignore[reportArgumentType]
    scale = max(size[0] / part.width, size[1] / part.height)
    part = part.resize(
        (round(part.width * scale), round(part.height * scale)), Image.Resampling.LANCZOS
    )
    left, top = (part.width - size[0]) // 2, (part.height - size[1]) // 2
    return part.crop((left, top, left + size[0], top + size[1]))


def pair(
    photo: Image.Image, what: Thumbnail, size: tuple[int, int], bad: Image.Image | None = None
) -> Image.Image:
    """Return one picture whose left half is damaged: as in ``bad``, or made so here."""
    whole = cropped(photo, what.crop, size)
    before = damaged(whole, what.shrink) if bad is None else cropped(bad, what.crop, size)
    middle = size[0] // 2
    whole.paste(before.crop((0, 0, middle, size[1])), (0, 0))
    draw = ImageDraw.Draw(whole)
    columns, rows = what.cells
    for k in range(1, columns):
        x = middle + (size[0] - middle) * k // columns
        draw.line((x, 0, x, size[1]), fill="white")
    for k in range(1, rows):
        y = size[1] * k // rows
        draw.line((middle, y, size[0], y), fill="white")
    draw.line((middle, 0, middle, size[1]), fill="white", width=3)
    return whole


def thumbnail(
    photo: Image.Image, what: Thumbnail, bad: Image.Image | None = None, note: str = HONEST
) -> Image.Image:
    """Return a whole thumbnail with title and label."""
    canvas = Image.new("RGB", (WIDTH, HEIGHT), "#1c2733")
    height = HEIGHT - BAR - FOOT
    width = WIDTH // what.repeat
    for k in range(what.repeat):
        size = (width - (k < what.repeat - 1) * 4, height)
        canvas.paste(pair(photo, what, size, bad), (k * width, BAR))
    draw = ImageDraw.Draw(canvas)
    draw.text(
        (14, BAR // 2), what.title, fill="white", font=ImageFont.load_default(24), anchor="lm"
    )
    small = ImageFont.load_default(12)
    draw.text((14, HEIGHT - FOOT // 2), note, fill="#b8c4d0", font=small, anchor="lm")
    label = ImageFont.load_default(15)
    for text, x, anchor in (("before", 8, "ls"), ("after", WIDTH - 8, "rs")):
        place = (x, HEIGHT - FOOT - 8)
        draw.text(
            place,
            text,
            fill="white",
            font=label,
            anchor=anchor,
            stroke_width=2,
            stroke_fill="black",
        )
    return canvas


def packed(picture: Image.Image) -> bytes:
    """Return a picture as JPEG below the limit, at the best quality that fits."""
    quality, data = 94, b""
    while not data or len(data) > LARGEST_BYTES:
        quality -= 6
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality, optimize=True)
        data = file.getvalue()
    return data


def demo_thumbnail(what: Thumbnail) -> Image.Image:
    """Return the demo's thumbnail. Raises: FileNotFoundError before ``run.py demo`` has run."""
    pictures: list[Image.Image] = []
    for path in DEMO_PICTURES:
        with Image.open(path) as opened:
            pictures.append(opened.convert("RGB"))
    return thumbnail(pictures[1], what, pictures[0], DEMO_HONEST)


def main() -> None:
    with Image.open(PHOTO) as opened:
        photo = opened.convert("RGB")
    for stem, what in THUMBNAILS.items():
        made = demo_thumbnail(what) if stem == DEMO else thumbnail(photo, what)
        data = packed(made)
        (TARGET / f"{stem}.jpg").write_bytes(data)
        print(f"{stem}.jpg: {len(data)} bytes")


if __name__ == "__main__":
    main()
