"""Find SUPIR files on disk and load one into ComfyUI's model management."""

from __future__ import annotations

import copy
import os
import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from ..supir.checkpoint import (
    SupirFile,
    denoise_encoder_matches,
    load_tensors,
    plan_supir_file,
)
from ..supir.detect import FileKind, identify
from ..supir.errors import CheckpointError, ModelError
from ..supir.injection import SupirNets
from ..supir.safetensors_header import read_header
from . import host
from .types import CATEGORY, SupirModel, SupirSocket

FOLDERS = (host.SUPIR_FOLDER, "model_patches", "checkpoints")
"""Where SUPIR files are looked for, in this order."""

NOTHING_FOUND = "no SUPIR file found"
HOW_TO_GET = (
    "Put SUPIR-v0Q_fp16.safetensors or SUPIR-v0F_fp16.safetensors (Kijai/SUPIR_pruned on Hugging "
    "Face) into ComfyUI/models/supir, then press R to refresh"
)

DAMAGED_PICKLE = (
    *(RuntimeError, EOFError, ValueError, LookupError, OSError),
    *(TypeError, AttributeError, AssertionError, struct.error),
)
"""What reading a damaged pickle was seen to raise, besides UnpicklingError."""

_kinds: dict[tuple[str, int, float], bool] = {}
"""Whether a file is SUPIR, by path, size and modification time."""


def _is_supir(path: str) -> bool:
    """Say whether a file on disk is SUPIR, from its header alone; pickles go by their name."""
    if not path.lower().endswith(host.SAFETENSORS_EXTENSIONS):
        return "supir" in os.path.basename(path).lower()
    try:
        status = os.stat(path)
        key = (path, status.st_size, status.st_mtime)
        if key not in _kinds:
            shapes = {name: info.shape for name, info in read_header(path).items()}
            _kinds[key] = identify(shapes) is FileKind.SUPIR
        return _kinds[key]
    except (OSError, CheckpointError):  # unreadable or damaged: not offered; choosing it says why
        return False


def _normalise(name: str) -> str:
    return name.replace("\\", "/").strip().lower()


def _all_files() -> Iterator[tuple[str, str]]:
    """Yield (name relative to its model folder with forward slashes, path) of every weight file."""
    for folder in FOLDERS:
        if folder not in folder_paths.folder_names_and_paths:
            continue
        for name in folder_paths.get_filename_list(folder):
            path = folder_paths.get_full_path(folder, name)
            if path is not None:
                yield name.replace("\\", "/"), path


def list_supir_files() -> list[str]:
    """Return the names of the SUPIR files on disk, or one entry that says there is none."""
    names = dict.fromkeys(name for name, path in _all_files() if _is_supir(path))
    return list(names) or [NOTHING_FOUND]


def find_supir_file(name: str) -> str:
    """Return the path of a chosen file: by its path within a model folder, else by its base name.

    Separators and letter case of the name do not matter, so workflows from other machines work.
    Raises: CheckpointError saying what is missing, where it belongs, and where to get it.
    """
    files = list(_all_files())
    wanted = _normalise(name)
    base = wanted.rsplit("/", 1)[-1]
    ways = (
        lambda found: found == name,
        lambda found: found.replace("\\", "/") == name.replace("\\", "/"),
        lambda found: _normalise(found) == wanted,
        lambda found: _normalise(found).rsplit("/", 1)[-1] == base,
    )
    for matches in ways:
        paths = [path for found, path in files if matches(found)]
        good = [path for path in paths if _is_supir(path)] or paths
        if len(good) > 1 and matches is ways[-1]:
            raise CheckpointError(
                f"supir_name: {name!r} is not there, and {len(good)} files have its base name: "
                f"{', '.join(good)}. Choose one of them by its full name."
            )
        if good:
            return good[0]
    what = "no SUPIR file" if name == NOTHING_FOUND else f"no file named {name!r}"
    raise CheckpointError(
        f"supir_name: there is {what} in the model folders {', '.join(FOLDERS)}. {HOW_TO_GET}."
    )


def plan_file(path: str) -> tuple[SupirFile, Mapping[str, torch.Tensor] | None]:
    """Return what a file holds; for a pickle also its tensors, read by the host's safe loader.

    Raises: CheckpointError when the file is damaged, holds code, or is no SUPIR file.
    """
    name = os.path.basename(path)
    if path.lower().endswith(host.SAFETENSORS_EXTENSIONS):
        infos = read_header(path)
        file = plan_supir_file({key: info.shape for key, info in infos.items()}, name)
        _check_dtypes(file, {key: info.dtype for key, info in infos.items()}, name)
        return file, None
    try:
        loaded = comfy.utils.load_torch_file(path, safe_load=True)
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"supir_name: {name} is damaged, or a pickle that asks for more than tensors and could "
            "run code; nothing of it was run. Use the .safetensors version of the file."
        ) from e
    except DAMAGED_PICKLE as e:
        raise CheckpointError(
            f"supir_name: {name} could not be read as a checkpoint ({type(e).__name__}: "
            f"{str(e)[:200]}). Download it again, or use the .safetensors version."
        ) from e
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"supir_name: {name} holds a {type(loaded).__name__} instead of named tensors, so it is "
            "no checkpoint. Download it again, or use the .safetensors version."
        )
    tensors = {
        k: v for k, v in loaded.items() if isinstance(k, str) and isinstance(v, torch.Tensor)
    }
    return plan_supir_file({k: tuple(v.shape) for k, v in tensors.items()}, name), tensors


def _check_dtypes(file: SupirFile, dtypes: Mapping[str, str], name: str) -> None:
    """Refuse weights that are no plain floating-point numbers. Raises: CheckpointError."""
    used = [*file.control.values(), *file.adapters.values(), *file.denoise_encoder.values()]
    odd = sorted({dtypes[key] for key in used if not dtypes[key].startswith(("F", "BF"))})
    if odd:
        raise CheckpointError(
            f"supir_name: {name} holds {', '.join(odd)} weights, and only floating-point ones (F32, "
            "F16, BF16, F8) can be used. Load the fp16 version of the file."
        )


def _compute_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype wide weights are kept in: the host's choice for a UNet of this size."""
    parameters = sum(t.numel() for t in tensors.values())
    return mm.unet_dtype(device=mm.get_torch_device(), model_params=parameters)


def build_supir(
    file: SupirFile, nets: dict[str, torch.Tensor], denoise: dict[str, torch.Tensor], name: str
) -> SupirModel:
    """Assemble the networks on the offload device around the loaded tensors.

    Weights keep the dtype of the file (half precision, fp8); fp32 weights are narrowed to the dtype
    the host would run a UNet of this size in. Layers cast to the activation's dtype when they run.
    Raises: CheckpointError when the tensors are not exactly those of the networks.
    """
    wide = _compute_dtype(nets)
    tensors = {k: v.to(wide) if v.dtype == torch.float32 else v for k, v in nets.items()}
    module = SupirNets(file.dims, operations=comfy.ops.manual_cast, dtype=wide, device="meta")
    try:
        module.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as e:
        raise CheckpointError(
            f"supir_name: {name} does not fit the networks its own shapes describe: {e}"
        ) from e
    module.requires_grad_(False).eval()
    patcher = comfy.model_patcher.CoreModelPatcher(
        module, load_device=mm.get_torch_device(), offload_device=mm.unet_offload_device()
    )
    return SupirModel(patcher, file.dims, denoise or None, name)


def load_supir(path: str) -> SupirModel:
    """Load a SUPIR file of any published layout. Raises: CheckpointError."""
    file, loaded = plan_file(path)
    net_keys = {f"control_model.{k}": v for k, v in file.control.items()}
    net_keys.update({f"project_modules.{k}": v for k, v in file.adapters.items()})

    def read(keys: Mapping[str, str]) -> dict[str, torch.Tensor]:
        if loaded is not None:
            return {key: loaded[source] for key, source in keys.items()}
        return load_tensors(path, keys)

    name = os.path.basename(path)
    return build_supir(file, read(net_keys), read(file.denoise_encoder), name)


class LoadSUPIR(io.ComfyNode):
    """Load SUPIR's control network and adapters."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_LoadSUPIR",
            display_name="Load SUPIR",
            category=CATEGORY,
            description=(
                "Loads the SUPIR control network, adapters and denoise encoder from one file. The "
                "SDXL checkpoint is loaded by ComfyUI's own loader."
            ),
            search_aliases=["supir", "restore", "upscale"],
            inputs=[
                io.Combo.Input(
                    "supir_name",
                    options=list_supir_files(),
                    tooltip=(
                        "SUPIR file from models/supir, models/model_patches or models/checkpoints. "
                        "v0Q: heavy damage, best detail. v0F: light damage, closest to the input."
                    ),
                )
            ],
            outputs=[SupirSocket.Output("supir", display_name="SUPIR")],
        )

    @classmethod
    def validate_inputs(cls, supir_name: str | None = None) -> bool | str:
        if supir_name is None:  # a link brings it
            return True
        if not isinstance(supir_name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return f"supir_name is {supir_name!r}, but a file name is text. Choose a file."
        try:
            path = find_supir_file(supir_name)
            if path.lower().endswith(host.SAFETENSORS_EXTENSIONS):
                plan_file(path)
        except CheckpointError as e:
            return str(e)
        return True

    @classmethod
    def fingerprint_inputs(cls, supir_name: str) -> str:
        path = find_supir_file(supir_name)
        status = os.stat(path)
        return f"{path}|{status.st_size}|{status.st_mtime}"

    @classmethod
    def execute(cls, supir_name: str) -> io.NodeOutput:
        return io.NodeOutput(load_supir(find_supir_file(supir_name)))


def denoising_vae(vae: Any, supir: SupirModel) -> tuple[Any, str | None]:
    """Return a copy of a VAE with SUPIR's denoise encoder in place of its own, and a note.

    The VAE itself is untouched: the weights are a patch on a clone of its patcher. A file without a
    denoise encoder gives the VAE itself and a note that says so.
    Raises: CheckpointError when the encoder is of another width than the VAE's.
    """
    if supir.denoise_encoder is None:
        return vae, (
            f"{supir.name} holds no denoise encoder: the VAE's own encoder was used, which keeps "
            "more of the input's noise."
        )
    module = getattr(vae.first_stage_model, "encoder", None)
    if module is None:
        raise ModelError(
            f"vae is a {type(vae.first_stage_model).__name__}, which has no encoder that SUPIR's denoise "
            "encoder could stand in for. Connect the VAE of an SDXL checkpoint."
        )
    encoder = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    given = {k: tuple(v.shape) for k, v in supir.denoise_encoder.items()}
    denoise_encoder_matches(given, encoder)
    patched = copy.copy(vae)
    patched.patcher = vae.patcher.clone()
    patches = {f"encoder.{k}": ("set", (v,)) for k, v in supir.denoise_encoder.items()}
    applied = patched.patcher.add_patches(patches)
    assert len(applied) == len(patches), "the VAE's encoder keys were checked above"
    return patched, None
