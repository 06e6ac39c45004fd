"""Group-norm statistics over stripes, combined in fp32 without E[x^2] - E[x]^2.

Source: Chan, Golub, LeVeque 1979: the variance of a union is the mean of the parts' variances
plus the variance of the parts' means, each weighted by its share of the elements.
"""

from __future__ import annotations

import torch

COMBINE_LAUNCHES = 16  # launches of Moments.affine on an accelerator


def moment_launches(element_bytes: int) -> int:
    """Launches of Moments.add on an accelerator: low precision is widened first."""
    return 1 if element_bytes == 4 else 2


def on_cpu(t: torch.Tensor) -> bool:
    """Return whether the processor's own way to the statistics is taken for t."""
    return t.device.type == "cpu"


class Moments:
    """Mean and variance per group of a map that is seen stripe by stripe.

    Args:
        groups: groups of the norm; divides the channels.
        height: rows of the whole map.
    """

    def __init__(self, groups: int, height: int) -> None:
        self.groups = groups
        self._height = height
        self._rows: list[int] = []
        self._means: list[torch.Tensor] = []
        self._seconds: list[torch.Tensor] = []  # variance, or 1 / deviation on the CPU

    def add(self, stripe: torch.Tensor) -> None:
        """Take in one stripe, [1, C, rows, W], any float dtype."""
        if on_cpu(stripe):
            mean, second = _moments_cpu(stripe, self.groups)
        else:
            flat = stripe.to(torch.float32).view(self.groups, -1)
            second, mean = torch.var_mean(flat, dim=1, correction=0)
        self._rows.append(stripe.shape[2])
        self._means.append(mean)
        self._seconds.append(second)

    def affine(
        self, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scale, shift), fp32 [1, C, 1, 1], so that norm(x) = x * scale + shift.

        Every stripe but the last has the same height.
        """
        means, variances = torch.stack(self._means), torch.stack(self._seconds)
        if on_cpu(means):
            variances = variances.pow(-2)
        share = means.new_full((len(self._rows), 1), self._rows[0] / self._height)
        share[-1:].fill_(self._rows[-1] / self._height)
        first = means[0]  # deviations from it keep a constant map's mean exact
        mean = first + ((means - first) * share).sum(0)
        offset = means - mean
        variance = (torch.addcmul(variances, offset, offset) * share).sum(0)
        if on_cpu(means):  # the CPU's group norm adds eps in double precision
            variance = variance.double()
        rstd = (variance + eps).rsqrt().to(torch.float32)
        scale = weight.view(self.groups, -1) * rstd[:, None]
        shift = torch.addcmul(bias.view(self.groups, -1), mean[:, None], scale, value=-1)
        return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


def _moments_cpu(stripe: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mean, 1 / deviation), fp32 [groups].

    The group-norm kernel measures ten times faster here than var_mean. With fp32 weights it
    keeps fp32 statistics for 16-bit input. A constant group gives 1 / 0 = inf, whose square
    inverts to the variance 0.
    """
    channels = stripe.shape[1]
    weight = bias = None
    if stripe.dtype != torch.float32:
        weight = torch.ones(channels)
        bias = torch.zeros(channels)
    _, mean, rstd = torch.native_group_norm(
        stripe, weight, bias, 1, channels, stripe[0, 0].numel(), groups, 0.0
    )
    return mean.view(groups), rstd.view(groups)
