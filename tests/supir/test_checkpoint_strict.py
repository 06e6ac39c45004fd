"""What a SUPIR file must not be: incomplete, altered, scaled, mixed, cut; and loading a good one.

Files are made with ``network_shapes``, whose lists ``test_checkpoint`` checks independently.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from supir_xpu.supir.checkpoint import (
    SCALE_NAMES,
    SupirFile,
    denoise_encoder_matches,
    load_tensors,
    plan_supir_file,
)
from supir_xpu.supir.errors import CheckpointError
from supir_xpu.supir.layout import BlockDims, ControlDims
from supir_xpu.supir.network_shapes import (
    fit_adapters,
    list_adapters,
    list_control,
    list_encoder,
)
from supir_xpu.supir.safetensors_header import read_header

LISTS = Path(__file__).resolve().parents[1] / "parity" / "golden" / "supir_v0_keys.json.gz"
CONTROL, ADAPTERS = "model.control_model.", "model.diffusion_model.project_modules."
ENCODER = "first_stage_model.denoise_encoder."


def make_network(width, mult, depths, *, blocks=2, context=48):
    """Return the shapes of a control encoder and of its adapters."""
    dims, ch = [], width
    for level, m in enumerate(mult):
        for _ in range(blocks):
            dims.append(BlockDims("res", ch, m * width, depths[level]))
            ch = m * width
        if level < len(mult) - 1:
            dims.append(BlockDims("down", ch, ch))
    control = ControlDims(4, 4, width, 4 * width, 80, context, tuple(dims), ch, depths[-1])
    return list_control(control), list_adapters(fit_adapters(control))


def make_encoder(width=32, mult=(1, 2, 4, 4), z=4):
    tell = {"conv_in.weight": (width, 3, 3, 3), "conv_out.bias": (2 * z,)}
    tell |= {f"down.{i}.block.0.conv1.bias": (m * width,) for i, m in enumerate(mult)}
    return list_encoder(tell)


def prefixed(prefix, keys):
    return {prefix + key: shape for key, shape in keys.items()}


def make_file(control, adapters):
    return prefixed(CONTROL, control) | prefixed(ADAPTERS, adapters)


WIDE = (64, (1, 2, 4), (0, 1, 2))
FLAT = (64, (1, 1, 1), (0, 1, 1))


@pytest.fixture(scope="module")
def small():
    """A small but complete file: every kind of layer, both kinds of adapter, a denoise encoder."""
    file = make_file(*make_network(64, (1, 1, 2), (0, 1, 1), blocks=1))
    return file | prefixed(ENCODER, make_encoder(32, (1, 2)))


@pytest.fixture(scope="module")
def sdxl_base():
    with gzip.open(LISTS, "rt", encoding="utf-8") as file:
        return {key: tuple(shape) for key, shape in json.load(file)["sdxl_base"].items()}


def refuse(shapes, name="my file.safetensors"):
    with pytest.raises(CheckpointError) as caught:
        plan_supir_file(shapes, name)
    message = str(caught.value)
    assert name in message
    assert message.isascii()
    assert len(message) < 1500
    return message


def test_every_missing_tensor_is_named(small):
    for key in small:
        message = refuse({k: s for k, s in small.items() if k != key})
        assert key in message
        assert "lacks" in message


def test_many_missing_tensors_are_counted(small):
    gone = [k for k in small if ".param_free_norm." in k or ".zero_mul." in k]
    message = refuse({k: s for k, s in small.items() if k not in gone})
    assert f"lacks {len(gone)} tensors" in message
    assert sum(key in message for key in gone) == 5
    assert f"and {len(gone) - 5} more" in message


def test_every_wrong_shape_is_refused(small):
    for key, shape in small.items():
        for axis in range(len(shape)):
            changed = (*shape[:axis], shape[axis] + 32, *shape[axis + 1 :])
            if axis == 1 and key.endswith((".label_emb.0.0.weight", "conv_in.weight")):
                continue  # the width of what comes from outside is free
            if axis == 0 and key.endswith("denoise_encoder.conv_out.weight"):
                changed = (shape[0] + 32, *shape[1:])  # its bias then does not fit
            if axis == 1 and key.endswith(("_blocks.0.0.weight", "_hint_block.0.weight")):
                continue
            refuse(small | {key: changed})
        refuse(small | {key: (*shape, 1)})
        refuse(small | {key: ()})


def test_unexpected_tensors_are_named(small):
    for key in (
        "model.control_model.input_blocks.1.0.extra",
        "model.control_model.output_blocks.0.0.weight",
        "model.control_model.input_blocks.01.0.op.weight",
        "model.diffusion_model.project_modules.0.zero_conv.weight.bak",
        "model.diffusion_model.project_modules.x",
        f"{ENCODER}down.0.attn.0.q.weight",
        "model.control_model.input_blocks.999999999999.0.op.weight",
        "model.diffusion_model.project_modules.99999999999.norm1.weight",
    ):
        message = refuse(small | {key: (64, 64, 1, 1)})
        assert key in message
        assert "too many" in message


def test_a_part_alone_is_refused_by_name(small):
    for part, prefix in (("control encoder", CONTROL), ("adapters", ADAPTERS)):
        message = refuse({k: s for k, s in small.items() if not k.startswith(prefix)})
        assert part in message
        assert prefix in message
    assert "control encoder" in refuse(prefixed(ENCODER, make_encoder()))


def test_adapters_of_another_model_are_refused(small):
    control, adapters = make_network(*WIDE)
    _, others = make_network(*FLAT)
    message = refuse(make_file(control, others))
    assert "do not fit its control encoder" in message
    assert "project_modules.2 is a ZeroSFT from 64 control channels" in message
    assert "128 decoder channels" in message

    swapped = {k: s for k, s in adapters.items() if not k.startswith(("3.", "4."))}
    for key, shape in adapters.items():
        number, _, rest = key.partition(".")
        if number in ("3", "4"):
            swapped[f"{7 - int(number)}.{rest}"] = shape
    assert "project_modules.3 should be a ZeroCrossAttn" in refuse(make_file(control, swapped))

    extra = adapters | {k.replace("0.", "12.", 1): s for k, s in adapters.items() if k[:2] == "0."}
    message = refuse(make_file(control, extra))
    assert "10 control features need exactly 12 adapters" in message

    fewer = {k: s for k, s in control.items() if not k.startswith("input_blocks.8.")}
    refuse(make_file(fewer, adapters))


def test_widths_no_network_can_have():
    assert "not a multiple of 32" in refuse(make_file(*make_network(40, (1, 1, 1), (0, 1, 1))))
    assert "not a multiple of 64" in refuse(make_file(*make_network(32, (1, 1, 1), (0, 1, 1))))
    assert "side of 0" in refuse(make_file(*make_network(*FLAT, context=0)))


def test_other_kinds_are_named_with_their_place(sdxl_base):
    message = refuse(sdxl_base)
    assert "an SDXL checkpoint" in message
    assert "models/checkpoints" in message
    assert "supir_name" in message
    assert "without any tensor" in refuse({})
    assert "a LoRA" in refuse({"lora_unet_mid_block.lora_up.weight": (8, 4)})


@pytest.mark.parametrize("scale", SCALE_NAMES)
def test_scaled_files_are_refused_by_name(small, scale):
    message = refuse(small | {f"model.control_model.time_embed.0.{scale}": ()})
    assert "scaled" in message
    assert scale in message
    base = {f"model.diffusion_model.output_blocks.0.0.{scale}": (), "scaled_fp8": (2,)}
    assert set(plan_supir_file(small | base, "merged").ignored) == set(base)


def test_mutated_shape_maps_give_a_plan_or_a_checkpoint_error(small):
    rng = random.Random(11)
    keys = list(small)
    plans = 0
    for _ in range(1_500):
        shapes = dict(small)
        for _ in range(rng.choice([1, 2, 30])):
            key = rng.choice(keys)
            shape = shapes.pop(key, small[key])
            how = rng.randrange(5)
            if how == 0:
                shapes[key] = tuple(
                    rng.choice([0, 1, 7, 64, 2**40]) for _ in range(rng.randrange(6))
                )
            elif how == 1:
                shapes[key.replace("1", "2", 1)] = shape
            elif how == 2:
                shapes[rng.choice(["", "é", "\udc80", "a." * 300]) + key] = shape
            elif how == 3:
                shapes[key[: rng.randrange(len(key))]] = shape
        try:
            assert isinstance(plan_supir_file(shapes, "mutated"), SupirFile)
            plans += 1
        except CheckpointError:
            continue
    assert plans < 150  # nearly every mutation is noticed; renamed-away parts may stay valid


# Loading


@pytest.fixture
def saved(tmp_path, small):
    """A real file of the small network in mixed types, with the tensors that went into it."""
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        key: torch.randn(shape, generator=generator).to(types[i % len(types)])
        for i, (key, shape) in enumerate(small.items())
    }
    path = tmp_path / "mixed.safetensors"
    save_file(tensors, path)
    return path, tensors


def shapes_of(path):
    return {key: info.shape for key, info in read_header(path).items()}


def test_mixed_and_fp8_files_load_bit_for_bit(saved):
    path, tensors = saved
    plan = plan_supir_file(shapes_of(path), path.name)
    for names in (plan.control, plan.adapters, plan.denoise_encoder):
        loaded = load_tensors(path, names)
        assert loaded.keys() == names.keys()
        for new, old in names.items():
            assert loaded[new].dtype == tensors[old].dtype
            assert torch.equal(loaded[new].view(torch.uint8), tensors[old].view(torch.uint8))


def test_a_file_that_changed_since_it_was_planned(saved):
    path, _ = saved
    plan = plan_supir_file(shapes_of(path), path.name)
    blob = path.read_bytes()
    for cut in (len(blob) - 1, len(blob) // 2, 100, 5, 0):
        path.write_bytes(blob[:cut])
        with pytest.raises(CheckpointError, match=r"mixed\.safetensors"):
            load_tensors(path, plan.control)
    path.write_bytes(blob[:-10])
    with pytest.raises(CheckpointError, match="10 too few"):
        load_tensors(path, plan.control)
    save_file({"other": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="changed since"):
        load_tensors(path, plan.control)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(path, plan.control)


def test_denoise_encoder_and_vae_must_be_alike():
    ours, wider = make_encoder(32), make_encoder(128)
    denoise_encoder_matches(ours, dict(reversed(ours.items())))
    with pytest.raises(CheckpointError, match=r"32 channels wide.*128 channels wide") as caught:
        denoise_encoder_matches(ours, wider)
    assert "vae" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"down\.3.*absent"):
        denoise_encoder_matches(ours, make_encoder(32, (1, 2, 4)))
    with pytest.raises(CheckpointError, match="conv_out"):
        denoise_encoder_matches(ours, make_encoder(32, z=16))
    with pytest.raises(CheckpointError, match="without conv_in"):
        denoise_encoder_matches(ours, {})
