"""Telling model files apart by names and shapes, on hand-written maps of each kind."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from supir_xpu.supir.detect import identify
from supir_xpu.supir.file_kinds import FileKind

LISTS = Path(__file__).resolve().parents[1] / "parity" / "golden" / "supir_v0_keys.json.gz"
UNET = "model.diffusion_model."


def make_unet(prefix=UNET, *, channels=4, width=320, cross=2048, vector=2816, depths=(0, 2, 10)):
    """Return the telling tensors of an original-layout UNet with two residual blocks per level."""
    shapes = {
        f"{prefix}input_blocks.0.0.weight": (width, channels, 3, 3),
        f"{prefix}time_embed.0.weight": (4 * width, width),
        f"{prefix}out.2.weight": (4, width, 3, 3),
    }
    if vector:
        shapes[f"{prefix}label_emb.0.0.weight"] = (4 * width, vector)
    places = [(f"input_blocks.{1 + 3 * level + i}.1", depths[level], 2**level)
              for level in range(3) for i in (0, 1)]  # fmt: skip
    for place, depth, mult in [*places, ("middle_block.1", depths[-1], 4)]:
        for i in range(depth):
            block = f"{prefix}{place}.transformer_blocks.{i}"
            shapes[f"{block}.attn1.to_q.weight"] = (mult * width, mult * width)
            shapes[f"{block}.attn2.to_k.weight"] = (mult * width, cross)
    return shapes


def make_diffusers_unet(channels=4, cross=2048, vector=2816, depths=(2, 10)):
    shapes = {
        "conv_in.weight": (320, channels, 3, 3),
        "time_embedding.linear_1.weight": (1280, 320),
        "down_blocks.0.resnets.0.conv1.weight": (320, 320, 3, 3),
        "conv_out.weight": (4, 320, 3, 3),
    }
    if vector:
        shapes["add_embedding.linear_1.weight"] = (1280, vector)
    places = [(f"down_blocks.{1 + n}.attentions.{i}", depth)
              for n, depth in enumerate(depths) for i in (0, 1)]  # fmt: skip
    for place, depth in [*places, ("mid_block.attentions.0", depths[-1])]:
        for i in range(depth):
            shapes[f"{place}.transformer_blocks.{i}.attn1.to_q.weight"] = (640, 640)
            shapes[f"{place}.transformer_blocks.{i}.attn2.to_k.weight"] = (640, cross)
    return shapes


VAE = {
    "encoder.conv_in.weight": (128, 3, 3, 3),
    "decoder.conv_in.weight": (512, 4, 3, 3),
    "quant_conv.weight": (8, 8, 1, 1),
}
CLIP_L = "text_model.encoder.layers.0."
INSIDE_VAE = {f"first_stage_model.{key}": shape for key, shape in VAE.items()}
INSIDE_CLIP = {f"conditioner.embedders.0.transformer.{CLIP_L}layer_norm1.weight": (768,)}
SD15 = {"cross": 768, "vector": 0, "depths": (1, 1, 1)}
ANY = (8, 4)

CASES = {
    "SUPIR full": (FileKind.SUPIR, {
        "model.control_model.input_hint_block.0.weight": (320, 4, 3, 3),
        "model.diffusion_model.project_modules.0.zero_conv.weight": (320, 320, 1, 1)}),
    "SUPIR short": (FileKind.SUPIR, {
        "control_model.input_hint_block.0.weight": (320, 4, 3, 3),
        "project_modules.0.zero_conv.weight": (320, 320, 1, 1)}),
    "SUPIR in an SDXL checkpoint": (FileKind.SUPIR, {
        **make_unet(), **INSIDE_VAE, **INSIDE_CLIP,
        "model.control_model.time_embed.0.weight": (1280, 320)}),
    "SUPIR adapters alone": (FileKind.SUPIR, {"project_modules.3.norm1.weight": (640,)}),
    "SUPIR denoise encoder alone": (FileKind.SUPIR, {
        "first_stage_model.denoise_encoder.conv_in.weight": (128, 3, 3, 3)}),
    "SDXL": (FileKind.SDXL_BASE, {**make_unet(), **INSIDE_VAE, **INSIDE_CLIP}),
    "SDXL without VAE": (FileKind.SDXL_BASE, {**make_unet(), **INSIDE_CLIP}),
    "SDXL UNet": (FileKind.SDXL_UNET, make_unet()),
    "SDXL UNet, bare names": (FileKind.SDXL_UNET, make_unet("")),
    "SDXL UNet, diffusion_model": (FileKind.SDXL_UNET, make_unet("diffusion_model.")),
    "SDXL UNet, diffusers": (FileKind.SDXL_UNET_DIFFUSERS, make_diffusers_unet()),
    "SDXL UNet, diffusers, unet": (FileKind.SDXL_UNET_DIFFUSERS, {
        f"unet.{key}": shape for key, shape in make_diffusers_unet().items()}),
    "refiner": (FileKind.SDXL_REFINER, {
        **make_unet(width=384, cross=1280, vector=2560, depths=(0, 4, 4)), **INSIDE_VAE}),
    "refiner, diffusers": (FileKind.SDXL_REFINER, make_diffusers_unet(
        cross=1280, vector=2560, depths=(4, 4))),
    "SDXL inpaint": (FileKind.SDXL_INPAINT, {**make_unet(channels=9), **INSIDE_VAE}),
    "SDXL pix2pix": (FileKind.SDXL_INPAINT, make_unet(channels=8)),
    "SDXL inpaint, diffusers": (FileKind.SDXL_INPAINT, make_diffusers_unet(channels=9)),
    "SSD-1B": (FileKind.SDXL_SMALL, {**make_unet(depths=(0, 2, 4)), **INSIDE_VAE}),
    "Vega": (FileKind.SDXL_SMALL, make_unet(depths=(0, 1, 2))),
    "SSD-1B, diffusers": (FileKind.SDXL_SMALL, make_diffusers_unet(depths=(2, 4))),
    "SD 1.5": (FileKind.SD15, {**make_unet(**SD15), **INSIDE_VAE}),
    "SD 1.5, diffusers": (FileKind.SD15, make_diffusers_unet(
        cross=768, vector=0, depths=(1, 1))),
    "SD 1.5 inpaint": (FileKind.SD15_INPAINT, make_unet(channels=9, **SD15)),
    "SD 1.5 pix2pix": (FileKind.SD15_INPAINT, make_unet(channels=8, **SD15)),
    "SD 2.1": (FileKind.SD2, make_unet(cross=1024, vector=0, depths=(1, 1, 1))),
    "SD 2 inpaint": (FileKind.SD2, make_unet(
        channels=9, cross=1024, vector=0, depths=(1, 1, 1))),
    "SVD": (FileKind.OTHER_DIFFUSION, {
        **make_unet(channels=8, cross=1024, vector=768, depths=(1, 1, 1)),
        f"{UNET}input_blocks.1.1.time_stack.0.attn1.to_q.weight": (320, 320)}),
    "UNet of unknown width": (FileKind.OTHER_DIFFUSION, make_unet(cross=48, vector=80)),
    "SD3 checkpoint": (FileKind.SD3, {
        f"{UNET}joint_blocks.0.context_block.attn.qkv.weight": (4608, 1536), **INSIDE_VAE,
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight": ANY,
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.layer_norm1.weight": (768,),
    }),
    "SD3, diffusers": (FileKind.SD3, {
        "transformer_blocks.0.attn.add_q_proj.weight": ANY,
        "pos_embed.proj.weight": (1536, 16, 2, 2)}),
    "Flux": (FileKind.FLUX, {
        "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
        "single_blocks.0.linear1.weight": (21504, 3072), "txt_in.weight": (3072, 4096)}),
    "Flux checkpoint": (FileKind.FLUX, {
        f"{UNET}double_blocks.0.img_attn.qkv.weight": (9216, 3072),
        f"{UNET}single_blocks.0.linear1.weight": (21504, 3072),
        f"{UNET}txt_in.weight": (3072, 4096), "vae.decoder.conv_in.weight": (512, 16, 3, 3)}),
    "Flux, diffusers": (FileKind.FLUX, {
        "transformer_blocks.0.attn.add_q_proj.weight": ANY, "x_embedder.weight": (3072, 64),
        "single_transformer_blocks.0.attn.to_q.weight": (3072, 3072)}),
    "Chroma": (FileKind.OTHER_DIFFUSION, {
        "double_blocks.0.img_attn.qkv.weight": ANY, "single_blocks.0.linear1.weight": ANY,
        "txt_in.weight": ANY, "distilled_guidance_layer.norms.0.scale": (5120,)}),
    "Wan": (FileKind.OTHER_DIFFUSION, {
        "patch_embedding.weight": (1536, 16, 1, 2, 2), "head.modulation": (1, 2, 1536),
        "blocks.0.self_attn.q.weight": (1536, 1536)}),
    "Lumina 2, Z-Image": (FileKind.OTHER_DIFFUSION, {
        "cap_embedder.1.weight": ANY, "noise_refiner.0.attention.qkv.weight": ANY,
        "layers.0.attention.qkv.weight": ANY, "x_embedder.weight": ANY}),
    "Qwen-Image": (FileKind.OTHER_DIFFUSION, {
        "img_in.weight": ANY, "txt_norm.weight": (3584,),
        "transformer_blocks.0.attn.add_q_proj.weight": ANY}),
    "PixArt": (FileKind.OTHER_DIFFUSION, {
        "t_block.1.weight": ANY, "blocks.0.attn.qkv.weight": ANY, "x_embedder.proj.weight": ANY}),
    "Stable Cascade": (FileKind.OTHER_DIFFUSION, {
        "clf.1.weight": ANY, "down_blocks.0.0.channelwise.0.weight": ANY}),
    "anything in the diffusion model's place": (FileKind.OTHER_DIFFUSION, {f"{UNET}x.weight": ANY}),
    "VAE": (FileKind.VAE, VAE),
    "VAE, decoder only": (FileKind.VAE, {"decoder.conv_in.weight": (512, 4, 3, 3)}),
    "VAE, diffusers": (FileKind.VAE, {
        "decoder.up_blocks.0.resnets.0.norm1.weight": (512,),
        "encoder.down_blocks.0.resnets.0.norm1.weight": (128,)}),
    "VAE inside first_stage_model": (FileKind.VAE, INSIDE_VAE),
    "video VAE": (FileKind.VAE, {"decoder.middle.0.residual.0.gamma": (384, 1, 1, 1)}),
    "TAESD": (FileKind.VAE, {"taesd_decoder.1.weight": (64, 4, 3, 3)}),
    "TAESD decoder": (FileKind.VAE, {"1.weight": ANY, "3.conv.0.weight": (64, 64, 3, 3)}),
    "LoRA, kohya": (FileKind.LORA, {
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": ANY,
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": ANY,
        "lora_unet_down_blocks_0_attentions_0_proj_in.alpha": ()}),
    "LoRA, kohya text encoder": (FileKind.LORA, {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": ANY}),
    "LoRA, diffusers": (FileKind.LORA, {
        "unet.down_blocks.0.attentions.0.processor.to_q_lora.up.weight": ANY}),
    "LoRA, diffusers with conv_in": (FileKind.LORA, {
        "unet.conv_in.lora.up.weight": ANY, "unet.conv_in.lora.down.weight": ANY}),
    "LoRA, peft": (FileKind.LORA, {
        "base_model.model.down_blocks.1.attentions.0.to_q.lora_A.weight": ANY,
        "base_model.model.down_blocks.1.attentions.0.to_q.lora_B.weight": ANY}),
    "LoRA of a transformer": (FileKind.LORA, {
        "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.default.weight": ANY}),
    "LoHa": (FileKind.LORA, {"lycoris_unet_x.hada_w1_a": ANY, "lycoris_unet_x.hada_w2_b": ANY}),
    "LoKr": (FileKind.LORA, {"lycoris_unet_x.lokr_w1": ANY, "lycoris_unet_x.lokr_w2_a": ANY}),
    "difference": (FileKind.LORA, {"diffusion_model.blocks.0.norm.diff_b": (8,)}),
    "ControlNet": (FileKind.CONTROLNET, {
        "control_model.zero_convs.0.0.weight": (320, 320, 1, 1),
        "control_model.input_hint_block.0.weight": (16, 3, 3, 3),
        "control_model.input_blocks.0.0.weight": (320, 4, 3, 3),
        "control_model.time_embed.0.weight": (1280, 320)}),
    "ControlNet, bare names": (FileKind.CONTROLNET, {
        "zero_convs.0.0.weight": (320, 320, 1, 1),
        "input_blocks.0.0.weight": (320, 4, 3, 3), "time_embed.0.weight": (1280, 320)}),
    "ControlNet, diffusers": (FileKind.CONTROLNET, {
        "controlnet_cond_embedding.conv_in.weight": (16, 3, 3, 3),
        "controlnet_down_blocks.0.weight": (320, 320, 1, 1), **make_diffusers_unet()}),
    "ControlNet for Flux": (FileKind.CONTROLNET, {
        "controlnet_blocks.0.weight": ANY, "double_blocks.0.img_attn.qkv.weight": ANY}),
    "Control-LoRA": (FileKind.CONTROLNET, {
        "lora_controlnet": (0,), "input_hint_block.0.weight": (16, 3, 3, 3),
        "input_blocks.1.0.in_layers.2.up": ANY}),
    "ControlNet-LLLite": (FileKind.CONTROLNET, {
        "lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight": ANY}),
    "T2I adapter": (FileKind.T2I_ADAPTER, {
        "conv_in.weight": (320, 64, 3, 3), "body.0.block1.weight": (320, 320, 3, 3),
        "body.0.block2.weight": (320, 320, 1, 1)}),
    "T2I adapter, light": (FileKind.T2I_ADAPTER, {"body.0.in_conv.weight": (80, 192, 1, 1)}),
    "T2I adapter, diffusers": (FileKind.T2I_ADAPTER, {
        "adapter.body.0.resnets.0.block1.weight": (320, 320, 3, 3)}),
    "IP-Adapter": (FileKind.IP_ADAPTER, {
        "image_proj.proj.weight": (8192, 1280), "ip_adapter.1.to_k_ip.weight": (640, 2048)}),
    "IP-Adapter FaceID": (FileKind.IP_ADAPTER, {
        "image_proj.proj.0.weight": (1024, 512),
        "ip_adapter.0.to_q_lora.down.weight": (128, 320),
        "ip_adapter.1.to_k_ip.weight": (320, 768)}),
    "CLIP-L": (FileKind.CLIP_L, {f"{CLIP_L}layer_norm1.weight": (768,)}),
    "CLIP-L with its vision half": (FileKind.CLIP_L, {
        "vision_model.encoder.layers.0.layer_norm1.weight": (1024,),
        f"{CLIP_L}layer_norm1.weight": (768,)}),
    "CLIP-G": (FileKind.CLIP_G, {f"{CLIP_L}layer_norm1.weight": (1280,)}),
    "CLIP-G, OpenCLIP": (FileKind.CLIP_G, {
        "transformer.resblocks.0.ln_1.weight": (1280,), "token_embedding.weight": (49408, 1280)}),
    "CLIP-H": (FileKind.TEXT_ENCODER, {f"{CLIP_L}layer_norm1.weight": (1024,)}),
    "CLIP vision": (FileKind.CLIP_VISION, {
        "vision_model.encoder.layers.0.layer_norm1.weight": (1280,)}),
    "T5": (FileKind.T5, {
        "encoder.block.0.layer.0.SelfAttention.q.weight": (4096, 4096),
        "shared.weight": (32128, 4096)}),
    "language model": (FileKind.TEXT_ENCODER, {
        "model.embed_tokens.weight": (151936, 2560),
        "model.layers.0.self_attn.q_proj.weight": (4096, 2560)}),
    "ESRGAN": (FileKind.UPSCALER, {
        "model.0.weight": (64, 3, 3, 3),
        "model.1.sub.0.RDB1.conv1.0.weight": (32, 64, 3, 3)}),
    "Real-ESRGAN": (FileKind.UPSCALER, {
        "conv_first.weight": (64, 3, 3, 3), "body.0.rdb1.conv1.weight": (32, 64, 3, 3)}),
    "Real-ESRGAN in params_ema": (FileKind.UPSCALER, {
        "params_ema.conv_first.weight": (64, 3, 3, 3)}),
    "compact": (FileKind.UPSCALER, {
        "body.0.weight": (64, 3, 3, 3), "body.0.bias": (64,), "body.1.weight": (64,),
        "body.2.weight": (64, 64, 3, 3)}),
    "SwinIR": (FileKind.UPSCALER, {
        "conv_first.weight": (180, 3, 3, 3),
        "layers.0.residual_group.blocks.0.norm1.weight": (180,)}),
    "Real-CUGAN": (FileKind.UPSCALER, {"unet1.conv1.conv.0.weight": (32, 3, 3, 3)}),
    "SPAN": (FileKind.UPSCALER, {"block_1.c1_r.sk.weight": (48, 48, 1, 1)}),
    "embedding": (FileKind.EMBEDDING, {"emb_params": (8, 768)}),
    "SDXL embedding": (FileKind.EMBEDDING, {"clip_l": (8, 768), "clip_g": (8, 1280)}),
    "embedding, diffusers": (FileKind.EMBEDDING, {"<cat-toy>": (768,)}),
    "empty": (FileKind.EMPTY, {}),
    "unknown": (FileKind.UNKNOWN, {"something.weight": (3, 4)}),
    "numbers only": (FileKind.UNKNOWN, {"0": (), "": (1,)}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "shapes"), CASES.values(), ids=CASES.keys())
def test_each_kind(kind, shapes):
    assert identify(shapes) is kind
    assert identify(dict(reversed(shapes.items()))) is kind


def test_every_kind_has_a_case():
    assert {kind for kind, _ in CASES.values()} == set(FileKind)


@pytest.mark.parametrize("kind", FileKind)
def test_every_kind_says_what_it_is_and_what_to_do(kind):
    assert kind.title.split()[0] in ("a", "an", "the")
    assert kind.advice.endswith(".")
    assert kind.title.isascii()
    assert kind.advice.isascii()


def test_titles_and_advice_are_told_apart():
    assert len({kind.title for kind in FileKind}) == len(FileKind)


def test_every_kind_of_model_names_its_folder():
    for kind in set(FileKind) - {FileKind.EMPTY, FileKind.UNKNOWN}:
        assert "models/" in kind.advice


def test_the_published_lists():
    with gzip.open(LISTS, "rt", encoding="utf-8") as file:
        lists = json.load(file)
    supir = {key: tuple(shape) for key, shape in lists["supir"].items()}
    base = {key: tuple(shape) for key, shape in lists["sdxl_base"].items()}
    assert identify(supir) is FileKind.SUPIR
    assert identify(base) is FileKind.SDXL_BASE
    assert identify(base | supir) is FileKind.SUPIR


def test_odd_names_and_shapes_never_raise():
    rng = random.Random(5)
    cases = [shapes for _, shapes in CASES.values() if shapes]
    kinds = set()
    for _ in range(2_000):
        shapes = dict(rng.choice(cases))
        for key in rng.sample(list(shapes), min(len(shapes), rng.randrange(1, 5))):
            shape = shapes.pop(key)
            at = rng.randrange(len(key) + 1)
            key = rng.choice([key, key, key[:at], key[:at] + "\udc80é." + key[at:]])
            odd = tuple(rng.choice([0, 1, 768, 2**70]) for _ in range(rng.randrange(6)))
            shapes[key] = rng.choice([shape, odd])
        kinds.add(identify(shapes))
    assert len(kinds) > 20
