"""How close a picture is to the original: PSNR, SSIM, GMSD, colour error; and the trivial filters.

Pictures are uint8 arrays [H, W, 3].
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageFilter

LUMA = np.array([0.299, 0.587, 0.114])
COLOUR_SQUARE = 32
"""Side in pixels of the squares whose mean colours are compared."""


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in dB over all three channels."""
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return 10.0 * math.log10(255.0**2 / max(error, 1e-9))


def _filter(image: np.ndarray, kernel: np.ndarray, axis: int) -> np.ndarray:
    """Correlate along one axis, edges reflected; the shape stays."""
    reach = len(kernel) // 2
    widths = [(0, 0)] * image.ndim
    widths[axis] = (reach, reach)
    padded = np.pad(image, widths, mode="symmetric")
    length = image.shape[axis]
    parts = (
        weight * padded.take(range(start, start + length), axis)
        for start, weight in enumerate(kernel)
    )
    return np.sum(list(parts), axis=0)


def smooth(image: np.ndarray, sigma: float) -> np.ndarray:
    """Return an image, float [H, W] or [H, W, C], after a Gaussian blur; sigma in pixels."""
    reach = max(1, math.ceil(3.5 * sigma))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    return _filter(_filter(image, kernel, 0), kernel, 1)


def luma(picture: np.ndarray) -> np.ndarray:
    """Return the brightness [H, W], 0 to 255."""
    return picture.astype(np.float64) @ LUMA


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the structural similarity of the brightness, 1 for equal pictures.

    Source: Wang et al. 2004; Gaussian window of 1.5 px, K1 = 0.01, K2 = 0.03.
    """
    x, y = luma(a), luma(b)
    mean_x, mean_y = smooth(x, 1.5), smooth(y, 1.5)
    var_x = smooth(x * x, 1.5) - mean_x**2
    var_y = smooth(y * y, 1.5) - mean_y**2
    both = smooth(x * y, 1.5) - mean_x * mean_y
    c1, c2 = (0.01 * 255.0) ** 2, (0.03 * 255.0) ** 2
    top = (2.0 * mean_x * mean_y + c1) * (2.0 * both + c2)
    return float(np.mean(top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))))


def gmsd(a: np.ndarray, b: np.ndarray) -> float:
    """Return the gradient magnitude similarity deviation of the brightness, 0 for equal pictures.

    Source: Xue et al. 2014; half size, Prewitt gradients, constant 170.
    """

    def gradients(picture: np.ndarray) -> np.ndarray:
        image = luma(picture)
        height, width = (side // 2 * 2 for side in image.shape)
        image = image[:height, :width]
        image = (image[::2, ::2] + image[1::2, ::2] + image[::2, 1::2] + image[1::2, 1::2]) / 4.0
        across, flat = np.array([1.0, 0.0, -1.0]), np.ones(3) / 3.0
        x = _filter(_filter(image, across, 1), flat, 0)
        y = _filter(_filter(image, across, 0), flat, 1)
        return np.hypot(x, y)

    m, n = gradients(a), gradients(b)
    return float(np.std((2.0 * m * n + 170.0) / (m**2 + n**2 + 170.0)))


def colour_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return how far the mean colours of 32 px squares are apart: mean over squares and channels, of 255."""
    height, width = (side // COLOUR_SQUARE for side in a.shape[:2])
    shape = (height, COLOUR_SQUARE, width, COLOUR_SQUARE, 3)
    area = (height * COLOUR_SQUARE, width * COLOUR_SQUARE)
    difference = a.astype(np.float64) - b.astype(np.float64)
    return float(np.abs(difference[: area[0], : area[1]].reshape(shape).mean((1, 3))).mean())


def trivial_filters(picture: np.ndarray) -> dict[str, np.ndarray]:
    """Return what plain filters make of a picture, by name: Gaussian blurs and medians."""
    made: dict[str, np.ndarray] = {}
    for sigma in (0.7, 1.0, 1.5):
        blurred = smooth(picture.astype(np.float64), sigma)
        made[f"Gaussian blur {sigma} px"] = np.clip(blurred + 0.5, 0, 255).astype(np.uint8)
    image = Image.fromarray(picture)
    for times in (1, 2):
        image = image.filter(ImageFilter.MedianFilter(3))
        made["median 3x3" + (" twice" if times == 2 else "")] = np.asarray(image)
    return made
