"""Runs the host's layers one after the other, plainly or the way a run's execution wants it.

The execution is a callable that is passed in; what it does about devices and faults is not known
here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .host_blocks import forward_timestep_embed

LayerRun = Callable[[torch.Tensor, "torch.device | None", "torch.dtype | None"], torch.Tensor]
"""run(h, device, dtype): a layer's result for h, computed on another device or dtype if given."""

RunLayer = Callable[[str, LayerRun, torch.Tensor], torch.Tensor]
"""run_layer(name, run, h): how a run executes one layer; plainly it is ``run(h, None, None)``."""


def move(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Return a tensor on another device and dtype (None keeps either); anything else as it is."""
    return value.to(device=device, dtype=dtype) if isinstance(value, torch.Tensor) else value


@contextmanager
def casting(module: Any) -> Generator[None]:
    """Have the host's layers cast their weights to where their input is, within the block."""
    layers = [m for m in module.modules() if getattr(m, "comfy_cast_weights", None) is False]
    for layer in layers:
        layer.comfy_cast_weights = True
    try:
        yield
    finally:
        for layer in layers:
            layer.comfy_cast_weights = False


def run_module(
    module: Any, call: Callable[..., torch.Tensor], *args: Any, run_layer: RunLayer | None
) -> torch.Tensor:
    """Return call(*args), a module's forward, under the run's execution; args[0] is a tensor."""
    if run_layer is None:
        return call(*args)

    def run(
        h: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if device is None and dtype is None:
            return call(h, *args[1:])
        with casting(module):
            return call(*(move(arg, device, dtype) for arg in (h, *args[1:])))

    return run_layer(type(module).__name__, run, args[0])


@dataclass
class LayerRunner:
    """Runs layers of one forward.

    Attributes:
        emb: [B, time_embed_dim] embedding of timestep and size; context: [B, tokens, width].
        options: the host's ``transformer_options`` for these layers.
        video: the host's extra arguments for video layers.
        run_layer: the run's execution, or None to call the host for whole blocks.
    """

    emb: torch.Tensor
    context: torch.Tensor
    options: dict[str, Any]
    video: dict[str, Any] = field(default_factory=dict[str, Any])
    run_layer: RunLayer | None = None

    def run(self, layers: Any, h: torch.Tensor, shape: Any = None) -> torch.Tensor:
        """Return the result of a block's layers; shape: of the skip an upsampling layer must meet."""
        if self.run_layer is None:
            return self._forward(layers, shape, h, self.emb, self.context)
        for layer in layers:
            forward = partial(self._forward, [layer], shape)
            h = run_module(layer, forward, h, self.emb, self.context, run_layer=self.run_layer)
        return h

    def _forward(
        self, layers: Any, shape: Any, h: torch.Tensor, emb: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        return forward_timestep_embed(layers, h, emb, context, self.options, shape, **self.video)
