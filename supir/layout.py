"""Widths and depths of one SUPIR network, as plain numbers deduced from tensor shapes.

Owns the description that passes from the checkpoint reader to the network builders. Holds no
tensor and builds no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD_CHANNELS = 64
"""Width of one attention head in the SDXL family and in SUPIR's adapters (SDXL's published config,
``num_head_channels: 64``). Not visible in tensor shapes."""


@dataclass(frozen=True)
class BlockDims:
    """One input block of the control encoder after the first convolution.

    ``kind`` is ``res`` (a residual block, followed by a transformer of ``depth`` blocks when
    ``depth > 0``) or ``down`` (a strided convolution that halves the latent; depth 0).
    """

    kind: Literal["res", "down"]
    in_channels: int
    out_channels: int
    depth: int = 0


@dataclass(frozen=True)
class ControlDims:
    """The control encoder: an SDXL encoder half and middle block with a hint convolution."""

    in_channels: int
    hint_channels: int
    model_channels: int
    time_embed_dim: int
    adm_in_channels: int
    context_dim: int
    blocks: tuple[BlockDims, ...]
    middle_channels: int
    middle_depth: int
    linear_projection: bool = True

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each control feature: first convolution, every block, middle block."""
        return (
            self.model_channels,
            *(block.out_channels for block in self.blocks),
            self.middle_channels,
        )


@dataclass(frozen=True)
class SftDims:
    """A ZeroSFT adapter: control feature, encoder skip, decoder activation (0 = none), hidden width."""

    control_channels: int
    skip_channels: int
    decoder_channels: int
    hidden_channels: int


@dataclass(frozen=True)
class CrossDims:
    """A ZeroCrossAttn adapter: query = decoder activation, keys and values = control feature."""

    query_channels: int
    control_channels: int


AdapterDims = SftDims | CrossDims


@dataclass(frozen=True)
class SupirDims:
    """Everything needed to build SUPIR's control encoder and adapters."""

    control: ControlDims
    adapters: tuple[AdapterDims, ...]
