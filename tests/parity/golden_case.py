"""Reading of golden case files: metadata, tensors, kind, and the deterministic weights."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

HERE = Path(__file__).resolve().parent
GOLDEN_DIR = Path(os.environ.get("SUPIR_GOLDEN_DIR", HERE / "golden"))
KINDS = [
    "adm_vector",
    "colorfix",
    "denoiser",
    "image_io",
    "linear_cfg",
    "net",
    "sigmas",
    "vae",
    "zerocrossattn",
    "zerosft",
]
HOST_KINDS = {"adm_vector", "denoiser", "net", "pipeline", "vae", "zerocrossattn", "zerosft"}


@dataclass(frozen=True)
class Case:
    """One golden file. ``kind`` is pipeline, sampler, one of KINDS, or unknown."""

    name: str
    kind: str
    meta: dict
    tensors: dict[str, torch.Tensor]

    @property
    def needs_host(self) -> bool:
        return self.kind in HOST_KINDS or self.meta.get("net") == "tiny"


def kind_of(meta: dict) -> str:
    """Return the kind by the rule of the golden specification."""
    case = meta["case"]
    if case.startswith("pipeline"):
        return "pipeline"
    if "sampler" in meta and "net" in meta:
        return "sampler"
    return next((k for k in sorted(KINDS, key=len, reverse=True) if case.startswith(k)), "unknown")


def read_meta(path: Path) -> dict:
    with safe_open(path, "pt") as f:
        return json.loads(f.metadata()["meta"])


def read_case(path: Path) -> Case:
    meta = read_meta(path)
    with safe_open(path, "pt") as f:
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
    return Case(path.stem, kind_of(meta), meta, tensors)


def case_files() -> list[Path]:
    files = sorted(GOLDEN_DIR.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no golden case (*.safetensors) in {GOLDEN_DIR}")
    return files


def _load_weights_module():
    spec = importlib.util.spec_from_file_location("golden_weights", HERE / "golden" / "weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


weights = _load_weights_module()


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    """Fail unless max|got - want| <= tolerance * max(1, max|want|)."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} != {tuple(want.shape)}"
    error = (got.double() - want.double()).abs().max().item()
    limit = tolerance * max(1.0, want.double().abs().max().item())
    assert error <= limit, f"{what}: max error {error:.3e} > {limit:.3e}"
