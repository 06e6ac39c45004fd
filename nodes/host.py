"""The only place for ComfyUI's folders, model management and progress."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import comfy.model_management as mm
import comfy.ops
import comfy.utils
import folder_paths
import latent_preview
import torch

log = logging.getLogger(__name__)

SUPIR_FOLDER = "supir"
"""Model folder of the pack; users may map it in ``extra_model_paths.yaml``."""

WEIGHT_EXTENSIONS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")
SAFETENSORS_EXTENSIONS = (".safetensors", ".sft")


def register_folders() -> None:
    """Make ``models/supir`` known to ComfyUI (creates nothing on disk)."""
    default = os.path.join(folder_paths.models_dir, SUPIR_FOLDER)
    folder_paths.add_model_folder_path(SUPIR_FOLDER, default)
    paths, _ = folder_paths.folder_names_and_paths[SUPIR_FOLDER]
    folder_paths.folder_names_and_paths[SUPIR_FOLDER] = (paths, set(WEIGHT_EXTENSIONS))


def serves_web_files(folder: str) -> bool:
    """Say whether ComfyUI serves a pack's web files: its static routes know no quoted characters."""
    return all(letter.isascii() and (letter.isalnum() or letter in "._-~") for letter in folder)


def check_cancel() -> None:
    """Raise ComfyUI's interruption when the user pressed cancel."""
    mm.throw_exception_if_processing_interrupted()


def resize_lanczos(image: torch.Tensor, width_px: int, height_px: int) -> torch.Tensor:
    """Resize [B, 3, H, W] in 0..1 with ComfyUI's 8-bit Lanczos filter."""
    return comfy.utils.common_upscale(image, width_px, height_px, "lanczos", "disabled")


@contextmanager
def borrow_weights(module: Any, like: torch.Tensor) -> Generator[tuple[Any, Any]]:
    """Yield (weight, bias) of a host layer, cast and moved to where ``like`` is, then give them back."""
    weight, bias, stream = comfy.ops.cast_bias_weight(module, like, offloadable=True)
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


class BatchProgress:
    """One progress bar with previews over several sampling runs of equal length."""

    def __init__(self, model: Any, steps: int, runs: int) -> None:
        self._bar = comfy.utils.ProgressBar(steps * runs)
        self._previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
        self._steps, self._total = steps, steps * runs

    def callback(self, run: int) -> Callable[[int, torch.Tensor, torch.Tensor, int], None]:
        """Return ComfyUI's sampling callback for the run with this index."""

        def on_step(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
            preview = None
            if self._previewer is not None:
                preview = self._previewer.decode_latent_to_preview_image("JPEG", x0)
            self._bar.update_absolute(run * self._steps + step + 1, self._total, preview)

        return on_step


PROGRESS_PARTS = 200
"""Visible positions of a progress bar within one phase."""


class PhasedProgress:
    """One progress bar over phases whose lengths are not known beforehand."""

    def __init__(self, phases: int) -> None:
        self._bar = comfy.utils.ProgressBar(phases * PROGRESS_PARTS)
        self._last = -1

    def phase(self, index: int) -> Callable[[int, int], None]:
        """Return ``report(done, total)`` for the phase with this index; lets the user cancel."""

        def report(done: int, total: int) -> None:
            check_cancel()
            at = index * PROGRESS_PARTS + PROGRESS_PARTS * done // max(total, 1)
            if at != self._last:
                self._last = at
                self._bar.update_absolute(at)

        return report


@contextmanager
def naming_picture(index: int, count: int) -> Generator[None]:
    """Name the picture of a batch in the message of whatever goes wrong with it."""
    try:
        yield
    except mm.InterruptProcessingException:
        raise
    except Exception as e:  # every error is passed on as it is, with the picture named
        if count > 1 and e.args and isinstance(e.args[0], str):
            e.args = (f"Picture {index + 1} of {count}: {e.args[0]}", *e.args[1:])
        raise


WAIT_SLICE_S = 0.25
"""How often a wait looks whether the user cancelled."""


def send_event(name: str, data: dict[str, Any]) -> None:
    """Tell the client of the running prompt something; without a server, nothing happens."""
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    instance = getattr(server, "instance", None)
    if instance is not None:
        instance.send_sync(name, data, instance.client_id)


def wait(seconds: float, why: str) -> None:
    """Wait, visibly and cancellably. Raises: ComfyUI's interruption."""
    if seconds <= 0:
        return
    log.info("Waiting %.0f s: %s", seconds, why)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        check_cancel()
        send_event("supir_xpu.wait", {"why": why, "seconds_left": round(left, 1)})
        time.sleep(min(WAIT_SLICE_S, left))
    send_event("supir_xpu.wait", {"why": why, "seconds_left": 0})


def tell_preflight(text: str) -> None:
    """Say which check of the device runs."""
    log.debug("preflight: %s", text)
    send_event("supir_xpu.preflight", {"text": text})


def free_device() -> None:
    """Move every model off the device and give cached memory back, as ComfyUI does it."""
    mm.unload_all_models()
    mm.soft_empty_cache()


def device_words() -> str:
    """Return the device ComfyUI computes on, in words."""
    name = str(mm.get_torch_device_name(mm.get_torch_device()))
    return "the processor (CPU)" if name == "cpu" else name


def is_loaded(patcher: Any) -> bool:
    """Whether a model's weights are on the device now."""
    return any(
        loaded.model is not None and loaded.model.model is patcher.model
        for loaded in mm.current_loaded_models
    )
