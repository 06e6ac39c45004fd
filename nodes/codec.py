"""Encode and Decode: any KL image VAE, any picture size."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..supir.constants import WORK_KEY
from ..supir.errors import ShapeError
from ..supir.prepare import plan_geometry
from . import vae as codec
from . import widgets
from .execution import check_stage
from .guarded_run import GuardedRun
from .host import PhasedProgress
from .judging import judge_vae
from .picture import crop_image, make_latent, padded, read_image, read_latent, size_to_plan
from .planning import vae_networks
from .sockets import check_vae
from .types import CATEGORY


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
                widgets.risk(),
            ],
            outputs=[io.Latent.Output("latent", display_name="LATENT")],
        )

    @classmethod
    def execute(
        cls, vae: Any, image: Any, workspace_mb: int = 0, risk: str = "auto"
    ) -> io.NodeOutput:
        check_vae(vae)
        picture = read_image(image)
        geometry = plan_geometry(*picture.size_px, 1.0)
        networks = vae_networks(vae, vae.spacial_compression_encode())
        size = (geometry.width_px, geometry.height_px, picture.rgb.shape[0])
        judged = judge_vae(*size, networks, risk, workspace_mb, only=("encode_control",))
        with GuardedRun.start("Encode", judged) as guard, guard.phase("encode_control"):
            samples, note = codec.encode_image(
                vae,
                padded(picture, geometry),
                workspace_mb=workspace_mb,
                progress=PhasedProgress(1).phase(0),
                execution=guard.execution,
            )
            check_stage("Encode", samples)
        alpha = None if picture.alpha is None else picture.alpha.movedim(1, -1)  # BCHW -> BHWC
        latent = make_latent(samples, geometry, alpha)
        height, width = samples.shape[-2:]
        return io.NodeOutput(latent, ui=guard.ui(f"latent {width}x{height}", note or ""))


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
                widgets.risk(),
            ],
            outputs=[io.Image.Output("image", display_name="IMAGE")],
        )

    @classmethod
    def execute(
        cls, vae: Any, latent: Any, workspace_mb: int = 0, risk: str = "auto"
    ) -> io.NodeOutput:
        check_vae(vae)
        samples = read_latent(latent, "latent")
        if samples.shape[1] != vae.latent_channels:
            raise ShapeError(
                f"latent has {samples.shape[1]} channels and vae decodes {vae.latent_channels}. "
                "Connect the VAE of the model the latent was sampled with."
            )
        ratio = vae.spacial_compression_decode()
        height, width = (side * ratio for side in samples.shape[-2:])
        networks = vae_networks(vae, ratio)
        size = (*size_to_plan(width, height, latent.get(WORK_KEY)), samples.shape[0])
        judged = judge_vae(*size, networks, risk, workspace_mb, only=("decode",))
        with GuardedRun.start("Decode", judged) as guard, guard.phase("decode"):
            decoded, note = codec.decode_latent(
                vae,
                samples,
                workspace_mb=workspace_mb,
                progress=PhasedProgress(1).phase(0),
                execution=guard.execution,
            )
            check_stage("Decode", decoded)
        image, cropped = crop_image(decoded, latent)
        height, width = image.shape[1:3]
        return io.NodeOutput(image, ui=guard.ui(f"{width}x{height} px", note or "", cropped or ""))
