"""From a noise level to what the network is told: SUPIR's discrete denoiser.

The network only knows the 1000 levels of the table. A level between two entries (Karras spacing)
or above the last one (churn) is seen by the network as the nearest entry, while the sampler goes on
with the exact value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scalings:
    """Preconditioning of an eps-prediction network at one noise level (all Python numbers).

    denoised = network(x * c_in, index) * c_out + x * c_skip
    """

    index: int
    sigma: float
    c_skip: float
    c_out: float
    c_in: float


def nearest_index(sigma: float, table: torch.Tensor) -> int:
    """Return the index of the table entry nearest to sigma; the lower index on a tie.

    Args:
        sigma: noise standard deviation, >= 0.
        table: [N] ascending noise levels.
    """
    distance = (table.detach().to("cpu", torch.float32) - sigma).abs()
    return int(torch.argmin(distance))


def quantise_sigma(sigma: float, table: torch.Tensor) -> float:
    """Return the table entry nearest to sigma (linear distance), clamped to the table's ends.

    Source: SUPIR's DiscreteDenoiserWithControl.
    """
    return float(table[nearest_index(sigma, table)])


def scalings(sigma: float, table: torch.Tensor) -> Scalings:
    """Return the preconditioning at the table entry nearest to sigma.

    Source: Karras et al. 2022, table 1 (iDDPM column): c_skip = 1, c_out = -sigma,
    c_in = 1 / sqrt(sigma^2 + 1), with sigma quantised as SUPIR does.
    """
    index = nearest_index(sigma, table)
    level = float(table[index])
    return Scalings(index, level, 1.0, -level, (level**2 + 1.0) ** -0.5)
