"""Finding the browser of the tests: a Chromium the system has. Nothing is ever downloaded.

Standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping

VARIABLE = "SUPIR_XPU_BROWSER"
"""Path of a Chromium, or ``required``: then a missing one fails the tests instead of leaving them out."""

REQUIRED = "required"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

ADVICE = (
    "install the package chromium (Debian, Ubuntu: apt-get install chromium) or name one in the "
    f"environment variable {VARIABLE}"
)


def find_browser(
    env: Mapping[str, str] = os.environ, which: Callable[[str], str | None] = shutil.which
) -> str | None:
    """Return the path of a Chromium, or None."""
    named = env.get(VARIABLE, "")
    if named and named != REQUIRED:
        return which(named)
    return next((path for name in NAMES if (path := which(name))), None)


def is_required(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the browser tests have to run."""
    return bool(env.get(VARIABLE))
