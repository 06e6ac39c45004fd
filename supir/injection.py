"""SUPIR inside the host's SDXL UNet, as the innermost call of its wrapper chain.

With no SUPIR state in the call the host's own forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .adapters import ZeroCrossAttn, ZeroSFT, build_adapters
from .constants import WORK_KEY
from .control_net import ControlNet
from .errors import ShapeError
from .host_blocks import SpatialTransformer, optimized_attention
from .layer_run import RunLayer, run_module
from .layout import SupirDims
from .unet_walk import PlainHooks, WalkHooks, walk_unet

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


def _fit(feature: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a control feature at an activation's size, which patches such as Deep Shrink change."""
    if feature.shape[-2:] == like.shape[-2:]:
        return feature
    return nn.functional.interpolate(feature, size=like.shape[-2:], mode="bilinear")


@dataclass
class AdapterHooks:
    """SUPIR's adapters, used from the last to the first with the features from the deepest up."""

    nets: SupirNets
    features: list[torch.Tensor]
    control_scale: float
    transformer_options: dict[str, Any]
    run_layer: RunLayer | None = None
    _adapters: Iterator[nn.Module] = field(init=False)
    _feature: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._adapters = iter(reversed(list(self.nets.project_modules)))
        self._feature = self.features[-1]

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int
    ) -> torch.Tensor:
        return optimized_attention(q, k, v, heads, transformer_options=self.transformer_options)

    def _sft(
        self, skip: torch.Tensor, control: torch.Tensor, decoder: torch.Tensor | None
    ) -> torch.Tensor:
        adapter = next(self._adapters)
        assert isinstance(adapter, ZeroSFT)
        control = _fit(control, skip)

        def call(skip: Any, control: Any, decoder: Any) -> torch.Tensor:
            return adapter(control, skip, decoder, self.control_scale)

        return run_module(adapter, call, skip, control, decoder, run_layer=self.run_layer)

    def after_middle(self, h: torch.Tensor) -> torch.Tensor:
        return self._sft(h, self.features.pop(), None)

    def merge(self, h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        self._feature = self.features.pop()
        return self._sft(skip, self._feature, h)

    def before_upsample(self, h: torch.Tensor) -> torch.Tensor:
        adapter = next(self._adapters)
        assert isinstance(adapter, ZeroCrossAttn)

        def call(h: Any, control: Any) -> torch.Tensor:
            return adapter(control, h, self.control_scale, self._attention)

        return run_module(adapter, call, h, self._feature, run_layer=self.run_layer)


def make_wrapper(nets: SupirNets, run_layer: RunLayer | None = None) -> Any:
    """Return a ``DIFFUSION_MODEL`` wrapper that runs SUPIR when the call carries our state.

    The wrapper never ends the chain: wrappers registered after it run around the walk. With
    ``run_layer`` every call is walked, so that the run's execution sees each layer.
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
        active = isinstance(state, InjectedState) and state.control_scale != 0.0
        if not active and run_layer is None:
            return executor(x, timesteps, context, y, control, options, **kwargs)
        walk = partial(_walk, nets, executor.class_obj, run_layer, state if active else None)
        following = type(executor)(walk, executor.class_obj, executor.wrappers, executor.idx + 1)
        return following.execute(x, timesteps, context, y, control, options, **kwargs)

    return wrapper


def _walk(
    nets: SupirNets,
    unet: Any,
    run_layer: RunLayer | None,
    state: InjectedState | None,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    context: torch.Tensor,
    y: torch.Tensor,
    control: Any = None,
    transformer_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What the host's forward is replaced by: control network, then the UNet with the adapters."""
    options = {} if transformer_options is None else transformer_options
    hooks: WalkHooks = PlainHooks()
    if state is not None:
        own = {k: options[k] for k in (ATTENTION_OVERRIDE,) if k in options}
        hint = match_batch(state.hint, x)
        features = nets.control_model(x, timesteps, hint, context, y, own, run_layer)
        hooks = AdapterHooks(nets, features, state.control_scale, own, run_layer)
    return walk_unet(
        unet,
        hooks,
        x,
        timesteps,
        context,
        y,
        control,
        options,
        run_layer=run_layer,
        **kwargs,
    )


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


def replaced_attention(unet: Any, transformer_options: dict[str, Any]) -> int:
    """Return how many attention calls of one UNet forward other packs' callbacks replace.

    A ``patches_replace`` callback runs instead of the layer's attention, so the attention callable
    of a run does not reach it: not its pieces, its limits, or its fault handling.

    Args: unet: the host's UNet; transformer_options: as a MODEL carries or a call receives them.
    """
    replace: dict[str, dict[Any, Any]] = transformer_options.get("patches_replace", {})
    blocks = [("input", i, b) for i, b in enumerate(unet.input_blocks)]
    blocks += [("middle", 0, unet.middle_block)]
    blocks += [("output", i, b) for i, b in enumerate(unet.output_blocks)]
    count = 0
    for name, number, block in blocks:
        depths = [
            len(layer.transformer_blocks)
            for layer in block
            if isinstance(layer, SpatialTransformer)
        ]
        for depth in (d for layers in depths for d in range(layers)):
            keys = {(name, number), (name, number, depth)}
            count += sum(1 for kind in ("attn1", "attn2") if keys & replace.get(kind, {}).keys())
    return count
