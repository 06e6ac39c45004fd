"""What lies between a sampler and the networks: the guider and the host's way to its UNet.

Mirrors the guider and the host's ``sampling_function``, ``calc_cond_batch`` and ``apply_model`` in
the same manner as ``plan_network.py`` mirrors the networks. Masks, areas, ControlNets and cfg
functions of other packs are not covered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .constants import RESTORE_MIN_SIGMA_NEXT, TABLE_STEPS
from .guidance import GuidanceSettings
from .layout import SupirDims
from .plan_dims import UNetDims
from .plan_network import StepNumbers, plan_step, replay
from .plan_tape import FLOAT_BYTES, HOST, TRANSFER, Attention, Sym, Tape
from .sampling import churn_gamma
from .tiling import Window, windows

DPMPP = "restore_dpmpp_2m"
BLEND_HOST_LAUNCHES = 18
"""Operators that make one blend mask on the host: 8 for each profile, their product, its cast."""

FINITE_LAUNCHES = 5
"""Operators that tell whether a tensor is finite: comparisons with itself and infinity, all of them."""

MAX_PADDING = 4
"""The host repeats the shorter conditioning at most this often to share a batch."""


@dataclass(frozen=True)
class SamplingRequest:
    """One sampling run.

    Args:
        height, width: of the latent in cells.
        sigmas: descending noise levels, the last 0; one more than there are steps.
        sampler: ``restore_edm`` or ``restore_dpmpp_2m``. s_churn, eta: its settings.
        guidance: as the sampler uses it.
        tile, overlap: in latent cells; tile 0 = the whole latent.
        has_center: a first-stage latent is connected, or stands in.
        batch: pictures per call; the Sample node runs them one by one.
        tokens, negative_tokens: text tokens of either conditioning; 0 = the same.
        dtype_bytes: element size of the networks' activations.
        share_batch: cond and uncond run as one batch.
        weight_bytes: element size of the weights of UNet and SUPIR; 0 = ``dtype_bytes``.
    """

    height: int
    width: int
    sigmas: tuple[float, ...]
    sampler: str = "restore_edm"
    guidance: GuidanceSettings = field(default_factory=GuidanceSettings)
    s_churn: float = 5.0
    eta: float = 1.0
    tile: int = 0
    overlap: int = 0
    has_center: bool = True
    batch: int = 1
    tokens: int = 77
    negative_tokens: int = 0
    dtype_bytes: int = 2
    share_batch: bool = True
    weight_bytes: tuple[int, int] = (0, 0)

    def tiles(self) -> list[Window]:
        """Return the tiles; all are of one size.

        Raises: SettingsError naming tile_px or tile_overlap_px.
        """
        if self.tile <= 0:
            return [Window(0, self.height, 0, self.width)]
        return windows(self.height, self.width, self.tile, self.overlap)


@dataclass(frozen=True)
class StepKind:
    """What distinguishes one step's cost from another's."""

    position: str  # "first", "later" or "last"
    guided: bool
    control: float  # 0, 1, or 0.5 for everything else
    noise: bool
    restores: bool


def describe_steps(request: SamplingRequest) -> list[StepKind]:
    """Return what each step of a run does besides calling the networks."""
    guidance, levels = request.guidance, request.sigmas
    count = len(levels) - 1
    steps: list[StepKind] = []
    for i, (sigma, sigma_next) in enumerate(zip(levels, levels[1:], strict=False)):
        if request.sampler == DPMPP:
            sigma_hat = sigma
            noise = i > 0 and request.eta > 0.0 and sigma_next > 0.0
        else:
            gamma = churn_gamma(request.s_churn, count, sigma)
            sigma_hat, noise = sigma * (gamma + 1.0), gamma > 0.0
        scale = guidance.control_scale(sigma) if guidance.uses_control else 0.0
        steps.append(
            StepKind(
                position="first" if i == 0 else "last" if sigma_next == 0.0 else "later",
                guided=not math.isclose(guidance.cfg_scale(sigma_hat), 1.0),
                control=scale if scale in (0.0, 1.0) else 0.5,
                noise=noise,
                restores=(
                    request.has_center
                    and guidance.uses_restore
                    and sigma_next > RESTORE_MIN_SIGMA_NEXT
                ),
            )
        )
    return steps


class GuiderMirror:
    """The guider of one run, on that run's tape.

    Attributes: tiles: per picture. networks: calls that differ. calls: of the networks so far.
    """

    def __init__(
        self,
        request: SamplingRequest,
        unet: UNetDims,
        supir: SupirDims | None,
        attention: Attention | None,
    ) -> None:
        self.request, self.unet, self.supir, self.attention = request, unet, supir, attention
        self.tape = Tape(attention)
        tiles = request.tiles()
        self.tiles = len(tiles)
        first = tiles[0]
        self.tile_size = (first.bottom - first.top, first.right - first.left)
        self.networks: dict[tuple[int, int, float], StepNumbers] = {}
        self.calls = 0
        guidance = request.guidance
        self.takes_part = guidance.uses_control or (guidance.uses_restore and request.has_center)

    def denoise(self, step: StepKind, x: Sym, ones: Sym) -> Sym:
        """Mirror the sampler's model call and the guider's ``predict_noise``."""
        tape, request = self.tape, self.request
        timestep = tape.point(ones)
        if self.takes_part:
            tape.aside(HOST, 3)  # nearest entry of the table
            timestep = tape.point(timestep)
        conds = [request.tokens, request.negative_tokens or request.tokens]
        denoised = self._tiled(step, x, conds[: 1 + step.guided])
        if step.position == "first":  # the result is checked for non-finite values
            tape.points(denoised, FINITE_LAUNCHES)
        if not request.has_center:
            return denoised
        tape.aside(TRANSFER)
        center = tape.run("elementwise", [denoised], denoised.shape)
        if step.restores:
            denoised = tape.point(denoised, tape.point(tape.point(denoised, center)))
        del timestep
        return denoised

    def _tiled(self, step: StepKind, x: Sym, conds: Sequence[int]) -> Sym:
        tape = self.tape
        if self.tiles == 1:
            return self._guided(step, x, conds)
        total = tape.run("elementwise", [], x.shape, FLOAT_BYTES)
        weights = tape.run("elementwise", [], x.shape[-2:], FLOAT_BYTES)
        with tape.times(self.tiles):
            tile = x.view(*x.shape[:2], *self.tile_size)
            denoised = self._guided(step, tile, conds)
            tape.aside(HOST, BLEND_HOST_LAUNCHES)
            tape.aside(TRANSFER)
            weight = tape.make(self.tile_size, FLOAT_BYTES)
            weighted = tape.point(denoised, weight)
            tape.inplace(weighted, tile)
            tape.inplace(weight, weight)
            del tile, denoised, weight, weighted
        return tape.point(total, weights)

    def _guided(self, step: StepKind, x: Sym, conds: Sequence[int]) -> Sym:
        """Mirror the host's ``sampling_function`` on one tile."""
        tape = self.tape
        outs: list[Sym] = []
        for tokens in self._batches(conds):
            outs += self._conditionings(step, x, tokens)
        while len(outs) < 2:  # the host keeps an empty estimate of a skipped conditioning
            outs.append(self._empty(x)[0])
            tape.inplace(outs[-1], outs[-1])
        return tape.point(outs[1], tape.point(tape.point(outs[0], outs[1])))

    def _empty(self, x: Sym) -> tuple[Sym, Sym]:
        """The host's sum and count of estimates, before any."""
        return self.tape.point(x), self.tape.points(x, 2)

    def _batches(self, conds: Sequence[int]) -> list[Sequence[int]]:
        """Return which conditionings share a call, by their tokens."""
        if not self.request.share_batch or len(conds) == 1:
            return [[tokens] for tokens in conds]
        padded = math.lcm(*conds)
        if padded // min(conds) > MAX_PADDING:
            return [[tokens] for tokens in conds]
        return [conds]

    def _conditionings(self, step: StepKind, x: Sym, conds: Sequence[int]) -> list[Sym]:
        """Mirror the host's ``calc_cond_batch`` for conditionings that share a call."""
        tape, dims = self.tape, self.unet
        sums = [self._empty(x) for _ in conds]
        masks = [tape.points(x, 2) for _ in conds]
        joined = tape.cat([x] * len(conds), 0)
        padded = math.lcm(*conds)
        contexts = [Sym((x.shape[0], n, dims.context_dim), FLOAT_BYTES) for n in conds]
        shape = (x.shape[0], padded, dims.context_dim)
        contexts = [
            c if c.shape == shape else tape.run("elementwise", [c], shape) for c in contexts
        ]
        context = tape.cat(contexts, 0)
        y = tape.cat([Sym((x.shape[0], dims.adm_in_channels), FLOAT_BYTES)] * len(conds), 0)
        times = tape.cat([Sym((x.shape[0],), FLOAT_BYTES)] * len(conds), 0)
        del contexts
        denoised = self._apply(step, joined, times, context, y)
        for (total, number), mask in zip(sums, masks, strict=True):
            part = denoised.view(*x.shape)
            tape.inplace(total, tape.point(part, mask))
            tape.inplace(number, mask)
            del part
        for total, number in sums:
            tape.inplace(total, number)
        del denoised, joined, context, y, times
        return [total for total, _ in sums]

    def _apply(self, step: StepKind, x: Sym, times: Sym, context: Sym, y: Sym) -> Sym:
        """Mirror the host's ``apply_model``: scalings, casts, the networks, the estimate."""
        tape, request = self.tape, self.request
        tape.points(times, 3)
        xc = tape.point(x)
        xc = tape.cast(xc, request.dtype_bytes)
        logs = tape.point(times)
        distance = tape.run("elementwise", [logs], (TABLE_STEPS, *times.shape))
        distance = tape.point(distance)
        t = tape.run("elementwise", [distance], times.shape, 8)
        t = tape.cast(t, FLOAT_BYTES)
        del logs, distance
        cast = [tape.cast(one, request.dtype_bytes) for one in (context, y)]
        out = self._network(step, xc, context.shape[1])
        out = tape.cast(out, FLOAT_BYTES)
        del cast
        return tape.point(x, tape.point(out))

    def _network(self, step: StepKind, x: Sym, tokens: int) -> Sym:
        batch, height, width = x.shape[0], *x.shape[2:]
        key = (batch, tokens, step.control)
        if key not in self.networks:
            self.networks[key] = plan_step(
                self.unet,
                self.supir,
                height,
                width,
                batch,
                tokens,
                self.request.dtype_bytes,
                step.control,
                self.attention,
                self.request.batch,
                self.request.weight_bytes,
            )
        self.calls += self.tape.factor
        shape = (batch, self.unet.out_channels, height, width)
        return replay(self.tape, self.networks[key], shape, self.request.dtype_bytes)
