"""Import modules of the pack from a script in ``tools/``, whatever the clone's folder is called.

Standard library only; ComfyUI is touched where it is asked for alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACK = "supir_xpu"


def load(name: str) -> Any:
    """Return a module of the pack: ``load("xpu.probe")``."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{PACK}.{name}")


def load_with_host(name: str) -> Any:
    """Return a module of the pack, with ComfyUI (environment variable COMFYUI_ROOT) on the CPU."""
    root = os.environ["COMFYUI_ROOT"]
    if root not in sys.path:
        sys.path.insert(0, root)
    importlib.import_module("comfy.options")  # argument parsing stays off
    importlib.import_module("comfy.cli_args").args.cpu = True
    return load(name)
