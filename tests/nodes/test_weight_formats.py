"""Weights of every kind, for MODEL and SUPIR: fp8, half precisions mixed, packed layers, wrappers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.host

FP8 = torch.float8_e4m3fn


def latent(height=8, width=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(1, 4, height, width, generator=g)}


def run(demo, **changes):
    control = latent()
    args = {"steps": 2, "control": control, "center": control, "cfg_start": 2.0, "cfg_end": 3.0}
    return demo.run_latent(**{**args, "restore_cfg": 0.5, **changes})


def apart(a, b):
    """Distance relative to the size of b."""
    return float((a - b).norm() / b.norm())


def build_model(dtype, cast=None, operations=None, weights=None):
    """The demo MODEL with its UNet stored in a dtype, computing in ``cast``."""
    import comfy.model_patcher
    import comfy.supported_models
    from supir_xpu.supir import demo_model

    config = comfy.supported_models.SDXL(dict(demo_model.UNET_CONFIG))
    config.unet_config["dtype"] = dtype
    config.set_inference_dtype(dtype, cast)
    config.custom_operations = operations
    model = config.get_model({}, device="cpu")
    if weights is not None:
        model.diffusion_model.load_state_dict({k: v.to(dtype) for k, v in weights.items()})
    cpu = torch.device("cpu")
    return comfy.model_patcher.CoreModelPatcher(model, load_device=cpu, offload_device=cpu)


@pytest.fixture
def unet_weights(demo):
    from supir_xpu.supir import demo_model

    return demo_model.state(demo.model.model.diffusion_model.state_dict(), "demo.unet.")


def test_fp8_model_is_the_model_with_rounded_weights(demo, unet_weights):
    rounded = {k: v.to(FP8).float() for k, v in unet_weights.items()}
    want = run(demo, model=build_model(torch.float32, weights=rounded))
    model = build_model(FP8, torch.float32, weights=unet_weights)
    stored = {p.dtype for p in model.model.diffusion_model.parameters()}
    assert stored == {FP8}
    got = run(demo, model=model)
    assert torch.equal(got, want)
    plain = run(demo)
    assert 1e-3 < apart(got, plain) < 0.5
    assert {p.dtype for p in model.model.diffusion_model.parameters()} == {FP8}


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float32, 0.0)]
)
def test_model_computing_in_any_float_dtype(demo, unet_weights, dtype, limit):
    got = run(demo, model=build_model(dtype, weights=unet_weights))
    assert torch.isfinite(got).all()
    assert apart(got, run(demo)) <= limit
    off = run(demo, model=build_model(dtype, weights=unet_weights), control_start=0, control_end=0)
    assert apart(off, got) > 2 * limit, "SUPIR matters more than the rounding"


def supir_of(tensors, tmp_path, name="one.safetensors"):
    from supir_xpu.nodes.load import load_supir

    save_file(tensors, tmp_path / name)
    return load_supir(str(tmp_path / name))


@pytest.fixture
def supir_tensors():
    from supir_xpu.nodes.demo import demo_supir_tensors

    return demo_supir_tensors()


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_fp8_supir_file_is_the_file_with_rounded_weights(demo, supir_tensors, tmp_path, dtype):
    small = supir_of({k: v.to(dtype) for k, v in supir_tensors.items()}, tmp_path)
    assert {p.dtype for p in small.patcher.model.parameters()} == {dtype}
    rounded = {k: v.to(dtype).half() for k, v in supir_tensors.items()}
    want = run(demo, supir=supir_of(rounded, tmp_path, "rounded.safetensors"))
    got = run(demo, supir=small)
    assert torch.equal(got, want)
    assert 1e-4 < apart(got, run(demo)) < 0.5
    stage1, control, center = demo.first_stage(demo.vae, small, demo.image, 1.0).result
    assert all(torch.isfinite(one["samples"]).all() for one in (control, center))
    assert apart(stage1, demo.stage1) < 0.5


def test_supir_file_of_mixed_dtypes(demo, supir_tensors, tmp_path):
    kinds = [torch.float16, torch.bfloat16, torch.float32, FP8]
    mixed = {k: v.to(kinds[i % 4]) for i, (k, v) in enumerate(sorted(supir_tensors.items()))}
    got = run(demo, supir=supir_of(mixed, tmp_path))
    rounded = {k: v.float() for k, v in mixed.items()}
    assert torch.equal(got, run(demo, supir=supir_of(rounded, tmp_path, "wide.safetensors")))
    assert 1e-4 < apart(got, run(demo)) < 0.5


def test_fp8_everywhere_with_tiles(demo, unet_weights, supir_tensors, tmp_path):
    small = supir_of({k: v.to(FP8) for k, v in supir_tensors.items()}, tmp_path)
    model = build_model(FP8, torch.bfloat16, weights=unet_weights)
    control = latent(8, 12)
    args = {"control": control, "center": control, "tile_px": 64, "tile_overlap_px": 16}
    got = run(demo, **args, model=model, supir=small)
    assert torch.isfinite(got).all()
    assert apart(got, run(demo, **args)) < 0.7


def packed_operations():
    """Layers as a pack for quantised files has them: no ``weight`` to read, unpacked in forward."""
    import comfy.ops

    class Packed(torch.nn.Module):
        def __init__(self, shape, bias):
            super().__init__()
            self.shape, self.has_bias = shape, bias

        def pack(self, layer):
            self.register_buffer("packed", layer.weight.detach().float().view(torch.uint8))
            bias = layer.bias.detach().float() if self.has_bias else None
            self.register_buffer("packed_bias", bias)

        def unpacked(self, x):
            weight = self.packed.view(torch.float32).reshape(self.shape).to(x.dtype)
            return weight, None if self.packed_bias is None else self.packed_bias.to(x.dtype)

        @property
        def weight(self):
            raise AttributeError("packed weights cannot be read")

        bias = weight

    class Linear(Packed):
        def __init__(self, channels, out, bias=True, dtype=None, device=None):
            super().__init__((out, channels), bias)
            self.in_features, self.out_features = channels, out

        def forward(self, x):
            return torch.nn.functional.linear(x, *self.unpacked(x))

    class Conv2d(Packed):
        def __init__(self, channels, out, size, stride=1, padding=0, dtype=None, device=None):
            size = size if isinstance(size, int) else size[0]
            super().__init__((out, channels, size, size), True)
            self.in_channels, self.out_channels = channels, out
            self.kernel_size, self.stride = (size, size), (stride, stride)
            self.options = {"stride": stride, "padding": padding}

        def forward(self, x):
            return torch.nn.functional.conv2d(x, *self.unpacked(x), **self.options)

    return type(
        "Operations", (comfy.ops.manual_cast,), {"Linear": Linear, "Conv2d": Conv2d}
    ), Packed


def pack_from(module, plain, kind):
    """Fill a module of packed layers from the same module of plain ones; returns how many."""
    count = 0
    for name, layer in module.named_modules():
        if isinstance(layer, kind):
            layer.pack(plain.get_submodule(name))
            count += 1
        elif layer._parameters:
            layer.load_state_dict(plain.get_submodule(name).state_dict())
    return count


def packed_supir(demo, operations, kind):
    from dataclasses import replace

    import comfy.model_patcher
    from supir_xpu.supir.injection import SupirNets

    nets = SupirNets(demo.supir.dims, operations=operations, dtype=torch.float32, device="cpu")
    assert pack_from(nets, demo.supir.patcher.model, kind) > 100
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.CoreModelPatcher(nets, load_device=cpu, offload_device=cpu)
    return replace(demo.supir, patcher=patcher)


def test_packed_layers_on_model_and_supir(demo, unet_weights):
    operations, kind = packed_operations()
    model = build_model(torch.float32, operations=operations)
    plain = build_model(torch.float32, weights=unet_weights)
    unet = model.model.diffusion_model
    assert pack_from(unet, plain.model.diffusion_model, kind) > 100
    assert not hasattr(unet.input_blocks[0][0], "weight")
    supir = packed_supir(demo, operations, kind)
    assert not hasattr(supir.patcher.model.project_modules[0].zero_conv, "weight")
    want = run(demo)
    assert torch.equal(run(demo, model=model), want)
    assert torch.equal(run(demo, supir=supir), want)
    assert torch.equal(run(demo, model=model, supir=supir), want)
    unet.middle_block[0].in_layers[2].packed.zero_()
    assert apart(run(demo, model=model, supir=supir), want) > 1e-3
    supir.patcher.model.project_modules[0].zero_add.packed_bias.add_(1.0)
    assert apart(run(demo, supir=supir), want) > 1e-3


class Outer(torch.nn.Module):
    """A pack's wrapper around the whole UNet, as compilers and profilers put one."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)


def test_wrapped_unet(demo):
    model = demo.model.clone()
    outer = Outer(demo.model.model.diffusion_model)
    model.add_object_patch("diffusion_model", outer)
    assert torch.equal(run(demo, model=model), run(demo))
    assert outer.calls == 2
