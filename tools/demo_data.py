"""Pictures the demo model is trained, tuned and judged on.

Three sets that share nothing: ``train``, ``dev`` (looked at while training, for every choice) and
``test`` (held out: other seeds, other photographs, used for the published table alone).
"""

from __future__ import annotations

from pathlib import Path

import demo_synth
import numpy as np
from demo_degrade import MILD, STRONG, degrade
from PIL import Image

TRAIN_PHOTOS = (
    *("astronaut.png", "coffee.png", "china.jpg", "hubble_deep_field.jpg", "ihc.png"),
    *("retina.jpg", "camera.png", "brick.png", "gravel.png", "cell.png", "horse.png", "text.png"),
)
"""From the data of scikit-image (CC0, public domain) and scikit-learn (CC BY 2.0)."""

TRAIN_PANORAMAS = (
    *(
        "apartment",
        "bridge",
        "dawn",
        "esplanade",
        "hall",
        "lab",
        "lobby",
        "night",
        "park",
        "studio",
    ),
    *("sunrise", "warehouse"),
)
"""CC0 panoramas of @pmndrs/assets (Poly Haven), tone-mapped to PNG."""

DEV_COLUMNS = {"coffee.png": 200, "china.jpg": 200}
"""So many columns at the right of these photographs are for ``dev`` and not for training."""

TEST_PHOTOS: dict[str, tuple[tuple[int, int], ...]] = {
    "chelsea.png": ((20, 120), (100, 200), (108, 10)),
    "flower.jpg": ((10, 10), (120, 200), (230, 400)),
    "coins.png": ((0, 0), (110, 190)),
    "grass.png": ((100, 100),),
    "clock_motion.png": ((50, 100),),
    "city.png": ((60, 0), (60, 256)),
    "forest.png": ((40, 20), (60, 280)),
    "venice.png": ((50, 40), (50, 300)),
    "workshop.png": ((60, 160),),
    "sky.png": ((10, 200),),
    "sunset.png": ((60, 0),),
}
"""Top left corners of the held-out crops. None of these files is trained on."""

DEV_SYNTHETIC_SEED = 1_000_000
DEV_SYNTHETIC = 8

TEST_SIDE = 192
TEST_SYNTHETIC_SEED = 2_000_000
TEST_SYNTHETIC = 13


def read_rgb(path: Path) -> np.ndarray:
    """Return a picture file as uint8 [H, W, 3]."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def load_photos(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (training photographs at three scales, dev crops of 192 px) from a folder of files."""
    train: list[np.ndarray] = []
    dev: list[np.ndarray] = []
    for name in (*TRAIN_PHOTOS, *(f"{one}.png" for one in TRAIN_PANORAMAS)):
        photo = read_rgb(folder / name)
        columns = DEV_COLUMNS.get(name, 0)
        if columns:
            dev += [photo[top : top + 192, -192:] for top in (10, 200)]
            photo = photo[:, :-columns]
        for scale in (1.0, 0.7, 0.5):
            size = (round(photo.shape[1] * scale), round(photo.shape[0] * scale))
            if min(size) >= 128:
                image = Image.fromarray(photo, "RGB")
                train.append(np.asarray(image.resize(size, Image.Resampling.LANCZOS)))
    return train, dev


def dev_set(folder: Path) -> dict[str, np.ndarray]:
    """Return the pictures that may guide choices by name, uint8 [192, 192, 3] each."""
    _, photos = load_photos(folder)
    found = {f"photo {n}": photo for n, photo in enumerate(photos)}
    for number in range(DEV_SYNTHETIC):
        seed = DEV_SYNTHETIC_SEED + number
        found[f"synthetic {seed}"] = demo_synth.picture(seed, TEST_SIDE)
    return found


def test_set(folder: Path) -> dict[str, np.ndarray]:
    """Return the held-out pictures by name, uint8 [192, 192, 3] each."""
    found: dict[str, np.ndarray] = {}
    for name, corners in TEST_PHOTOS.items():
        photo = read_rgb(folder / name)
        for top, left in corners:
            crop = photo[top : top + TEST_SIDE, left : left + TEST_SIDE]
            found[f"{Path(name).stem}@{left},{top}"] = crop
    for number in range(TEST_SYNTHETIC):
        seed = TEST_SYNTHETIC_SEED + number
        found[f"synthetic {seed}"] = demo_synth.picture(seed, TEST_SIDE)
    return found


class Crops:
    """Random training crops: two thirds synthetic, flipped, turned, recoloured."""

    def __init__(self, synthetic: np.ndarray, photos: list[np.ndarray], seed: int) -> None:
        self.synthetic, self.photos = synthetic, photos
        self.rng = np.random.default_rng([21, seed])
        areas = np.array([p.shape[0] * p.shape[1] for p in photos], np.float64) ** 0.5
        self.weights = areas / areas.sum()

    def crop(self, size: int) -> np.ndarray:
        """Return one crop, uint8 [size, size, 3]."""
        rng = self.rng
        if rng.random() < 0.62:
            source = self.synthetic[rng.integers(len(self.synthetic))]
        else:
            source = self.photos[rng.choice(len(self.photos), p=self.weights)]
        top = rng.integers(0, source.shape[0] - size + 1)
        left = rng.integers(0, source.shape[1] - size + 1)
        crop = source[top : top + size, left : left + size]
        crop = np.rot90(crop, rng.integers(4))
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        if rng.random() < 0.5:
            crop = crop[..., rng.permutation(3)]
        return np.ascontiguousarray(crop if rng.random() < 0.55 else self.recolour(crop))

    def recolour(self, crop: np.ndarray) -> np.ndarray:
        """Return a crop of another brightness, contrast, saturation and cast."""
        rng = self.rng
        colour = crop.astype(np.float32) / 255.0
        grey = colour.mean(-1, keepdims=True)
        colour = grey + (colour - grey) * rng.uniform(0.5, 2.2)
        colour = colour * rng.uniform(0.6, 1.2) + rng.uniform(-0.15, 0.15)
        if rng.random() < 0.5:
            colour = colour * rng.uniform(0.4, 1.2, 3).astype(np.float32)
        if rng.random() < 0.1:
            colour = 1.0 - colour
        return (np.clip(colour, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)

    def batch(self, count: int, size: int) -> np.ndarray:
        """Return clean crops, uint8 [count, size, size, 3]."""
        return np.stack([self.crop(size) for _ in range(count)])

    def pairs(self, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (degraded, clean) crops; three in four strongly degraded."""
        clean = self.batch(count, size)
        kinds = [STRONG if self.rng.random() < 0.75 else MILD for _ in range(count)]
        damaged = [degrade(c, self.rng, how) for c, how in zip(clean, kinds, strict=True)]
        return np.stack(damaged), clean
