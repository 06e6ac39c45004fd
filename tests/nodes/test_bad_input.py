"""Unusable input: a message that says what, why and what to do, and a correct run after it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.host


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty set of model folders; returns the ``supir`` folder."""
    import folder_paths

    folders = {}
    for name in ("supir", "model_patches", "checkpoints"):
        folder = tmp_path / name
        folder.mkdir()
        folders[name] = ([str(folder)], {".safetensors", ".ckpt"})
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", folders)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path / "supir"


@pytest.fixture
def supir_tensors():
    from supir_xpu.nodes.demo import demo_supir_tensors

    return demo_supir_tensors()


def load(name):
    from supir_xpu.nodes.load import LoadSUPIR

    return LoadSUPIR.execute(name).result[0]


def message_of(name, *parts):
    from supir_xpu.nodes.load import LoadSUPIR
    from supir_xpu.supir.errors import CheckpointError

    with pytest.raises(CheckpointError) as caught:
        load(name)
    for part in parts:
        assert part in str(caught.value), f"{part!r} not in: {caught.value}"
    if not name.endswith(".ckpt"):
        assert LoadSUPIR.validate_inputs(name) == str(caught.value)
    return str(caught.value)


def test_a_correct_file_loads_from_every_folder_and_by_any_spelling(models, supir_tensors):
    from supir_xpu.nodes.load import list_supir_files

    sub = models.parent / "checkpoints" / "SUPIR"
    sub.mkdir()
    save_file(supir_tensors, sub / "SUPIR-v0Q_fp16.safetensors")
    assert list_supir_files() == ["SUPIR/SUPIR-v0Q_fp16.safetensors"]
    for name in (
        "SUPIR/SUPIR-v0Q_fp16.safetensors",
        "SUPIR\\SUPIR-v0Q_fp16.safetensors",
        "supir-v0q_FP16.safetensors",
        "elsewhere/SUPIR-v0Q_fp16.safetensors",
    ):
        assert load(name).dims.control.model_channels == 64


def test_no_file_on_disk_says_which_where_and_from_where(models):
    from supir_xpu.nodes.load import LoadSUPIR, list_supir_files

    assert list_supir_files() == ["no SUPIR file found"]
    for name in ("no SUPIR file found", "SUPIR-v0Q.safetensors"):
        answer = LoadSUPIR.validate_inputs(name)
        for part in ("SUPIR-v0Q_fp16.safetensors", "models/supir", "Kijai/SUPIR_pruned"):
            assert part in answer


def sd15():
    return {
        "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(320, 4, 3, 3),
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(
            320, 768
        ),
        "model.diffusion_model.time_embed.0.weight": torch.zeros(1280, 320),
        "model.diffusion_model.output_blocks.0.0.in_layers.0.weight": torch.zeros(2560),
        "cond_stage_model.transformer.text_model.final_layer_norm.weight": torch.zeros(768),
        "first_stage_model.decoder.conv_in.weight": torch.zeros(512, 4, 3, 3),
    }


def flux():
    return {
        "single_blocks.0.linear1.weight": torch.zeros(16, 8),
        "double_blocks.0.img_attn.qkv.weight": torch.zeros(9216, 3072),
        "img_in.weight": torch.zeros(3072, 64),
        "txt_in.weight": torch.zeros(3072, 4096),
    }


def vae():
    return {
        "encoder.conv_in.weight": torch.zeros(128, 3, 3, 3),
        "decoder.conv_in.weight": torch.zeros(512, 4, 3, 3),
        "quant_conv.weight": torch.zeros(8, 8, 1, 1),
        "decoder.conv_out.weight": torch.zeros(3, 128, 3, 3),
    }


def lora():
    return {
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": torch.zeros(4, 320),
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": torch.zeros(320, 4),
        "lora_unet_down_blocks_0_attentions_0_proj_in.alpha": torch.zeros(()),
    }


@pytest.mark.parametrize(
    ("tensors", "says"),
    [(sd15, "Stable Diffusion 1.x"), (flux, "Flux"), (vae, "VAE"), (lora, "LoRA")],
)
def test_a_file_of_another_kind_is_named(models, tensors, says):
    save_file(tensors(), models / "wrong.safetensors")
    message_of("wrong.safetensors", "wrong.safetensors", says)


def test_missing_keys_are_counted_and_the_first_named(models, supir_tensors):
    gone = [k for k in supir_tensors if k.endswith("zero_add.weight")][:3]
    kept = {k: v for k, v in supir_tensors.items() if k not in gone}
    save_file(kept, models / "short.safetensors")
    text = message_of("short.safetensors", "3", "zero_add.weight")
    assert "supir" in text.lower()


def test_a_truncated_file_is_named_with_its_numbers(models, supir_tensors):
    path = models / "cut.safetensors"
    save_file(supir_tensors, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    message_of("cut.safetensors", "cut.safetensors", "5,880,784 are there", "Download")
    path.write_bytes(whole)
    assert load("cut.safetensors").dims.control.model_channels == 64


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_code_in_a_pickle_never_runs(models, tmp_path):
    mark = tmp_path / "it ran"
    torch.save(
        {"state_dict": {"a": torch.zeros(1)}, "bomb": Bomb(mark)}, models / "supir-evil.ckpt"
    )
    message_of("supir-evil.ckpt", "supir-evil.ckpt", "safetensors")
    (models / "supir-raw.ckpt").write_bytes(pickle.dumps(Bomb(mark)))
    message_of("supir-raw.ckpt", "supir-raw.ckpt")
    assert not mark.exists()


def test_a_clean_pickle_loads(models, supir_tensors):
    torch.save({"state_dict": supir_tensors}, models / "SUPIR-v0Q.ckpt")
    assert load("SUPIR-v0Q.ckpt").dims.control.model_channels == 64


def test_a_file_that_changed_on_disk_is_looked_at_again(models, supir_tensors):
    from supir_xpu.nodes.load import LoadSUPIR, list_supir_files

    path = models / "one.safetensors"
    save_file(vae(), path)
    assert list_supir_files() == ["no SUPIR file found"]
    before = LoadSUPIR.fingerprint_inputs("one.safetensors")
    save_file(supir_tensors, path)
    assert list_supir_files() == ["one.safetensors"]
    assert LoadSUPIR.fingerprint_inputs("one.safetensors") != before


class FakeBase:
    """What check_base looks at, with one thing changed."""

    def __init__(
        self, real, kind="SDXL", channels=4, prediction="EPS", sigma_max=None, classes=None
    ):
        unet = real.model.diffusion_model
        config = {**real.model.model_config.unet_config, "in_channels": channels}
        fake_unet = SimpleNamespace(
            input_blocks=unet.input_blocks,
            middle_block=unet.middle_block,
            output_blocks=unet.output_blocks,
            num_classes=classes or unet.num_classes,
        )
        self.model = type(kind, (), {})()
        self.model.model_config = SimpleNamespace(unet_config=config)
        self.model.diffusion_model = fake_unet
        self.model.model_type = SimpleNamespace(name=prediction)
        sampling = real.get_model_object("model_sampling")
        self.sampling = type(sampling)()
        if sigma_max:
            self.sampling.register_buffer("sigmas", sampling.sigmas * sigma_max / 14.6146)

    def get_model_object(self, name):
        assert name == "model_sampling"
        return self.sampling


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "SDXLRefiner"}, "refiner"),
        ({"channels": 9}, "inpaint"),
        ({"prediction": "V_PREDICTION"}, "V_PREDICTION"),
        ({"prediction": "EDM"}, "EDM"),
        ({"sigma_max": 120.0}, "120"),
        ({"classes": "none"}, "size conditioning"),
    ],
)
def test_bases_supir_was_not_trained_on_are_refused_by_name(demo, change, says):
    from supir_xpu.supir.errors import ModelError

    with pytest.raises(ModelError, match="SDXL base checkpoint") as caught:
        demo.run(model=FakeBase(demo.model, **change))
    assert says in str(caught.value)


def test_a_distilled_base_is_refused_by_its_depths(demo):
    from supir_xpu.supir.errors import ModelError
    from supir_xpu.supir.layout import BlockDims

    control = demo.supir.dims.control
    blocks = list(control.blocks)
    blocks[-1] = BlockDims("res", 64, 64, 4)
    dims = replace(demo.supir.dims, control=replace(control, blocks=tuple(blocks)))
    with pytest.raises(ModelError, match="SSD-1B"):
        demo.run(supir=replace(demo.supir, dims=dims))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_picture_is_refused_and_counted(demo, value):
    from supir_xpu.supir.errors import ShapeError

    image = torch.rand(3, 20, 20, 3)
    image[1, 3, 4, 0] = value
    with pytest.raises(ShapeError, match=r"image holds NaN or infinite values in 1 of 3"):
        demo.first_stage(demo.vae, demo.supir, image, 1.0)


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (1, 0, 8, 3), (8, 8, 3), (1, 8, 8, 5)])
def test_a_tensor_that_is_no_picture_is_refused(demo, shape):
    from supir_xpu.supir.errors import ShapeError

    with pytest.raises(ShapeError, match="image"):
        demo.first_stage(demo.vae, demo.supir, torch.zeros(shape), 1.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tile_px": 64, "tile_overlap_px": 64}, "tile_overlap_px is 64 and tile_px is 64"),
        ({"tile_px": 4}, "tile_px is 4"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1001}, "steps is 1001"),
        ({"cfg_start": -1.0}, "cfg_start is -1"),
        ({"control_end": float("nan")}, "control_end is nan"),
        ({"restore_cfg": float("nan")}, "restore_cfg is nan"),
    ],
)
def test_settings_that_cannot_work_name_the_input(demo, change, says):
    from supir_xpu.supir.errors import SettingsError

    big = {"samples": torch.zeros(1, 4, 64, 64)}
    with pytest.raises(SettingsError) as caught:
        demo.run(control=big, center=big, **change)
    assert says in str(caught.value)


def test_latents_that_do_not_belong_together_are_refused(demo):
    from supir_xpu.supir.errors import ShapeError

    other = {"samples": torch.zeros(1, 4, 8, 8)}
    with pytest.raises(ShapeError, match="center is .* and control is"):
        demo.run(center=other)
    with pytest.raises(ShapeError, match="control has 16 channels"):
        demo.run(control={"samples": torch.zeros(1, 16, 8, 8)}, center=None)
    with pytest.raises(ShapeError, match="control holds NaN"):
        demo.run(control={"samples": torch.full((1, 4, 8, 8), float("nan"))}, center=None)


def test_captions_that_fit_nothing_name_both_counts(demo):
    from supir_xpu.supir.errors import SettingsError

    positive, _ = demo.condition([demo.clip], ["x"], ["y"], [["a"], ["b", "c"]]).result
    with pytest.raises(SettingsError, match=r"3 captions.*1 picture.*1 tile"):
        demo.run(positive=positive)


def test_area_conditioning_is_refused_before_anything_is_loaded(demo, monkeypatch):
    import comfy.model_management as mm
    from supir_xpu.supir.errors import SettingsError

    def never(*args, **kwargs):
        raise AssertionError("a model moved before the check")

    monkeypatch.setattr(mm, "load_models_gpu", never)
    cond, extra = demo.positive[0]
    with pytest.raises(SettingsError, match="positive is limited to an area"):
        demo.run(positive=[[cond, {**extra, "area": (8, 8, 0, 0)}]])


def test_a_denoise_encoder_of_another_width_is_refused(demo):
    from supir_xpu.supir.errors import CheckpointError

    wrong = {k: v.repeat_interleave(2, 0) for k, v in demo.supir.denoise_encoder.items()}
    with pytest.raises(CheckpointError, match="VAE"):
        demo.first_stage(demo.vae, replace(demo.supir, denoise_encoder=wrong), demo.image, 1.0)


@pytest.mark.parametrize("kind", ["v_prediction", "x0", "lcm"])
def test_a_base_patched_to_another_prediction_is_refused(demo, kind):
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete
    from supir_xpu.supir.errors import ModelError

    node = ModelSamplingDiscrete()
    patched = node.patch(demo.model, kind, False)[0]
    with pytest.raises(ModelError, match="patched to predict"):
        demo.run(model=patched)
    plain = node.patch(demo.model, "eps", False)[0]
    assert torch.isfinite(demo.run_latent(model=plain, steps=1)).all()


@pytest.mark.parametrize("levels", [[1.0, 5.0, 0.0], [14.6, 0.0, 0.0], [5.0, float("nan"), 0.0]])
def test_schedules_that_cannot_be_sampled_are_refused(levels):
    from supir_xpu.supir.errors import SettingsError
    from supir_xpu.supir.sampling import restore_dpmpp_2m, restore_edm

    for sampler in (restore_edm, restore_dpmpp_2m):
        with pytest.raises(SettingsError, match="sigmas is"):
            sampler(lambda x, call: x, torch.zeros(1), torch.tensor(levels), lambda i: 0.0)


def test_a_schedule_that_stays_at_a_level_is_sampled():
    from supir_xpu.supir.sampling import restore_dpmpp_2m

    levels = torch.tensor([14.6, 5.0, 5.0, 1.0, 0.0])
    x = torch.randn(1, 4, 4, 4)
    out = restore_dpmpp_2m(lambda x, call: x * 0.1, x, levels, lambda i: torch.zeros_like(x))
    assert torch.isfinite(out).all()


def test_conditioning_of_another_encoder_is_refused_by_its_width(demo):
    from supir_xpu.supir.errors import ShapeError

    cond, extra = demo.positive[0]
    for wrong, says in (
        ([[cond[..., :32], extra]], "a width of 64"),
        ([[cond, {**extra, "pooled_output": None}]], "pooled output of NoneType"),
        ([], "positive is empty"),
    ):
        with pytest.raises(ShapeError, match=says):
            demo.run(positive=wrong)


def test_integer_weights_are_refused_by_their_dtype(models, supir_tensors):
    save_file({k: v.to(torch.int8) for k, v in supir_tensors.items()}, models / "int8.safetensors")
    assert len(message_of("int8.safetensors", "I8", "fp16 version")) < 400


def test_names_that_differ_in_case_are_two_files_and_a_shared_base_name_is_asked_about(
    models, supir_tensors
):
    from supir_xpu.nodes.load import find_supir_file
    from supir_xpu.supir.errors import CheckpointError

    for folder in ("v0F", "v0Q"):
        (models / folder).mkdir()
        save_file(supir_tensors, models / folder / "SUPIR.safetensors")
    assert find_supir_file("v0Q/SUPIR.safetensors").endswith("SUPIR.safetensors")
    assert "v0Q" in find_supir_file("v0Q\\SUPIR.safetensors")
    with pytest.raises(CheckpointError, match="2 files have its base name"):
        find_supir_file("old/SUPIR.safetensors")


def test_a_correct_run_works_after_every_failure(demo):
    want = demo.run_latent(steps=1)
    broken = torch.full((1, 4, 16, 16), float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        demo.run(control={"samples": broken}, center=None)
    assert torch.equal(demo.run_latent(steps=1), want)
