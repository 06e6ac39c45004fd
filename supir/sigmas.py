"""Noise schedules and the discrete noise table of the SDXL family.

Everything is computed in float64 on the CPU and returned as float32, so it is the same on every
device.
"""

from __future__ import annotations

import numpy as np
import torch

from .constants import KARRAS_RHO, LINEAR_END, LINEAR_START, SIGMA_MAX, TABLE_STEPS
from .errors import SettingsError


def noise_table() -> torch.Tensor:
    """Return the 1000 noise levels of SDXL, ascending, [1000] float32, 0.0292 to 14.6146.

    Source: Rombach et al. 2022, scaled-linear betas; sigma = sqrt((1 - abar) / abar). The ratio is
    rounded to float32 before the square root, as SUPIR's table is.
    """
    betas = np.linspace(LINEAR_START**0.5, LINEAR_END**0.5, TABLE_STEPS, dtype=np.float64) ** 2
    alphas_cumprod = np.cumprod(1.0 - betas)
    ratio = ((1.0 - alphas_cumprod) / alphas_cumprod).astype(np.float32)
    return torch.from_numpy(np.sqrt(ratio))


def _check_steps(steps: int) -> None:
    if not 1 <= steps <= TABLE_STEPS:
        raise SettingsError(
            f"steps is {steps}, but the schedule picks from a table of {TABLE_STEPS} noise levels. "
            f"Set steps to a number from 1 to {TABLE_STEPS}."
        )


def ddpm_sigmas(steps: int) -> torch.Tensor:
    """Return SUPIR's DDPM schedule: [steps + 1] float32, descending, the last value 0.

    The levels are table entries floor(999 - i * 999 / steps), i = 0 .. steps - 1.

    Raises: SettingsError when steps is outside 1 .. 1000.
    Source: SUPIR's LegacyDDPM discretisation.
    """
    _check_steps(steps)
    indices = np.linspace(TABLE_STEPS - 1, 0, steps, endpoint=False).astype(int)
    levels = noise_table()[torch.from_numpy(indices)]
    return torch.cat([levels, levels.new_zeros(1)])


def karras_sigmas(steps: int) -> torch.Tensor:
    """Return the Karras spacing SUPIR's DPM++ sampler uses: [steps + 1] float32, ending in 0.

    It runs from 14.6146 down to the smallest non-zero level of ``ddpm_sigmas(steps)``.

    Raises: SettingsError when steps is outside 1 .. 1000.
    Source: Karras et al. 2022, eq. 5 with rho = 7; end points as in SUPIR's sampler.
    """
    sigma_min = float(ddpm_sigmas(steps)[-2])
    ramp = np.arange(steps, dtype=np.float64) / max(steps - 1, 1)
    low, high = sigma_min ** (1 / KARRAS_RHO), SIGMA_MAX ** (1 / KARRAS_RHO)
    levels = (high + ramp * (low - high)) ** KARRAS_RHO
    return torch.from_numpy(np.append(levels, 0.0).astype(np.float32))
