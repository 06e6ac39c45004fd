"""First Stage: clean the input with the denoise encoder and give the latents sampling starts from."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..supir.prepare import plan_geometry
from . import vae as codec
from . import widgets
from .host import PhasedProgress
from .load import denoising_vae
from .picture import crop_image, make_latent, padded, read_image, resize
from .types import CATEGORY, SupirModel, SupirSocket


class FirstStageResult:
    """What First Stage gives: cleaned IMAGE, control LATENT, center LATENT, notes."""

    def __init__(self, stage1: Any, control: Any, center: Any, notes: list[str]) -> None:
        self.stage1, self.control, self.center, self.notes = stage1, control, center, notes


def run_first_stage(
    vae: Any, supir: SupirModel, image: Any, upscale_by: float, workspace_mb: int = 0
) -> FirstStageResult:
    """Resize, pad, and pass a batch of pictures through the denoise encoder and the VAE.

    Returns: stage1 [B, H, W, 3 or 4] at the exact target size; control = mode of the denoise
        encoder; center = mode of the VAE's encoder on the padded stage1.
    Raises: ShapeError, SettingsError, CheckpointError on unusable input, before a model moves.
    Source: SUPIR (Yu et al. 2024), stage 1; the mode where the original samples, so runs repeat.
    """
    picture = read_image(image)
    geometry = plan_geometry(*picture.size_px, upscale_by)
    encoder, note = denoising_vae(vae, supir)
    picture = resize(picture, geometry.width_px, geometry.height_px)
    canvas = padded(picture, geometry)
    notes = [note] if note else []
    bar = PhasedProgress(3)
    control, encode_note = codec.encode_image(
        encoder, canvas, workspace_mb=workspace_mb, progress=bar.phase(0)
    )
    decoded, decode_note = codec.decode_latent(
        vae, control, workspace_mb=workspace_mb, progress=bar.phase(1)
    )
    rgb = decoded[..., :3]
    center, _ = codec.encode_image(vae, rgb, workspace_mb=workspace_mb, progress=bar.phase(2))
    notes += [n for n in (encode_note, decode_note) if n]
    alpha = None if picture.alpha is None else picture.alpha.movedim(1, -1)  # BCHW -> BHWC
    control_latent = make_latent(control, geometry, alpha)
    stage1 = crop_image(decoded, control_latent)
    return FirstStageResult(stage1, control_latent, make_latent(center, geometry, alpha), notes)


class FirstStage(io.ComfyNode):
    """Clean a picture and encode it for sampling."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_FirstStage",
            display_name="SUPIR First Stage",
            category=CATEGORY,
            description=(
                "Resizes the picture, removes noise and compression with SUPIR's denoise encoder, "
                "and gives the latents the sampler needs. Any size, grey, RGB or RGBA, batches."
            ),
            search_aliases=["supir", "denoise", "encode"],
            inputs=[
                io.Vae.Input("vae", tooltip="VAE of the SDXL checkpoint."),
                SupirSocket.Input(
                    "supir", tooltip="From Load SUPIR; supplies the denoise encoder."
                ),
                io.Image.Input("image", tooltip="Picture or batch to restore. Any size."),
                widgets.upscale_by(),
            ],
            outputs=[
                io.Image.Output(
                    "stage1",
                    display_name="stage1",
                    tooltip="Cleaned picture at the target size; reference for Color Fix.",
                ),
                io.Latent.Output(
                    "control",
                    display_name="control",
                    tooltip="What the control network sees; connect to Sample.",
                ),
                io.Latent.Output(
                    "center",
                    display_name="center",
                    tooltip="What restore_cfg pulls towards; connect to Sample.",
                ),
            ],
        )

    @classmethod
    def execute(cls, vae: Any, supir: SupirModel, image: Any, upscale_by: float) -> io.NodeOutput:
        result = run_first_stage(vae, supir, image, upscale_by)
        height, width = result.stage1.shape[1:3]
        text = "\n".join([f"{width}x{height} px", *result.notes])
        return io.NodeOutput(result.stage1, result.control, result.center, ui=ui.PreviewText(text))
