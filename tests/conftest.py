"""Load the pack under one fixed name, whatever the clone's folder is called.

Tests import ``supir_xpu.supir...``; ComfyUI itself comes from the folder named by the
environment variable COMFYUI_ROOT, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ALIAS = "supir_xpu"


def _load_pack() -> None:
    if ALIAS in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        ALIAS, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[ALIAS] = module
    spec.loader.exec_module(module)


def _load_host() -> None:
    """Put ComfyUI on the path of this test process and pin it to the CPU."""
    root = os.environ["COMFYUI_ROOT"]
    if root not in sys.path:
        sys.path.insert(0, root)
    import comfy.options  # noqa: F401  (argument parsing stays off)
    from comfy.cli_args import args

    args.cpu = True


_load_pack()
if os.environ.get("COMFYUI_ROOT"):
    _load_host()


def pytest_collection_modifyitems(config, items):
    """Select ``core_supir`` tests only where ComfyUI has such parts to compare with."""
    root = os.environ.get("COMFYUI_ROOT")
    if root is None or (Path(root) / "comfy" / "ldm" / "supir").is_dir():
        return
    left_out = [item for item in items if item.get_closest_marker("core_supir")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def inference():
    """Every test runs as ComfyUI runs a node: in inference mode."""
    with torch.inference_mode():
        yield
