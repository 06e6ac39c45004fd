"""ControlNet hints on tiles: every tile sees its own part of the hint picture."""

from __future__ import annotations

from typing import Any

import comfy.utils
from torch.nn import functional as F

from ..supir.errors import SettingsError
from ..supir.tiling import Window


class ControlCropper:
    """Makes, keeps and frees per-tile copies of ControlNet chains.

    Args:
        latent_size: height and width of the whole latent in cells.
        picture: part of that height and width the picture covers; hints show the picture alone.
    """

    def __init__(self, latent_size: Any, picture: tuple[float, float] = (1.0, 1.0)) -> None:
        self._height, self._width = latent_size
        self._picture = picture
        self._copies: dict[tuple[int, int], Any] = {}

    def crop(self, control: Any, index: int, window: Window) -> Any:
        """Return the whole chain with its hints cut to one tile.

        Raises: SettingsError when a control in the chain has no picture hint that can be cut.
        """
        key = (id(control), index)
        if key not in self._copies:
            self._copies[key] = self._crop_chain(control, window)
        return self._copies[key]

    def _crop_chain(self, control: Any, window: Window) -> Any:
        if not hasattr(control, "cond_hint_original") or control.cond_hint_original is None:
            raise SettingsError(
                f"positive or negative carries a {type(control).__name__} without a picture hint, "
                "which cannot be cut into tiles. Remove it, or set tile_px to -1."
            )
        copied = control.copy()
        for prepared in ("timestep_range", "model_sampling_current"):  # set by the host's pre_run
            if hasattr(control, prepared):
                setattr(copied, prepared, getattr(control, prepared))
        ratio = getattr(control, "compression_ratio", 8)
        if getattr(control, "vae", None) is not None:  # the hint is a picture the VAE then encodes
            ratio *= control.vae.spacial_compression_encode()
        algorithm = getattr(control, "upscale_algorithm", "nearest-exact")
        height, width = self._height * ratio, self._width * ratio
        pixels = Window(*(side * ratio for side in window))

        def cut(picture: Any) -> Any:
            if tuple(picture.shape[-2:]) != (height, width):
                rows, columns = (
                    round(a * b) for a, b in zip((height, width), self._picture, strict=True)
                )
                inner = comfy.utils.common_upscale(picture, columns, rows, algorithm, "center")
                pad = (0, width - columns, 0, height - rows)
                picture = F.pad(inner, pad, mode="replicate") if any(pad) else inner
            return pixels.crop(picture)

        copied.cond_hint_original = cut(control.cond_hint_original)
        if getattr(control, "extra_concat_orig", None):  # masks of inpainting ControlNets
            copied.extra_concat_orig = [cut(one) for one in control.extra_concat_orig]
        copied.cond_hint = None
        previous = control.previous_controlnet
        if previous is not None:
            copied.set_previous_controlnet(self._crop_chain(previous, window))
        return copied

    def clear(self) -> None:
        """Free what the copies hold."""
        for control in self._copies.values():
            control.cleanup()
        self._copies.clear()
