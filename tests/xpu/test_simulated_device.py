"""The simulated device does what its rules say, so that tests on it mean something."""

from __future__ import annotations

import threading

import pytest
import torch
from supir_xpu.tests.simulated_device import (
    DeviceSpec,
    SimulatedDevice,
    SimulatedHang,
    run_child,
)
from supir_xpu.xpu.counting import CountOps, count
from supir_xpu.xpu.device import host_region
from supir_xpu.xpu.faults import classify, is_memory_fault

MIB = 2**20


def work(x):
    y = torch.nn.functional.silu(x @ x.T).softmax(-1)
    return (y.view(-1).reshape(y.shape) * 2).sum()


def test_counts_what_the_counter_counts():
    x = torch.randn(16, 16)
    counted, _ = count(lambda: work(x))
    with SimulatedDevice() as dev:
        work(x)
    assert dev.launches == counted.launches == 5
    assert dict(dev.ops) == dict(counted.ops)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_composite_operators_count_as_their_parts(mode):
    """Inference mode hands them over whole; the count must not depend on that."""
    with torch.inference_mode(False), mode():
        layer = torch.nn.Linear(8, 8)
        norm = torch.nn.GroupNorm(2, 8)
        x = torch.ones(4, 8)
        with SimulatedDevice() as dev:
            norm(layer(x)).to(torch.bfloat16).contiguous()
    assert dev.ops == {"addmm": 1, "native_group_norm": 1, "_to_copy": 1}


def test_attention_is_one_launch_or_a_score_matrix():
    q = torch.randn(1, 2, 64, 32)
    attend = torch.nn.functional.scaled_dot_product_attention
    with SimulatedDevice() as fused:
        a = attend(q, q, q)
    with SimulatedDevice(DeviceSpec(sdpa="math")) as unfused:
        b = attend(q, q, q)
    assert fused.launches == 1
    assert unfused.launches > 4
    assert unfused.max_scores == 2 * 64 * 64
    assert (a - b).abs().max() < 1e-5


def test_queue_depth_between_waits():
    with SimulatedDevice() as dev:
        x = torch.zeros(4)
        for _ in range(9):
            x = x + 1
        event = dev.event()
        event.record()
        x = x + 1
        assert dev.depth == 11
        event.synchronize()
        assert dev.depth == 1
        float(x.sum())
        assert dev.depth == 0
    assert dev.max_depth == 11


def test_memory_limit_counts_live_bytes_only():
    with SimulatedDevice(DeviceSpec(total_bytes=4 * MIB)) as dev:
        for _ in range(20):
            x = torch.zeros(MIB // 4 * 2)  # 2 MiB, the previous one is freed late
            del x
        keep = [torch.zeros(MIB // 4) for _ in range(3)]
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(MIB // 4 * 2)
        assert dev.free_bytes == MIB
    assert len(keep) == 3
    assert is_memory_fault(caught.value)
    assert dev.live.peak == 3 * MIB


def test_single_allocation_limit():
    with SimulatedDevice(DeviceSpec(max_alloc_bytes=MIB)) as dev:
        torch.zeros(MIB // 4)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.zeros(MIB // 4 + 1)
    assert dev.largest == MIB + 4


def test_no_float64():
    with SimulatedDevice():
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(2).double()
        assert classify(caught.value).row == 15
    with SimulatedDevice(DeviceSpec(has_fp64=True)) as dev:
        torch.zeros(2).double()
    assert torch.float64 in dev.dtypes


def test_no_random_numbers_from_the_device():
    x = torch.zeros(4)
    generator = torch.Generator().manual_seed(0)
    with SimulatedDevice() as dev:
        with pytest.raises(AssertionError, match="random numbers were drawn"):
            torch.randn(4, generator=generator)
        dev.adopt(x)
        torch.randn(4, generator=generator)  # on the host now
        with pytest.raises(AssertionError, match="randn_like"):
            torch.randn_like(x + 1)
    with SimulatedDevice(DeviceSpec(allows_random=True)):
        torch.randn(4, generator=generator)


def test_adopted_tensors_decide_what_is_on_the_device():
    layer = torch.nn.Linear(4, 4)
    noise = torch.ones(2, 4)
    with SimulatedDevice() as dev:
        dev.adopt(layer)
        schedule = torch.linspace(0, 1, 5, dtype=torch.float64).sqrt()
        assert dev.launches == 0
        out = layer(noise) + 1
        assert dev.launches == 2
        assert dev.is_on_device(out)
        assert not dev.is_on_device(schedule)
        back = dev.to_host(out)
        assert dev.depth == 0
        back.double()
    assert dev.launches == 2


def test_host_work_is_not_device_work():
    x = torch.ones(4)
    with SimulatedDevice() as dev, CountOps() as mode, host_region():
        (x.double() + 1).sum()
    assert dev.launches == mode.count.launches == 0


@pytest.mark.parametrize("at", [1, 4])
def test_raises_at_a_launch(at):
    done = []

    def run():
        x = torch.ones(4)
        for _ in range(9):
            done.append(x)
            x = x + 1

    with SimulatedDevice() as dev:
        dev.inject("error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", at_launch=at)
        with pytest.raises(RuntimeError, match="DEVICE_LOST"):
            run()
    assert len(done) == at - 1 == dev.launches


def test_raises_at_the_nth_operator_and_then_no_more():
    x = torch.ones(4, 4)
    with SimulatedDevice() as dev:
        dev.inject("could not create a primitive", op="^mm$", nth=2, error=ValueError)
        x @ x
        x + x
        with pytest.raises(ValueError, match="primitive"):
            x @ x
        x @ x
    assert dev.ops == {"mm": 2, "add": 1}


def test_corrupts_silently():
    x = torch.ones(4)
    with SimulatedDevice() as dev:
        dev.corrupt(op="add", nth=2)
        assert torch.isfinite(x + 1).all()
        assert torch.isnan(x + 1).all()
        assert torch.isfinite(x + 1).all()


def test_hang_and_interruption():
    raised = []
    dev = SimulatedDevice()

    def stuck():
        with torch.inference_mode(), dev:
            try:
                x = torch.ones(4)
                for _ in range(5):
                    x = x + 1
            except SimulatedHang as e:
                raised.append(e)

    dev.hang(3)
    thread = threading.Thread(target=stuck, daemon=True)
    thread.start()
    assert dev.hanging.wait(10)
    assert thread.is_alive()
    assert dev.launches == 2
    dev.interrupt()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1


@pytest.mark.slow
def test_machine_death_ends_the_process_at_once(tmp_path):
    half = tmp_path / "half.txt"
    child = run_child(f"""
with SimulatedDevice() as dev:
    dev.die(4)
    x = torch.ones(4)
    try:
        for _ in range(9):
            x = x + 1
            print(dev.launches, flush=True)
    finally:
        open({str(half)!r}, "w").close()
""")
    assert child.returncode == 0xD1
    assert child.stdout.split() == ["2", "3"]
    assert not half.exists(), "nothing runs after the machine died"


@pytest.mark.slow
def test_a_healthy_child_ends_well():
    child = run_child("with SimulatedDevice() as dev: torch.ones(4) + 1\nprint(dev.launches)")
    assert (child.returncode, child.stdout.strip()) == (0, "2"), child.stderr
