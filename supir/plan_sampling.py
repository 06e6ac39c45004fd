"""What a sampling run costs: every step of it, with all that lies around the networks.

Mirrors ``sampling.py`` in the same manner as ``plan_network.py`` mirrors the networks. Covered is
the sampling loop of one picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from .errors import SettingsError
from .layout import SupirDims
from .plan_dims import UNetDims
from .plan_guider import DPMPP, GuiderMirror, SamplingRequest, StepKind, describe_steps
from .plan_network import StepNumbers, numbers_of
from .plan_tape import ASIDE, FLOAT_BYTES, HOST, TRANSFER, Attention, Sym


@dataclass(frozen=True)
class SamplingNumbers(StepNumbers):
    """A whole run; the fields of ``StepNumbers`` add up or are the largest of all steps.

    Attributes:
        steps, tiles, network_calls: how often the networks run, over all steps and tiles.
        launches_per_step: of the most expensive step, over all tiles.
        network: one call of the networks at its largest.
        host_launches: operators on the host processor (noise, blend masks, table look-ups); the
            search of the Brownian noise tree is not among them. On a CPU they count as launches.
        transfers: copies between host and device.
    """

    steps: int
    tiles: int
    network_calls: int
    launches_per_step: int
    network: StepNumbers
    host_launches: int
    transfers: int


def plan_sampling(
    request: SamplingRequest,
    unet: UNetDims,
    supir: SupirDims | None,
    attention: Attention | None = None,
) -> SamplingNumbers:
    """Count a sampling run from the start of its loop to the end.

    Guarantees: launches equal the dispatch count of the same run (on an accelerator; on a CPU add
        ``host_launches``).
    Raises: SettingsError for fewer than two noise levels or tiles that do not advance.
    """
    if len(request.sigmas) < 2:
        raise SettingsError(
            f"sigmas has {len(request.sigmas)} noise levels, but a run goes from one level to the "
            "next. Set steps to at least 1."
        )
    guider = GuiderMirror(request, unet, supir, attention)
    run = _Run(guider)
    x = Sym((request.batch, unet.in_channels, request.height, request.width), FLOAT_BYTES)
    sampler = run.dpmpp(x) if request.sampler == DPMPP else run.edm(x)
    per_step = max(sampler)
    whole = numbers_of(guider.tape)
    return SamplingNumbers(
        **vars(whole),
        steps=len(request.sigmas) - 1,
        tiles=guider.tiles,
        network_calls=guider.calls,
        launches_per_step=per_step,
        network=max(guider.networks.values(), key=lambda n: (n.live_peak_bytes, n.launches)),
        host_launches=whole.launches_by_kind.get(HOST, 0),
        transfers=whole.launches_by_kind.get(TRANSFER, 0),
    )


class _Run:
    """A sampler on its guider's tape. Equal steps in a row are traced once, counted as often."""

    def __init__(self, guider: GuiderMirror) -> None:
        self.guider, self.request, self.tape = guider, guider.request, guider.tape

    def _groups(self) -> Iterator[tuple[StepKind, int]]:
        for step, equal in groupby(describe_steps(self.request)):
            yield step, len(list(equal))

    def _launches(self) -> int:
        return sum(n for kind, n in self.tape.kinds.items() if kind not in ASIDE)

    def edm(self, x: Sym) -> Iterator[int]:
        """Mirror ``restore_edm``; yield the launches of each kind of step."""
        tape = self.tape
        tape.aside(HOST)  # the starting noise is drawn once more
        ones = tape.run("elementwise", [], (x.shape[0],), FLOAT_BYTES)
        denoised = d = None  # what the step before left
        for step, count in self._groups():
            before = self._launches()
            with tape.times(count):
                if step.noise:
                    tape.aside(HOST)
                    noise = tape.make(x.shape, FLOAT_BYTES)
                    tape.cast(noise, FLOAT_BYTES, moves=True)
                    noise = tape.point(noise)
                    x = tape.point(x, noise)
                    del noise
                denoised = self.guider.denoise(step, x, ones)
                d = tape.point(tape.point(x, denoised))
                x = tape.point(x, tape.point(d))
            yield (self._launches() - before) // count
        del denoised, d

    def dpmpp(self, x: Sym) -> Iterator[int]:
        """Mirror ``restore_dpmpp_2m`` with the host's Brownian noise tree."""
        tape = self.tape
        levels = Sym((len(self.request.sigmas),), FLOAT_BYTES)
        tape.points(levels, 2)
        base: Sym | None = None
        if self.request.eta > 0.0 and len(self.request.sigmas) > 2:
            for _ in range(3):  # smallest and largest level, their comparison
                tape.run("elementwise", [levels], ())
            base = tape.point(x)
            tape.aside(TRANSFER, 3)
        ones = tape.run("elementwise", [], (x.shape[0],), FLOAT_BYTES)
        previous: Sym | None = None
        for step, count in self._groups():
            before = self._launches()
            with tape.times(count):
                denoised = self.guider.denoise(step, x, ones)
                if step.position != "last" and not self._ends(step):
                    x = self._second_order(step, x, denoised, previous)
                previous = denoised
                del denoised
            yield (self._launches() - before) // count
        del base

    def _ends(self, step: StepKind) -> bool:
        """A run of a single step ends with its first."""
        return step.position == "first" and len(self.request.sigmas) == 2

    def _second_order(self, step: StepKind, x: Sym, denoised: Sym, previous: Sym | None) -> Sym:
        tape = self.tape
        if previous is None:
            return tape.point(tape.point(x), tape.point(denoised))
        extrapolated = tape.point(tape.point(denoised), tape.point(previous))
        x = tape.point(tape.point(x), tape.point(extrapolated))
        if step.noise:
            tape.aside(HOST)  # the tree's answers are stacked
            tape.aside(TRANSFER, 3)
            for _ in range(4):  # comparison, difference, its absolute value and root
                tape.run("elementwise", [], (), FLOAT_BYTES)
            noise = tape.make(x.shape, FLOAT_BYTES)
            noise = tape.points(noise, 2)
            x = tape.point(x, tape.point(noise))
        return x
