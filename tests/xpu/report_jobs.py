"""The jobs of the first crash report as plans, and a planner that can cut them differently.

Launches, traffic and arithmetic per step are the counted ones of the full-size network; sizes in
between follow a fit through them. Nothing here ran on an Intel GPU.
"""

from supir_xpu.xpu.auto_plan import Settings
from supir_xpu.xpu.device import DeviceFacts
from supir_xpu.xpu.device_profiles import bundled_profiles
from supir_xpu.xpu.history import Crash, History, JobSize
from supir_xpu.xpu.risk import JudgeSettings, PhaseNumbers, PlanNumbers, judge

B70 = DeviceFacts(
    "xpu",
    family="battlemage",
    os="Windows",
    driver="32.0.101.8629",
    name="Intel(R) Arc(TM) Pro B70 Graphics",
    total_bytes=32 << 30,
    free_bytes=28 << 30,
    max_alloc_bytes=4 << 30,
)
PROFILE = bundled_profiles().pick(B70)
STEPS = 35
WEIGHTS = 7_730_000_000

# latent pixels: (launches with scores in half precision, in float32, GB moved in half precision)
CHUNKED = {
    168 * 168: (5_499, 6_369, 309),
    184 * 184: (12_624, 15_840, 661),
    240 * 352: (25_301, 32_139, 3_540),
    368 * 368: (37_978, 48_438, 8_735),
}


def step_numbers(latent_pixels, policy, fp32=False):
    """Launches, bytes and operations of one step over one tile."""
    p = latent_pixels / 1e4
    flops = (10.946 * p + 0.8417 * p * p) * 1e12
    if policy == "chunk_loop":
        size = min(CHUNKED, key=lambda known: (known < latent_pixels, abs(known - latent_pixels)))
        half, full, gigabytes = CHUNKED[size]
        return full if fp32 else half, gigabytes * 1e9, flops
    if policy == "math":
        return 4_308, (8.5 + 33.5 * p + 28 * p * p) * 1e9, flops
    return (2_628 if policy == "fused" else 4_026), (8.5 + 33.5 * p) * 1e9, flops


def vae_numbers(pixels, settings):
    """One encode or decode: launches, bytes, operations."""
    part = pixels / (2944 * 2944)
    if settings.vae_untiled or settings.vae_tile_px:
        return int(3_000 * part), 450e9 * part, 141e12 * part
    return int(12_251 * part), 382e9 * part, 119.6e12 * part


def make_plan(settings, latent, images=1, steps=STEPS, fp32=False, with_vae=True):
    """Plan one job. ``with_vae=False`` counts sampling only, as the report's numbers do."""
    h, w = latent
    pixels = h * w * 64
    edge = settings.tile_px // 8
    tiled = 0 < edge < max(h, w)
    stride = edge - edge // 8
    rows, columns = ((1 + max(0, -(-(n - edge) // stride))) if tiled else 1 for n in (h, w))
    tiles = rows * columns
    latent_pixels = min(h, edge) * min(w, edge) if tiled else h * w
    launches, moved, flops = step_numbers(latent_pixels, settings.attention_policy, fp32)
    vae = vae_numbers(pixels, settings) if with_vae else (0, 0.0, 0.0)
    phases = (
        PhaseNumbers("first stage", 3 * images * vae[0], 3 * images * vae[2], 3 * images * vae[1]),
        PhaseNumbers(
            "sample",
            launches * tiles * steps * images,
            flops * tiles * steps * images,
            moved * tiles * steps * images,
        ),
        PhaseNumbers("decode", images * vae[0], images * vae[2], images * vae[1]),
    )
    return PlanNumbers(
        output_width_px=w * 8,
        output_height_px=h * 8,
        latent_h=h,
        latent_w=w,
        tile_px=settings.tile_px,
        tiles=tiles,
        steps=steps,
        images=images,
        launches_per_step=launches * tiles,
        launches_total=sum(p.launches for p in phases),
        attention_policy=settings.attention_policy,
        max_score_elements=512 * (latent_pixels // 4) * 20
        if settings.attention_policy == "chunk_loop"
        else 0,
        largest_tensor_bytes=pixels * 256 * 2 if settings.vae_untiled else latent_pixels * 5_000,
        live_peak_bytes=pixels * 1000,
        weight_bytes=WEIGHTS,
        flops_total=sum(p.flops for p in phases),
        bytes_moved_total=sum(p.bytes_moved for p in phases),
        vae_tile_px=settings.vae_tile_px,
        vae_untiled=settings.vae_untiled,
        phases=phases,
    )


LOOP_1024 = Settings(attention_policy="chunk_loop", vae_tile_px=1024)
LOOP_768 = Settings(attention_policy="chunk_loop", vae_tile_px=768)

JOBS = {
    # name: (settings, latent, float32 scores)
    "A": (LOOP_1024, (352, 240), False),
    "B": (LOOP_768, (184, 184), False),
    "C": (LOOP_768, (368, 368), False),
    "D": (LOOP_768, (368, 368), False),
    "E": (LOOP_1024, (168, 168), True),
    "F": (LOOP_768, (368, 368), True),
}


def report_plan(name, **changes):
    """The job as the report ran it: sampling launches and time only."""
    settings, latent, fp32 = JOBS[name]
    return make_plan(settings, latent, fp32=fp32, with_vae=False, **changes)


NOW = 10_000.0
QUIET = JudgeSettings(novelty="off")
GIB = 1024**3
SMALL = PlanNumbers(512, 512, attention_policy="fused", launches_total=1000)
GOOD = DeviceFacts("xpu", family="battlemage", os="Linux", driver="1.6", name="Arc B580")
GOOD_PROFILE = bundled_profiles().pick(GOOD, guc="70.72")
ALCHEMIST = DeviceFacts("xpu", family="alchemist", os="Linux", name="Arc A770")
CUDA = DeviceFacts("cuda", total_bytes=8 * GIB)


def verdict(plan=SMALL, facts=B70, profile=None, history=None, how=QUIET, now=NOW):
    profile = profile or (PROFILE if facts is B70 else bundled_profiles().pick(facts))
    return judge(plan, facts, profile, history or History(facts.driver), now, how)


def crash(launches=1000, time=100.0, policy="fused", event="boot 1", **changes):
    size = JobSize(launches, time)
    values = {"kind": "machine", "driver": B70.driver, "phase": "sample", "when": 1.0, **changes}
    return Crash(size=size, policy=policy, event=event, **values)
