"""The published SUPIR files, as key and shape lists: every key used once, none missing, none extra."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

KEYS = Path(__file__).resolve().parents[1] / "parity" / "golden" / "supir_v0_keys.json.gz"


@pytest.fixture(scope="module")
def published():
    with gzip.open(KEYS, "rt", encoding="utf-8") as f:
        data = json.load(f)
    return {name: {k: tuple(v) for k, v in data[name].items()} for name in ("supir", "sdxl_base")}


def short(key):
    if key.startswith("model.control_model."):
        return key.removeprefix("model.")
    return key.replace("model.diffusion_model.project_modules.", "project_modules.")


def build(shapes):
    """Plan a file and build its networks on the meta device; return (file, module)."""
    import comfy.ops
    import torch
    from supir_xpu.supir.checkpoint import plan_supir_file
    from supir_xpu.supir.injection import SupirNets

    file = plan_supir_file(shapes, "published.safetensors")
    nets = SupirNets(
        file.dims, operations=comfy.ops.manual_cast, dtype=torch.float16, device="meta"
    )
    tensors = {
        f"{part}.{key}": torch.empty(shapes[source], dtype=torch.float16, device="meta")
        for part, keys in (("control_model", file.control), ("project_modules", file.adapters))
        for key, source in keys.items()
    }
    nets.load_state_dict(tensors, strict=True, assign=True)
    return file, nets


@pytest.mark.parametrize("variant", ["full", "short", "mask_lq", "no_denoise", "with_base"])
def test_every_published_key_is_used_exactly_once(published, variant):
    shapes = dict(published["supir"])
    extra = set()
    if variant == "short":
        shapes = {short(k): v for k, v in shapes.items()}
    if variant == "mask_lq":
        extra = {"model.control_model.mask_LQ"}
        shapes["model.control_model.mask_LQ"] = (1, 4, 1, 1)
    if variant == "no_denoise":
        shapes = {k: v for k, v in shapes.items() if "denoise_encoder" not in k}
    if variant == "with_base":
        extra = set(published["sdxl_base"])
        shapes.update(published["sdxl_base"])
    file, nets = build(shapes)
    used = [*file.control.values(), *file.adapters.values(), *file.denoise_encoder.values()]
    assert len(used) == len(set(used)) == len(shapes) - len(extra)
    assert set(used) | extra == set(shapes)
    assert set(file.ignored) == extra
    parameters = sum(p.numel() for p in nets.parameters())
    assert 1.29e9 < parameters < 1.31e9
    denoise = 0 if variant == "no_denoise" else 106
    assert len(file.denoise_encoder) == denoise


def test_denoise_encoder_names_are_those_of_the_hosts_sdxl_encoder(published):
    import torch
    from supir_xpu.supir.checkpoint import denoise_encoder_matches, plan_supir_file
    from supir_xpu.supir.host_blocks import Encoder

    config = {
        "double_z": True,
        "z_channels": 4,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 128,
        "ch_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    with torch.device("meta"):
        encoder = {k: tuple(v.shape) for k, v in Encoder(**config).state_dict().items()}
    file = plan_supir_file(published["supir"], "published.safetensors")
    given = {k: published["supir"][source] for k, source in file.denoise_encoder.items()}
    denoise_encoder_matches(given, encoder)
    assert given == encoder
