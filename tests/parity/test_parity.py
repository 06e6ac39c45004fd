"""Every golden case file found in the golden directory, one test each.

SUPIR_GOLDEN_DIR names another directory; whatever cases it holds are run by their metadata.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from golden_case import assert_close, case_files, kind_of, read_case, read_meta
from supir_xpu.supir import color_fix, denoiser, guidance, sampling, sigmas, tiling

MODULE, LOOP, NET_LOOP = 2e-5, 1e-5, 1e-4


def run_sigmas(case):
    for key, want in case.tensors.items():
        name, _, count = key.partition("_")
        if key == "table_ascending":
            got = sigmas.noise_table()
        else:
            make = {"ddpm": sigmas.ddpm_sigmas, "karras": sigmas.karras_sigmas}[name]
            got = make(int(count))
        assert_close(got, want, LOOP, key)


def run_linear_cfg(case):
    for one in case.meta["settings"]:
        i = one["i"]
        low = one["scale"] if one["scale_min"] is None else one["scale_min"]
        settings = guidance.GuidanceSettings(cfg_start=one["scale"], cfg_end=low)
        uncond, cond = case.tensors["x_uncond_then_cond"].chunk(2)
        level = case.tensors[f"sigma_{i}"]
        scale = [settings.cfg_scale(float(s)) for s in level]
        assert_close(torch.tensor(scale), case.tensors[f"scale_{i}"], LOOP, f"scale_{i}")
        rows = [guidance.guide(u, c, s) for u, c, s in zip(uncond, cond, scale, strict=True)]
        assert_close(torch.stack(rows), case.tensors[f"out_{i}"], LOOP, f"out_{i}")


def run_colorfix(case):
    t = case.tensors
    content, style = t["content"], t["style"]
    computed = {
        "wavelet": lambda: color_fix.wavelet(content, style),
        "adain": lambda: color_fix.adain(content, style),
        "wavelet_high": lambda: content - color_fix.low_frequencies(content),
        "wavelet_low": lambda: color_fix.low_frequencies(content),
    }
    for key, want in t.items():
        if key in ("content", "style"):
            continue
        if key.startswith("blur_r"):
            got = color_fix.blur(content, int(key.removeprefix("blur_r")))
        else:
            got = computed[key]()
        assert_close(got, want, LOOP, key)


def run_denoiser(case):
    from nets import golden_net

    t, table = case.tensors, sigmas.noise_table()
    rows = [denoiser.scalings(float(s), table) for s in t["sigma"]]
    assert [r.index for r in rows] == t["idx"].tolist() == t["timestep"].tolist()
    for key, attribute in (
        ("sigma_q", "sigma"),
        ("c_skip", "c_skip"),
        ("c_out", "c_out"),
        ("c_in", "c_in"),
    ):
        got = torch.tensor([getattr(r, attribute) for r in rows])
        assert_close(got, t[key], LOOP, key)
    net = golden_net(net_meta_of(case.meta))
    for key, want in t.items():
        if not key.startswith("denoised_scale_"):
            continue
        k = float(key.rsplit("_", 1)[1])
        parts = []
        for b, level in enumerate(t["net_sigma"]):
            one = denoiser.scalings(float(level), table)
            x = t["x"][b : b + 1]
            index = torch.tensor([one.index])
            out = net(x * one.c_in, index, *(t[n][b : b + 1] for n in ("context", "y", "lq")), k)
            parts.append(out * one.c_out + x * one.c_skip)
        assert_close(torch.cat(parts), want, MODULE, key)


def net_meta_of(meta):
    return meta["net_config"] if "net_config" in meta else meta.get("net", meta)


def run_net(case):
    from nets import golden_net

    t = case.tensors
    net = golden_net(case.meta)
    args = (t["x"], t["timesteps"], t["context"], t["y"])
    features = net.nets.control_model(args[0], args[1], t["lq"], args[2], args[3], {})
    for i, feature in enumerate(features):
        assert_close(feature, t[f"control_{i}"], MODULE, f"control_{i}")
    for key, want in t.items():
        if key.startswith("out_scale_"):
            out = net(*args, t["lq"], float(key.removeprefix("out_scale_")))
            assert_close(out, want, MODULE, key)


def run_zerosft(case):
    import comfy.ops
    from golden_case import weights
    from supir_xpu.supir.adapters import ZeroSFT
    from supir_xpu.supir.layout import SftDims

    m, t = case.meta, case.tensors
    dims = SftDims(m["label_channels"], m["norm_channels"], m["concat_channels"], 128)
    module = ZeroSFT(dims, operations=comfy.ops.manual_cast, dtype=torch.float32, device="cpu")
    weights.fill(module, m["prefix"])
    for key, want in t.items():
        if key.startswith("out_scale_"):
            k = float(key.removeprefix("out_scale_"))
            got = module(t["control"], t["skip"], t.get("dec"), k)
            assert_close(got, want, MODULE, key)


def run_zerocrossattn(case):
    import comfy.ops
    from golden_case import weights
    from supir_xpu.supir.adapters import ZeroCrossAttn
    from supir_xpu.supir.host_blocks import optimized_attention
    from supir_xpu.supir.layout import CrossDims

    m, t = case.meta, case.tensors
    dims = CrossDims(m["query_channels"], m["context_channels"])
    module = ZeroCrossAttn(
        dims, operations=comfy.ops.manual_cast, dtype=torch.float32, device="cpu"
    )
    weights.fill(module, m["prefix"])
    for key, want in t.items():
        if key.startswith("out_scale_"):
            k = float(key.removeprefix("out_scale_"))
            assert_close(module(t["control"], t["x"], k, optimized_attention), want, MODULE, key)


def run_adm_vector(case):
    import comfy.model_base
    import comfy.supported_models
    from supir_xpu.supir.conditioning import SIZE_CONDITIONING

    t = case.tensors
    config = comfy.supported_models.SDXL({"disable_unet_model_creation": True, "dtype": None})
    config.set_inference_dtype(torch.float32, None)
    sdxl = comfy.model_base.SDXL(config)
    for one in case.meta["settings"]:
        i = one["i"]
        sizes = {
            "height": one["original_size_hw"][0],
            "width": one["original_size_hw"][1],
            "crop_h": one["crop_top_left"][0],
            "crop_w": one["crop_top_left"][1],
            "target_height": one["target_size_hw"][0],
            "target_width": one["target_size_hw"][1],
        }
        if one["supir_uses"]:
            assert sizes == SIZE_CONDITIONING
        got = sdxl.encode_adm(pooled_output=t[f"pooled_{i}"], **sizes)
        assert_close(got, t[f"vector_{i}"], MODULE, f"vector_{i}")
        joined = torch.cat([t[f"clip_l_{i}"], t[f"clip_g_{i}"]], dim=-1)
        assert_close(joined, t[f"crossattn_first_token_{i}"], LOOP, f"crossattn_{i}")


def run_image_io(case):
    """The PIL path: 8-bit picture in, restored float picture out. Our own pictures never go
    through it (they are padded, not stretched); the size rule and the 8-bit maths are checked."""
    from image_io import from_tensor, target_size, to_tensor

    t = case.tensors
    checked = 0
    for one in case.meta["settings"]:
        if not one["kind"].startswith("PIL2Tensor"):
            continue
        i = one["i"]
        image = t[f"pil_in_{i}"].numpy()
        got, height, width = to_tensor(image, one["upscale"], one["min_size"], one["fix_resize"])
        assert (height, width) == (one["h0"], one["w0"])
        want = t[f"pil_out_{i}"]
        level = 1.01 * 2.0 / 255.0
        assert got.shape == want.shape
        assert (got - want).abs().max().item() <= level
        back = from_tensor(want * 1.05, height, width)
        step = np.abs(back.astype(int) - t[f"pil_back_{i}"].numpy().astype(int)).max()
        assert step <= 1
        checked += 1
    assert checked
    for one in case.meta.get("sizes", []):
        size = target_size(one["w"], one["h"], one["upscale"], one["min_size"], one["fix_resize"])
        assert (size.final_width, size.final_height) == (one["w0"], one["h0"])
        assert [size.width, size.height] == one["resized_wh"]


def run_vae(case):
    from nets import golden_vae

    m, t = case.meta, case.tensors
    vae, denoise_encoder = golden_vae(m, m["ddconfig"])
    scale = m["scale_factor"]
    moments = vae.quant_conv(vae.encoder(t["image"]))
    denoise = vae.quant_conv(denoise_encoder(t["image"]))
    assert_close(moments, t["enc_moments"], MODULE, "enc_moments")
    assert_close(denoise, t["denoise_moments"], MODULE, "denoise_moments")
    mean = denoise.chunk(2, dim=1)[0]
    assert_close(mean * scale, t["denoise_latent_scaled"], MODULE, "denoise_latent_scaled")
    mean, logvar = moments.chunk(2, dim=1)
    sample = mean + (logvar.clamp(-30.0, 20.0) * 0.5).exp() * t["eps"]
    assert_close(sample, t["enc_sample"], MODULE, "enc_sample")
    assert_close(vae.decode(t["z"]), t["dec_image"], MODULE, "dec_image")
    decoded = vae.decode(t["z_scaled"] / scale)
    assert_close(decoded, t["dec_image_from_scaled"], MODULE, "dec_image_from_scaled")


def toy_net(x, sigma, crossattn, vector, control, k):
    """The toy denoiser of the golden specification, section 7."""
    r = math.sqrt(1.0 + sigma**2)
    u = x / r
    m = crossattn.mean(dim=(1, 2)) + 0.5 * vector.mean(dim=1)
    target = k * torch.tanh(control) + 0.3 * (1 - k) * torch.sin(control + 1)
    pull = sigma**2 / (1 + sigma**2)
    mean = u.mean(dim=(2, 3), keepdim=True)
    return u / r + pull * (target + m[:, None, None, None]) + 0.05 * torch.sin(3 * u) + 0.1 * mean


class SamplerCase:
    """A golden sampler case as (guided denoiser, noise source), tiled or not."""

    def __init__(self, case):
        m, self.t = case.meta, case.tensors
        self.meta, self.calls = m, []
        guider = m["guider"]
        low = guider["scale"] if guider.get("scale_min") is None else guider["scale_min"]
        end = m["control_scale"]
        self.dpmpp = "DPMPP2M" in m["sampler"]
        ramped = m.get("use_linear_control_scale", False) and not self.dpmpp
        self.settings = guidance.GuidanceSettings(
            cfg_start=guider["scale"],
            cfg_end=low,
            control_start=m["control_scale_start"] if ramped else end,
            control_end=end,
            restore_cfg=-1.0 if self.dpmpp else m["restore_cfg"],
        )
        self.table = sigmas.noise_table()
        self.net = None
        if m["net"] == "tiny":
            from nets import golden_net

            self.net = golden_net(m["net_config"])
        else:
            assert m["net"] == "toy", f"unknown net {m['net']}"
        x = self.t["x_T"]
        self.windows = [tiling.Window(0, x.shape[2], 0, x.shape[3])]
        self.weights = [x.new_ones(x.shape[2:])]
        if case.meta["case"].startswith("tiled"):
            tile, stride = m["tile_size"], m["tile_stride"]
            self.windows = tiling.windows(x.shape[2], x.shape[3], tile, tile - stride)
            if "windows" in m:
                got = [[w.top, w.bottom, w.left, w.right] for w in self.windows]
                assert got == m["windows"]
            weight = tiling.blend_weights(tile, tile, row_offset=0.0)
            if "tile_weights_f64" in self.t:
                assert_close(weight, self.t["tile_weights_f64"].float(), LOOP, "tile_weights")
            self.weights = [weight] * len(self.windows)

    def one(self, x, sigma, prefix, tile, control, k):
        if prefix == "c" and "c_crossattn_per_tile" in self.t:
            crossattn = self.t["c_crossattn_per_tile"][tile]
        else:
            crossattn = self.t[f"{prefix}_crossattn"]
        vector = self.t[f"{prefix}_vector"]
        if self.net is None:
            return toy_net(x, sigma, crossattn, vector, control, k)
        level = denoiser.scalings(sigma, self.table)
        index = torch.full((x.shape[0],), level.index)
        out = self.net(x * level.c_in, index, crossattn, vector, control, k)
        return out * level.c_out + x * level.c_skip

    def denoise(self, x, call):
        s = self.settings
        k, scale = s.control_scale(call.sigma), s.cfg_scale(call.sigma_hat)
        total, weight_sum = torch.zeros_like(x), x.new_zeros(x.shape[2:])
        for tile, (window, weight) in enumerate(zip(self.windows, self.weights, strict=True)):
            self.calls.append((call.sigma_hat, k, scale))
            args = (window.crop(x), call.sigma_hat)
            control = window.crop(self.t["control"])
            uncond, cond = (self.one(*args, p, tile, control, k) for p in ("u", "c"))
            denoised = guidance.guide(uncond, cond, scale)
            center = window.crop(self.t["x_center"])
            denoised = guidance.restore(denoised, center, call, s.restore_cfg)
            window.crop(total).add_(denoised * weight)
            window.crop(weight_sum).add_(weight)
        return total / weight_sum

    def run(self):
        m, t = self.meta, self.t
        steps = []
        make = sigmas.karras_sigmas if self.dpmpp else sigmas.ddpm_sigmas
        schedule = make(m["num_steps"])
        assert_close(schedule, t["sigmas"], LOOP, "sigmas")
        x = t["x_T"] * math.sqrt(1.0 + float(schedule[0]) ** 2)
        drawn = iter(range(m["noise_draws"]))
        tiled_edm = len(self.weights) > 0 and m["case"].startswith("tiled") and not self.dpmpp

        def noise_at(step):
            # The tiled EDM reference draws at every step, used or not.
            return t["noise"][step if tiled_edm else next(drawn)]

        def on_step(i, x, denoised, call):
            steps.append((x, denoised))

        if self.dpmpp:
            options = {"eta": m["eta"], "s_noise": m["s_noise"]}
            out = sampling.restore_dpmpp_2m(
                self.denoise, x, schedule, noise_at, on_step=on_step, **options
            )
        else:
            options = {
                "s_churn": m["s_churn"],
                "s_noise": m["s_noise"],
                "s_tmin": float(m.get("s_tmin", 0.0)),
                "s_tmax": float(m.get("s_tmax", "inf")),
            }
            out = sampling.restore_edm(
                self.denoise, x, schedule, noise_at, on_step=on_step, **options
            )
        return out, steps


def run_sampler(case):
    one = SamplerCase(case)
    out, steps = one.run()
    t, tolerance = case.tensors, NET_LOOP if case.meta["net"] == "tiny" else LOOP
    if case.meta["case"].startswith("tiled"):
        tolerance = NET_LOOP
    want = t["out"]
    if want.isnan().any():  # eta = 0: the reference divides 0 by 0; the limit is the last estimate
        assert case.meta["eta"] == 0
        want = t["denoised_steps"][-1]
    assert_close(out, want, tolerance, "out")
    if "denoised_steps" in t:
        got = torch.stack([denoised for _, denoised in steps])
        assert_close(got, t["denoised_steps"], tolerance, "denoised_steps")
    for name, column in (("sigma", 0), ("control_scale", 1), ("cfg_scale", 2)):
        got = torch.tensor([call[column] for call in one.calls])
        assert_close(got, t[f"call_{name}"].float(), LOOP, f"call_{name}")


def run_pipeline(case):
    from nets import golden_vae

    m, t, options = case.meta, case.tensors, case.meta["options"]
    vae, denoise_encoder = golden_vae(m["vae"], m["vae"]["ddconfig"])
    scale = m["vae"]["scale_factor"]
    z = vae.quant_conv(denoise_encoder(t["image"])).chunk(2, dim=1)[0] * scale
    assert_close(z, t["z_lq"], NET_LOOP, "z_lq")
    stage1 = vae.decode(z / scale)
    assert_close(stage1, t["x_stage1"], NET_LOOP, "x_stage1")
    mean, logvar = vae.quant_conv(vae.encoder(stage1)).chunk(2, dim=1)
    center = (mean + (logvar.clamp(-30.0, 20.0) * 0.5).exp() * t["noise_0"]) * scale

    def size_embedding(width):
        half = width // 2
        freqs = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        parts = []
        for value in (1024, 1024, 0, 0, 1024, 1024):
            parts += [torch.cos(value * freqs), torch.sin(value * freqs)]
        return torch.cat(parts)[None]

    size = size_embedding(m["size_embed_dim"])
    vectors = {f"{p}_vector": torch.cat([t[f"{p}_pooled"], size], dim=1) for p in ("c", "u")}
    batch = z.shape[0]
    vectors = {k: v.expand(batch, -1) for k, v in vectors.items()}
    linear_cfg = options.get("use_linear_CFG", False)
    end = options["cfg_scale"]
    noises = sorted((k for k in t if k.startswith("noise_")), key=lambda k: int(k.split("_")[1]))
    sampler_meta = {
        "sampler": m["sampler"],
        "case": "tiled" if m["sampler"].startswith("Tiled") else "untiled",
        "tile_size": options.get("tile_size", m.get("tile_size")),
        "tile_stride": options.get("tile_stride", m.get("tile_stride")),
        "net": "tiny",
        "net_config": m["net"],
        "num_steps": options["num_steps"],
        "guider": {
            "scale": options["cfg_scale_start"] if linear_cfg else end,
            "scale_min": end,
        },
        "restore_cfg": options["restoration_scale"],
        "s_churn": options["s_churn"],
        "s_noise": options["s_noise"],
        "eta": options.get("eta", 1.0),
        "control_scale": options["control_scale"],
        "control_scale_start": options.get("control_scale_start", 0.0),
        "use_linear_control_scale": options.get("use_linear_control_scale", False),
        "noise_draws": len(noises) - 2,
    }
    tensors = {
        "x_T": t["noise_1"],
        "control": z,
        "x_center": center,
        "noise": torch.stack([t[k] for k in noises[2:]]) if len(noises) > 2 else None,
        "c_crossattn": t["c_crossattn"],
        "u_crossattn": t["u_crossattn"],
        **vectors,
    }
    dpmpp = "DPMPP2M" in m["sampler"]
    make = sigmas.karras_sigmas if dpmpp else sigmas.ddpm_sigmas
    tensors["sigmas"] = make(options["num_steps"])
    one = SamplerCase(type(case)(case.name, "sampler", sampler_meta, tensors))
    latent, _ = one.run()
    assert_close(latent, t["samples_latent"], NET_LOOP, "samples_latent")
    raw = vae.decode(latent / scale)
    assert_close(raw, t["samples_image_raw"], NET_LOOP, "samples_image_raw")
    fix = {"wavelet": color_fix.wavelet, "adain": color_fix.adain}.get(m["color_fix"].lower())
    out = raw if fix is None else fix(raw, stage1)
    assert_close(out, t["out"], NET_LOOP, "out")


RUNNERS = {
    "sigmas": run_sigmas,
    "linear_cfg": run_linear_cfg,
    "colorfix": run_colorfix,
    "denoiser": run_denoiser,
    "net": run_net,
    "zerosft": run_zerosft,
    "zerocrossattn": run_zerocrossattn,
    "adm_vector": run_adm_vector,
    "image_io": run_image_io,
    "vae": run_vae,
    "sampler": run_sampler,
    "pipeline": run_pipeline,
}


def parameters():
    for path in case_files():
        meta = read_meta(path)
        kind = kind_of(meta)
        host = kind in {"adm_vector", "denoiser", "net", "pipeline", "vae"}
        host = host or kind.startswith("zero") or meta.get("net") == "tiny"
        marks = [pytest.mark.host] if host else []
        yield pytest.param(path, id=f"{path.stem}", marks=marks)


@pytest.mark.parametrize("path", list(parameters()))
def test_golden(path):
    case = read_case(path)
    assert case.kind in RUNNERS, (
        f"{path.name}: case {case.meta['case']!r} is of no known kind; known: {sorted(RUNNERS)}"
    )
    RUNNERS[case.kind](case)
