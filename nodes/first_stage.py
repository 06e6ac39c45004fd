"""First Stage: clean the input with the denoise encoder and give the latents sampling starts from."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..supir.prepare import plan_geometry
from . import vae as codec
from . import widgets
from .execution import check_stage
from .guarded_run import GuardedRun
from .host import PhasedProgress
from .judging import judge_vae
from .load import denoising_vae
from .picture import crop_image, make_latent, padded, read_image, resize
from .planning import vae_networks
from .sockets import check_supir, check_vae
from .types import CATEGORY, SupirModel, SupirSocket


class FirstStageResult:
    """What First Stage gives: cleaned IMAGE, control LATENT, center LATENT, notes."""

    def __init__(self, stage1: Any, control: Any, center: Any, notes: list[str]) -> None:
        self.stage1, self.control, self.center, self.notes = stage1, control, center, notes


class FirstStageInput:
    """A checked request: the picture, its canvas, and the encoder that reads it.

    Raises: ModelError, ShapeError, SettingsError, CheckpointError on unusable input.
    """

    def __init__(self, vae: Any, supir: SupirModel, image: Any, upscale_by: float) -> None:
        check_vae(vae)
        check_supir(supir)
        self.vae, self.picture = vae, read_image(image)
        self.geometry = plan_geometry(*self.picture.size_px, upscale_by)
        self.encoder, self.note = denoising_vae(vae, supir)
        self.images = self.picture.rgb.shape[0]


def run_first_stage(
    asked: FirstStageInput, guard: GuardedRun, workspace_mb: int = 0
) -> FirstStageResult:
    """Resize, pad, and pass a batch of pictures through the denoise encoder and the VAE.

    Returns: stage1 [B, H, W, 3 or 4] at the exact target size; control = mode of the denoise
        encoder; center = mode of the VAE's encoder on the padded stage1.
    Source: SUPIR (Yu et al. 2024), stage 1; the mode where the original samples, so runs repeat.
    """
    geometry, vae = asked.geometry, asked.vae
    picture = resize(asked.picture, geometry.width_px, geometry.height_px)
    canvas = padded(picture, geometry)
    bar = PhasedProgress(3)
    options: Any = {"workspace_mb": workspace_mb, "execution": guard.execution}
    with guard.phase("encode_control"):
        progress = bar.phase(0)
        control, encoded = codec.encode_image(asked.encoder, canvas, progress=progress, **options)
        check_stage("First Stage (denoise encoder)", control)
    with guard.phase("decode_stage1"):
        decoded, note = codec.decode_latent(vae, control, progress=bar.phase(1), **options)
        check_stage("First Stage (VAE decode)", decoded)
    with guard.phase("encode_center"):
        rgb = decoded[..., :3]
        center, _ = codec.encode_image(vae, rgb, progress=bar.phase(2), **options)
        check_stage("First Stage (VAE encode)", center)
    notes = [n for n in (asked.note, encoded, note) if n]
    alpha = None if picture.alpha is None else picture.alpha.movedim(1, -1)  # BCHW -> BHWC
    control_latent = make_latent(control, geometry, alpha)
    stage1, _ = crop_image(decoded, control_latent)
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
                widgets.risk(),
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
    def execute(
        cls, vae: Any, supir: SupirModel, image: Any, upscale_by: float, risk: str = "auto"
    ) -> io.NodeOutput:
        asked = FirstStageInput(vae, supir, image, upscale_by)
        size = asked.geometry
        networks = vae_networks(vae, vae.spacial_compression_encode())
        judged = judge_vae(size.width_px, size.height_px, asked.images, networks, risk)
        with GuardedRun.start("First Stage", judged) as guard:
            result = run_first_stage(asked, guard)
        ui = guard.ui(f"{size.width_px}x{size.height_px} px", *result.notes)
        return io.NodeOutput(result.stage1, result.control, result.center, ui=ui)
