"""Operators that take another way: same numbers, the broken one never called. On the processor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from supir_xpu.tests.simulated_device import DeviceSpec, SimulatedDevice
from supir_xpu.xpu.workarounds import OPERATORS, Workarounds

ERROR_45 = "level_zero backend failed with error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)"


def everywhere(_):
    return True


def network(x, weight):
    """One operator of every class."""
    h = F.conv2d(x, weight, padding=1)
    h = F.silu(F.group_norm(h, 4))
    tokens = h.flatten(2).transpose(1, 2)[:, ::2]
    tokens = F.layer_norm(tokens, tokens.shape[-1:]).softmax(-1)
    heads = tokens.unsqueeze(1)
    out = F.scaled_dot_product_attention(heads, heads, heads)
    return out.sum(2) + tokens[:, :, ::2].to(torch.float64).mean()


CASES = [
    ("norms", "native_group_norm|native_layer_norm|_softmax|silu", 4),
    ("reductions", "^(sum|mean)$", 2),
    ("dense", "^convolution$", 1),
    ("attention", "scaled_dot_product", 1),
    ("index_cast", "^_to_copy$", 1),
]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize(("op_class", "ops", "calls"), CASES)
def test_a_broken_class_on_the_processor_gives_the_same_numbers(op_class, ops, calls, inference):
    torch.manual_seed(1)
    with torch.inference_mode(inference), torch.no_grad():
        x, weight = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3)
        want = network(x, weight)
        spec = DeviceSpec(has_fp64=True)
        with SimulatedDevice(spec) as device:
            device.inject(ERROR_45, op=ops, times=0)
            with pytest.raises(RuntimeError, match="45"):
                network(x, weight)
        with SimulatedDevice(spec) as device:
            device.inject(ERROR_45, op=ops, times=0)
            with Workarounds({op_class: "cpu_block"}, (), everywhere) as ways:
                got = network(x, weight)
    assert torch.equal(got, want)
    assert dict(ways.used) == {(op_class, "cpu_block"): calls}
    assert ways.lines() == [f"workaround: {calls} calls of {op_class} on the processor"]


def test_contiguous_reaches_the_operator():
    seen = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "sum" in str(func):
                seen.append(args[0].is_contiguous())
            return func(*args, **(kwargs or {}))

    x = torch.arange(12.0).reshape(3, 4)
    with Look():
        x.t().sum(0)
        with Workarounds({"reductions": "contiguous"}, (), everywhere):
            got = x.t().sum(0)
    assert torch.equal(got, x.sum(1))
    assert seen == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dropped_dtype_is_computed_in_float32_and_given_back(dtype):
    torch.manual_seed(2)
    a, b = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)
    with Workarounds({"dense": "dtype"}, (str(dtype)[6:],), everywhere) as ways:
        got = a @ b
        other = torch.randn(2, 2).sum()
    assert got.dtype == dtype
    assert torch.equal(got, (a.float() @ b.float()).to(dtype))
    assert other.dtype == torch.float32
    assert dict(ways.used) == {("dense", "dtype"): 1}, "float32 is left alone"


def test_in_place_operators_write_where_they_were_asked_to():
    x = torch.randn(4, 4)
    want = F.silu(x)
    before = x.data_ptr()
    with Workarounds({"norms": "cpu_block"}, (), everywhere):
        F.silu(x, inplace=True)
    assert x.data_ptr() == before
    assert torch.equal(x, want)


def test_an_operator_that_writes_to_out_is_left_alone():
    x, out = torch.ones(3, 4), torch.empty(4)
    with Workarounds({"reductions": "cpu_block"}, (), everywhere) as ways:
        torch.sum(x, 0, out=out)
    assert torch.equal(out, torch.full((4,), 3.0))
    assert torch.equal(x, torch.ones(3, 4))
    assert not ways.used


@pytest.mark.parametrize("way", ["cpu_block", "contiguous"])
def test_a_strided_cast_into_a_strided_place(way):
    source, place = torch.arange(12.0).reshape(3, 4), torch.zeros(4, 6, dtype=torch.float64)
    with Workarounds({"index_cast": way}, (), everywhere) as ways:
        place[:, ::2].copy_(source.t())
    assert torch.equal(place[:, ::2], source.t().double())
    assert place[:, 1::2].sum() == 0
    assert ways.used["index_cast", way] == 1


def test_only_what_is_on_the_device_takes_another_way():
    with Workarounds({"reductions": "cpu_block"}, (), lambda t: False) as ways:
        torch.ones(3).sum()
    assert not ways.used


def test_ways_carried_out_elsewhere_change_nothing_here():
    assert not Workarounds({"silence": "read_back", "allocation": "smaller"}, (), everywhere).ways
    assert not Workarounds({"attention": "math"}, (), everywhere).is_needed
    assert Workarounds({}, ("float16",), everywhere).is_needed


def test_the_operators_exist():
    for names in OPERATORS.values():
        for name in names:
            assert hasattr(torch.ops.aten, name), name
