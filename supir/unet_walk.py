"""The host's SDXL UNet, block by block, with SUPIR's three places left open.

Every patch the host honours is honoured in the same order; with ``PlainHooks`` the result equals the
host's own forward bit for bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .errors import ModelError
from .host_blocks import Upsample, apply_control, timestep_embedding
from .layer_run import LayerRunner, RunLayer, run_module


class WalkHooks(Protocol):
    """The three places SUPIR changes in an SDXL UNet."""

    def after_middle(self, h: torch.Tensor) -> torch.Tensor: ...

    def merge(self, h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor: ...

    def before_upsample(self, h: torch.Tensor) -> torch.Tensor: ...


class PlainHooks:
    """What an unmodified SDXL UNet does at the three places."""

    def after_middle(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def merge(self, h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.cat([h, skip], dim=1)

    def before_upsample(self, h: torch.Tensor) -> torch.Tensor:
        return h


def walk_unet(
    unet: Any,
    hooks: WalkHooks,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    context: torch.Tensor,
    y: torch.Tensor | None,
    control: dict[str, Any] | None,
    transformer_options: dict[str, Any],
    *,
    run_layer: RunLayer | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run the host's UNet with the given hooks.

    Args:
        unet, x .. transformer_options, kwargs: as in the forward of the host's ``UNetModel``;
            x: [B, C, h, w] scaled by c_in.
        run_layer: the run's execution of single layers, or None.
    Returns: [B, out_channels, h, w], the network's prediction.
    Raises: ModelError when a patch merges the skip connections itself.
    """
    options = transformer_options
    options["original_shape"] = list(x.shape)
    options["transformer_index"] = 0
    video = {
        "time_context": kwargs.get("time_context"),
        "num_video_frames": kwargs.get("num_video_frames", unet.default_num_video_frames),
        "image_only_indicator": kwargs.get("image_only_indicator"),
    }
    emb = _embed(unet, x, timesteps, y, options, run_layer)
    runner = LayerRunner(emb, context, options, video, run_layer)
    h, skips = _encode(unet, runner, x, control)
    options["block"] = ("middle", 0)
    h = apply_control(runner.run(unet.middle_block, h), control, "middle")
    for patch in _patches(options, "middle_block_after_patch"):
        call = {"h": h, "x": x, "emb": emb, "context": context, "y": y}
        h = patch({**call, "timesteps": timesteps, "transformer_options": options})["h"]
    h = _decode(unet, runner, hooks, hooks.after_middle(h), skips, control)
    head = unet.id_predictor if unet.predict_codebook_ids else unet.out
    return run_module(head, head, h.type(x.dtype), run_layer=run_layer)


def _patches(options: dict[str, Any], name: str) -> list[Any]:
    return options.get("patches", {}).get(name, [])


def _embed(
    unet: Any,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    y: Any,
    options: dict[str, Any],
    run_layer: RunLayer | None,
) -> torch.Tensor:
    embedding = timestep_embedding(timesteps, unet.model_channels, repeat_only=False)
    embed = unet.time_embed
    emb = run_module(embed, embed, embedding.to(x.dtype), run_layer=run_layer)
    for patch in _patches(options, "emb_patch"):
        emb = patch(emb, unet.model_channels, options)
    if unet.num_classes is None:
        return emb
    return emb + run_module(unet.label_emb, unet.label_emb, y, run_layer=run_layer)


def _encode(
    unet: Any, runner: LayerRunner, h: torch.Tensor, control: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    options, skips = runner.options, list[torch.Tensor]()
    for i, block in enumerate(unet.input_blocks):
        options["block"] = ("input", i)
        h = apply_control(runner.run(block, h), control, "input")
        for patch in _patches(options, "input_block_patch"):
            h = patch(h, options)
        skips.append(h)
        for patch in _patches(options, "input_block_patch_after_skip"):
            h = patch(h, options)
    return h, skips


def _decode(
    unet: Any,
    runner: LayerRunner,
    hooks: WalkHooks,
    h: torch.Tensor,
    skips: list[torch.Tensor],
    control: Any,
) -> torch.Tensor:
    options = runner.options
    for i, block in enumerate(unet.output_blocks):
        options["block"] = ("output", i)
        skip = apply_control(skips.pop(), control, "output")
        for patch in _patches(options, "output_block_patch"):
            h, skip = patch(h, skip, options)
        if skip is None:
            raise ModelError(
                "A patch on the MODEL merges the UNet's skip connections itself (as ComfyUI's own "
                "SUPIR node does), which is what SUPIR's adapters do here. Connect the MODEL from "
                "before that patch."
            )
        h = hooks.merge(h, skip)
        del skip
        shape = skips[-1].shape if skips else None
        layers = list(block)
        at = next((j for j, layer in enumerate(layers) if isinstance(layer, Upsample)), None)
        if at is not None:
            h = runner.run(layers[:at], h, shape)
            h = hooks.before_upsample(h)
            layers = layers[at:]
        h = runner.run(layers, h, shape)
    return h
