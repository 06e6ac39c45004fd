"""The kinds of model file a user may have picked, what each is called and where it belongs."""

from __future__ import annotations

from enum import Enum

_CHECKPOINTS = "It belongs in ComfyUI's models/checkpoints and is loaded by Load Checkpoint"
_UNETS = "It belongs in ComfyUI's models/diffusion_models and is loaded by Load Diffusion Model"
_CLIPS = "It belongs in ComfyUI's models/text_encoders and is loaded by Load CLIP or DualCLIPLoader"
_NOT_A_BASE = "SUPIR cannot work on it: its adapters fit the SDXL base network only."


class FileKind(Enum):
    """What a file is: ``title`` to finish the sentence "it is ...", ``advice`` where it belongs."""

    SUPIR = (
        "a SUPIR model",
        "It belongs in ComfyUI's models/supir or models/model_patches and is loaded by Load SUPIR.",
    )
    SDXL_BASE = (
        "an SDXL checkpoint",
        f"{_CHECKPOINTS}; connect its MODEL, CLIP and VAE to the SUPIR nodes.",
    )
    SDXL_UNET = (
        "an SDXL diffusion model without text encoders and VAE",
        f"{_UNETS}; connect it as the SUPIR nodes' model.",
    )
    SDXL_UNET_DIFFUSERS = (
        "an SDXL UNet in the diffusers layout",
        f"{_UNETS}; connect it as the SUPIR nodes' model.",
    )
    SDXL_REFINER = ("the SDXL refiner", f"{_CHECKPOINTS}. {_NOT_A_BASE}")
    SDXL_INPAINT = (
        "an SDXL inpainting or editing model (more than 4 input channels)",
        f"{_CHECKPOINTS} or Load Diffusion Model. {_NOT_A_BASE}",
    )
    SDXL_SMALL = (
        "a reduced SDXL (SSD-1B, Segmind Vega, KOALA or another with fewer transformer blocks)",
        f"{_CHECKPOINTS}. {_NOT_A_BASE}",
    )
    SD15 = ("a Stable Diffusion 1.x model", f"{_CHECKPOINTS}. {_NOT_A_BASE}")
    SD15_INPAINT = (
        "a Stable Diffusion 1.x inpainting or editing model (more than 4 input channels)",
        f"{_CHECKPOINTS}. {_NOT_A_BASE}",
    )
    SD2 = ("a Stable Diffusion 2.x model", f"{_CHECKPOINTS}. {_NOT_A_BASE}")
    SD3 = ("a Stable Diffusion 3 model", f"{_CHECKPOINTS}. {_NOT_A_BASE}")
    FLUX = ("a Flux model", f"{_UNETS}. {_NOT_A_BASE}")
    OTHER_DIFFUSION = (
        "a diffusion model of another family",
        f"{_UNETS}, or in models/checkpoints if it brings text encoders and VAE. {_NOT_A_BASE}",
    )
    VAE = ("a VAE", "It belongs in ComfyUI's models/vae and is loaded by Load VAE.")
    LORA = ("a LoRA", "It belongs in ComfyUI's models/loras and is loaded by Load LoRA.")
    CONTROLNET = (
        "a ControlNet",
        "It belongs in ComfyUI's models/controlnet and is loaded by Load ControlNet Model.",
    )
    T2I_ADAPTER = (
        "a T2I adapter",
        "It belongs in ComfyUI's models/controlnet and is loaded by Load ControlNet Model.",
    )
    IP_ADAPTER = (
        "an IP-Adapter",
        "It belongs in ComfyUI's models/ipadapter and is loaded by an IPAdapter node pack.",
    )
    CLIP_L = ("the CLIP-L text encoder", f"{_CLIPS} (SDXL: together with CLIP-G, type sdxl).")
    CLIP_G = ("the CLIP-G text encoder", f"{_CLIPS} (SDXL: together with CLIP-L, type sdxl).")
    T5 = ("a T5 text encoder", f"{_CLIPS}. SDXL and SUPIR do not use it.")
    TEXT_ENCODER = ("a text encoder", f"{_CLIPS}. SDXL and SUPIR do not use it.")
    CLIP_VISION = (
        "a CLIP vision model",
        "It belongs in ComfyUI's models/clip_vision and is loaded by Load CLIP Vision.",
    )
    UPSCALER = (
        "an upscale model",
        "It belongs in ComfyUI's models/upscale_models and is loaded by Load Upscale Model.",
    )
    EMBEDDING = (
        "a textual inversion embedding",
        "It belongs in ComfyUI's models/embeddings and is used by writing embedding:name in a "
        "prompt.",
    )
    EMPTY = (
        "a file without any tensor",
        "Nothing can be loaded from it. Download the model again.",
    )
    UNKNOWN = (
        "a model of a kind not known here",
        "Look up on its download page which loader it needs.",
    )

    @property
    def title(self) -> str:
        """Human name with its article, such as "the SDXL refiner"."""
        return self.value[0]

    @property
    def advice(self) -> str:
        """One or two sentences: folder, loader, and whether SUPIR can use it."""
        return self.value[1]
