"""Encode and Decode: any KL image VAE, any picture size."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..supir.prepare import plan_geometry
from . import vae as codec
from . import widgets
from .host import PhasedProgress
from .picture import crop_image, make_latent, padded, read_image, read_latent
from .types import CATEGORY


def note_text(*lines: str | None) -> Any:
    """Return the lines that say something as text shown on the node."""
    return ui.PreviewText("\n".join(line for line in lines if line))


class Encode(io.ComfyNode):
    """Encode a picture of any size; decoding gives the same size back."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Encode",
            display_name="SUPIR Encode",
            category=CATEGORY,
            description="Encodes a picture of any size; Decode gives exactly that size back.",
            search_aliases=["vae encode"],
            inputs=[
                io.Vae.Input("vae", tooltip="VAE that encodes."),
                io.Image.Input("image", tooltip="Picture or batch, grey, RGB or RGBA, any size."),
                widgets.workspace_mb(),
            ],
            outputs=[io.Latent.Output("latent", display_name="LATENT")],
        )

    @classmethod
    def execute(cls, vae: Any, image: Any, workspace_mb: int = 0) -> io.NodeOutput:
        picture = read_image(image)
        geometry = plan_geometry(*picture.size_px, 1.0)
        samples, note = codec.encode_image(
            vae,
            padded(picture, geometry),
            workspace_mb=workspace_mb,
            progress=PhasedProgress(1).phase(0),
        )
        alpha = None if picture.alpha is None else picture.alpha.movedim(1, -1)  # BCHW -> BHWC
        latent = make_latent(samples, geometry, alpha)
        height, width = samples.shape[-2:]
        return io.NodeOutput(latent, ui=note_text(f"latent {width}x{height}", note))


class Decode(io.ComfyNode):
    """Decode a latent to the exact size of its picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Decode",
            display_name="SUPIR Decode",
            category=CATEGORY,
            description="Decodes a latent to the exact picture size, transparency put back.",
            search_aliases=["vae decode"],
            inputs=[
                io.Vae.Input("vae", tooltip="VAE that decodes."),
                io.Latent.Input("latent", tooltip="Latent from Sample, Encode or any sampler."),
                widgets.workspace_mb(),
            ],
            outputs=[io.Image.Output("image", display_name="IMAGE")],
        )

    @classmethod
    def execute(cls, vae: Any, latent: Any, workspace_mb: int = 0) -> io.NodeOutput:
        samples = read_latent(latent, "latent")
        decoded, note = codec.decode_latent(
            vae, samples, workspace_mb=workspace_mb, progress=PhasedProgress(1).phase(0)
        )
        image = crop_image(decoded, latent)
        height, width = image.shape[1:3]
        return io.NodeOutput(image, ui=note_text(f"{width}x{height} px", note))
