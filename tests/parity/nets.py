"""The golden networks on the host's real blocks, filled with the golden weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from golden_case import weights
from supir_xpu.supir.layout import BlockDims, ControlDims, CrossDims, SftDims, SupirDims


def dims_from_config(config: dict) -> SupirDims:
    """Return SUPIR's dims for an SDXL-style config, from the published channel tables."""
    width, mult = config["model_channels"], config["channel_mult"]
    depth = config["transformer_depth"]
    attention_levels = {config["attention_resolutions"].index(r) for r in [4, 2]}
    assert attention_levels == {0, 1}
    blocks, channels = [], width
    per_level = []
    for level, factor in enumerate(mult):
        for _ in range(config["num_res_blocks"]):
            blocks.append(
                BlockDims("res", channels, width * factor, depth[level] if level > 0 else 0)
            )
            channels = width * factor
        per_level.append(channels)
        if level + 1 < len(mult):
            blocks.append(BlockDims("down", channels, channels))
    control = ControlDims(
        in_channels=config["in_channels"],
        hint_channels=config["in_channels"],
        model_channels=width,
        time_embed_dim=width * 4,
        adm_in_channels=config["adm_in_channels"],
        context_dim=config["context_dim"],
        blocks=tuple(blocks),
        middle_channels=channels,
        middle_depth=depth[-1],
        linear_projection=config["use_linear_in_transformer"],
    )
    norm = [320] * 4 + [640] * 3 + [1280] * 3
    concat = [320] * 2 + [640] * 3 + [1280] * 4 + [0]
    scale = width / 320
    adapters = [
        SftDims(int(n * scale), int(n * scale), int(c * scale), 128)
        for n, c in zip(norm, concat, strict=True)
    ]
    adapters.insert(6, CrossDims(int(1280 * scale), int(640 * scale)))
    adapters.insert(3, CrossDims(int(640 * scale), int(320 * scale)))
    return SupirDims(control, tuple(adapters))


def host_unet(config: dict):
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    depth, blocks = config["transformer_depth"], config["num_res_blocks"]
    per_level = [0 if i == 0 else d for i, d in enumerate(depth)]
    return UNetModel(
        image_size=32,
        in_channels=config["in_channels"],
        out_channels=config["out_channels"],
        model_channels=config["model_channels"],
        num_res_blocks=[blocks] * len(depth),
        channel_mult=config["channel_mult"],
        num_head_channels=config["num_head_channels"],
        use_spatial_transformer=True,
        use_linear_in_transformer=config["use_linear_in_transformer"],
        transformer_depth=[d for d in per_level for _ in range(blocks)],
        transformer_depth_output=[d for d in per_level for _ in range(blocks + 1)],
        transformer_depth_middle=depth[-1],
        context_dim=config["context_dim"],
        adm_in_channels=config["adm_in_channels"],
        num_classes="sequential",
        legacy=False,
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )


@dataclass
class GoldenNet:
    """UNet with SUPIR, called as the golden specification's ``net(x, index, cond, k)``."""

    unet: torch.nn.Module
    nets: torch.nn.Module

    def __call__(self, x, timesteps, context, y, hint, control_scale):
        from comfy.patcher_extension import WrappersMP
        from supir_xpu.supir.constants import WORK_KEY
        from supir_xpu.supir.injection import InjectedState, make_wrapper

        state = InjectedState(hint, control_scale)
        options = {
            "wrappers": {WrappersMP.DIFFUSION_MODEL: {WORK_KEY: [make_wrapper(self.nets)]}},
            WORK_KEY: {"state": state},
        }
        return self.unet(x, timesteps, context, y, transformer_options=options)


def golden_net(net_meta: dict) -> GoldenNet:
    import comfy.ops
    from supir_xpu.supir.injection import SupirNets

    config = net_meta["config"]
    unet = weights.fill(host_unet(config), net_meta["prefix_unet"])
    nets = SupirNets(
        dims_from_config(config),
        operations=comfy.ops.manual_cast,
        dtype=torch.float32,
        device="cpu",
    )
    weights.fill(nets.control_model, net_meta["prefix_control"])
    weights.fill(nets.project_modules, net_meta["prefix_unet"] + "project_modules.")
    return GoldenNet(unet, nets)


def golden_vae(meta: dict, cls_config: dict):
    """Return (host AutoencoderKL, host Encoder of the denoise path), golden weights in both."""
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.modules.diffusionmodules.model import Encoder

    vae = AutoencoderKL(ddconfig=cls_config, embed_dim=meta["embed_dim"])
    denoise_encoder = Encoder(**cls_config)
    weights.fill(vae, meta["prefix"])
    weights.fill(denoise_encoder, meta["prefix"] + "denoise_encoder.")
    return vae, denoise_encoder
