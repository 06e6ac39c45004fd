"""SUPIR's two restoration samplers, as pure functions over a denoiser.

One signature: a denoiser ``denoise(x, call) -> denoised``, the starting latent, the schedule, and a
source of noise. Guidance lives in the denoiser that is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .errors import SettingsError
from .guidance import StepCall

Denoise = Callable[[torch.Tensor, StepCall], torch.Tensor]
NoiseAt = Callable[[int], torch.Tensor]
"""Unit-variance noise of x's shape for a step index; called at most once per step, in order."""
OnStep = Callable[[int, torch.Tensor, torch.Tensor, StepCall], None]
"""Called after each step's estimate with step, x (before the update), denoised, call."""


def churn_gamma(
    s_churn: float, steps: int, sigma: float, s_tmin: float = 0.0, s_tmax: float = math.inf
) -> float:
    """Return how much of sigma is added back as noise at one step: min(s_churn / steps, sqrt2 - 1).

    0 outside [s_tmin, s_tmax]. Source: Karras et al. 2022, algorithm 2.
    """
    if not s_tmin <= sigma <= s_tmax:
        return 0.0
    return min(s_churn / steps, math.sqrt(2.0) - 1.0)


def check_levels(sigmas: torch.Tensor) -> list[float]:
    """Return a schedule as numbers: finite, never rising, positive but for a last 0.

    Raises: SettingsError naming sigmas and the levels that cannot be sampled.
    """
    levels = [float(s) for s in sigmas]
    pairs = zip(levels, levels[1:], strict=False)
    if all(math.inf > a > 0.0 and a >= b >= 0.0 for a, b in pairs):
        return levels
    raise SettingsError(
        f"sigmas is {[round(s, 4) for s in levels[:8]]}, but noise levels must be finite, never rise, "
        "and be above 0 until the last. Connect SUPIR Sigmas or a scheduler's sigmas."
    )


def restore_edm(
    denoise: Denoise,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    noise_at: NoiseAt,
    *,
    s_churn: float = 5.0,
    s_noise: float = 1.003,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Run SUPIR's restoring EDM sampler (Euler steps with churn).

    Args:
        denoise: denoised estimate of x at ``call.sigma_hat``.
        x: [B, 4, h, w] noisy latent at ``sigmas[0]``, fp32.
        sigmas: [N + 1] descending noise levels.
        noise_at: unit noise, asked for only at steps with churn.
        s_churn: total amount of noise put back over the run, >= 0.
        s_noise: factor on that noise, about 1.
        s_tmin, s_tmax: noise levels between which churn is on.
        on_step: progress.
    Returns: latent at sigmas[-1], the shape and dtype of x.
    Source: Karras et al. 2022, algorithm 2 without the second-order correction; SUPIR (Yu et al.
        2024) for the guidance inside ``denoise``.
    """
    levels = check_levels(sigmas)
    steps = len(levels) - 1
    for i, (sigma, sigma_next) in enumerate(zip(levels, levels[1:], strict=False)):
        gamma = churn_gamma(s_churn, steps, sigma, s_tmin, s_tmax)
        sigma_hat = sigma * (gamma + 1.0)
        if gamma > 0.0:
            x = x + noise_at(i) * (s_noise * math.sqrt(sigma_hat**2 - sigma**2))
        call = StepCall(i, sigma, sigma_hat, sigma_next)
        denoised = denoise(x, call)
        if on_step is not None:
            on_step(i, x, denoised, call)
        d = (x - denoised) / sigma_hat
        x = x + d * (sigma_next - sigma_hat)
    return x


def restore_dpmpp_2m(
    denoise: Denoise,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    noise_at: NoiseAt,
    *,
    eta: float = 1.0,
    s_noise: float = 1.003,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Run SUPIR's DPM-Solver++ (2M) sampler, stochastic for eta > 0.

    Args:
        denoise, x, sigmas, noise_at, on_step: as in ``restore_edm``; noise is asked for at every
            step but the first and the last when eta > 0.
        eta: stochasticity, >= 0; 0 is deterministic.
        s_noise: factor on the noise.
    Returns: latent at sigmas[-1]; with sigmas[-1] = 0 this is the last denoised estimate.
    Source: Lu et al. 2022 (DPM-Solver++ 2M) with the SDE term of SUPIR's sampler. Two habits of the
        original are kept: the first step adds no noise although its decay contains eta, and the
        last step is first-order. One is not: at eta = 0 the original ends in 0 * inf; the limit is
        taken here.
    """
    levels = check_levels(sigmas)
    previous: torch.Tensor | None = None
    for i, (sigma, sigma_next) in enumerate(zip(levels, levels[1:], strict=False)):
        call = StepCall(i, sigma, sigma, sigma_next)
        denoised = denoise(x, call)
        if on_step is not None:
            on_step(i, x, denoised, call)
        if sigma_next == 0.0:
            return denoised
        if sigma_next == sigma:  # a schedule may stay at a level: nothing to advance
            continue
        h = math.log(sigma) - math.log(sigma_next)
        decay = (sigma_next / sigma) * math.exp(-eta * h)
        gain = -math.expm1(-(1.0 + eta) * h)
        if previous is None or levels[i - 1] == sigma:
            x = decay * x + gain * denoised
        else:
            r = (math.log(levels[i - 1]) - math.log(sigma)) / h
            extrapolated = (1.0 + 0.5 / r) * denoised - (0.5 / r) * previous
            x = decay * x + gain * extrapolated
            if eta > 0.0:
                spread = sigma_next * math.sqrt(-math.expm1(-2.0 * eta * h)) * s_noise
                x = x + noise_at(i) * spread
        previous = denoised
    return x
