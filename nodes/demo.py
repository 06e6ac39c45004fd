"""Load Demo: the bundled tiny model, so that the pipeline can be tried without any download."""

from __future__ import annotations

import os
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.sd1_clip
import comfy.supported_models
import folder_paths
import safetensors.torch
import torch
from comfy_api.latest import io

from ..supir import demo_model
from ..supir.errors import CheckpointError
from ..supir.host_blocks import Encoder
from ..supir.injection import SupirNets
from ..supir.layout import BlockDims, ControlDims, CrossDims, SftDims, SupirDims
from .load import load_supir
from .types import CATEGORY, SupirModel, SupirSocket

FILE_NAME = "SUPIR-demo-2.safetensors"
"""Name of the generated SUPIR file; the number changes with its content."""


class TinyTextModel(comfy.sd1_clip.SDClipModel):
    """A CLIP text encoder in miniature."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        options = {**(model_options or {}), "model_name": "supir_xpu_demo"}
        super().__init__(
            device=device,
            dtype=dtype,
            textmodel_json_config=dict(demo_model.TEXT_CONFIG),
            model_options=options,
        )


class TinyClipModel(comfy.sd1_clip.SD1ClipModel):
    """What the host's CLIP object wraps."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            device=device, dtype=dtype, clip_model=TinyTextModel, model_options=model_options or {}
        )


class TinyTokenizer(comfy.sd1_clip.SD1Tokenizer):
    """CLIP's tokenizer; textual inversions are of another width and are not looked up."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: dict[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory=None, tokenizer_data=tokenizer_data or {})


class _Target:
    """The three things the host's CLIP constructor asks of a text encoder."""

    params: dict[str, Any] = {}
    clip = TinyClipModel
    tokenizer = TinyTokenizer


def load_demo_clip() -> Any:
    """Return the demo CLIP; its weights are computed."""
    clip = comfy.sd.CLIP(_Target, parameters=4_000_000)
    module = clip.cond_stage_model
    module.load_state_dict(demo_model.state(module.state_dict(), "demo.clip."))
    return clip


def build_demo_model() -> Any:
    """Return the host's narrow SDXL, its UNet without values yet."""
    config = comfy.supported_models.SDXL(dict(demo_model.UNET_CONFIG))
    device, offload = mm.get_torch_device(), mm.unet_offload_device()
    dtypes = config.supported_inference_dtypes
    dtype = mm.unet_dtype(device=device, supported_dtypes=dtypes)
    config.unet_config["dtype"] = dtype
    config.set_inference_dtype(dtype, mm.unet_manual_cast(dtype, device, dtypes))
    return config.get_model({}, device=offload)


def load_demo_model() -> Any:
    """Return the demo MODEL: a narrow SDXL that the host runs as SDXL."""
    device, offload = mm.get_torch_device(), mm.unet_offload_device()
    model = build_demo_model()
    unet = model.diffusion_model
    unet.load_state_dict(demo_model.state(unet.state_dict(), "demo.unet."))
    return comfy.model_patcher.CoreModelPatcher(model, load_device=device, offload_device=offload)


def load_demo_vae() -> Any:
    """Return the demo VAE; its latent cells cover 4 px, not SDXL's 8."""
    config = {"params": {"ddconfig": dict(demo_model.VAE_CONFIG), "embed_dim": 4}}
    with torch.device("meta"):
        shapes = comfy.sd.AutoencoderKL(**config["params"]).state_dict()
    vae = comfy.sd.VAE(sd=demo_model.state(shapes, "demo.vae."), config=config)
    vae.downscale_ratio = vae.upscale_ratio = demo_model.VAE_RATIO
    return vae


def demo_dims() -> SupirDims:
    """Return the dims of SUPIR for the demo UNet: SDXL's block pattern at one width."""
    unet = demo_model.UNET_CONFIG
    width = unet["model_channels"]
    blocks: list[BlockDims] = []
    for level in range(len(unet["channel_mult"])):
        if level:
            blocks.append(BlockDims("down", width, width))
        blocks += [BlockDims("res", width, width, 1 if level else 0)] * 2
    control = ControlDims(
        in_channels=4,
        hint_channels=4,
        model_channels=width,
        time_embed_dim=4 * width,
        adm_in_channels=unet["adm_in_channels"],
        context_dim=unet["context_dim"],
        blocks=tuple(blocks),
        middle_channels=width,
        middle_depth=unet["transformer_depth_middle"],
    )
    sft, cross = SftDims(width, width, width, 128), CrossDims(width, width)
    adapters = (
        [sft] * 3 + [cross] + [sft] * 3 + [cross] + [sft] * 3 + [SftDims(width, width, 0, 128)]
    )
    return SupirDims(control, tuple(adapters))


def demo_supir_tensors() -> dict[str, torch.Tensor]:
    """Return the content of the demo SUPIR file, keys as in the published files, fp16."""
    ops = comfy.ops.disable_weight_init
    nets = SupirNets(demo_dims(), operations=ops, dtype=torch.float32, device="meta")
    with torch.device("meta"):
        encoder = Encoder(**demo_model.VAE_CONFIG)
    parts = {
        "model.control_model.": nets.control_model,
        "model.diffusion_model.project_modules.": nets.project_modules,
        "first_stage_model.denoise_encoder.": encoder,
    }
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in parts.items():
        for key, value in demo_model.state(module.state_dict(), f"demo.{prefix}").items():
            tensors[prefix + key] = value.half()
    return tensors


def demo_supir_path() -> str:
    """Return the demo SUPIR file in ComfyUI's temp folder, written unless it is there undamaged.

    Raises: CheckpointError when the temp folder is no folder or cannot be written to.
    """
    folder = os.path.join(folder_paths.get_temp_directory(), "supir_xpu")
    path = os.path.join(folder, FILE_NAME)
    content = safetensors.torch.save(demo_supir_tensors())
    try:
        os.makedirs(folder, exist_ok=True)
        if not _holds(path, content):
            partial = f"{path}.{os.getpid()}.part"
            with open(partial, "wb") as file:
                file.write(content)
            os.replace(partial, path)
    except OSError as e:
        raise CheckpointError(
            f"The demo's SUPIR file cannot be written to {path}: {e.strerror or e}. It belongs into "
            f"a folder of ComfyUI's temp folder, which is {folder_paths.get_temp_directory()}. Free "
            "that name or make it writable, or start ComfyUI with --temp-directory and another folder."
        ) from e
    return path


def _holds(path: str, content: bytes) -> bool:
    """Say whether a file is there with exactly this content."""
    try:
        with open(path, "rb") as file:
            return file.read() == content
    except FileNotFoundError:
        return False


def load_demo_supir() -> SupirModel:
    """Load the demo SUPIR file on the path every SUPIR file takes."""
    return load_supir(demo_supir_path())


class LoadDemo(io.ComfyNode):
    """Load the bundled tiny model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_LoadDemo",
            display_name="Load SUPIR Demo Model",
            category=CATEGORY,
            description=(
                "A tiny bundled SDXL and SUPIR, trained to take noise and JPEG blocks out of small "
                "pictures. Shows the whole pipeline at work without any download; it is not SUPIR's "
                "quality."
            ),
            search_aliases=["supir", "demo", "test"],
            inputs=[],
            outputs=[
                io.Model.Output("model", display_name="MODEL"),
                io.Clip.Output("clip", display_name="CLIP"),
                io.Vae.Output("vae", display_name="VAE"),
                SupirSocket.Output("supir", display_name="SUPIR"),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(
            load_demo_model(), load_demo_clip(), load_demo_vae(), load_demo_supir()
        )
