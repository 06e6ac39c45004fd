"""Run the host's SDXL UNet with SUPIR's adapters in place, as the innermost call of its wrappers.

The host's block loop is walked here so that the adapters sit where the original has them. Every
patch the host honours is honoured in the same order; with no SUPIR state in the call the host's own
forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from .adapters import ZeroCrossAttn, ZeroSFT, build_adapters
from .constants import WORK_KEY
from .control_net import ControlNet
from .errors import ModelError, ShapeError
from .host_blocks import (
    Upsample,
    apply_control,
    forward_timestep_embed,
    optimized_attention,
    timestep_embedding,
)
from .layout import SupirDims

ATTENTION_OVERRIDE = "optimized_attention_override"
"""The host's slot for an attention callable in ``transformer_options``."""


class SupirNets(nn.Module):
    """The networks of one SUPIR file: control encoder and adapters, names as in its checkpoint."""

    def __init__(
        self, dims: SupirDims, *, operations: Any, dtype: torch.dtype | None, device: Any
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"operations": operations, "dtype": dtype, "device": device}
        self.dims = dims
        self.control_model = ControlNet(dims.control, **options)
        self.project_modules = build_adapters(dims.adapters, **options)


@dataclass
class InjectedState:
    """What the guider tells the walk about one call, under our key in ``transformer_options``.

    Attributes:
        hint: [B or 1, 4, h, w] scaled latent of the degraded picture, cropped to the tile.
        control_scale: strength at this step; at 0 the host's own forward runs.
    """

    hint: torch.Tensor
    control_scale: float


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


@dataclass
class AdapterHooks:
    """SUPIR's adapters, used from the last to the first with the features from the deepest up."""

    nets: SupirNets
    features: list[torch.Tensor]
    control_scale: float
    transformer_options: dict[str, Any]
    _adapters: Iterator[nn.Module] = field(init=False)
    _feature: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._adapters = iter(reversed(list(self.nets.project_modules)))
        self._feature = self.features[-1]

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int
    ) -> torch.Tensor:
        return optimized_attention(q, k, v, heads, transformer_options=self.transformer_options)

    def after_middle(self, h: torch.Tensor) -> torch.Tensor:
        adapter = next(self._adapters)
        assert isinstance(adapter, ZeroSFT)
        return adapter(self.features.pop(), h, None, self.control_scale)

    def merge(self, h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        adapter = next(self._adapters)
        assert isinstance(adapter, ZeroSFT)
        self._feature = self.features.pop()
        return adapter(self._feature, skip, h, self.control_scale)

    def before_upsample(self, h: torch.Tensor) -> torch.Tensor:
        adapter = next(self._adapters)
        assert isinstance(adapter, ZeroCrossAttn)
        return adapter(self._feature, h, self.control_scale, self._attention)


def walk_unet(
    unet: Any,
    hooks: WalkHooks,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    context: torch.Tensor,
    y: torch.Tensor | None,
    control: dict[str, Any] | None,
    transformer_options: dict[str, Any],
    **kwargs: Any,
) -> torch.Tensor:
    """Run the host's UNet block by block; with ``PlainHooks`` equal to its forward bit for bit.

    Args: as the host's ``UNetModel`` forward; x: [B, C, h, w] scaled by c_in.
    Returns: [B, out_channels, h, w], the network's prediction.
    """
    options = transformer_options
    options["original_shape"] = list(x.shape)
    options["transformer_index"] = 0
    patches: dict[str, list[Any]] = options.get("patches", {})
    video = {
        "time_context": kwargs.get("time_context"),
        "num_video_frames": kwargs.get("num_video_frames", unet.default_num_video_frames),
        "image_only_indicator": kwargs.get("image_only_indicator"),
    }

    def run(layers: Any, h: torch.Tensor, shape: Any = None) -> torch.Tensor:
        return forward_timestep_embed(layers, h, emb, context, options, shape, **video)

    embedding = timestep_embedding(timesteps, unet.model_channels, repeat_only=False)
    emb = unet.time_embed(embedding.to(x.dtype))
    for patch in patches.get("emb_patch", []):
        emb = patch(emb, unet.model_channels, options)
    if unet.num_classes is not None:
        emb = emb + unet.label_emb(y)

    skips: list[torch.Tensor] = []
    h = x
    for i, block in enumerate(unet.input_blocks):
        options["block"] = ("input", i)
        h = apply_control(run(block, h), control, "input")
        for patch in patches.get("input_block_patch", []):
            h = patch(h, options)
        skips.append(h)
        for patch in patches.get("input_block_patch_after_skip", []):
            h = patch(h, options)

    options["block"] = ("middle", 0)
    h = apply_control(run(unet.middle_block, h), control, "middle")
    for patch in patches.get("middle_block_after_patch", []):
        call = {"h": h, "x": x, "emb": emb, "context": context, "y": y}
        h = patch({**call, "timesteps": timesteps, "transformer_options": options})["h"]
    h = hooks.after_middle(h)

    for i, block in enumerate(unet.output_blocks):
        options["block"] = ("output", i)
        skip = apply_control(skips.pop(), control, "output")
        for patch in patches.get("output_block_patch", []):
            h, skip = patch(h, skip, options)
        if skip is None:
            raise ModelError(
                "A patch on the MODEL merges the UNet's skip connections itself (as ComfyUI's own "
                "SUPIR node does), which is what SUPIR's adapters do here. Connect the MODEL from "
                "before that patch."
            )
        h = hooks.merge(h, skip)
        shape = skips[-1].shape if skips else None
        layers = list(block)
        at = next((j for j, layer in enumerate(layers) if isinstance(layer, Upsample)), None)
        if at is not None:
            h = run(layers[:at], h, shape)
            h = hooks.before_upsample(h)
            layers = layers[at:]
        h = run(layers, h, shape)
    h = h.type(x.dtype)
    return unet.id_predictor(h) if unet.predict_codebook_ids else unet.out(h)


def make_wrapper(nets: SupirNets) -> Any:
    """Return a ``DIFFUSION_MODEL`` wrapper that runs SUPIR when the call carries our state.

    The wrapper never ends the chain: wrappers registered after it run around the walk.
    """

    def wrapper(
        executor: Any,
        x: torch.Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        options = {} if transformer_options is None else transformer_options
        state = options.get(WORK_KEY, {}).get("state")
        if not isinstance(state, InjectedState) or state.control_scale == 0.0:
            return executor(x, timesteps, context, y, control, options, **kwargs)

        def walk(
            x: torch.Tensor,
            timesteps: torch.Tensor,
            context: torch.Tensor,
            y: torch.Tensor,
            control: Any = None,
            transformer_options: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            inner = {} if transformer_options is None else transformer_options
            own = (
                {ATTENTION_OVERRIDE: inner[ATTENTION_OVERRIDE]}
                if ATTENTION_OVERRIDE in inner
                else {}
            )
            hint = match_batch(state.hint, x)
            features = nets.control_model(x, timesteps, hint, context, y, own)
            hooks = AdapterHooks(nets, features, state.control_scale, own)
            return walk_unet(
                executor.class_obj, hooks, x, timesteps, context, y, control, inner, **kwargs
            )

        following = type(executor)(walk, executor.class_obj, executor.wrappers, executor.idx + 1)
        return following.execute(x, timesteps, context, y, control, options, **kwargs)

    return wrapper


def match_batch(hint: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the hint on x's device and dtype, repeated for every conditioning in x's batch.

    Args: hint: [b, 4, h, w]; x: [n * b, 4, h, w], one run of b pictures per conditioning.
    Raises: ShapeError when the sizes or the batches do not fit.
    """
    if hint.shape[-2:] != x.shape[-2:] or x.shape[0] % hint.shape[0]:
        raise ShapeError(
            f"control is a latent of {tuple(hint.shape)}, the sampled latent is {tuple(x.shape)} "
            "(batch, channels, height, width). Sample the latent that First Stage gave as control."
        )
    hint = hint.to(device=x.device, dtype=x.dtype)
    return hint.repeat(x.shape[0] // hint.shape[0], 1, 1, 1)
