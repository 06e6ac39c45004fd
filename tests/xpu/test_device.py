"""Device facts from the runtime, from plain data and from YAML."""

from __future__ import annotations

import types

import pytest
import torch
from supir_xpu.tests.simulated_device import GIB, DeviceSpec, SimulatedDevice
from supir_xpu.xpu.device import (
    DeviceFacts,
    classify_family,
    device_identity,
    facts_from_mapping,
    host_region,
    in_host_region,
    load_facts,
    probe_facts,
)
from supir_xpu.xpu.errors import FactsError


def architecture(major, minor, revision=0):
    return (major << 22 | minor << 14 | revision) << 8


FAMILIES = [
    ("", architecture(12, 0), "xe-lp"),
    ("", architecture(12, 10), "xe-lp"),
    ("", architecture(12, 55, 8), "alchemist"),
    ("", architecture(12, 57), "alchemist"),
    ("", 13136561920, "pvc"),
    ("", architecture(12, 70), "meteor-lake"),
    ("", architecture(12, 74), "meteor-lake"),
    ("", 21479031808, "battlemage"),
    ("", architecture(20, 2), "battlemage"),
    ("", architecture(20, 4), "lunar-lake"),
    ("", architecture(30, 0), "panther-lake"),
    ("", architecture(9, 0), "pre-xe"),
    ("Intel(R) Arc(TM) A770 Graphics", 0, "alchemist"),
    ("Intel(R) Arc(TM) A730M Graphics", 0, "alchemist"),
    ("Intel(R) Arc(TM) B580 Graphics", 0, "battlemage"),
    ("Intel(R) Arc(TM) Pro B70 Graphics", 0, "battlemage"),
    ("Intel(R) Arc(TM) 140V GPU (16GB)", 0, "lunar-lake"),
    ("Intel(R) Arc(TM) 140T GPU", 0, "meteor-lake"),
    ("Intel(R) Arc(TM) Graphics", 0, "meteor-lake"),
    ("Intel(R) Iris(R) Xe Graphics", 0, "xe-lp"),
    ("Intel(R) UHD Graphics 770", 0, "xe-lp"),
    ("Intel(R) HD Graphics 530", 0, "pre-xe"),
    ("Intel(R) Data Center GPU Max 1550", 0, "pvc"),
    ("Something else", 0, "unknown"),
]


@pytest.mark.parametrize(("name", "number", "family"), FAMILIES)
def test_family(name, number, family):
    assert classify_family(name, number) == family
    supported = DeviceFacts("xpu", family=family).is_supported
    assert supported == (family not in ("xe-lp", "pre-xe"))


@pytest.mark.parametrize(
    ("matrix", "blocks", "family"),
    [(True, False, "alchemist"), (False, False, "xe-lp"), (True, True, "unknown")],
)
def test_family_from_the_matrix_engine_as_last_resort(matrix, blocks, family):
    properties = types.SimpleNamespace(
        has_subgroup_matrix_multiply_accumulate=matrix, has_subgroup_2d_block_io=blocks
    )
    assert classify_family("", 0, properties) == family


def test_probe_of_a_whole_device():
    dev = SimulatedDevice(DeviceSpec(total_bytes=12 * GIB))
    facts = probe_facts("xpu", torch_module=dev.torch_module())
    assert (facts.kind, facts.family, facts.driver) == ("xpu", "battlemage", dev.spec.driver)
    assert facts.total_bytes == facts.free_bytes == 12 * GIB
    assert facts.max_alloc_bytes == 4 * GIB
    assert facts.dtypes == ("float32", "float16", "bfloat16")
    assert facts.is_xpu
    assert not facts.has_fp64
    assert facts.fused_sdpa == "unknown", "nothing but a measurement tells"
    assert facts.sources["free_bytes"] == "torch.xpu.mem_get_info"


def broken(**members):
    return types.SimpleNamespace(__version__="2.6.0", xpu=types.SimpleNamespace(**members))


def test_old_torch_lacks_most_properties():
    properties = types.SimpleNamespace(name="Intel(R) Arc(TM) A770 Graphics", total_memory=16 * GIB)
    asked = []

    def is_bf16_supported(including_emulation=True):
        asked.append(including_emulation)
        return including_emulation

    torch_module = broken(
        get_device_properties=lambda device: properties, is_bf16_supported=is_bf16_supported
    )
    facts = probe_facts("xpu", torch_module=torch_module)
    assert facts.family == "alchemist"
    assert asked == [False], "the default answers True for every device"
    assert "bfloat16" not in facts.dtypes
    assert facts.free_bytes == 16 * GIB
    assert facts.usable_bytes == facts.free_bytes - int(1.6 * GIB)


def test_integrated_gpu_that_hides_its_free_memory():
    def mem_get_info(device):
        raise RuntimeError("The device doesn't support querying the available free memory")

    properties = types.SimpleNamespace(
        name="Intel(R) Arc(TM) Graphics", total_memory=10 * GIB, is_integrated_gpu=True
    )
    torch_module = broken(
        get_device_properties=lambda device: properties,
        mem_get_info=mem_get_info,
        memory_reserved=lambda device: 2 * GIB,
    )
    facts = probe_facts("xpu", torch_module=torch_module)
    assert facts.is_integrated
    assert (facts.free_bytes, facts.headroom_bytes) == (8 * GIB, GIB)
    assert "invisible" in facts.sources["free_bytes"]


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ValueError])
def test_a_machine_without_an_xpu_gives_reasons_not_errors(error):
    def fail(*args, **kwargs):
        raise error("Torch not compiled with XPU enabled")

    facts = probe_facts("xpu", torch_module=broken(get_device_properties=fail, mem_get_info=fail))
    assert (facts.family, facts.total_bytes) == ("unknown", 0)
    assert "not compiled" in facts.sources["properties"]


def test_this_machine_can_be_asked():
    for kind in ("cpu", "xpu"):
        assert probe_facts(kind).kind == kind


def test_properties_are_not_asked_when_they_were_read_elsewhere():
    def crash(*args):
        pytest.fail("get_device_properties can end the process")

    given = types.SimpleNamespace(name="Intel(R) Arc(TM) B580 Graphics", total_memory=GIB)
    torch_module = broken(get_device_properties=crash)
    assert probe_facts("xpu", torch_module=torch_module, properties=given).total_bytes == GIB
    silent = probe_facts("xpu", torch_module=torch_module, ask_properties=False)
    assert silent.total_bytes == 0


def test_the_hosts_memory_helper_wins():
    facts = probe_facts("cpu", memory=(3 * GIB, 5 * GIB))
    assert (facts.free_bytes, facts.total_bytes) == (3 * GIB, 5 * GIB)


def test_facts_from_a_mapping():
    facts = facts_from_mapping(
        {"kind": "xpu", "family": "battlemage", "total_bytes": GIB, "flops_per_s": 10,
         "dtypes": ["float32"], "sources": {"flops_per_s": "measured"}}
    )  # fmt: skip
    assert facts.flops_per_s == 10.0
    assert facts.dtypes == ("float32",)
    assert hash(facts)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"family": "battlemage"}, "no key 'kind'"),
        ({"kind": "xpu", "flop": 1}, "unknown key 'flop'"),
        ({"kind": "xpu", "total_bytes": "16G"}, "'total_bytes' is '16G'"),
        ({"kind": "xpu", "total_bytes": True}, "'total_bytes' is True"),
        ({"kind": "xpu", "total_bytes": -1}, "'total_bytes' is -1"),
        ({"kind": "xpu", "has_fp64": 1}, "'has_fp64' is 1"),
        ({"kind": "xpu", "fused_sdpa": "maybe"}, "'fused_sdpa' is 'maybe'"),
        ({"kind": "xpu", "family": "b70"}, "'family' is 'b70'"),
        ({"kind": 3}, "'kind' is 3"),
        ({"kind": "banana"}, "'kind' is 'banana'; it must be one of xpu, cpu"),
        ({"kind": "xpu", "flops_per_s": float("nan")}, "'flops_per_s' is nan"),
        ({"kind": "xpu", "launch_s": float("inf")}, "'launch_s' is inf"),
        (
            {"kind": "xpu", "flops_per_s": 10**500},
            "'flops_per_s' is an integer of about 501 digits",
        ),
        ({"kind": "xpu", "total_bytes": 10**5000}, "'total_bytes' is an integer of about 5001"),
        ({"kind": "xpu", "total_bytes": 10**25}, "'total_bytes' is 1000"),
        ({"kind": "xpu", "launch_s": 1e300}, r"'launch_s' is 1e\+300"),
        ({"kind": "xpu", "dtypes": []}, "'dtypes' is empty"),
        ({"kind": "xpu", "dtypes": ["float32", 5]}, "'dtypes' holds 5"),
        ({"kind": "xpu", "dtypes": [None]}, "'dtypes' holds None"),
        ({"kind": "xpu", "dtypes": ["float33"]}, "'dtypes' holds 'float33'"),
        ({"kind": "xpu", "name": "${oc.env:HOME}"}, r"'name' is '\$\{oc.env:HOME\}'"),
    ],
)
def test_a_wrong_mapping_names_the_key(mapping, words):
    with pytest.raises(FactsError, match=words):
        facts_from_mapping(mapping)


def test_yaml(tmp_path):
    path = tmp_path / "device.yaml"
    path.write_text("kind: xpu\nname: ${oc.env:PATH}\n", encoding="utf-8")
    with pytest.raises(FactsError, match="'name'"):
        load_facts(path)
    path.write_text("kind: xpu\nfamily: alchemist\nbw_bytes_per_s: 4.0e11\n", encoding="utf-8")
    assert load_facts(path) == DeviceFacts("xpu", family="alchemist", bw_bytes_per_s=4e11)
    for text, words in [("kind: [", "cannot be read"), ("- 1\n", "is not a list of"),
                        ("kind: xpu\nwrong: 1\n", "device.yaml: .*'wrong'")]:  # fmt: skip
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FactsError, match=words):
            load_facts(path)
    with pytest.raises(FactsError, match=r"none\.yaml cannot be read"):
        load_facts(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("properties", "identity"),
    [
        ({"uuid": "u-1", "name": "Arc", "driver_version": "1.6"}, ("u-1", "1.6")),
        ({"name": "Arc", "driver_version": "1.6"}, ("Arc", "1.6")),
        ({"uuid": object(), "name": "Arc"}, ("Arc", "")),
        ({}, ("", "")),
    ],
)
def test_identity(properties, identity):
    found = types.SimpleNamespace(**properties)
    xpu = types.SimpleNamespace(get_device_properties=lambda device: found)
    assert device_identity("xpu:0", types.SimpleNamespace(xpu=xpu)) == identity


def test_identity_of_a_device_that_does_not_answer():
    def broken(device):
        raise RuntimeError("no")

    module = types.SimpleNamespace(xpu=types.SimpleNamespace(get_device_properties=broken))
    assert device_identity("xpu:0", module) == ("", "")


def test_host_region_nests():
    assert not in_host_region()
    with host_region(), host_region():
        assert in_host_region()
    assert not in_host_region()


def test_importing_starts_no_device():
    assert not torch.xpu.is_initialized()
