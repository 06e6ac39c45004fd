"""The trained demo model: its file, and that each part of the pipeline does what it is for."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("trained")]
ROOT = Path(__file__).resolve().parents[2]
SIDE = 96


def tool(name):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def to_image(picture):
    return torch.from_numpy(picture.astype(np.float32) / 255.0)[None]


def to_picture(image):
    return (image[0].numpy() * 255.0).round().clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def demo(trained):
    return trained


@pytest.fixture(scope="module")
def case(demo):
    """A crop of the demo's photograph, which is not among the training data, damaged and encoded."""
    degrade = tool("demo_degrade")
    with Image.open(ROOT / "tools" / "photo" / "chelsea.jpg") as photo:
        clean = np.asarray(photo.convert("RGB").crop((150, 90, 150 + SIDE, 90 + SIDE)))
    damaged = degrade.damage(
        clean, np.random.default_rng(5), blur=0.8, factor=1.0, noise=26.0, grey=False, quality=40
    )
    with torch.inference_mode():
        image = to_image(damaged)
        stage1, control, center = demo.first_stage(demo.vae, demo.supir, image, 1.0).result
    settings = {
        "control": control,
        "center": center,
        "steps": 8,
        "cfg_start": 1.0,
        "cfg_end": 1.0,
        "control_end": 1.0,
        "restore_cfg": 0.25,
    }

    class Case:
        """The pictures, and sampling with the demo workflow's kind of settings."""

        def __init__(self):
            self.clean, self.damaged, self.image = clean, damaged, image
            self.stage1, self.control, self.center = stage1, control, center

        def sample(self, **changes):
            return demo.run(**{**settings, **changes}).result[0]

        def restore(self, **changes):
            (decoded,) = demo.decode(demo.vae, self.sample(**changes)).result
            return decoded

    return Case()


def psnr(a, b):
    return tool("demo_metrics").psnr(a, b)


def published():
    from supir_xpu.supir import demo_model

    return demo_model.read_file()


def test_file_is_small_and_holds_eight_bit_weights():
    from supir_xpu.supir import demo_model

    assert demo_model.WEIGHTS_FILE.stat().st_size <= 12_000_000
    for key, value in published().items():
        wide = value.ndim >= 2
        assert value.dtype == (torch.int8 if wide else torch.float16), key
        assert wide == (key + demo_model.SCALE in published()), key
        assert bool(torch.isfinite(value.float()).all()), key


def test_every_tensor_of_the_file_is_used_and_none_is_missing(demo):
    from supir_xpu.supir import demo_model

    nets = demo.supir.patcher.model
    parts = {
        "demo.vae.": demo.vae.first_stage_model.state_dict(),
        "demo.unet.": demo.model.model.diffusion_model.state_dict(),
        "demo.model.control_model.": nets.control_model.state_dict(),
        "demo.model.diffusion_model.project_modules.": nets.project_modules.state_dict(),
        "demo.first_stage_model.denoise_encoder.": demo.supir.denoise_encoder,
    }
    used = {prefix + key for prefix, part in parts.items() for key in part}
    names = {key for key in published() if not key.endswith(demo_model.SCALE)}
    assert used == names


def test_quantised_weights_are_within_half_a_level():
    from supir_xpu.supir import demo_model

    weights = {"a": torch.randn(5, 3, 3, 3), "b": torch.randn(7), "zero": torch.zeros(2, 4)}
    stored = demo_model.quantise(weights)
    scale = stored["a.scale"].float().view(5, 1, 1, 1)
    off = (stored["a"].float() * scale - weights["a"]).abs()
    assert bool((off <= scale * 0.51 + weights["a"].abs() * 1e-3).all())
    assert not stored["zero"].any()
    assert torch.equal(stored["b"], weights["b"].half())


def test_damaged_file_is_refused(tmp_path):
    from supir_xpu.supir import demo_model
    from supir_xpu.supir.errors import CheckpointError

    path = tmp_path / "demo.safetensors"
    content = bytearray(demo_model.WEIGHTS_FILE.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged.*Install the pack again"):
        demo_model.read_file.__wrapped__(path)
    path.write_bytes(content[:1000])
    with pytest.raises(CheckpointError, match="1,000 bytes"):
        demo_model.read_file.__wrapped__(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        demo_model.read_file.__wrapped__(tmp_path / "nowhere.safetensors")


def test_weights_of_other_networks_are_refused():
    from supir_xpu.supir import demo_model
    from supir_xpu.supir.errors import CheckpointError

    shapes = {
        key.removeprefix("demo.unet."): value
        for key, value in published().items()
        if key.startswith("demo.unet.") and not key.endswith(demo_model.SCALE)
    }
    assert demo_model.state(shapes, "demo.unet.").keys() == shapes.keys()
    for wrong in (
        {**shapes, "more.weight": torch.zeros(1)},
        {key: value for key, value in shapes.items() if key != "out.2.bias"},
        {**shapes, "out.2.bias": torch.zeros(5)},
    ):
        with pytest.raises(CheckpointError, match="1 tensors behind demo.unet."):
            demo_model.state(wrong, "demo.unet.")


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """ComfyUI's temp folder, one of this test's own."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    return tmp_path / "temp"


def test_damaged_temp_file_is_written_again(temp):
    from supir_xpu.nodes.demo import demo_supir_path

    path = Path(demo_supir_path())
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    assert demo_supir_path() == str(path)
    assert path.read_bytes() == good
    path.write_bytes(good[:5000])
    demo_supir_path()
    assert path.read_bytes() == good
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_undamaged_temp_file_is_left_alone(temp):
    from supir_xpu.nodes.demo import demo_supir_path

    path = Path(demo_supir_path())
    before = path.stat().st_mtime_ns, path.stat().st_ino
    demo_supir_path()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


@pytest.mark.parametrize("blocked", ["temp", "temp/supir_xpu"])
def test_file_in_place_of_the_temp_folder_is_reported(temp, blocked):
    from supir_xpu.nodes.demo import demo_supir_path
    from supir_xpu.supir.errors import CheckpointError

    path = temp.parent / blocked
    path.parent.mkdir(exist_ok=True)
    path.write_text("a file", encoding="utf-8")
    with pytest.raises(CheckpointError, match="temp folder.*--temp-directory"):
        demo_supir_path()


def test_temp_file_in_the_way_of_a_folder_is_reported(temp):
    from supir_xpu.nodes import demo
    from supir_xpu.supir.errors import CheckpointError

    (temp / "supir_xpu" / demo.FILE_NAME).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        demo.demo_supir_path()
    shutil.rmtree(temp)


def test_restored_picture_is_closer_to_the_original(demo, case):
    (fixed,) = demo.color_fix(case.restore(), case.stage1, "wavelet").result
    before = psnr(case.damaged, case.clean)
    assert psnr(to_picture(fixed), case.clean) > before + 1.0
    assert psnr(to_picture(case.stage1), case.clean) > before + 1.0


def test_small_restore_cfg_pulls_harder_to_the_first_stage(case):
    center = case.center["samples"]
    off = [
        float((case.sample(restore_cfg=r)["samples"] - center).square().mean())
        for r in (0.25, 4.0, -1.0)
    ]
    assert off[0] < 0.8 * off[1] < off[2]


def test_without_control_the_input_is_not_followed(case):
    """Text alone says nothing of the picture: what comes out is another picture."""
    free = {"restore_cfg": -1.0}
    led = case.restore(**free)
    alone = case.restore(**free, control_start=0.0, control_end=0.0)
    clean = to_image(case.clean)
    assert float((led - clean).square().mean()) < 0.3 * float((alone - clean).square().mean())


def test_prompt_changes_the_picture(demo, case):
    prompts = demo.condition([demo.clip], ["oil painting of a ship"], ["dog"]).result
    other = case.sample(positive=prompts[0], negative=prompts[1], cfg_start=4.0, cfg_end=4.0)
    same = case.sample(cfg_start=4.0, cfg_end=4.0)
    assert float((other["samples"] - same["samples"]).abs().mean()) > 1e-3


def test_color_fix_brings_the_mean_colour_of_its_reference(demo, case):
    restored = case.restore()
    reference = (case.image * torch.tensor([0.7, 1.0, 0.9]) + 0.1).clamp(0.0, 1.0)
    (fixed,) = demo.color_fix(restored, reference, "wavelet").result

    def distance(image):
        return float((image.mean((1, 2)) - reference.mean((1, 2))).abs().max())

    assert distance(fixed) < 0.02 < distance(restored)


def test_tiled_sampling_stays_close_to_untiled(case):
    whole = case.restore(tile_px=-1)
    tiled = case.restore(tile_px=64, tile_overlap_px=32)
    assert not torch.equal(whole, tiled)
    assert psnr(to_picture(tiled), to_picture(whole)) > 27.0


def test_stripes_keep_the_colours_that_tiles_of_the_host_shift(demo, case):
    latent = case.center["samples"]
    want = demo.vae.decode(latent)[:, :SIDE, :SIDE]
    tiled = demo.vae.decode_tiled(latent, tile_x=12, tile_y=12, overlap=3)
    (ours,) = demo.decode(demo.vae, case.center).result

    def drift(image):
        squares = (image[:, :SIDE, :SIDE] - want).unfold(1, 32, 32).unfold(2, 32, 32).mean((-1, -2))
        return float(squares.abs().max())

    assert drift(ours) < 1e-4
    assert drift(tiled) > 20.0 * drift(ours)
    assert drift(tiled) > 1.0 / 255.0


def test_activations_fit_half_precision(demo, case):
    """Nothing inside the networks comes near the largest number of 16 bits, 65504."""
    largest = []

    def hook(module, inputs, output):
        if isinstance(output, torch.Tensor):
            largest.append(float(output.abs().max()))

    nets = demo.vae.first_stage_model, demo.model.model.diffusion_model, demo.supir.patcher.model
    handles = [m.register_forward_hook(hook) for net in nets for m in net.modules()]
    try:
        demo.vae.decode(demo.vae.encode(case.image))
        case.sample(steps=2)
    finally:
        for handle in handles:
            handle.remove()
    assert len(largest) > 200
    assert max(largest) < 16_000.0
