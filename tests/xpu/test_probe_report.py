"""The report: what it names, and what must never be in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from supir_xpu.xpu.probe_libraries import loaded_libraries, mixed_versions, stack_files
from supir_xpu.xpu.probe_report import Private, absent_line, scrub, vendor_report, verdict_lines
from supir_xpu.xpu.probe_types import Battery, Check, Measured, RetreatOption, Verdict

WINDOWS = {"USERNAME": "Jane Doe", "USERPROFILE": r"C:\Users\Jane Doe", "COMPUTERNAME": "DESK-77"}
LINUX = {"USER": "jdoe", "HOME": "/srv/people/jdoe", "HOSTNAME": "desk77.example.org"}
SECRETS = ("jane", "doe", "jdoe", "desk-77", "desk77", "holiday", "people")


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (WINDOWS, r"File C:\Users\Jane Doe\ComfyUI\a.py"),
        (WINDOWS, r"File c:/users/jane doe/ComfyUI/a.py"),
        (WINDOWS, r"{'p': 'C:\\Users\\Jane Doe\\x'}"),
        (WINDOWS, "owner JANE DOE on desk-77"),
        (WINDOWS, r"D:\Users\Jane\stuff and \\DESK-77\share"),
        (LINUX, "/srv/people/jdoe/ComfyUI/x.py: jdoe@desk77.example.org"),
        (LINUX, "/home/jane/x and /Users/jane/y on DESK77"),
        (LINUX, "saved 'my holiday 1.png' and /data/holiday.JPEG"),
        (LINUX, '{"image": "holiday (2).webp"}'),
    ],
)
def test_scrub(environ, text):
    found = scrub(text, Private.here(environ))
    for secret in SECRETS:
        assert secret not in found.lower(), found


def test_scrub_leaves_the_rest_alone():
    text = "Intel(R) Arc(TM) B580, driver 32.0.101.8629, libze_loader.so.1.28.2, error: 45 at 0x14"
    assert scrub(text, Private.here(LINUX)) == text
    # a user called like part of a word
    assert scrub("artifact art", Private(names=("art",))) == "artifact <user>"
    assert scrub("/srv/peoples", Private(homes=("/srv/people",))) == "/srv/peoples"


def test_this_machine_is_known():
    private = Private.here()
    assert private.hosts or private.names
    assert "localhost" not in private.hosts


VERDICT = Verdict(
    "retreat",
    "classes",
    "2 classes of operations are broken.",
    "Update the driver.",
    broken=("reductions", "index_cast"),
    notes=("A note.",),
    retreats=(RetreatOption("torch on the processor", 12.0, "start ComfyUI with --cpu"),),
    measured=Measured(flops_per_s=2e12, fused_sdpa="math"),
    device_name="Arc",
)
BATTERY = Battery(
    "xpu:0",
    frozenset((0, 2)),
    [
        Check(0, "torch", numbers={"torch": "2.14+xpu", "python": "3.12.1", "arch_list": ["bmg"]}),
        Check(
            0,
            "device properties",
            numbers={"properties": {"name": "Arc", "driver_version": "1.6", "uuid": "serial-1"}},
        ),
        Check(2, "sum", "error", "float32", "error: 45", "cpu_block", ("contiguous", "cpu_block")),
    ],
    stderr=["File /srv/people/jdoe/torch/x.py", "saw desk77"],
    libraries=["libsycl.so.8.0.0", "libze_loader.so.1.28.2"],
)


def test_the_report_has_what_a_vendor_needs_and_no_person():
    environ = {
        **LINUX,
        "ONEAPI_DEVICE_SELECTOR": "level_zero:0",
        "SYCL_CACHE_DIR": "/srv/people/jdoe/.cache",
        "SECRET_TOKEN": "hunter2",
    }
    text = vendor_report(
        VERDICT,
        BATTERY,
        private=Private.here(environ),
        environ=environ,
        sections={"Journal": "2026-01-01 sample open, holiday.png"},
    )
    for word in (
        "RETREAT (Arc)", "2 classes", "2.14+xpu", "3.12.1", "driver: 1.6", "libsycl.so.8.0.0",
        "libze_loader.so.1.28.2", "ONEAPI_DEVICE_SELECTOR=level_zero:0", "2 error   sum", "error: 45",
        "tried contiguous, cpu_block: cpu_block works", "12 minutes", "== Journal ==", "A note.",
        "2.00 TFLOP/s", "attention runs as math", "SYCL_CACHE_DIR=<home>/.cache",
    ):  # fmt: skip
        assert word in text
    for secret in (*SECRETS, "hunter2", "serial-1"):
        assert secret not in text.lower()


def test_lines_for_a_person():
    lines = verdict_lines(VERDICT)
    assert lines[0] == "RETREAT (Arc): Do not use this device."
    assert "Decided by: classes." in lines[1]
    assert "  1. torch on the processor: about 12 minutes; start ComfyUI with --cpu" in lines
    careful = Verdict(
        "degraded",
        "workaround",
        "r",
        workarounds={"attention": "math"},
        dropped_dtypes=("bfloat16",),
    )
    text = "\n".join(verdict_lines(careful))
    assert "Workaround for attention: math" in text
    assert "bfloat16" in text


@pytest.mark.parametrize(
    ("device", "words"),
    [("cpu", "processor (CPU)"), ("cuda", "CUDA"), ("mps", "MPS"), ("npu", "npu")],
)
def test_one_line_without_an_xpu(device, words):
    verdict = Verdict("absent", "absent", "No XPU:\n none.", host_device=device)
    line = absent_line(verdict)
    assert "\n" not in line
    assert words in line
    assert verdict_lines(verdict) == [line]


def test_libraries():
    paths = [Path(f"/x/{n}") for n in ("libsycl.so.8", "ze_loader.dll", "libc.so.6", "dnnl.dll")]
    assert {path.name for path in stack_files(paths)} == {
        "libsycl.so.8",
        "ze_loader.dll",
        "dnnl.dll",
    }
    assert isinstance(loaded_libraries(), list)
    assert mixed_versions(["libsycl.so.8.0.0", "libze_loader.so.1.28.2"]) == []
    for pair in (["sycl7.dll 7.1", "sycl8.dll 8.0"], ["libsycl.so.7.1", "libsycl.so.8.0"]):
        (warning,) = mixed_versions(pair)
        assert all(entry in warning for entry in pair)
