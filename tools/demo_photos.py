"""Gather the photographs for train_demo.py and eval_demo.py from three freely licensed packages.

``demo_photos.py OUT scikit_image-0.26.0-*.whl scikit_learn-1.9.1-*.whl pmndrs-assets-1.7.0.tgz``,
as ``pip download --no-deps`` and ``npm pack`` fetch them. Needs the package OpenEXR for the
panoramas. Licences: NOTICE.md.
"""

from __future__ import annotations

import argparse
import base64
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

PICTURES = (".png", ".jpg")


def from_wheel(wheel: Path, out: Path) -> int:
    """Copy the pictures of a wheel; return how many."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(PICTURES) and "/tests/" not in n]
        for name in names:
            (out / PurePosixPath(name).name).write_bytes(archive.read(name))
    return len(names)


def tone_map(light: np.ndarray) -> np.ndarray:
    """Return linear light [H, W, 3] as a picture of usual brightness, uint8."""
    light = np.clip(np.nan_to_num(light.astype(np.float32), nan=1e4, posinf=1e4), 0.0, None)
    exposed = light * (0.35 / np.exp(np.log(light.mean(-1) + 1e-4).mean()))
    shown = np.clip(exposed / (1.0 + 0.35 * exposed), 0.0, 1.0) ** (1.0 / 2.2)
    return (shown * 255.0 + 0.5).astype(np.uint8)


def from_assets(package: Path, out: Path) -> int:
    """Tone-map the panoramas of @pmndrs/assets to PNG; return how many."""
    import OpenEXR  # pyright: ignore[reportMissingImports]

    count = 0
    with tarfile.open(package) as archive, tempfile.TemporaryDirectory() as temp:
        for member in archive.getmembers():
            if "/hdri/" not in member.name or not member.name.endswith(".exr.js"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            text = file.read().decode("utf-8")
            exr = Path(temp) / "panorama.exr"
            exr.write_bytes(base64.b64decode(text.split("base64,", 1)[1].split("'", 1)[0]))
            channels = OpenEXR.File(str(exr)).channels()
            if "RGB" in channels:
                light = channels["RGB"].pixels
            else:
                light = np.stack([channels[c].pixels for c in "RGB"], axis=-1)
            name = PurePosixPath(member.name).name.split(".")[0]
            Image.fromarray(tone_map(light)).save(out / f"{name}.png")
            count += 1
    return count


def main() -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("packages", type=Path, nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for package in args.packages:
        take = from_wheel if package.suffix == ".whl" else from_assets
        print(f"{package.name}: {take(package, args.out)} pictures")


if __name__ == "__main__":
    main()
