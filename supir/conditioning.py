"""What SUPIR tells SDXL besides the prompt: one constant size, and captions before the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import SIZE_PX
from .errors import SettingsError

SIZE_CONDITIONING = {
    "width": SIZE_PX,
    "height": SIZE_PX,
    "crop_w": 0,
    "crop_h": 0,
    "target_width": SIZE_PX,
    "target_height": SIZE_PX,
}
"""Size, crop and target in the host's key names, the same for every picture and both prompts
(SUPIR's published config)."""


def flatten_captions(captions: object) -> list[str]:
    """Return the captions of a possibly nested list as one flat list of stripped strings.

    Raises: SettingsError when something in it is not text.
    """
    if isinstance(captions, str):
        return [captions.strip()]
    if isinstance(captions, Sequence):
        return [text for one in captions for text in flatten_captions(one)]
    if captions is None:
        return [""]
    raise SettingsError(
        f"captions holds a {type(captions).__name__} ({captions!r:.60}), but a caption is text. "
        "Connect a string or a list of strings to captions."
    )


def join_prompt(caption: str, prompt: str) -> str:
    """Return the caption followed by the prompt, parted by a comma where both say something."""
    caption, prompt = caption.strip(), prompt.strip()
    if not caption or not prompt:
        return caption or prompt
    separator = " " if caption[-1] in ".,;:!?。、，" else ", "
    return caption + separator + prompt


def choose_captions(count: int, images: int, tiles: int) -> str:
    """Return how ``count`` captions are used: ``shared``, ``image``, ``tile`` or ``image_tile``.

    Args: count: captions given, >= 1; images: pictures in the batch; tiles: tiles per picture.
    Raises: SettingsError naming all counts when none fits.
    """
    ways = {"shared": 1, "image": images, "tile": tiles, "image_tile": images * tiles}
    for way, wanted in ways.items():
        if count == wanted:
            return way
    raise SettingsError(
        f"captions holds {count} captions, but there are {images} picture(s) and {tiles} tile(s) "
        "per picture. Give one caption, one per picture, one per tile (the Tiles node shows them "
        "in reading order), or one per tile of every picture."
    )
