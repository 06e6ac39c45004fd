"""Tiles: the tiles a picture will be sampled in, to look at and to caption."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..supir.constants import WORK_KEY
from ..supir.errors import SettingsError, ShapeError
from ..supir.prepare import pad
from ..supir.tiling import Window, windows
from . import widgets
from .picture import read_image, read_latent
from .sample_request import latent_ratio, tile_cells
from .types import CATEGORY, Canvas

MAX_TILE_BYTES = 8 * 2**30
"""Most memory the tiles may take as pictures."""


def cut_tiles(image: Any, latent: Any, tile: int, overlap: int) -> torch.Tensor:
    """Return the tiles of every picture, [B * tiles, h, w, 3], pictures outer, reading order inner.

    Args: tile, overlap: latent cells; tile 0 = the whole picture.
    Raises: ShapeError when the picture is not the one the latent was made from.
    """
    picture = read_image(image)
    samples, ratio = read_latent(latent, "latent"), latent_ratio(latent)
    height, width = samples.shape[-2:]
    canvas = latent.get(WORK_KEY)
    size = picture.size_px
    known = (canvas.width_px, canvas.height_px) if isinstance(canvas, Canvas) else size
    if size != known or size[0] > width * ratio or size[1] > height * ratio:
        raise ShapeError(
            f"image is {size[0]}x{size[1]} px, but latent belongs to a picture of "
            f"{known[0]}x{known[1]} px on {width * ratio}x{height * ratio}. Connect image and latent "
            "from the same First Stage node (stage1 and control)."
        )
    whole = pad(picture.rgb, height * ratio, width * ratio)
    places = [Window(0, height, 0, width)]
    if tile:
        places = windows(height, width, tile, overlap)
    side = (places[0].bottom - places[0].top) * (places[0].right - places[0].left)
    needed = len(places) * picture.rgb.shape[0] * 3 * 4 * side * ratio**2
    if needed > MAX_TILE_BYTES:
        raise SettingsError(
            f"tile_overlap_px makes {len(places)} tiles per picture, {needed / 2**30:.0f} GiB of pixels "
            f"in all. Lower tile_overlap_px to half of tile_px or less."
        )
    pixels = [Window(*(side * ratio for side in place)) for place in places]
    cut = [place.crop(one) for one in whole for place in pixels]
    return torch.stack(cut).movedim(1, -1)  # BCHW -> BHWC


class Tiles(io.ComfyNode):
    """Show the tiles of a picture and tell their size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Tiles",
            display_name="SUPIR Tiles",
            category=CATEGORY,
            description=(
                "Cuts the picture into the tiles Sample will use, in reading order, for captioning. "
                "Connect tile_px and tile_overlap_px to Sample so that both agree."
            ),
            search_aliases=["supir", "tiles", "caption"],
            inputs=[
                io.Image.Input("image", tooltip="stage1 of First Stage: what the tiles show."),
                io.Latent.Input("latent", tooltip="control of First Stage: where the tiles lie."),
                *widgets.tiles(),
            ],
            outputs=[
                io.Image.Output("tiles", display_name="tiles"),
                io.Int.Output("tile_px", display_name="tile_px", tooltip="-1 when not tiled."),
                io.Int.Output("tile_overlap_px", display_name="tile_overlap_px"),
                io.Int.Output("count", display_name="count", tooltip="Tiles per picture."),
            ],
        )

    @classmethod
    def validate_inputs(cls, tile_px: Any = None) -> bool | str:
        return widgets.check_tile_px(tile_px)

    @classmethod
    def execute(cls, image: Any, latent: Any, tile_px: int, tile_overlap_px: int) -> io.NodeOutput:
        read_latent(latent, "latent")
        tile, overlap = tile_cells(tile_px, tile_overlap_px, latent)
        tiles = cut_tiles(image, latent, tile, overlap)
        ratio = latent_ratio(latent)
        count = tiles.shape[0] // image.shape[0]
        side = tile * ratio if tile else -1
        return io.NodeOutput(tiles, side, overlap * ratio, count)
