"""Planning a SUPIR file of any published layout and any size, from names and shapes alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from supir_xpu.supir.checkpoint import plan_supir_file
from supir_xpu.supir.layout import BlockDims, CrossDims, SftDims
from supir_xpu.supir.network_shapes import list_adapters, list_control
from supir_xpu.supir.safetensors_header import read_header

GOLDEN = Path(__file__).resolve().parents[1] / "parity" / "golden"
FULL = ("model.control_model.", "model.diffusion_model.project_modules.")
SHORT = ("control_model.", "project_modules.")
ENCODER = "first_stage_model.denoise_encoder."

# A second, separate description of the networks: a walk through encoder and decoder as they run.


def layer(name, *weight):
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def res_block(p, a, b, emb):
    keys = layer(f"{p}in_layers.0", a) | layer(f"{p}in_layers.2", b, a, 3, 3)
    keys |= layer(f"{p}emb_layers.1", b, emb) | layer(f"{p}out_layers.0", b)
    keys |= layer(f"{p}out_layers.3", b, b, 3, 3)
    return keys if a == b else keys | layer(f"{p}skip_connection", b, a, 1, 1)


def transformer(p, c, depth, context, linear):
    kernel = () if linear else (1, 1)
    keys = layer(f"{p}norm", c) | layer(f"{p}proj_in", c, c, *kernel)
    keys |= layer(f"{p}proj_out", c, c, *kernel)
    for i in range(depth):
        b = f"{p}transformer_blocks.{i}."
        for n, source in ((1, c), (2, context)):
            keys |= {f"{b}attn{n}.to_q.weight": (c, c), f"{b}attn{n}.to_k.weight": (c, source)}
            keys |= {f"{b}attn{n}.to_v.weight": (c, source)} | layer(f"{b}attn{n}.to_out.0", c, c)
            keys |= layer(f"{b}norm{n}", c)
        keys |= layer(f"{b}norm3", c) | layer(f"{b}ff.net.0.proj", 8 * c, c)
        keys |= layer(f"{b}ff.net.2", c, 4 * c)
    return keys


def make_control(
    mc, mult, depths, *, blocks=(2, 2, 2), middle=None, context=48, adm=80, linear=True
):
    """Return the control encoder's shapes, its block dims and the skips' widths."""
    emb = 4 * mc
    keys = layer("input_blocks.0.0", mc, 4, 3, 3) | layer("input_hint_block.0", mc, 4, 3, 3)
    keys |= layer("time_embed.0", emb, mc) | layer("time_embed.2", emb, emb)
    keys |= layer("label_emb.0.0", emb, adm) | layer("label_emb.0.2", emb, emb)
    ch, n, dims, skips = mc, 1, [], [mc]
    for level, m in enumerate(mult):
        for _ in range(blocks[level]):
            keys |= res_block(f"input_blocks.{n}.0.", ch, m * mc, emb)
            dims.append(BlockDims("res", ch, m * mc, depths[level]))
            ch = m * mc
            if depths[level]:
                keys |= transformer(f"input_blocks.{n}.1.", ch, depths[level], context, linear)
            n += 1
            skips.append(ch)
        if level < len(mult) - 1:
            keys |= layer(f"input_blocks.{n}.0.op", ch, ch, 3, 3)
            dims.append(BlockDims("down", ch, ch))
            n += 1
            skips.append(ch)
    keys |= res_block("middle_block.0.", ch, ch, emb) | res_block("middle_block.2.", ch, ch, emb)
    keys |= transformer("middle_block.1.", ch, middle or depths[-1], context, linear)
    return keys, tuple(dims), skips


def make_adapters(mc, mult, skips, *, blocks=(2, 2, 2), hidden=128):
    """Return the adapters' shapes by running the decoder: skips popped, upsampling per level."""
    h, numbered = mult[-1] * mc, []
    stack = list(skips)
    numbered.append(("sft", h, h, 0))
    for level in reversed(range(len(mult))):
        for i in range(blocks[level] + 1):
            skip = stack.pop()
            numbered.append(("sft", skip, skip, h))
            h = mult[level] * mc
            if level and i == blocks[level]:
                numbered.append(("cross", skip, h))
    keys, dims = {}, []
    for i, (kind, c, *rest) in enumerate(reversed(numbered)):
        if kind == "cross":
            q = rest[0]
            keys |= {f"{i}.attn.to_q.weight": (q, q), f"{i}.attn.to_k.weight": (q, c)}
            keys |= {f"{i}.attn.to_v.weight": (q, c)} | layer(f"{i}.attn.to_out.0", q, q)
            keys |= layer(f"{i}.norm1", q) | layer(f"{i}.norm2", c)
            dims.append(CrossDims(q, c))
        else:
            skip, dec = rest
            keys |= layer(f"{i}.mlp_shared.0", hidden, c, 3, 3)
            keys |= layer(f"{i}.zero_conv", skip, c, 1, 1)
            keys |= layer(f"{i}.param_free_norm", skip + dec)
            for part in ("zero_mul", "zero_add"):
                keys |= layer(f"{i}.{part}", skip + dec, hidden, 3, 3)
            dims.append(SftDims(c, skip, dec, hidden))
    return keys, tuple(dims)


def make_encoder(ch=32, mult=(1, 2, 4, 4), blocks=2, z=4):
    keys, width = layer("conv_in", ch, 3, 3, 3), ch

    def res(p, a, b):
        keys = layer(f"{p}norm1", a) | layer(f"{p}conv1", b, a, 3, 3)
        keys |= layer(f"{p}norm2", b) | layer(f"{p}conv2", b, b, 3, 3)
        return keys if a == b else keys | layer(f"{p}nin_shortcut", b, a, 1, 1)

    for level, m in enumerate(mult):
        for i in range(blocks):
            keys |= res(f"down.{level}.block.{i}.", width, m * ch)
            width = m * ch
        if level < len(mult) - 1:
            keys |= layer(f"down.{level}.downsample.conv", width, width, 3, 3)
    keys |= res("mid.block_1.", width, width) | res("mid.block_2.", width, width)
    keys |= layer("mid.attn_1.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        keys |= layer(f"mid.attn_1.{part}", width, width, 1, 1)
    return keys | layer("norm_out", width) | layer("conv_out", 2 * z, width, 3, 3)


def prefixed(prefix, keys):
    return {prefix + key: shape for key, shape in keys.items()}


def make_file(control, adapters, encoder=None, prefixes=FULL):
    keys = prefixed(prefixes[0], control) | prefixed(prefixes[1], adapters)
    return keys | prefixed(ENCODER, encoder or {})


SIZES = {
    "golden 64": {"mc": 64, "mult": (1, 2, 4), "depths": (0, 1, 2)},
    "golden 32": {"mc": 32, "mult": (1, 2, 4), "depths": (0, 1, 2)},
    "flat": {"mc": 64, "mult": (1, 1, 1), "depths": (0, 1, 1)},
    "half flat": {"mc": 32, "mult": (1, 2, 2), "depths": (0, 1, 1)},
    "one block per level": {"mc": 64, "mult": (1, 2, 4), "depths": (0, 1, 2), "blocks": (1, 1, 1)},
    "uneven levels": {"mc": 64, "mult": (1, 1, 3), "depths": (0, 0, 3), "blocks": (1, 3, 2)},
    "two levels": {"mc": 64, "mult": (1, 2), "depths": (0, 2), "blocks": (2, 2)},
    "four levels": {"mc": 64, "mult": (1, 2, 2, 4), "depths": (0, 1, 2, 1), "blocks": (2,) * 4},
    "attention everywhere": {"mc": 64, "mult": (1, 2, 4), "depths": (1, 1, 1)},
    "deeper middle": {"mc": 64, "mult": (1, 2, 4), "depths": (0, 1, 2), "middle": 5},
    "convolution projections": {"mc": 64, "mult": (1, 2, 4), "depths": (0, 1, 2), "linear": False},
    "narrow hidden": {"mc": 64, "mult": (1, 1, 1), "depths": (0, 1, 1), "hidden": 32},
}


def make_network(mc, mult, depths, hidden=128, **options):
    control, blocks, skips = make_control(mc, mult, depths, **options)
    counts = options.get("blocks", (2, 2, 2))
    adapters, dims = make_adapters(mc, mult, skips, blocks=counts, hidden=hidden)
    return control, adapters, blocks, dims


# Published files


@pytest.fixture(scope="module")
def published():
    with gzip.open(GOLDEN / "supir_v0_keys.json.gz", "rt", encoding="utf-8") as file:
        lists = json.load(file)
    return {
        part: {key: tuple(shape) for key, shape in lists[part].items()}
        for part in ("supir", "sdxl_base", "computed_buffers")
    }


def shorten(shapes):
    renames = dict(zip(FULL, SHORT, strict=True))
    for long, short in renames.items():
        shapes = {
            short + key[len(long) :] if key.startswith(long) else key: shape
            for key, shape in shapes.items()
        }
    return shapes


def variant(published, *, short=False, base=False, extra=False, encoder=True):
    shapes = dict(published["supir"])
    if not encoder:
        shapes = {key: shape for key, shape in shapes.items() if not key.startswith(ENCODER)}
    if extra:
        shapes |= {"model.control_model.mask_LQ": (320,), **published["computed_buffers"]}
    if short:
        shapes = shorten(shapes)
    return shapes | (published["sdxl_base"] if base else {})


@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_every_published_file_uses_every_supir_tensor_once(published, short, base, extra, encoder):
    shapes = variant(published, short=short, base=base, extra=extra, encoder=encoder)
    plan = plan_supir_file(shapes, "SUPIR-v0Q.safetensors")
    used = [*plan.control.values(), *plan.adapters.values(), *plan.denoise_encoder.values()]
    supir = variant(published, short=short, encoder=encoder)
    assert sorted(used) == sorted(supir)
    assert sorted([*used, *plan.ignored]) == sorted(shapes)
    assert plan.layout == ("short" if short else "full")
    assert len(plan.denoise_encoder) == (106 if encoder else 0)
    assert len(used) == (1034 if encoder else 928)
    assert plan.control["input_blocks.0.0.weight"].endswith("control_model.input_blocks.0.0.weight")
    assert plan.adapters["0.zero_conv.weight"].endswith("project_modules.0.zero_conv.weight")
    if encoder:
        assert plan.denoise_encoder["conv_in.weight"] == f"{ENCODER}conv_in.weight"


def test_published_dims(published):
    """Numbers from the published config and golden README section 3."""
    dims = plan_supir_file(published["supir"], "SUPIR-v0Q.safetensors").dims
    control = dims.control
    assert (control.model_channels, control.time_embed_dim) == (320, 1280)
    assert (control.in_channels, control.hint_channels) == (4, 4)
    assert (control.context_dim, control.adm_in_channels) == (2048, 2816)
    assert (control.middle_channels, control.middle_depth) == (1280, 10)
    assert control.linear_projection
    assert control.blocks == (
        BlockDims("res", 320, 320),
        BlockDims("res", 320, 320),
        BlockDims("down", 320, 320),
        BlockDims("res", 320, 640, 2),
        BlockDims("res", 640, 640, 2),
        BlockDims("down", 640, 640),
        BlockDims("res", 640, 1280, 10),
        BlockDims("res", 1280, 1280, 10),
    )
    widths = [320] * 4 + [640] * 3 + [1280] * 3
    concat = [320] * 2 + [640] * 3 + [1280] * 4 + [0]
    sfts = [SftDims(w, w, d, 128) for w, d in zip(widths, concat, strict=True)]
    order = (0, 1, 2, 4, 5, 6, 8, 9, 10, 11)
    assert [dims.adapters[i] for i in order] == sfts
    assert dims.adapters[3] == CrossDims(query_channels=640, control_channels=320)
    assert dims.adapters[7] == CrossDims(query_channels=1280, control_channels=640)
    assert len(dims.adapters) == 12


# Any size


@pytest.mark.parametrize("prefixes", [FULL, SHORT], ids=["full", "short"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_any_width_and_depth_is_deduced(size, prefixes):
    control, adapters, blocks, adapter_dims = make_network(**size)
    plan = plan_supir_file(make_file(control, adapters, prefixes=prefixes), "narrow.safetensors")
    assert plan.dims.control.blocks == blocks
    assert plan.dims.adapters == adapter_dims
    assert plan.dims.control.model_channels == size["mc"]
    assert plan.dims.control.middle_depth == size.get("middle", size["depths"][-1])
    assert plan.dims.control.linear_projection == size.get("linear", True)
    assert (plan.dims.control.context_dim, plan.dims.control.adm_in_channels) == (48, 80)
    assert set(plan.control) == set(control)
    assert set(plan.adapters) == set(adapters)
    assert plan.ignored == ()
    assert list_control(plan.dims.control) == control
    assert list_adapters(plan.dims.adapters) == adapters


@pytest.mark.parametrize("case", ["net_b1", "net_b2"])
def test_features_of_the_golden_nets(case):
    """The features the original network put out have the widths we deduce for its config."""
    with safe_open(GOLDEN / f"{case}.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["meta"])["config"]
    header = read_header(GOLDEN / f"{case}.safetensors")
    depths = (0, *config["transformer_depth"][1:])
    control, adapters, _, _ = make_network(
        config["model_channels"], config["channel_mult"], depths, context=config["context_dim"]
    )
    plan = plan_supir_file(make_file(control, adapters), case)
    widths = [header[f"control_{i}"].shape[1] for i in range(10)]
    assert list(plan.dims.control.feature_channels) == widths


def test_a_middle_block_without_transformer():
    control, adapters, _, _ = make_network(**SIZES["flat"])
    control = {k: s for k, s in control.items() if not k.startswith("middle_block.1.")}
    control = {k.replace("middle_block.2.", "middle_block.1."): s for k, s in control.items()}
    plan = plan_supir_file(make_file(control, adapters), "plain.safetensors")
    assert plan.dims.control.middle_depth == 0
    assert set(plan.control) == set(control)


@pytest.mark.parametrize(
    "encoder", [make_encoder(), make_encoder(64, (1, 1, 1), 1), make_encoder(32, (1,), 3)]
)
def test_denoise_encoders_of_any_size(encoder):
    control, adapters, _, _ = make_network(**SIZES["flat"])
    plan = plan_supir_file(make_file(control, adapters, encoder), "with encoder.safetensors")
    assert set(plan.denoise_encoder) == set(encoder)


# Against ComfyUI's own classes, without weights


@pytest.fixture
def operations():
    from comfy.ops import disable_weight_init

    return {"operations": disable_weight_init, "device": "meta", "dtype": torch.float16}


def state_shapes(module):
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


@pytest.mark.host
@pytest.mark.core_supir
@pytest.mark.parametrize("size", ["golden 64", "golden 32", "flat", "half flat"])
def test_comfyui_s_control_encoder_has_the_planned_tensors(operations, size):
    from comfy.ldm.supir.supir_modules import GLVControl

    config = SIZES[size]
    net = GLVControl(
        model_channels=config["mc"],
        channel_mult=config["mult"],
        transformer_depth=config["depths"],
        context_dim=48,
        adm_in_channels=80,
        **operations,
    )
    control, adapters, blocks, _ = make_network(**config)
    assert state_shapes(net) == control
    plan = plan_supir_file(make_file(state_shapes(net), adapters), size)
    assert plan.dims.control.blocks == blocks


@pytest.mark.host
@pytest.mark.core_supir
def test_comfyui_s_whole_supir_model(operations):
    from comfy.ldm.supir.supir_modules import SUPIR

    shapes = state_shapes(SUPIR(**operations))
    plan = plan_supir_file(shapes, "core.safetensors")
    assert plan.layout == "short"
    assert plan.ignored == ()
    assert plan.dims.control.model_channels == 320


@pytest.mark.host
def test_comfyui_s_vae_encoder(operations):
    from comfy.ldm.modules.diffusionmodules.model import Encoder

    net = Encoder(
        ch=32, out_ch=3, ch_mult=(1, 2, 4, 4), num_res_blocks=2, attn_resolutions=[],
        in_channels=3, resolution=256, z_channels=4, double_z=True,
    )  # fmt: skip
    assert state_shapes(net) == make_encoder(32)


@pytest.mark.host
@pytest.mark.parametrize("size", [None, *SIZES])
def test_our_networks_take_exactly_the_planned_tensors(published, operations, size):
    from supir_xpu.supir.adapters import build_adapters
    from supir_xpu.supir.control_net import ControlNet

    shapes = published["supir"] if size is None else make_file(*make_network(**SIZES[size])[:2])
    plan = plan_supir_file(shapes, "any.safetensors")
    control = state_shapes(ControlNet(plan.dims.control, **operations))
    assert control == {name: shapes[key] for name, key in plan.control.items()}
    adapters = state_shapes(build_adapters(plan.dims.adapters, **operations))
    assert adapters == {name: shapes[key] for name, key in plan.adapters.items()}
