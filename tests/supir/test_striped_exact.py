"""The striped VAE equals the untiled network, whatever the size, workspace and precision."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from supir_xpu.supir import striped
from supir_xpu.supir.errors import ShapeError
from supir_xpu.supir.striped import layers

pytestmark = pytest.mark.host
MIB = striped.MIB


def fill(net, seed: int):
    """Seeded random weights that keep activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in net.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1:
            value.copy_(noise / value[0].numel() ** 0.5)
        else:
            scale = 0.2 if "norm" in name else 0.1
            value.copy_(noise * scale + ("norm" in name and name.endswith("weight")))
    return net.eval()


def build(kind: str, ch_mult=(1, 2, 4, 4), blocks=2, **extra):
    from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder

    config = {"ch": 32, "out_ch": 3, "ch_mult": ch_mult, "num_res_blocks": blocks, "z_channels": 4}
    config |= {"attn_resolutions": [], "in_channels": 3, "resolution": 256} | extra
    return fill((Encoder if kind == "encode" else Decoder)(**config), seed=3)


@pytest.fixture(scope="module")
def nets():
    """(kind, narrow?) -> network of 32 channels; narrow and thin ones are smaller throughout."""
    with torch.inference_mode():
        widths = {False: ((1, 2, 4, 4), 2), True: ((1, 1, 2, 2), 1), "thin": ((1, 1, 1, 1), 1)}
        return {
            (kind, narrow): build(kind, *width)
            for kind in ("encode", "decode")
            for narrow, width in widths.items()
        }


class Lender:
    """Lends weights and keeps the books."""

    def __init__(self) -> None:
        self.lent: Counter[int] = Counter()
        self.open = 0

    @contextmanager
    def __call__(self, module, like):
        self.lent[id(module)] += 1
        self.open += 1
        try:
            yield module.weight.to(like), module.bias.to(like)
        finally:
            self.open -= 1


def picture(kind: str, height: int, width: int, batch: int = 1, dtype=torch.float32):
    """Noise whose strength changes over the picture, so that tile statistics would show."""
    generator = torch.Generator().manual_seed(height * 7 + width)
    channels, h, w = (3, height, width) if kind == "encode" else (4, height // 8, width // 8)
    x = torch.randn(batch, channels, h, w, generator=generator)
    ramp = torch.linspace(0.1, 2, h)[:, None] * torch.linspace(0.1, 2, w)
    return (x * ramp + torch.arange(batch)[:, None, None, None]).to(dtype)


def run(kind, net, x, workspace, **extra):
    return getattr(striped, kind)(net, x, striped.StripeOptions(int(workspace), Lender(), **extra))


def assert_exact(found, reference):
    limit = 2e-5 * max(1.0, reference.std(correction=0).item())
    assert found.shape == reference.shape
    assert (found - reference).abs().max().item() <= limit


def rms(x, reference):
    return (x.float() - reference).square().mean().sqrt().item()


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["encode", "decode"])
@pytest.mark.parametrize(
    ("size", "narrow", "mibs"),
    [
        ((8, 8), False, (0.05, 1, 1024)),
        ((8, 4000), False, (1, 4)),
        ((31, 2000), False, (1, 16, 1024)),
        ((120, 96), False, (0.25, 1, 3, 1024)),
        ((1001, 777), "thin", (6,)),
        ((1024, 1024), "thin", (32,)),
    ],
)
def test_equals_the_untiled_network(nets, kind, size, narrow, mibs):
    net, x = nets[kind, narrow], picture(kind, *size)
    reference = net(x)
    for mib in mibs:
        assert_exact(run(kind, net, x, mib * MIB), reference)


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_every_count_of_stripes(nets, kind):
    net, x = nets[kind, True], picture(kind, 88, 48)
    reference, steps = net(x), striped.describe(net)
    counts = set()
    for workspace in (int(1.25**n) for n in range(36, 75)):
        plan = striped.plan_steps(steps, *x.shape[2:], striped.Limits(workspace, 4))
        if max(plan.stripes) not in counts:
            counts.add(max(plan.stripes))
            assert_exact(run(kind, net, x, workspace), reference)
    assert {1, 2, 3, 11, 22} <= counts


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_whole_network_in_the_workspace_is_bit_identical(nets, kind):
    net, x = nets[kind, False], picture(kind, 64, 80)
    assert torch.equal(run(kind, net, x, 1024 * MIB), net(x))


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_polyphase_and_spilling_change_no_result(nets, kind):
    net, x = nets[kind, False], picture(kind, 104, 72)
    reference = net(x)
    for extra in (
        {"polyphase": True},
        {"store_budget_bytes": 0},
        {"store_budget_bytes": MIB, "polyphase": True},
        {"attention": lambda q, k, v: layers.attend(q, k, v, None)},
    ):
        assert_exact(run(kind, net, x, MIB, **extra), reference)


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_batch_items_are_independent(nets, kind):
    net, x = nets[kind, False], picture(kind, 40, 56, batch=2)
    both = run(kind, net, x, MIB / 4)
    assert_exact(both, net(x))
    assert torch.equal(both[1:], run(kind, net, x[1:], MIB / 4))


@pytest.mark.parametrize("kind", ["encode", "decode"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 50.0])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_flat_and_far_from_zero(nets, kind, value, noise):
    net, x = nets[kind, True], picture(kind, 64, 40) * noise + value
    assert_exact(run(kind, net, x, MIB / 4), net(x))


@pytest.mark.parametrize("kind", ["encode", "decode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_close_to_fp32_as_untiled(kind, dtype):
    net, x = build(kind), picture(kind, 96, 64)
    reference = net(x)
    net, x = net.to(dtype), x.to(dtype)
    limit = 1.1 * rms(net(x), reference)
    for mib in (0.25, 1, 4):
        found = run(kind, net, x, mib * MIB)
        assert found.dtype == dtype
        assert rms(found, reference) <= limit


def test_attention_in_pieces_equals_attention_at_once(monkeypatch):
    q, k, v = torch.randn(3, 1, 1, 97, 32).unbind()
    whole = layers.attend(q, k, v, None)
    seen = []
    monkeypatch.setattr("supir_xpu.supir.striped.sweeps.MAX_SCORES", 97 * 10)
    pieces = layers.attend(q, k, v, lambda: seen.append(1))
    assert len(seen) == 10
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


def test_phase_kernel_is_the_doubled_convolution():
    x, kernel = torch.randn(1, 3, 5, 7), torch.randn(2, 3, 3, 3)
    wanted = torch.nn.functional.conv2d(
        x.repeat_interleave(2, 2).repeat_interleave(2, 3), kernel, padding=1
    )
    phases = torch.nn.functional.conv2d(x, layers.phase_kernel(kernel), padding=1)
    for phase in range(4):
        down, right = divmod(phase, 2)
        part = phases[:, 2 * phase : 2 * phase + 2, down : down + 5, right : right + 7]
        torch.testing.assert_close(part, wanted[:, :, down::2, right::2], rtol=1e-4, atol=1e-5)


def test_tanh_output_and_attention_in_the_levels():
    net = build("decode", (1, 2), 1, tanh_out=True)
    x = picture("decode", 96, 128)
    assert_exact(run("decode", net, x, MIB / 2), net(x))
    net = build("encode", (1, 2), 1, attn_resolutions=[128])
    assert len(net.down[1].attn) == 1
    x = picture("encode", 48, 40)
    assert striped.recognise(net) is None
    assert_exact(run("encode", net, x, MIB / 2), net(x))


# ---- the module is read, never changed ----------------------------------------------------


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_every_layer_is_borrowed_once(nets, kind):
    net, x = nets[kind, False], picture(kind, 64, 64)
    lender = Lender()
    options = striped.StripeOptions(16384, lender)
    getattr(striped, kind)(net, x, options)
    layers_of = [id(m) for m in net.modules() if getattr(m, "weight", None) is not None]
    assert lender.lent == Counter(layers_of)  # small enough a workspace that nothing ran natively
    assert lender.open == 0


@pytest.mark.parametrize("kind", ["encode", "decode"])
@pytest.mark.parametrize("how", ["check_cancel", "tick", "attention"])
def test_a_stop_at_any_stripe_leaves_the_module_alone(nets, kind, how):
    net, x = nets[kind, True], picture(kind, 24, 16)
    before = {name: dict(vars(m)) for name, m in net.named_modules()}
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    lender, calls = Lender(), 0
    stop_at = 0

    def stop(*tensors):
        nonlocal calls
        calls += 1
        if calls > stop_at:
            raise InterruptedError
        return tensors[0] if how == "attention" else None

    options = replace(striped.StripeOptions(16384, lender), **{how: stop})
    while True:
        calls = 0
        try:
            getattr(striped, kind)(net, x, options)
            break
        except InterruptedError:
            assert lender.open == 0
            stop_at += 1
    steps = striped.describe(net)
    plan = striped.plan_steps(steps, *x.shape[2:], striped.limits_of(options, x.dtype))
    if how == "attention":
        assert stop_at >= 1
    else:
        assert stop_at >= plan.ticks > 30
    assert {name: dict(vars(m)) for name, m in net.named_modules()} == before
    assert all(torch.equal(weights[n], v) for n, v in net.state_dict().items())
    assert_exact(run(kind, net, x, 16384), net(x))


# ---- recognising --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_describe_agrees_with_the_configuration(nets, kind):
    layout = striped.KLLayout(ch=32)
    steps = layout.encoder_steps() if kind == "encode" else layout.decoder_steps()
    assert striped.describe(nets[kind, False]) == steps
    assert striped.recognise(nets[kind, False]) is None


def _subclass(net):
    net.__class__ = type("Patched", (type(net),), {})


def _other_block(net):
    net.mid.block_1 = torch.nn.Identity()


CHANGES = {
    "is not ComfyUI's KL": _subclass,
    "mid.block_1 is a Identity": _other_block,
    "forward of mid.block_2": lambda net: setattr(net.mid.block_2, "forward", lambda x, t: x),
    "carries a hook": lambda net: net.conv_out.register_forward_hook(lambda *a: None),
    "attention function": lambda net: setattr(net.mid.attn_1, "optimized_attention", max),
    "another shape": lambda net: setattr(net.conv_in, "stride", (2, 2)),
    "video frames": lambda net: setattr(net, "carried", True),
    "not a group norm": lambda net: setattr(net, "norm_out", torch.nn.Identity()),
    "time embedding": lambda net: setattr(net.mid.block_1, "use_conv_shortcut", True),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_changed_network_is_refused_with_the_reason(reason):
    net = build("decode", (1, 2), 1)
    assert striped.recognise(net) is None
    CHANGES[reason](net)
    assert reason in striped.recognise(net)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("up.1.upsample", {"scale_factor": 3.0}, "double"),
        ("up.1.upsample", {"with_conv": False}, "double"),
        ("up.1.upsample", {"__class__": torch.nn.Module}, "Module"),
    ],
)
def test_a_changed_upsampling_is_refused(part, change, reason):
    net = build("decode", (1, 2), 1)
    for name, value in change.items():
        setattr(net.get_submodule(part), name, value)
    assert reason in striped.recognise(net)


def test_averaging_downsampling_is_refused():
    net = build("encode", (1, 2), 1)
    net.down[0].downsample.with_conv = False
    assert "averages" in striped.recognise(net)


def test_wrong_shapes_are_named(nets):
    with pytest.raises(ShapeError, match=r"\(1, 3, 8, 8\)"):
        run("decode", nets["decode", True], torch.zeros(1, 3, 8, 8), MIB)
