"""Which tensor names a SUPIR file may use: the layouts of ``configs/layouts.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from omegaconf import MISSING

from .settings import load_settings

LAYOUTS_FILE = Path(__file__).parent / "configs" / "layouts.yaml"


@dataclass
class KeyLayout:
    """Prefixes, each ending in a dot, of the three parts of one published layout."""

    control: str = MISSING
    adapters: str = MISSING
    denoise_encoder: str = MISSING

    def __post_init__(self) -> None:
        for prefix in (self.control, self.adapters, self.denoise_encoder):
            if not prefix.endswith("."):
                raise ValueError(f"the prefix {prefix!r} does not end in a dot; add it")


@dataclass
class KeyLayouts:
    """Every layout by name, and the names that are dropped behind any of their prefixes."""

    layouts: dict[str, KeyLayout] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


@lru_cache(maxsize=1)
def load_layouts() -> KeyLayouts:
    """Return the published layouts, read once.

    Raises: SettingsError if the file that ships with the pack was edited into something invalid.
    """
    return load_settings(KeyLayouts, LAYOUTS_FILE)
