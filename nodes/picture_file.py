"""The size of a picture file ComfyUI would load, from its header.

Opens nothing outside ComfyUI's input, output and temp folders.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import folder_paths
from PIL import Image, UnidentifiedImageError

EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class ImageSize:
    """Size of an IMAGE; ``images`` is None where the length of the batch is not known."""

    width_px: int
    height_px: int
    images: int | None = 1


def picture_path(name: str) -> str | None:
    """Return the path of a picture LoadImage would read, or None when it is not one of its folders'.

    ComfyUI's own check comes first; before 0.30 it lets names through that leave the folder.
    """
    try:
        path = os.path.abspath(folder_paths.get_annotated_filepath(name))
        folders = (
            folder_paths.get_input_directory(),
            folder_paths.get_output_directory(),
            folder_paths.get_temp_directory(),
        )
        inside = any(_is_inside(path, os.path.abspath(folder)) for folder in folders)
        return path if inside and os.path.isfile(path) else None
    except (ValueError, OSError, TypeError, AttributeError):
        return None


def _is_inside(path: str, folder: str) -> bool:
    try:
        return os.path.commonpath([path, folder]) == folder
    except ValueError:  # on another drive
        return False


@lru_cache(maxsize=512)
def header_size(path: str, mtime_ns: int, size_bytes: int) -> ImageSize | None:
    """Return the size a picture file's header tells, turned as its camera says.

    Args: mtime_ns, size_bytes: of the file, so that a changed file is read again.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            images = None if getattr(image, "is_animated", False) else 1
            turned = image.getexif().get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
            if turned and image.format not in ("JPEG", "MPO"):
                return None  # ComfyUI's versions differ in whether they turn these
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    except Exception:  # noqa: BLE001 - a reader may raise anything on a damaged file: size unknown
        return None
    return ImageSize(height, width, images) if turned else ImageSize(width, height, images)
