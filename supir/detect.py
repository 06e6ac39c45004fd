"""Say what kind of model a file holds, from the names and shapes of its tensors alone.

Every rule looks for names that the respective format must contain. No tensor data is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property

from .file_kinds import FileKind
from .key_layouts import load_layouts

Shapes = Mapping[str, tuple[int, ...]]

_WRAPPERS = ("model.diffusion_model.", "diffusion_model.", "unet.", "transformer.", "model.", "")
"""Prefixes behind which a diffusion network is stored, most specific first."""

_LORA = re.compile(
    r"\.(lora_(up|down|mid|A|B)(\.default)?(\.weight)?|lora\.(up|down)\.weight"
    r"|lora_linear_layer\.(up|down)\.weight|hada_[wt][12](_[ab])?|lokr_[wt][12](_[ab])?"
    r"|oft_(blocks|diag)|diff|diff_b|dora_scale|w_norm|b_norm)$"
    r"|_lora\.(up|down)\.weight$"
)
"""Endings of the LoRA family: kohya, diffusers, peft, LoHa, LoKr, OFT, full differences."""

_SDXL_DEPTHS = ((4, 2), (5, 2), (7, 10), (8, 10))
"""Transformer blocks of SDXL's input blocks 4, 5, 7 and 8 (published config, depth 1, 2, 10)."""


class _File:
    """Names and shapes of one file, with the questions the rules ask."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def has(self, *keys: str) -> bool:
        return all(key in self.shapes for key in keys)

    def starts(self, *prefixes: str) -> bool:
        return any(key.startswith(prefixes) for key in self.shapes)

    def contains(self, *parts: str) -> bool:
        return any(part in key for key in self.shapes for part in parts)

    def matches(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(key) for key in self.shapes)

    def size(self, key: str, axis: int) -> int:
        """Return one side of a tensor, 0 if there is no such tensor or side."""
        shape = self.shapes.get(key, ())
        return shape[axis] if axis < len(shape) else 0

    def depth(self, prefix: str) -> int:
        """Return how many transformer blocks are numbered from 0 behind a prefix."""
        count = 0
        while f"{prefix}{count}.attn1.to_q.weight" in self.shapes:
            count += 1
        return count

    def wrapper(self, *keys: str) -> str | None:
        """Return the prefix behind which all these keys exist."""
        for prefix in _WRAPPERS:
            if self.has(*(prefix + key for key in keys)):
                return prefix
        return None

    @cached_property
    def cross_width(self) -> int:
        """Width of the text conditioning: the input of any cross-attention's key projection."""
        for key, shape in self.shapes.items():
            if key.endswith("attn2.to_k.weight") and len(shape) == 2:
                return shape[1]
        return 0


def identify(shapes: Shapes) -> FileKind:
    """Return what kind of model a file holds.

    Args:
        shapes: every tensor name of the file with its shape.
    Returns: the first kind that fits, SUPIR first: a file that holds a SUPIR model and a whole
        SDXL checkpoint is a SUPIR file. ``UNKNOWN`` if nothing fits.
    """
    if not shapes:
        return FileKind.EMPTY
    file = _File(shapes)
    for rule in _RULES:
        kind = rule(file)
        if kind is not None:
            return kind
    return FileKind.UNKNOWN


def _supir(file: _File) -> FileKind | None:
    for layout in load_layouts().layouts.values():
        if file.starts(layout.adapters, layout.denoise_encoder):
            return FileKind.SUPIR
        if file.starts(layout.control) and not file.starts(f"{layout.control}zero_convs."):
            return FileKind.SUPIR
    return None


def _add_on(file: _File) -> FileKind | None:
    """ControlNets, adapters and LoRAs, which repeat names of the network they belong to."""
    if file.starts("image_proj.", "ip_adapter.") and file.contains("to_k_ip", "image_proj."):
        return FileKind.IP_ADAPTER
    if file.has("lora_controlnet") or file.starts(
        "zero_convs.",
        "control_model.zero_convs.",
        "model.control_model.zero_convs.",
        "controlnet_cond_embedding.",
        "controlnet_down_blocks.",
        "controlnet_blocks.",
        "controlnet_x_embedder.",
        "control_blocks.0.after_proj.",
        "after_proj_list.",
        "lllite_",
    ):
        return FileKind.CONTROLNET
    if file.starts("adapter.body.", "body.0.in_conv.") or file.has(
        "conv_in.weight", "body.0.block1.weight", "body.0.block2.weight"
    ):
        return FileKind.T2I_ADAPTER
    if file.starts("lora_unet_", "lora_te") or file.matches(_LORA):
        return FileKind.LORA
    return None


def _embedding(file: _File) -> FileKind | None:
    names = file.shapes.keys()
    vectors = all(1 <= len(shape) <= 2 for shape in file.shapes.values())
    if vectors and names <= {"emb_params", "clip_l", "clip_g", "t5xxl", "string_to_param.*"}:
        return FileKind.EMBEDDING
    if vectors and len(names) <= 2 and all(re.fullmatch(r"<.+>", name) for name in names):
        return FileKind.EMBEDDING
    return None


def _ldm_unet(file: _File) -> FileKind | None:
    """UNets in the original layout, alone or inside a checkpoint."""
    prefix = file.wrapper("input_blocks.0.0.weight", "time_embed.0.weight")
    if prefix is None:
        return None
    if file.contains(".time_stack.", ".time_mixer", ".temporal_"):
        return FileKind.OTHER_DIFFUSION
    depths = [
        (i, file.depth(f"{prefix}input_blocks.{i}.1.transformer_blocks.")) for i, _ in _SDXL_DEPTHS
    ]
    full = (
        tuple(depths) == _SDXL_DEPTHS
        and file.depth(f"{prefix}middle_block.1.transformer_blocks.") == 10
    )
    whole = file.starts("first_stage_model.", "conditioner.")
    base = FileKind.SDXL_BASE if whole else FileKind.SDXL_UNET
    return _unet_family(
        channels=file.size(f"{prefix}input_blocks.0.0.weight", 1),
        vector=file.size(f"{prefix}label_emb.0.0.weight", 1),
        cross=file.cross_width,
        full_depth=full,
        sdxl=base,
    )


def _diffusers_unet(file: _File) -> FileKind | None:
    prefix = file.wrapper("conv_in.weight", "time_embedding.linear_1.weight")
    if prefix is None or not file.starts(f"{prefix}down_blocks."):
        return None
    full = all(
        file.depth(f"{prefix}{place}.transformer_blocks.") == depth
        for place, depth in (
            ("down_blocks.1.attentions.0", 2),
            ("down_blocks.1.attentions.1", 2),
            ("down_blocks.2.attentions.0", 10),
            ("down_blocks.2.attentions.1", 10),
            ("mid_block.attentions.0", 10),
        )
    )
    return _unet_family(
        channels=file.size(f"{prefix}conv_in.weight", 1),
        vector=file.size(f"{prefix}add_embedding.linear_1.weight", 1),
        cross=file.cross_width,
        full_depth=full,
        sdxl=FileKind.SDXL_UNET_DIFFUSERS,
    )


def _unet_family(
    *, channels: int, vector: int, cross: int, full_depth: bool, sdxl: FileKind
) -> FileKind:
    """Return the family of a UNet from input channels, vector width, cross-attention width.

    Source: the published configs; SDXL 4, 2816, 2048; refiner 4, 2560, 1280; SD 1.x 4, none, 768;
    SD 2.x 4, none (unCLIP: 1536 or 2048), 1024. Inpainting adds 5 input channels, editing 4.
    """
    if cross == 1280 and vector == 2560:
        return FileKind.SDXL_REFINER
    if cross == 2048:
        if not full_depth:
            return FileKind.SDXL_SMALL
        return sdxl if channels == 4 else FileKind.SDXL_INPAINT
    if cross == 768:
        return FileKind.SD15 if channels == 4 else FileKind.SD15_INPAINT
    if cross == 1024:
        return FileKind.SD2
    return FileKind.OTHER_DIFFUSION


def _transformer(file: _File) -> FileKind | None:
    """Diffusion transformers, and whatever else sits in the place of the diffusion model."""
    if file.wrapper("joint_blocks.0.context_block.attn.qkv.weight") is not None:
        return FileKind.SD3
    flux = file.wrapper("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight")
    if flux is not None and file.has(f"{flux}txt_in.weight"):
        chroma = file.starts(f"{flux}distilled_guidance_layer.")
        return FileKind.OTHER_DIFFUSION if chroma else FileKind.FLUX
    if file.wrapper("transformer_blocks.0.attn.add_q_proj.weight") is not None:
        if file.wrapper("pos_embed.proj.weight") is not None:
            return FileKind.SD3
        flux = file.wrapper("single_transformer_blocks.0.attn.to_q.weight", "x_embedder.weight")
        return FileKind.OTHER_DIFFUSION if flux is None else FileKind.FLUX
    if file.starts("model.diffusion_model.") or _is_transformer(file):
        return FileKind.OTHER_DIFFUSION
    return None


def _is_transformer(file: _File) -> bool:
    blocks = re.compile(r"(^|\.)(\w*blocks|\w*_layers|layers|noise_refiner|down_blocks\.0)\.0\.")
    ends = re.compile(
        r"^(model\.|net\.|transformer\.)?(x_embedder|patch_embed(ding|der)?|img_in|patchify_proj"
        r"|pos_embed\.proj|final_layer|head\.modulation|cap_embedder|clf\.1|t_embedder|t_block"
        r"|time_embedder|adaln_single|caption_projection|visual_embeddings|t5_yproj|txt_in"
        r"|embedding\.1|proj_out)(\.|$|1)"
    )
    return file.matches(ends) and file.matches(blocks)


def _text_encoder(file: _File) -> FileKind | None:
    for key, shape in file.shapes.items():
        if key.endswith("text_model.encoder.layers.0.layer_norm1.weight"):
            return _clip_of_width(shape)
        if re.search(r"(^|\.)transformer\.resblocks\.0\.ln_1\.weight$", key) and (
            "visual." not in key
        ):
            return _clip_of_width(shape)
    if file.contains(".SelfAttention.", ".DenseReluDense."):
        return FileKind.T5
    if file.contains("vision_model.encoder.layers.0.", "visual.transformer.resblocks.0."):
        return FileKind.CLIP_VISION
    if file.matches(re.compile(r"(^|\.)layers\.0\.self_attn\.(q_proj|qkv_proj|Wqkv)\.")):
        return FileKind.TEXT_ENCODER
    return None


def _clip_of_width(shape: tuple[int, ...]) -> FileKind:
    widths = {768: FileKind.CLIP_L, 1280: FileKind.CLIP_G}
    return widths.get(shape[0] if shape else 0, FileKind.TEXT_ENCODER)


def _vae(file: _File) -> FileKind | None:
    ends = re.compile(
        r"^(first_stage_model\.|vae\.)?(encoder|decoder)\."
        r"(conv_in|conv1|conv_out|up_blocks|down_blocks|middle|mid_block|mid|layers|blocks)\."
    )
    if file.matches(ends) or file.starts("taesd_", "quant_conv.", "post_quant_conv."):
        return FileKind.VAE
    if file.has("1.weight", "3.conv.0.weight"):  # one half of TAESD
        return FileKind.VAE
    return None


def _upscaler(file: _File) -> FileKind | None:
    """Image upscalers: ESRGAN, SwinIR, HAT, DAT and kin (conv_first), ESRGAN in its old layout,
    SPAN, PLKSR, OmniSR, Real-CUGAN, and the compact nets.
    """
    names = {re.sub(r"^(params_ema|params|module)\.", "", key) for key in file.shapes}
    known = (
        "conv_first.",
        "model.1.sub.0.",
        "block_1.c1_r.",
        "feats.0.",
        "residual_layer.0.residual_layer.",
        "unet1.conv1.",
    )
    compact = {"body.0.weight", "body.0.bias", "body.1.weight", "body.2.weight"}
    if compact <= names or any(name.startswith(known) for name in names):
        return FileKind.UPSCALER
    return None


_RULES: tuple[Callable[[_File], FileKind | None], ...] = (
    _supir,
    _add_on,
    _embedding,
    _ldm_unet,
    _diffusers_unet,
    _upscaler,
    _transformer,
    _text_encoder,
    _vae,
)
