"""Every layout in which the older wrapper's values were saved."""

from __future__ import annotations

import pytest
from supir_xpu.migrate.old_nodes import OLD_NODES, SEED_CONTROL, read_values


def names(kind):
    return [widget.name for widget in OLD_NODES[kind].widgets]


def defaults(kind):
    return {widget.name: widget.default for widget in OLD_NODES[kind].widgets}


def test_the_ten_nodes_are_known():
    assert set(OLD_NODES) == {
        *("SUPIR_Upscale", "SUPIR_model_loader", "SUPIR_model_loader_v2"),
        *("SUPIR_model_loader_v2_clip", "SUPIR_first_stage", "SUPIR_encode", "SUPIR_conditioner"),
        *("SUPIR_sample", "SUPIR_decode", "SUPIR_tiles"),
    }


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("SUPIR_model_loader_v2", ["F.safetensors", False, "auto"]),
        ("SUPIR_model_loader_v2", ["F.safetensors", True, "fp16", True]),
        ("SUPIR_model_loader_v2_clip", ["Q.ckpt", False, "auto", True]),
        ("SUPIR_model_loader", ["Q.ckpt", "a/b.safetensors", False, "auto"]),
        ("SUPIR_first_stage", [True, 512, 1024, "bf16"]),
        ("SUPIR_encode", [False, 768, "fp32"]),
        ("SUPIR_conditioner", ["good", "bad"]),
        ("SUPIR_conditioner", ["good", "bad", "green hair"]),
        ("SUPIR_decode", [True, 512]),
        ("SUPIR_decode", [True, 512, "auto"]),
        ("SUPIR_tiles", [768, 384]),
    ],
)
def test_plain_layouts_are_read_in_order(kind, row):
    stored = read_values(kind, row)
    assert stored.values == dict(zip(names(kind), row, strict=False))
    assert stored.left == []


def test_the_five_values_of_a_conditioner_keep_two_and_name_the_rest():
    stored = read_values("SUPIR_conditioner", ["good", "bad", "", True, True])
    assert stored.values == {"positive_prompt": "good", "negative_prompt": "bad", "captions": ""}
    assert stored.left == [("value 4", True), ("value 5", True)]


NOW = [17, "fixed", 10, 2, 1.5, 5, 1.003, 0.7, 1, 0.9, 3, False, "RestoreDPMPP2MSampler", 1024, 512]
EARLY = [123, "fixed", 45, 4, 7.5, 5, 1.003, 1, 0.8, -1, False, "TiledRestoreEDMSampler", 512, 256]


def test_the_sampler_with_and_without_eta():
    now, early = read_values("SUPIR_sample", NOW), read_values("SUPIR_sample", EARLY)
    assert now.values["DPMPP_eta"] == 0.7
    assert now.values["restore_cfg"] == 3
    assert "DPMPP_eta" not in early.values
    assert early.values["control_scale_start"] == 1
    assert early.values["control_scale_end"] == 0.8
    assert early.values["restore_cfg"] == -1
    for stored, size in ((now, 1024), (early, 512)):
        assert stored.values["sampler_tile_size"] == size
        assert stored.values["sampler_tile_stride"] == size // 2
        assert stored.values[SEED_CONTROL] == "fixed"
        assert stored.left == []


@pytest.mark.parametrize("row", [NOW, EARLY])
def test_a_sampler_saved_without_the_seeds_control(row):
    with_control = read_values("SUPIR_sample", row).values
    without = read_values("SUPIR_sample", [row[0], *row[2:]]).values
    assert without == {k: v for k, v in with_control.items() if k != SEED_CONTROL}


def upscale_row(captions, length=None, **changed):
    """A stored row of the legacy node; ``length`` cuts it to that many values."""
    values = {**defaults("SUPIR_Upscale"), "supir_model": "Q", "sdxl_model": "x", **changed}
    row = [values[name] for name in names("SUPIR_Upscale") if name != "captions"]
    if captions is not None:
        row.insert(20, captions)
    row.insert(3, "randomize")
    return row[:length]


@pytest.mark.parametrize("captions", [None, "", "a cat", "auto", "fp16"])
@pytest.mark.parametrize("dtype", ["auto", "fp16"])
def test_the_legacy_node_with_and_without_a_stored_caption(captions, dtype):
    given = {"diffusion_dtype": dtype, "batch_size": 4, "sampler_tile_size": 640, "fp8_vae": True}
    stored = read_values("SUPIR_Upscale", upscale_row(captions, **given))
    wanted = {**defaults("SUPIR_Upscale"), "supir_model": "Q", "sdxl_model": "x", **given}
    wanted |= {SEED_CONTROL: "randomize", "captions": captions}
    if captions is None:
        del wanted["captions"]
    assert stored.left == []
    assert stored.values == wanted


@pytest.mark.parametrize("length", [8, 21, 22, 23, 24, 25, 27, 31])
def test_shorter_rows_of_the_legacy_node_are_prefixes(length):
    row = upscale_row(None, length)
    stored = read_values("SUPIR_Upscale", row)
    assert stored.left == []
    known = [stored.values[n] for n in names("SUPIR_Upscale") if n in stored.values]
    assert [*known[:3], stored.values[SEED_CONTROL], *known[3:]] == row


def test_the_one_day_with_xformers_at_the_end():
    row = upscale_row(None, 28)
    row[-1] = True
    stored = read_values("SUPIR_Upscale", row)
    assert stored.left == [("use_xformers", True)]
    assert "fp8_unet" not in stored.values
    assert stored.values["sampler_tile_stride"] == 512


def test_the_order_of_the_very_first_version_is_named_not_guessed():
    row = ["Q", "x", 1024, 1.0, 45, "prompt"]
    stored = read_values("SUPIR_Upscale", row)
    assert stored.values == {}
    assert stored.left == [("widgets_values", row)]


@pytest.mark.parametrize("kind", sorted(OLD_NODES))
def test_values_stored_by_name_and_nothing_stored(kind):
    given = {**defaults(kind), "surplus": 1}
    stored = read_values(kind, given)
    assert stored.values == defaults(kind)
    assert stored.left == [("surplus", 1)]
    assert read_values(kind, None).values == {}
    assert read_values(kind, "text").left == [("widgets_values", "text")]


@pytest.mark.parametrize("kind", sorted(OLD_NODES))
@pytest.mark.parametrize("odd", [[], {}, None, [[]], float("inf")])
def test_odd_values_never_stop_the_reading(kind, odd):
    for length in range(40):
        read_values(kind, [odd] * length)
