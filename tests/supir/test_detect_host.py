"""Telling model files apart: networks built by ComfyUI itself, without weights."""

from __future__ import annotations

import pytest
import torch
from supir_xpu.supir.detect import identify
from supir_xpu.supir.file_kinds import FileKind

UNET = "model.diffusion_model."
INSIDE_VAE = {"first_stage_model.decoder.conv_in.weight": (512, 4, 3, 3)}
INSIDE_CLIP = {
    "conditioner.embedders.0.transformer.text_model.encoder.layers.0.layer_norm1.weight": (768,)
}


@pytest.fixture
def factory():
    from comfy.ops import disable_weight_init

    return {"operations": disable_weight_init, "device": "meta", "dtype": torch.float16}


def shapes_of(module, prefix=""):
    return {prefix + key: tuple(value.shape) for key, value in module.state_dict().items()}


UNETS = {
    "SDXL": (FileKind.SDXL_UNET, {}),
    "refiner": (FileKind.SDXL_REFINER, {
        "model_channels": 384, "adm_in_channels": 2560, "channel_mult": (1, 2, 4, 4),
        "context_dim": 1280, "transformer_depth": [0, 0, 4, 4, 4, 4, 0, 0],
        "transformer_depth_middle": 4,
        "transformer_depth_output": [0, 0, 0, 4, 4, 4, 4, 4, 4, 0, 0, 0],
        "num_res_blocks": [2, 2, 2, 2]}),
    "inpaint": (FileKind.SDXL_INPAINT, {"in_channels": 9}),
    "SSD-1B": (FileKind.SDXL_SMALL, {
        "transformer_depth": [0, 0, 2, 2, 4, 4], "transformer_depth_middle": -1,
        "transformer_depth_output": [0, 0, 0, 1, 1, 2, 10, 4, 4]}),
    "Vega": (FileKind.SDXL_SMALL, {
        "transformer_depth": [0, 0, 1, 1, 2, 2], "transformer_depth_middle": -1,
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2]}),
    "SD 1.5": (FileKind.SD15, {
        "num_classes": None, "adm_in_channels": None, "channel_mult": (1, 2, 4, 4),
        "context_dim": 768, "num_res_blocks": [2] * 4,
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
        "transformer_depth_output": [1] * 9 + [0] * 3, "use_linear_in_transformer": False}),
}  # fmt: skip


def build_unet(factory, **changes):
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320,
        "num_res_blocks": [2, 2, 2], "channel_mult": (1, 2, 4), "num_heads": -1,
        "num_head_channels": 64, "use_spatial_transformer": True, "context_dim": 2048,
        "adm_in_channels": 2816, "num_classes": "sequential", "use_linear_in_transformer": True,
        "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], **changes,
    }  # fmt: skip
    return UNetModel(**config, **factory), config


@pytest.mark.host
@pytest.mark.parametrize(("kind", "changes"), UNETS.values(), ids=UNETS.keys())
def test_comfyui_s_unets_in_both_layouts(factory, kind, changes):
    from comfy.utils import unet_to_diffusers

    unet, config = build_unet(factory, **changes)
    shapes = shapes_of(unet)
    assert identify(shapes) is kind
    assert identify(shapes_of(unet, UNET) | INSIDE_CLIP) is (
        FileKind.SDXL_BASE if kind is FileKind.SDXL_UNET else kind
    )
    names = unet_to_diffusers(
        {**config, "transformer_depth_output": list(config["transformer_depth_output"]),
         "transformer_depth": list(config["transformer_depth"])}
    )  # fmt: skip
    diffusers = {new: shapes[old] for new, old in names.items() if old in shapes}
    assert len(diffusers) > 0.9 * len(shapes)
    assert identify(diffusers) is (
        FileKind.SDXL_UNET_DIFFUSERS if kind is FileKind.SDXL_UNET else kind
    )


@pytest.mark.host
def test_comfyui_s_controlnet(factory):
    from comfy.cldm.cldm import ControlNet

    _, config = build_unet(factory)
    del config["out_channels"], config["transformer_depth_output"]
    net = ControlNet(**config, hint_channels=3, **factory)
    assert identify(shapes_of(net)) is FileKind.CONTROLNET
    assert identify(shapes_of(net, "control_model.")) is FileKind.CONTROLNET


@pytest.mark.host
def test_comfyui_s_t2i_adapters():
    from comfy.t2i_adapter.adapter import Adapter, Adapter_light

    with torch.device("meta"):
        adapter = Adapter(cin=64, ksize=1, sk=True)
        light = Adapter_light(cin=64, channels=[320, 640, 1280, 1280], nums_rb=4)
    assert identify(shapes_of(adapter)) is FileKind.T2I_ADAPTER
    assert identify(shapes_of(light)) is FileKind.T2I_ADAPTER


@pytest.mark.host
def test_comfyui_s_transformers(factory):
    from comfy.ldm.flux.model import Flux, FluxParams
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
    from comfy.ldm.wan.model import WanModel

    newer = {"txt_ids_dims": []}  # a field that older hosts do not have
    newer = {key: newer[key] for key in newer if key in FluxParams.__dataclass_fields__}
    flux = Flux(
        in_channels=16, out_channels=16, patch_size=2, vec_in_dim=768, context_in_dim=4096,
        hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=1, depth_single_blocks=1,
        axes_dim=[16, 56, 56], theta=10000, qkv_bias=True, guidance_embed=True, **newer,
        **factory,
    )  # fmt: skip
    assert identify(shapes_of(flux)) is FileKind.FLUX
    sd3 = MMDiT(input_size=None, depth=2, adm_in_channels=2048, num_patches=36864, **factory)
    assert identify(shapes_of(sd3, UNET) | INSIDE_VAE) is FileKind.SD3
    wan = WanModel(num_layers=1, **factory)
    assert identify(shapes_of(wan)) is FileKind.OTHER_DIFFUSION


@pytest.mark.host
def test_comfyui_s_vae_and_text_encoders(factory):
    from comfy.clip_model import CLIPTextModel, CLIPVisionModelProjection
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.text_encoders.t5 import T5

    with torch.device("meta"):
        vae = AutoencoderKL(
            embed_dim=4,
            ddconfig={
                "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3,
                "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2,
                "attn_resolutions": [], "dropout": 0.0,
            },
        )  # fmt: skip
    assert identify(shapes_of(vae)) is FileKind.VAE
    parts = {"dtype": torch.float16, "device": "meta", "operations": factory["operations"]}
    for width, kind in ((768, FileKind.CLIP_L), (1280, FileKind.CLIP_G)):
        clip = {
            "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": width // 64,
            "intermediate_size": 4 * width, "hidden_act": "gelu", "num_positions": 77,
            "projection_dim": width, "image_size": 224, "patch_size": 14, "num_channels": 3,
            "model_type": "clip_vision_model", "max_position_embeddings": 77,
            "eos_token_id": 49407,
        }  # fmt: skip
        assert identify(shapes_of(CLIPTextModel(clip, **parts))) is kind
        vision = CLIPVisionModelProjection(clip, **parts)
        assert identify(shapes_of(vision)) is FileKind.CLIP_VISION
    t5 = {
        "d_ff": 128, "d_kv": 64, "d_model": 64, "dense_act_fn": "gelu_pytorch_tanh",
        "is_gated_act": True, "num_heads": 1, "num_layers": 2, "vocab_size": 32,
        "model_type": "t5",
    }  # fmt: skip
    assert identify(shapes_of(T5(t5, **parts))) is FileKind.T5


@pytest.mark.host
def test_upscalers_of_comfyui_s_upscale_library():
    from spandrel.architectures import ESRGAN, PLKSR, SPAN, Compact, OmniSR, SwinIR

    with torch.device("meta"):
        nets = [
            ESRGAN.ESRGAN(num_blocks=1),
            Compact.Compact(),
            OmniSR.OmniSR(),
            PLKSR.PLKSR(n_blocks=1),
            PLKSR.RealPLKSR(n_blocks=1),
            SPAN.SPAN(num_in_ch=3, num_out_ch=3),
        ]
    nets.append(SwinIR.SwinIR(embed_dim=12, depths=[1], num_heads=[2]))
    for net in nets:
        assert identify(shapes_of(net)) is FileKind.UPSCALER
        assert identify(shapes_of(net, "params_ema.")) is FileKind.UPSCALER
