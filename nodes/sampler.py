"""SUPIR's samplers as ComfyUI samplers, and the noise they draw.

Noise comes from the CPU, so a seed means the same picture on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import comfy.samplers
import torch
from comfy.k_diffusion.sampling import BrownianTreeNoiseSampler

from ..supir import sampling
from ..supir.constants import WORK_KEY
from ..supir.errors import SettingsError
from ..supir.guidance import StepCall
from ..supir.sigmas import ddpm_sigmas, karras_sigmas
from . import host

SAMPLERS = ("restore_edm", "restore_dpmpp_2m")
"""Sampler ids; frozen."""

SEED_RANGE = 2**64


def image_seed(seed: int, image: int, batch_seed: str) -> int:
    """Return the seed of one picture of a batch: seed + image, or seed for every one of them."""
    return (seed + (image if batch_seed == "increment" else 0)) % SEED_RANGE


def start_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return unit noise of a shape from a seed, as ComfyUI's own noise node draws it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def schedule(sampler: str, steps: int) -> torch.Tensor:
    """Return the noise levels the original uses with a sampler, [steps + 1]."""
    return karras_sigmas(steps) if sampler == "restore_dpmpp_2m" else ddpm_sigmas(steps)


def make_sampler(sampler: str, s_churn: float, s_noise: float, eta: float) -> Any:
    """Return a host SAMPLER for one of our ids. Raises: SettingsError for NaN or infinity."""
    for name, value in (("s_churn", s_churn), ("s_noise", s_noise), ("eta", eta)):
        if not math.isfinite(value):
            raise SettingsError(
                f"{name} is {value}, so no step could be computed. Set {name} to a finite number."
            )
    if sampler == "restore_edm":
        return comfy.samplers.KSAMPLER(sample_edm, {"s_churn": s_churn, "s_noise": s_noise})
    return comfy.samplers.KSAMPLER(sample_dpmpp_2m, {"eta": eta, "s_noise": s_noise})


def _denoiser(
    model: Any, x: torch.Tensor, extra_args: dict[str, Any], plain: bool = False
) -> sampling.Denoise:
    """Return ``denoise(x, call)`` over the host's model call, telling the guider where it stands.

    Args: plain: the sampler uses neither the control ramp nor restoration, as the original's.
    """
    ones = x.new_ones([x.shape[0]])
    options = extra_args.get("model_options", {})

    def denoise(x: torch.Tensor, call: StepCall) -> torch.Tensor:
        host.check_cancel()
        told = {"step": call.step, "sigma": call.sigma, "sigma_next": call.sigma_next}
        told["plain"] = plain
        inner = {**options.get("transformer_options", {}), WORK_KEY: told}
        args = {**extra_args, "model_options": {**options, "transformer_options": inner}}
        return model(x, call.sigma_hat * ones, **args)

    return denoise


def _on_step(callback: Callable[[dict[str, Any]], None] | None) -> sampling.OnStep | None:
    if callback is None:
        return None

    def on_step(i: int, x: torch.Tensor, denoised: torch.Tensor, call: StepCall) -> None:
        sigmas = {"sigma": call.sigma, "sigma_hat": call.sigma_hat}
        callback({"i": i, "x": x, "denoised": denoised, **sigmas})

    return on_step


@torch.no_grad()
def sample_edm(
    model: Any,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Any = None,
    disable: Any = None,
    s_churn: float = 5.0,
    s_noise: float = 1.003,
) -> torch.Tensor:
    """Run ``restore_edm`` as a host sampler function; x is already scaled by the host.

    Churn noise goes on where the starting noise of the same seed ended.
    """
    extra_args = extra_args or {}
    generator = torch.Generator("cpu").manual_seed(int(extra_args.get("seed") or 0) % SEED_RANGE)
    torch.randn(x.shape, generator=generator)  # the starting noise, drawn before this sampler ran

    def noise_at(step: int) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator).to(x)

    denoise = _denoiser(model, x, extra_args)
    return sampling.restore_edm(
        denoise, x, sigmas, noise_at, s_churn=s_churn, s_noise=s_noise, on_step=_on_step(callback)
    )


@torch.no_grad()
def sample_dpmpp_2m(
    model: Any,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Any = None,
    disable: Any = None,
    eta: float = 1.0,
    s_noise: float = 1.003,
) -> torch.Tensor:
    """Run ``restore_dpmpp_2m`` as a host sampler function, with the host's Brownian noise tree."""
    extra_args = extra_args or {}
    levels = sigmas[sigmas > 0]
    seed = int(extra_args.get("seed") or 0) % SEED_RANGE
    tree: Any = None
    if eta > 0 and len(levels) > 1:
        tree = BrownianTreeNoiseSampler(x, levels.min(), levels.max(), seed=seed, cpu=True)

    def noise_at(step: int) -> torch.Tensor:
        return tree(sigmas[step], sigmas[step + 1])

    denoise = _denoiser(model, x, extra_args, plain=True)
    return sampling.restore_dpmpp_2m(
        denoise, x, sigmas, noise_at, eta=eta, s_noise=s_noise, on_step=_on_step(callback)
    )
