"""Planned attention against a float64 reference, and every plan against a dispatch count."""

from __future__ import annotations

import pytest
import torch
from supir_xpu.tests.simulated_device import DeviceSpec, SimulatedDevice
from supir_xpu.xpu.attention import PlannedAttention, limits_from_facts
from supir_xpu.xpu.chunking import MAX_SCORES, AttentionLimits
from supir_xpu.xpu.counting import count
from supir_xpu.xpu.device import DeviceFacts
from supir_xpu.xpu.errors import DeviceMemoryError
from supir_xpu.xpu.governor import Governor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TWO_RESULTS = 4e-6  # each within 2e-6 of the true value
XPU = DeviceFacts("xpu", fused_sdpa="fused")
CPU = DeviceFacts("cpu")

# batch, heads, queries, keys, head width
SHAPES = {
    "self": (2, 4, 256, 256, 64),
    "prime": (1, 3, 251, 251, 64),
    "cross 77": (2, 5, 211, 77, 64),
    "batch 4": (4, 2, 97, 97, 64),
    "batch 3, width 40": (3, 2, 130, 61, 40),
    "vae": (1, 1, 293, 293, 512),
    "one query": (2, 2, 1, 65, 64),
    "one key": (1, 2, 67, 1, 64),
}
WORKSPACES = {"ample": 2**30, "rows": 700_000, "heads": 400_000, "keys": 300_000}


def limits(workspace, fused="fused", **changes):
    return AttentionLimits(workspace, workspace, 10**13, fused=fused, **changes)


def make(shape, dtype=torch.float32, seed=0, kv_heads=None):
    """q as the host hands it over: a head-split view of [B, N, H*D]."""
    batch, heads, nq, nk, d = shape
    g = torch.Generator().manual_seed(seed)

    def split(n, h):
        t = torch.randn(batch, n, h * d, generator=g).to(dtype)
        return t.view(batch, n, h, d).transpose(1, 2)

    return split(nq, heads), split(nk, kv_heads or heads), split(nk, kv_heads or heads)


def make_mask(kind, shape, seed=1):
    batch, heads, nq, nk, _ = shape
    g = torch.Generator().manual_seed(seed)
    if kind == "bool":
        mask = torch.rand(batch, 1, nq, nk, generator=g) > 0.3
        mask[0, 0, 0] = False  # a query that may see nothing
        return mask
    if kind == "float":
        mask = torch.randn(nq, nk, generator=g)
        return mask.masked_fill(torch.rand(nq, nk, generator=g) > 0.7, float("-inf"))
    if kind == "keys":
        return torch.rand(batch, 1, nk, generator=g) > 0.3
    return torch.randn(batch, heads, nq, nk, generator=g) if kind == "full" else None


def reference(q, k, v, mask=None, scale=None):
    """softmax(q kT * scale + mask) v in float64; rows without a visible key are 0."""
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask.double()
    return scores.softmax(-1).nan_to_num(0.0) @ v


def assert_exact(got, q, k, v, mask=None, scale=None):
    assert got.dtype == q.dtype
    assert got.shape == (*q.shape[:3], v.shape[3])
    error = (got.double() - reference(q, k, v, mask, scale)).abs().max().item()
    assert error <= TOLERANCE[q.dtype], error


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("policy", ["auto", "fused", "fused_pieces", "math", "cpu"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_policy_is_exact(shape, policy, dtype):
    q, k, v = make(shape, dtype)
    for workspace in WORKSPACES.values():
        try:
            attend = PlannedAttention(XPU, limits(workspace), policy=policy)
            got = attend(q, k, v)
        except DeviceMemoryError:
            assert shape[4] == 512
            assert workspace < 700_000
            continue
        assert_exact(got, q, k, v)


@pytest.mark.parametrize("kind", ["bool", "float", "keys", "full"])
@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math", "cpu"])
@pytest.mark.parametrize("workspace", [2**30, 500_000, 120_000])
def test_masks_are_cut_with_the_queries(kind, policy, workspace):
    shape = (2, 3, 193, 131, 64)
    q, k, v = make(shape)
    mask = make_mask(kind, shape)
    attend = PlannedAttention(XPU, limits(workspace), policy=policy)
    assert_exact(attend(q, k, v, mask), q, k, v, mask)
    assert attend.report.masked == 1


@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math", "cpu"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("workspace", [2**30, 900_000])
def test_grouped_keys(policy, masked, workspace):
    shape = (2, 6, 150, 90, 64)
    q, k, v = make(shape, kv_heads=2)
    mask = make_mask("float", shape) if masked else None
    attend = PlannedAttention(XPU, limits(workspace), policy=policy)
    counted, got = count(lambda: attend(q, k, v, mask))
    assert_exact(got, q, k, v, mask)
    assert counted.launches == attend.plan(q, k, mask).launches
    assert attend.report.grouped == 1


@pytest.mark.parametrize("policy", ["fused", "math"])
@pytest.mark.parametrize("scale", [0.3, 0.125, 0.01])
def test_scale_is_honoured(policy, scale):
    q, k, v = make((1, 2, 100, 100, 64))
    attend = PlannedAttention(XPU, limits(2**30), policy=policy)
    assert_exact(attend(q, k, v, scale=scale), q, k, v, scale=scale)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math", "cpu"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plan_equals_the_dispatch_count(shape, policy, kind):
    """Launches exactly; bytes and arithmetic exactly without a mask; memory and scores as bounds."""
    q, k, v = make(shape, torch.bfloat16)
    mask = make_mask(kind, shape)
    for workspace in WORKSPACES.values():
        bound = limits(workspace)
        attend = PlannedAttention(XPU, bound, policy=policy)
        try:
            plan = attend.plan(q, k, mask)
        except DeviceMemoryError:
            continue
        counted, got = count(lambda a=attend: a(q, k, v, mask))
        assert counted.launches == plan.launches == attend.report.launches
        assert torch.float64 not in counted.dtypes
        if kind == "none" and plan.policy != "cpu":
            assert counted.bytes_moved == plan.bytes_moved
            assert counted.flops == plan.flops
        if plan.policy in ("math", "fused_pieces"):
            result = got.numel() * got.element_size()
            assert counted.live.peak - result <= plan.temp_bytes
        if plan.policy == "math":
            assert plan.temp_bytes <= bound.workspace_bytes
            assert counted.scores <= plan.score_elements <= MAX_SCORES
            limit = max(plan.largest_bytes, got.numel() * got.element_size())
            assert counted.largest[0] <= limit


@pytest.mark.parametrize("n", [7056, 33856])
@pytest.mark.parametrize("workspace", [2**29, 2**31])
def test_true_size_counts_on_meta_tensors(n, workspace):
    """The worst call of 168x168 and 368x368 latents, without data."""
    heads = torch.empty(2, n, 640, dtype=torch.bfloat16, device="meta")
    q = heads.view(2, n, 10, 64).transpose(1, 2)
    attend = PlannedAttention(XPU, limits(workspace, fused="math"))
    plan = attend.plan(q, q)
    counted, got = count(lambda: attend(q, q, q))
    assert counted.launches == plan.launches
    assert counted.bytes_moved == plan.bytes_moved
    assert counted.scores == plan.score_elements <= MAX_SCORES
    result = got.numel() * got.element_size()
    assert counted.live.peak - result <= workspace


def test_scores_in_the_input_dtype_stay_at_its_level():
    q, k, v = make((2, 4, 512, 512, 64), torch.bfloat16)
    attend = PlannedAttention(XPU, limits(700_000, half_scores=True), policy="math")
    counted, got = count(lambda: attend(q, k, v))
    assert torch.float32 not in counted.dtypes
    assert (got.double() - reference(q, k, v)).abs().max() <= 4e-2


def test_meets_no_float64_on_the_simulated_device():
    q, k, v = make((1, 2, 300, 300, 64))
    for policy in ("fused", "fused_pieces", "math"):
        with SimulatedDevice(DeviceSpec(has_fp64=False)) as dev:
            PlannedAttention(dev.facts(), limits(400_000), policy=policy)(q, k, v)
        assert torch.float64 not in dev.dtypes
        assert dev.launches > 0


def test_queue_depth_stays_in_the_window():
    q, k, v = make((2, 4, 700, 700, 64))
    with SimulatedDevice() as dev:
        governor = Governor(8, 3, event_factory=dev.event, drain=dev.synchronize)
        attend = PlannedAttention(dev.facts(), limits(700_000), policy="math", governor=governor)
        attend(q, k, v)
    assert dev.launches > 100
    assert dev.max_depth <= governor.limit == 24
    assert governor.report.launches == dev.launches


def test_is_inert_off_xpu_and_active_with_forced_limits():
    q, k, v = make((1, 2, 128, 128, 64))
    idle = PlannedAttention(CPU)
    counted, got = count(lambda: idle(q, k, v))
    assert (counted.launches, idle.report.inert, idle.report.calls) == (1, 1, 0)
    assert torch.equal(got, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    forced = PlannedAttention(CPU, limits(2**20), policy="math")
    assert_exact(forced(q, k, v), q, k, v)
    assert forced.report.policies["math"] == 1


def test_limits_follow_the_facts():
    facts = DeviceFacts(
        "xpu", free_bytes=10 * 2**30, headroom_bytes=2 * 2**30, max_alloc_bytes=2**30
    )
    got = limits_from_facts(facts)
    assert got.workspace_bytes == 2 * 2**30
    assert got.alloc_bytes == 2**29
    assert got.launch_flops == 2.5e12
    weak = limits_from_facts(DeviceFacts("xpu", family="xe-lp", is_integrated=True))
    assert weak.launch_flops == 2.5e11
    assert weak.workspace_bytes == 2**30


# ---------------------------------------------------------------- the host's calling convention


def host_kernel(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                skip_output_reshape=False, **kwargs):  # fmt: skip
    """What ComfyUI's own attention functions promise."""
    if not skip_reshape:
        d = q.shape[-1] // heads
        q, k, v = (t.view(t.shape[0], t.shape[1], -1, d).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    gqa = kwargs.get("enable_gqa", False)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=kwargs.get("scale"), enable_gqa=gqa
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math"])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "float", "keys"])
def test_override_matches_the_host(policy, skip_reshape, skip_output_reshape, mask_kind):
    shape = (2, 4, 150, 70, 64)
    q4, k4, v4 = make(shape)
    mask = make_mask(mask_kind, shape)
    args = (q4, k4, v4) if skip_reshape else [t.transpose(1, 2).flatten(2) for t in (q4, k4, v4)]
    options = {
        "skip_reshape": skip_reshape,
        "skip_output_reshape": skip_output_reshape,
        "scale": 0.2,
    }
    override = PlannedAttention(XPU, limits(400_000), policy=policy).as_override()
    got = override(host_kernel, *args, 4, mask, transformer_options={}, **options)
    expected = host_kernel(*args, 4, mask, **options)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TWO_RESULTS


@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math"])
def test_override_takes_grouped_keys(policy):
    q4, k4, v4 = make((1, 6, 80, 50, 64), kv_heads=2)
    flat = [t.transpose(1, 2).flatten(2) for t in (q4, k4, v4)]
    override = PlannedAttention(XPU, limits(2**20), policy=policy).as_override()
    got = override(host_kernel, *flat, 6, enable_gqa=True)
    assert (got - host_kernel(*flat, 6, enable_gqa=True)).abs().max() <= TWO_RESULTS


def test_override_takes_a_whole_number_as_scale():
    q4, k4, v4 = make((1, 2, 40, 30, 64))
    override = PlannedAttention(XPU, limits(2**30), policy="math").as_override()
    got = override(host_kernel, q4, k4, v4, 2, scale=0, skip_reshape=True, skip_output_reshape=True)
    assert (got - v4.mean(2, keepdim=True)).abs().max() <= 2e-6


def test_inert_override_calls_the_original_unchanged():
    seen = {}

    def original(*args, **kwargs):
        seen.update(args=args, kwargs=kwargs)
        return "original"

    q = torch.zeros(1, 4, 64)
    options = {"block": ("input", 4)}
    override = PlannedAttention(CPU).as_override()
    got = override(original, q, q, q, 1, transformer_options=options, _inside_attn_wrapper=True)
    assert got == "original"
    assert seen["args"][3:] == (1, None)
    assert seen["kwargs"]["transformer_options"] is options
    assert seen["kwargs"]["_inside_attn_wrapper"] is True


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "keys"])
def test_a_previous_override_stays_the_kernel(skip_reshape, mask_kind):
    shape = (1, 2, 300, 300, 64)
    q4, k4, v4 = make(shape)
    mask = make_mask(mask_kind, shape)
    args = (q4, k4, v4) if skip_reshape else [t.transpose(1, 2).flatten(2) for t in (q4, k4, v4)]
    rows = []

    def previous(func, q, k, v, heads, mask=None, **kwargs):
        rows.append(q.shape[2 if kwargs["skip_reshape"] else 1])
        return func(q, k, v, heads, mask, **kwargs)

    attend = PlannedAttention(XPU, limits(900_000, fused="unknown"))
    got = attend.as_override(previous)(host_kernel, *args, 2, mask, skip_reshape=skip_reshape)
    assert len(rows) > 1
    assert sum(rows) == 300
    assert (got - host_kernel(*args, 2, mask, skip_reshape=skip_reshape)).abs().max() <= TWO_RESULTS
    assert attend.report.chained == 1


def test_our_pieces_take_over_when_a_previous_override_faults():
    q, k, v = (t.transpose(1, 2).flatten(2) for t in make((1, 2, 128, 128, 64)))

    def previous(func, *args, **kwargs):
        raise RuntimeError("could not create a primitive")

    attend = PlannedAttention(XPU, limits(2**30))
    got = attend.as_override(previous)(host_kernel, q, k, v, 2)
    assert (got - host_kernel(q, k, v, 2)).abs().max() <= TWO_RESULTS
    assert [e.outcome for e in attend.report.faults.events][-1] == "recovered"


@pytest.mark.host
@pytest.mark.parametrize("name", ["attention_pytorch", "attention_sub_quad", "attention_split"])
@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math"])
def test_override_in_the_real_host(name, policy):
    from comfy.ldm.modules import attention as host

    kernel = getattr(host, name)
    q, k, v = (t.transpose(1, 2).flatten(2) for t in make((2, 4, 190, 77, 64)))
    attend = PlannedAttention(XPU, limits(300_000), policy=policy)
    options = {"optimized_attention_override": attend.as_override()}
    got = kernel(q, k, v, 4, transformer_options=options)
    assert (got - kernel(q, k, v, 4)).abs().max() <= TWO_RESULTS
    assert attend.report.calls == 1


# ---------------------------------------------------------------- VAE


@pytest.mark.parametrize(("policy", "extra"), [("fused", 4), ("fused_pieces", 2), ("math", 0)])
@pytest.mark.parametrize("size", [(1, 512, 17, 19), (2, 64, 8, 9)])
def test_vae_attention(policy, extra, size):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, generator=g) for _ in range(3))
    workspace = 2**30 if policy == "fused" else 3_000_000
    attend = PlannedAttention(XPU, limits(workspace), policy=policy)
    counted, got = count(lambda: attend.vae_attention()(q, k, v))
    q4, k4, v4 = (t.flatten(2).unsqueeze(1).transpose(2, 3) for t in (q, k, v))
    expected = reference(q4, k4, v4).transpose(2, 3).reshape(size)
    assert got.is_contiguous()
    assert (got.double() - expected).abs().max() <= 2e-6
    plan = attend.plan(q4, k4)
    assert counted.launches == plan.launches + (4 if plan.policy == "fused" else extra)


def test_inert_vae_attention_uses_the_previous_one():
    q = torch.randn(1, 8, 4, 4)
    attend = PlannedAttention(CPU)
    assert attend.vae_attention(lambda q, k, v: "previous")(q, q, q) == "previous"
    alone = attend.vae_attention()(q, q, q)
    q4 = q.flatten(2).unsqueeze(1).transpose(2, 3)
    expected = reference(q4, q4, q4).transpose(2, 3).reshape(q.shape)
    assert (alone.double() - expected).abs().max() <= 2e-6


# ---------------------------------------------------------------- stepping down on evidence


def test_an_unfused_fallback_of_the_library_is_stepped_around():
    """A device whose attention turns out unfused runs out of memory once, then plans for it."""
    q, k, v = make((1, 4, 1024, 1024, 64))
    with SimulatedDevice(DeviceSpec(total_bytes=12 * 2**20, sdpa="math")) as dev:
        attend = PlannedAttention(dev.facts(), limits(6 * 2**20), policy="fused")
        first = attend(q, k, v)
        faults = len(attend.report.faults.events)
        second = attend(q, k, v)
    assert_exact(first, q, k, v)
    assert torch.equal(first, second)
    assert faults >= 1
    assert len(attend.report.faults.events) == faults, "the lesson is remembered"
    assert attend.plan(q, k).policy != "fused"


@pytest.mark.parametrize(
    ("text", "op", "reaction"),
    [
        ("could not create a primitive", "scaled_dot", "cpu_block"),
        ("error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)", "scaled_dot", "cpu_block"),
        ("FlashAttentionForwardXPU only support headdim 64,96,128,192", "scaled_dot", "smaller"),
        ("No available kernel. Aborting execution.", "scaled_dot", "smaller"),
    ],
)
def test_a_permanent_fault_ends_on_the_way_the_table_names(text, op, reaction):
    q, k, v = make((1, 2, 200, 200, 64))
    with SimulatedDevice() as dev:
        dev.inject(text, op=op, times=0)
        attend = PlannedAttention(dev.facts(), limits(2**30, fused="fused"), policy="fused")
        got = attend(q, k, v)
        tried = len(attend.report.faults.events)
        again = attend(q, k, v)
    assert_exact(got, q, k, v)
    assert_exact(again, q, k, v)
    last = attend.report.faults.events[-1]
    assert (last.reaction, last.outcome) == (reaction, "recovered")
    assert len(attend.report.faults.events) == tried


def test_half_precision_is_widened_when_a_dtype_is_rejected():
    q, k, v = make((1, 2, 100, 100, 64), torch.bfloat16)

    def kernel(q, k, v, **kwargs):
        if q.dtype == torch.bfloat16:
            raise RuntimeError("Native API failed. Native API returns: 45 (UR_RESULT)")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **kwargs)

    attend = PlannedAttention(XPU, limits(2**30), kernel=kernel)
    got = attend(q, k, v)
    assert_exact(got, q, k, v)
    assert attend.report.faults.events[-1].reaction == "dtype"


@pytest.mark.parametrize(("n_query", "n_key"), [(0, 5), (5, 0), (0, 0)])
def test_empty_tensors_are_answered_as_the_kernel_does(n_query, n_key):
    q, k = torch.ones(1, 2, n_query, 8), torch.ones(1, 2, n_key, 8)
    got = PlannedAttention(XPU, limits(2**20))(q, k, k)
    assert torch.equal(got, torch.nn.functional.scaled_dot_product_attention(q, k, k))
