"""How strongly text, control network and first-stage picture steer a step.

Pure functions of the noise level; the node adapters and the parity tests call the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .constants import RESTORE_MIN_SIGMA_NEXT, SIGMA_MAX
from .errors import SettingsError, ShapeError


@dataclass(frozen=True)
class StepCall:
    """Where a sampler stands when it asks for a denoised estimate.

    Attributes:
        step: index of the step, from 0.
        sigma: level of the schedule at this step, before churn.
        sigma_hat: level the estimate is asked at; above ``sigma`` under churn.
        sigma_next: level of the schedule at the next step; 0 at the last.
    """

    step: int
    sigma: float
    sigma_hat: float
    sigma_next: float


@dataclass(frozen=True)
class GuidanceSettings:
    """The steering of one run. ``*_start`` holds at sigma 14.6146, ``*_end`` at sigma 0.

    Attributes:
        cfg_start, cfg_end: scale between unconditional and conditional estimate; 1 = no guidance.
        control_start, control_end: strength of the control network; 0 = plain SDXL.
        restore_cfg: exponent of the pull towards the first-stage latent; larger is a weaker pull
            that is confined to the first steps; 0 or less switches it off.
    """

    cfg_start: float = 4.0
    cfg_end: float = 4.0
    control_start: float = 1.0
    control_end: float = 1.0
    restore_cfg: float = 4.0

    def __post_init__(self) -> None:
        for name in ("cfg_start", "cfg_end", "control_start", "control_end"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise SettingsError(
                    f"{name} is {value}, but a scale is a finite number of at least 0. "
                    f"Set {name} to 0 or more."
                )
        if not -float("inf") < self.restore_cfg < float("inf"):
            raise SettingsError(
                f"restore_cfg is {self.restore_cfg}, which is no exponent. Set restore_cfg to a "
                "finite number; 0 switches it off."
            )

    def cfg_scale(self, sigma_hat: float) -> float:
        """Return the cfg scale at the level the estimate is asked at (not clamped above the top)."""
        return ramp(self.cfg_start, self.cfg_end, sigma_hat)

    def control_scale(self, sigma: float) -> float:
        """Return the control scale at the un-churned level of the step."""
        return ramp(self.control_start, self.control_end, sigma)

    def unsteered(self) -> GuidanceSettings:
        """Return the settings as SUPIR's DPM++ uses them: ``control_end`` throughout, no restoration."""
        return GuidanceSettings(
            self.cfg_start, self.cfg_end, self.control_end, self.control_end, -1.0
        )

    @property
    def uses_control(self) -> bool:
        """Whether the control network takes part at any noise level."""
        return self.control_start > 0.0 or self.control_end > 0.0

    @property
    def uses_restore(self) -> bool:
        """Whether denoised estimates are pulled towards the first-stage latent."""
        return self.restore_cfg > 0.0


def ramp(start: float, end: float, sigma: float) -> float:
    """Interpolate linearly in sigma: ``start`` at 14.6146, ``end`` at 0, extrapolated above.

    Source: SUPIR's LinearCFG and linear control scale.
    """
    return end + (start - end) * sigma / SIGMA_MAX


def guide(uncond: torch.Tensor, cond: torch.Tensor, cfg_scale: float) -> torch.Tensor:
    """Return uncond + cfg_scale * (cond - uncond) (Ho & Salimans 2022)."""
    return uncond + cfg_scale * (cond - uncond)


def restore(
    denoised: torch.Tensor, center: torch.Tensor, call: StepCall, restore_cfg: float
) -> torch.Tensor:
    """Pull a denoised estimate towards the first-stage latent.

    Args:
        denoised: [B, 4, h, w] estimate, scaled latent.
        center: [B or 1, 4, h, w] first-stage latent in the same scale.
        call: the weight follows ``call.sigma``, the switch-off ``call.sigma_next``.
        restore_cfg: exponent; 0 or less returns ``denoised`` itself.
    Returns: denoised - (denoised - center) * (sigma / 14.6146) ** restore_cfg, or ``denoised``
        once sigma_next <= 0.05.
    Raises: ShapeError when the two do not have the same size.
    Source: SUPIR (Yu et al. 2024), restoration-guided sampling.
    """
    if restore_cfg <= 0.0 or call.sigma_next <= RESTORE_MIN_SIGMA_NEXT:
        return denoised
    if center.shape[1:] != denoised.shape[1:]:
        raise ShapeError(
            f"center is a latent of {tuple(center.shape[1:])}, the sampled latent is "
            f"{tuple(denoised.shape[1:])}. Connect center and control from the same First Stage node."
        )
    weight = (call.sigma / SIGMA_MAX) ** restore_cfg
    return denoised - (denoised - center) * weight
