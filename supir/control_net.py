"""SUPIR's control encoder: the encoder half of an SDXL UNet, told of the degraded latent by a hint.

Built from the host's blocks, with layers from the ``operations`` that are passed in, so weights of
any dtype are cast and moved the way the host does it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .host_blocks import (
    Downsample,
    ResBlock,
    SpatialTransformer,
    TimestepEmbedSequential,
    timestep_embedding,
)
from .layer_run import LayerRunner, RunLayer, run_module
from .layout import HEAD_CHANNELS, ControlDims


class ControlNet(nn.Module):
    """GLVControl of the published model; parameter names are those of its checkpoint.

    Args:
        dims: widths and depths, deduced from the checkpoint.
        operations: layer factory of the host (``comfy.ops``).
        dtype, device: of the parameters, which hold no values until weights are loaded.
    """

    def __init__(
        self, dims: ControlDims, *, operations: Any, dtype: torch.dtype | None, device: Any
    ) -> None:
        super().__init__()
        self.dims = dims
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        width, embed = dims.model_channels, dims.time_embed_dim

        def embedder(channels: int) -> nn.Sequential:
            return nn.Sequential(
                operations.Linear(channels, embed, **options),
                nn.SiLU(),
                operations.Linear(embed, embed, **options),
            )

        def first_conv(channels: int) -> nn.Module:
            return TimestepEmbedSequential(
                operations.Conv2d(channels, width, 3, padding=1, **options)
            )

        def res(channels_in: int, channels_out: int) -> nn.Module:
            return ResBlock(
                channels_in,
                embed,
                0.0,
                out_channels=channels_out,
                operations=operations,
                **options,
            )

        def transformer(channels: int, depth: int) -> nn.Module:
            return SpatialTransformer(
                channels,
                channels // HEAD_CHANNELS,
                HEAD_CHANNELS,
                depth=depth,
                context_dim=dims.context_dim,
                use_linear=dims.linear_projection,
                use_checkpoint=False,
                operations=operations,
                **options,
            )

        self.time_embed = embedder(width)
        self.label_emb = nn.Sequential(embedder(dims.adm_in_channels))
        self.input_hint_block = first_conv(dims.hint_channels)
        blocks: list[nn.Module] = [first_conv(dims.in_channels)]
        for block in dims.blocks:
            if block.kind == "down":
                layers: list[nn.Module] = [
                    Downsample(
                        block.in_channels,
                        True,
                        out_channels=block.out_channels,
                        operations=operations,
                        **options,
                    )
                ]
            else:
                layers = [res(block.in_channels, block.out_channels)]
                if block.depth:
                    layers.append(transformer(block.out_channels, block.depth))
            blocks.append(TimestepEmbedSequential(*layers))
        self.input_blocks = nn.ModuleList(blocks)
        middle = dims.middle_channels
        layers = [res(middle, middle)]
        if dims.middle_depth:
            layers.append(transformer(middle, dims.middle_depth))
        self.middle_block = TimestepEmbedSequential(*layers, res(middle, middle))

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        hint: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor,
        transformer_options: dict[str, Any],
        run_layer: RunLayer | None = None,
    ) -> list[torch.Tensor]:
        """Return the control features: first convolution, every block, middle block.

        Args:
            x: [B, 4, h, w] noisy latent scaled by c_in, the tensor the UNet gets.
            timesteps: [B] table index.
            hint: [B, 4, h, w] latent of the degraded picture, scaled (times 0.13025 for SDXL).
            context: [B, tokens, context_dim]; y: [B, adm_in_channels].
            transformer_options: for these blocks alone; holds at most the attention callable.
            run_layer: the run's execution of single layers, or None.
        """
        embedding = timestep_embedding(timesteps, self.dims.model_channels, repeat_only=False)
        times, labels = self.time_embed, self.label_emb
        emb = run_module(times, times, embedding.to(x.dtype), run_layer=run_layer)
        emb = emb + run_module(labels, labels, y, run_layer=run_layer)
        runner = LayerRunner(emb, context, transformer_options, run_layer=run_layer)
        features: list[torch.Tensor] = []
        h = x
        for i, block in enumerate(self.input_blocks):
            h = runner.run(block, h)
            if i == 0:
                h = h + runner.run(self.input_hint_block, hint)
            features.append(h)
        features.append(runner.run(self.middle_block, h))
        return features
