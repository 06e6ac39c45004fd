"""Which settings suit which kind of SDXL base model, and a hint when they do not fit together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .settings import load_settings

PRESETS_FILE = Path(__file__).parent / "configs" / "presets.yaml"


@dataclass
class Preset:
    """One kind of base model.

    Attributes:
        title: what messages call it.
        sampler: the sampler it works best with.
        steps: [lowest, highest] number of steps it is made for.
        cfg: [lowest, highest] prompt guidance it is made for.
    """

    title: str = "???"
    sampler: str = "???"
    steps: list[int] = field(default_factory=list)
    cfg: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("steps", "cfg"):
            bounds = getattr(self, name)
            if len(bounds) != 2 or bounds[0] > bounds[1]:
                raise ValueError(f"{name} is {bounds}; give [lowest, highest]")


@dataclass
class Presets:
    """All kinds of base models, by name."""

    presets: dict[str, Preset] = field(default_factory=dict)


@lru_cache(maxsize=1)
def load_presets() -> dict[str, Preset]:
    """Return the presets of the pack. Raises: SettingsError naming the key in the file."""
    return load_settings(Presets, PRESETS_FILE).presets


def hint(steps: int, sampler: str, cfg_scale: float) -> str | None:
    """Return a sentence when steps, sampler and guidance belong to different kinds of base model.

    Args: cfg_scale: the highest guidance of the run.
    """
    for preset in load_presets().values():
        if not preset.steps[0] <= steps <= preset.steps[1]:
            continue
        misfits: list[str] = []
        if sampler != preset.sampler:
            misfits.append(f"the sampler {preset.sampler}")
        if not preset.cfg[0] <= cfg_scale <= preset.cfg[1]:
            misfits.append(f"cfg {preset.cfg[0]:g} to {preset.cfg[1]:g} (it is {cfg_scale:g})")
        if misfits:
            return f"{steps} steps suit {preset.title}, which wants {' and '.join(misfits)}."
    return None
