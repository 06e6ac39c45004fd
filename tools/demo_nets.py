"""The demo's networks outside of ComfyUI's loaders, with gradients, for training and evaluation."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from the_pack import load_with_host
from torch import nn
from torch.nn import functional as F

LOGVAR = -9.0
"""Log variance of every latent of the VAE: its encoders state a point."""

ZERO_START = ("conv2", "proj_out", "out_layers.3", "zero_mul", "zero_add", "zero_conv", "to_out.0")
"""Last layers of residual branches: they start at 0, so that every block starts as the identity."""


def use_fused_attention() -> None:
    """Have ComfyUI's layers use torch's fused attention; to be called before any other function."""
    load_with_host("supir.constants")
    importlib.import_module("comfy.cli_args").args.use_pytorch_cross_attention = True


def start(module: nn.Module, prefix: str) -> None:
    """Give a network its computed starting weights."""
    demo_model = load_with_host("supir.demo_model")
    with torch.no_grad():
        module.load_state_dict(demo_model.computed(module.state_dict(), prefix))
        for name, p in module.named_parameters():
            if name.rsplit(".", 1)[0].endswith(ZERO_START):
                p.zero_()
    module.requires_grad_(True)


class Autoencoder(nn.Module):
    """The demo VAE: encoder, decoder, and the 1x1 convolutions that scale and turn the latent."""

    def __init__(self) -> None:
        super().__init__()
        demo_model, blocks = load_with_host("supir.demo_model"), load_with_host("supir.host_blocks")
        self.encoder = blocks.Encoder(**demo_model.VAE_CONFIG)
        self.decoder = blocks.Decoder(**demo_model.VAE_CONFIG)
        self.quant_conv = nn.Conv2d(8, 8, 1)
        self.post_quant_conv = nn.Conv2d(4, 4, 1)
        start(self.encoder, "demo.vae.encoder.")
        start(self.decoder, "demo.vae.decoder.")
        with torch.no_grad():
            self.quant_conv.weight.copy_(torch.eye(8)[..., None, None])
            self.quant_conv.bias.zero_()  # pyright: ignore[reportOptionalMemberAccess]
            self.post_quant_conv.weight.copy_(torch.eye(4)[..., None, None])
            self.post_quant_conv.bias.zero_()  # pyright: ignore[reportOptionalMemberAccess]
        self.quant_conv.requires_grad_(False)
        self.post_quant_conv.requires_grad_(False)
        narrow_norms(self)

    def encode(self, rgb: torch.Tensor, encoder: nn.Module | None = None) -> torch.Tensor:
        """Return latents [B, 4, h, w] of pictures [B, 3, 4h, 4w], -1 to 1."""
        return self.quant_conv((encoder or self.encoder)(rgb))[:, :4]

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Return pictures [B, 3, 4h, 4w], about -1 to 1, of latents [B, 4, h, w]."""
        return self.decoder(self.post_quant_conv(latent))

    @torch.no_grad()
    def whiten(self, latents: torch.Tensor, scale: float) -> None:
        """Turn and scale the latent so that ``scale`` times it has unit covariance and mean 0.

        Args: latents: [N, 4] samples of the latent as it is now.
        """
        mean = latents.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov((latents - mean).T.double()))
        white = (vectors * values.rsqrt()) @ vectors.T / scale
        colour = torch.linalg.inv(white).float()
        white = white.float()
        weight = torch.zeros(8, 8)
        weight[:4, :4] = white
        bias = torch.full((8,), LOGVAR)
        bias[:4] = -white @ mean
        self.quant_conv.weight.copy_(weight[..., None, None])
        self.quant_conv.bias.copy_(bias)  # pyright: ignore[reportOptionalMemberAccess]
        self.post_quant_conv.weight.copy_(colour[..., None, None])
        self.post_quant_conv.bias.copy_(mean)  # pyright: ignore[reportOptionalMemberAccess]


class Restorer(nn.Module):
    """The demo's UNet with SUPIR's control network and adapters."""

    def __init__(self) -> None:
        super().__init__()
        demo, injection = load_with_host("nodes.demo"), load_with_host("supir.injection")
        ops = importlib.import_module("comfy.ops").disable_weight_init
        self.unet = demo.build_demo_model().diffusion_model.float()
        self.nets = injection.SupirNets(
            demo.demo_dims(), operations=ops, dtype=torch.float32, device="cpu"
        )
        self.walk, self.hooks = load_with_host("supir.unet_walk").walk_unet, injection.AdapterHooks
        start(self.unet, "demo.unet.")
        start(self.nets.control_model, "demo.model.control_model.")
        start(self.nets.project_modules, "demo.model.diffusion_model.project_modules.")
        narrow_norms(self)

    def forward(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        hint: torch.Tensor,
        context: torch.Tensor,
        vector: torch.Tensor,
    ) -> torch.Tensor:
        """Return the predicted noise; arguments as of the pack's control network."""
        features = self.nets.control_model(x, index, hint, context, vector, {})
        hooks = self.hooks(self.nets, features, 1.0, {})
        return self.walk(self.unet, hooks, x, index, context, vector, None, {})


def narrow_norms(module: nn.Module) -> None:
    """Have group norms run in their input's dtype: autocast would widen them, many times slower."""

    def run(norm: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
            return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)

    for part in module.modules():
        if isinstance(part, nn.GroupNorm):
            part.forward = partial(run, part)


def to_tensor(pictures: Any) -> torch.Tensor:
    """Return uint8 pictures [B, H, W, 3] as float32 [B, 3, H, W], -1 to 1."""
    rgb = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    # Left as it is, this would make every activation channels-last: ten times slower group norms.
    return rgb.float().contiguous() / 127.5 - 1.0


def to_pictures(rgb: torch.Tensor) -> Any:
    """Return [B, 3, H, W], -1 to 1, as uint8 pictures [B, H, W, 3]."""
    values = (rgb.detach().float() + 1.0) * 127.5 + 0.5
    return values.clamp(0.0, 255.0).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def gradient_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the L1 distance of the gradients at three scales."""
    total = a.new_zeros(())
    for scale in range(3):
        if scale:
            a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
        d = a - b
        total = total + (d[..., 1:] - d[..., :-1]).abs().mean()
        total = total + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()
    return total / 3.0


def colour_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of the pictures reduced 8 times, chroma weighted 3 times."""
    d = F.avg_pool2d(a - b, 8)
    luma = (d * d.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    return (luma**2).mean() + 3.0 * ((d - luma) ** 2).mean()


def picture_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return L1 + gradients + squared error + colour."""
    a, b = a.float(), b.float()
    plain = (a - b).abs().mean() + 2.0 * ((a - b) ** 2).mean()
    return plain + gradient_loss(a, b) + 2.0 * colour_loss(a, b)
