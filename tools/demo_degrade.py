"""How pictures are damaged: to train the demo model, to judge it, and in ``run.py demo``."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageFilter


def damage(
    clean: np.ndarray,
    rng: Generator,
    *,
    blur: float,
    factor: float,
    noise: float,
    grey: bool,
    quality: int | None,
) -> np.ndarray:
    """Return a damaged copy of a picture, of the same size.

    Args:
        clean: uint8 [H, W, 3].
        rng: source of the noise.
        blur: radius of a Gaussian blur in pixels; 0 = none.
        factor: how many times it is made smaller (bicubic), and larger again at the end.
        noise: deviation of Gaussian noise, of 255, put on the small picture; ``grey``: the same
            noise in all channels.
        quality: JPEG quality of the small picture; None = no JPEG.
    """
    height, width = clean.shape[:2]
    image = Image.fromarray(clean)
    if blur:
        image = image.filter(ImageFilter.GaussianBlur(blur))
    small = (max(1, round(width / factor)), max(1, round(height / factor)))
    image = image.resize(small, Image.Resampling.BICUBIC)
    grain = rng.normal(0.0, noise, (small[1], small[0], 1 if grey else 3))
    noisy = np.clip(np.asarray(image, np.float32) + grain + 0.5, 0.0, 255.0).astype(np.uint8)
    image = Image.fromarray(noisy)
    if quality is not None:
        packed = io.BytesIO()
        image.save(packed, "JPEG", quality=quality)
        image = Image.open(io.BytesIO(packed.getvalue())).convert("RGB")
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


@dataclass(frozen=True)
class Degradation:
    """Ranges of one kind of damage: blur (px), reduction, noise (of 255), JPEG quality."""

    blur: tuple[float, float] = (0.5, 2.4)
    factors: tuple[float, ...] = (1.0, 2.0, 2.5)
    noise: tuple[float, float] = (8.0, 32.0)
    quality: tuple[int, int] = (20, 75)


STRONG = Degradation()
MILD = Degradation((0.4, 2.0), (1.0, 1.5, 2.0), (2.0, 18.0), (35, 92))


def degrade(clean: np.ndarray, rng: Generator, how: Degradation = STRONG) -> np.ndarray:
    """Return a randomly damaged copy of a picture, uint8 [H, W, 3].

    Blur for four in five, JPEG for four in five, grey noise for three in ten.
    """
    blur = rng.uniform(*how.blur) if rng.random() < 0.8 else 0.0
    factor = how.factors[rng.integers(len(how.factors))]
    grey, noise = rng.random() < 0.3, rng.uniform(*how.noise)
    low, high = how.quality
    quality = int(rng.integers(low, high + 1)) if rng.random() < 0.8 else None
    return damage(clean, rng, blur=blur, factor=factor, noise=noise, grey=grey, quality=quality)
