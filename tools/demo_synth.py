"""Synthetic training pictures for the demo model: dead leaves, textures, gradients, glyphs.

Every picture is a function of its seed. Nothing is read from disk but Pillow's own font.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SCALE = 2
"""Pictures are drawn this many times larger and reduced, so that edges are anti-aliased."""

LETTERS = "ABCDEFGHKLMNOPRSTUVWXYZabcdefghiklmnoprstuvwxyz0123456789&?!%"


def random_colour(rng: Generator) -> np.ndarray:
    """Return an RGB colour, 0 to 1: grey, muted, or (one in three) saturated."""
    kind = rng.random()
    if kind < 0.2:
        return np.repeat(rng.random(), 3)
    colour = rng.random(3)
    if kind < 0.67:
        return colour.mean() + (colour - colour.mean()) * rng.uniform(0.2, 0.9)
    low, high = rng.uniform(0.0, 0.2), rng.uniform(0.6, 1.0)
    spread = (colour - colour.min()) / max(float(np.ptp(colour)), 1e-6)
    return low + (high - low) * spread


def fractal(rng: Generator, size: int, slope: float) -> np.ndarray:
    """Return noise [size, size] with an amplitude spectrum of 1 / f^slope, mean 0, deviation 1."""
    fy = np.fft.fftfreq(size)[:, None]
    fx = np.fft.rfftfreq(size)[None, :]
    stretch = math.exp(rng.normal(0.0, 0.5))
    frequency = np.sqrt((fy * stretch) ** 2 + (fx / stretch) ** 2)
    frequency[0, 0] = 1.0
    shape = frequency.shape
    spectrum = (rng.normal(size=shape) + 1j * rng.normal(size=shape)) / frequency**slope
    spectrum[0, 0] = 0.0
    noise = np.fft.irfft2(spectrum, s=(size, size))
    return noise / max(float(noise.std()), 1e-9)


def grating(rng: Generator, size: int) -> np.ndarray:
    """Return stripes, checks or a fabric [size, size], about -1 to 1."""
    y, x = np.mgrid[0:size, 0:size].astype(np.float32)
    total = np.zeros((size, size), np.float32)
    sharp = rng.choice([1.0, 4.0, 20.0])
    for _ in range(rng.integers(1, 3)):
        angle, period = rng.uniform(0.0, math.pi), math.exp(rng.uniform(1.8, 4.0))
        phase = (x * math.cos(angle) + y * math.sin(angle)) / period + rng.random()
        total += np.tanh(sharp * np.sin(2.0 * math.pi * phase))
    return total / 1.5


def texture_sheet(rng: Generator, size: int) -> np.ndarray:
    """Return a coloured texture [size, size, 3] around 0."""
    base = grating(rng, size) if rng.random() < 0.3 else fractal(rng, size, rng.uniform(0.6, 2.0))
    direction = np.ones(3) + rng.normal(0.0, 0.5, 3)
    sheet = base[..., None] * direction
    if rng.random() < 0.5:
        sheet = sheet + fractal(rng, size, rng.uniform(0.8, 1.8))[..., None] * rng.normal(0, 0.4, 3)
    return sheet.astype(np.float32)


def shade(rng: Generator, height: int, width: int) -> np.ndarray:
    """Return a linear or round gradient [height, width, 1], -1 to 1."""
    y = np.linspace(-1.0, 1.0, height, dtype=np.float32)[:, None]
    x = np.linspace(-1.0, 1.0, width, dtype=np.float32)[None, :]
    angle = rng.uniform(0.0, 2.0 * math.pi)
    if rng.random() < 0.6:
        field = x * math.cos(angle) + y * math.sin(angle)
    else:
        field = 1.0 - (x - math.cos(angle) / 2) ** 2 - (y - math.sin(angle) / 2) ** 2
    return np.clip(field, -1.0, 1.0)[..., None]


def fill(rng: Generator, height: int, width: int, sheets: list[np.ndarray]) -> Image.Image:
    """Return the surface of one leaf: a colour, perhaps shaded, perhaps textured."""
    surface = np.broadcast_to(random_colour(rng).astype(np.float32), (height, width, 3))
    if rng.random() < 0.5:
        surface = surface + shade(rng, height, width) * rng.uniform(0.03, 0.3)
    if rng.random() < 0.6:
        sheet = sheets[rng.integers(len(sheets))]
        top = rng.integers(0, sheet.shape[0] - height + 1)
        left = rng.integers(0, sheet.shape[1] - width + 1)
        surface = surface + sheet[top : top + height, left : left + width] * rng.uniform(0.02, 0.2)
    return Image.fromarray((np.clip(surface, 0.0, 1.0) * 255.0).astype(np.uint8), "RGB")


def outline(rng: Generator, radius: float) -> tuple[Image.Image, int]:
    """Return the mask of one leaf and its side in pixels: disc, box, polygon, blob or stroke."""
    side = max(4, int(2 * radius))
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    kind = rng.random()
    squash = rng.uniform(0.0, 0.35) * side
    box = [0.0, squash, side - 1.0, side - 1.0 - squash]
    if kind < 0.25:
        draw.ellipse(box, fill=255)
    elif kind < 0.4:
        draw.rectangle(box, fill=255)
    elif kind < 0.55:
        width = max(1, int(side * rng.uniform(0.01, 0.08)))
        draw.arc(
            [side * v for v in (0.05, 0.05, 0.95, 0.95)], 0, int(rng.uniform(60, 300)), 255, width
        )
        draw.line([tuple(rng.uniform(0, side, 2)), tuple(rng.uniform(0, side, 2))], 255, width)
    else:
        corners = int(rng.integers(3, 9 if kind < 0.8 else 24))
        angles = np.sort(rng.uniform(0.0, 2.0 * math.pi, corners))
        reach = radius * rng.uniform(0.5, 1.0, corners)
        points = zip(radius + reach * np.cos(angles), radius + reach * np.sin(angles), strict=True)
        draw.polygon([(float(a), float(b)) for a, b in points], fill=255)
    return mask.rotate(rng.uniform(0.0, 180.0)), side


def write_text(rng: Generator, picture: Image.Image) -> None:
    """Write a few words or lines of glyphs."""
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.integers(1, 6)):
        font = ImageFont.load_default(size=int(math.exp(rng.uniform(3.0, 4.8))))
        words = "".join(rng.choice(list(LETTERS), rng.integers(1, 12)))
        at = rng.uniform(-0.1, 0.9, 2) * picture.width
        colour = tuple(int(255 * c) for c in np.clip(random_colour(rng), 0, 1))
        draw.text((float(at[0]), float(at[1])), words, fill=colour, font=font)


def picture(seed: int, size: int = 256) -> np.ndarray:
    """Return synthetic picture number ``seed``: uint8 [size, size, 3], size at least 72."""
    rng = np.random.default_rng([20, seed])
    large = SCALE * size
    sheets = [texture_sheet(rng, large) for _ in range(3)]
    canvas = fill(rng, large, large, sheets)
    smallest, largest = rng.uniform(4.0, 14.0), rng.uniform(60.0, large / 2.2)
    for _ in range(int(math.exp(rng.uniform(3.3, 6.1)))):
        # Areas of leaves follow a power law, which gives the statistics of natural pictures.
        u = rng.random()
        radius = (smallest**-2 + u * (largest**-2 - smallest**-2)) ** -0.5
        if rng.random() < 0.25:
            radius = rng.uniform(smallest, largest)
        mask, side = outline(rng, radius)
        at = rng.uniform(-side, large, 2).astype(int)
        canvas.paste(fill(rng, side, side, sheets), (int(at[0]), int(at[1])), mask)
    if rng.random() < 0.35:
        write_text(rng, canvas)
    if rng.random() < 0.4:
        canvas = canvas.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 2.0)))
    array = np.asarray(canvas.resize((size, size), Image.Resampling.BOX), np.float32) / 255.0
    if rng.random() < 0.5:
        light = 1.0 + fractal(rng, size, 3.0)[..., None] * rng.uniform(0.05, 0.25)
        array = np.clip(array * light, 0.0, 1.0)
    return (array * 255.0 + 0.5).astype(np.uint8)
