"""Optimiser of the demo training: Muon for matrices and convolutions, AdamW for the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with the same singular vectors and singular values near 1.

    Args: matrices: [N, rows, columns]. Five quintic Newton-Schulz steps.
    Source: Jordan et al., "Muon", 2024 (the coefficients).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = (x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Trainer:
    """Steps parameters and keeps their moving average.

    Args:
        modules: what is trained.
        muon_lr, adam_lr: peak learning rates.
        ema: decay of the moving average per step.
    """

    def __init__(
        self, modules: Iterable[nn.Module], muon_lr: float, adam_lr: float, ema: float = 0.995
    ) -> None:
        self.params = [p for m in modules for p in m.parameters() if p.requires_grad]
        self.muon_lr, self.adam_lr, self.ema = muon_lr, adam_lr, ema
        self.shapes: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for p in self.params:
            if p.ndim >= 2 and p.shape[0] >= 16 and p[0].numel() >= 16:
                self.shapes[p.shape[0], p[0].numel()].append(p)
            else:
                rest.append(p)
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.momentum = {p: torch.zeros_like(p) for ps in self.shapes.values() for p in ps}
        self.average = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step at ``rate`` (0 to 1) times the peak learning rates."""
        norm = nn.utils.clip_grad_norm_(self.params, 1.0)
        if not math.isfinite(float(norm)):
            self.zero()
            return
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * rate
        self.adam.step()
        for (rows, columns), params in self.shapes.items():
            updates: list[torch.Tensor] = []
            for p in params:
                gradient = p.grad if p.grad is not None else torch.zeros_like(p)
                momentum = self.momentum[p].lerp_(gradient, 0.05)
                updates.append(gradient.lerp(momentum, 0.95).flatten(1))
            scale = self.muon_lr * rate * max(1.0, rows / columns) ** 0.5
            for p, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                p.mul_(1.0 - 0.01 * self.muon_lr * rate).sub_(update.view_as(p), alpha=scale)
        for average, p in zip(self.average, self.params, strict=True):
            average.lerp_(p, 1.0 - self.ema)
        self.zero()

    def zero(self) -> None:
        """Forget the gradients."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the parameters with their moving average."""
        for average, p in zip(self.average, self.params, strict=True):
            kept = p.detach().clone()
            p.copy_(average)
            average.copy_(kept)

    def state(self) -> dict[str, object]:
        """Return everything needed to go on."""
        momentum = [m for ps in self.shapes.values() for m in (self.momentum[p] for p in ps)]
        return {"adam": self.adam.state_dict(), "momentum": momentum, "average": self.average}

    @torch.no_grad()
    def restore(self, state: dict[str, object]) -> None:
        """Go on from ``state``."""
        self.adam.load_state_dict(state["adam"])  # pyright: ignore[reportArgumentType]
        own = [m for ps in self.shapes.values() for m in (self.momentum[p] for p in ps)]
        for mine, kept in zip(own, state["momentum"], strict=True):  # pyright: ignore[reportArgumentType]
            mine.copy_(kept)
        for mine, kept in zip(self.average, state["average"], strict=True):  # pyright: ignore[reportArgumentType]
            mine.copy_(kept)


def rate(progress: float) -> float:
    """Return the learning rate factor: a short warm-up, flat, then linear to 0 over the last 60 %."""
    return min(1.0, progress / 0.01 + 0.02, max(0.0, (1.0 - progress) / 0.6))
