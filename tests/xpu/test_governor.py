"""Bounded submission on a queue that only counts."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from supir_xpu.tests.simulated_device import DeviceSpec, QueueOverflowError, SimulatedDevice
from supir_xpu.xpu.device import DeviceFacts
from supir_xpu.xpu.governor import DutyCycle, Governor, StallWatch


class Queue:
    """Launches and completions; an event completes everything before it."""

    def __init__(self):
        self.launched = self.completed = self.deepest = self.drains = 0

    def launch(self, n):
        self.launched += n
        self.deepest = max(self.deepest, self.launched - self.completed)

    def event(self):
        queue = self

        class Event:
            def record(self):
                self.at = queue.launched

            def synchronize(self):
                queue.completed = max(queue.completed, self.at)

        return Event()

    def drain(self):
        self.completed = self.launched
        self.drains += 1


def governed(queue, window=64, windows=4, **options):
    return Governor(window, windows, event_factory=queue.event, drain=queue.drain, **options)


@pytest.mark.parametrize("window", [1, 8, 64])
@pytest.mark.parametrize("windows", [2, 4, 7])
@pytest.mark.parametrize("block", ["one", "whole", "mixed"])
def test_never_more_in_flight_than_the_window(window, windows, block):
    queue = Queue()
    governor = governed(queue, window, windows)
    sizes = {"one": [1], "whole": [window], "mixed": [1, window, max(1, window // 3)]}[block]
    for i in range(500):
        n = sizes[i % len(sizes)]
        queue.launch(n)
        governor.tick(n)
    assert queue.deepest <= governor.limit == window * windows
    assert governor.report.max_in_flight == queue.deepest
    assert governor.report.launches == queue.launched


def test_the_queue_is_not_drained_at_every_wait():
    queue = Queue()
    governor = governed(queue)
    shallowest = 10**6
    for i in range(400):
        queue.launch(20)
        governor.tick(20)
        if i > 20:
            shallowest = min(shallowest, queue.launched - queue.completed)
    assert shallowest >= 64
    assert queue.drains == 0


def test_a_block_larger_than_the_window_is_reported():
    queue = Queue()
    governor = governed(queue, 8, 2)
    queue.launch(100)
    governor.tick(100)
    assert governor.report.largest_tick == 100
    assert queue.launched - queue.completed <= 8


def test_finish_waits_for_everything_recorded():
    queue = Queue()
    governor = governed(queue)
    queue.launch(10)
    governor.tick(10)
    governor.finish()
    assert queue.completed == queue.launched


def test_off_means_nothing_happens():
    def event():
        pytest.fail("an event was made")

    for facts, window in [(DeviceFacts("cpu"), 64), (DeviceFacts("xpu"), 0)]:
        governor = Governor.for_facts(facts, window)
        governor.event_factory = event
        for _ in range(1000):
            governor.tick(100)
        governor.finish()
        assert governor.report.ticks == governor.report.events == 0
    assert Governor.for_facts(DeviceFacts("xpu"), 16).enabled


@pytest.mark.parametrize(("window", "windows"), [(0, 4), (64, 1)])
def test_a_window_that_bounds_nothing_is_refused(window, windows):
    with pytest.raises(ValueError, match="cannot bound"):
        Governor(window, windows)


def test_duty_cycle_pauses_after_long_work_and_can_be_cancelled():
    now, slept, checks = [0.0], [], []
    queue = Queue()

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    governor = governed(
        queue, clock=lambda: now[0], sleep=sleep, duty_cycle=DutyCycle(60, 8),
        check_cancel=lambda: checks.append(1),
    )  # fmt: skip
    for _ in range(130):
        queue.launch(10)
        governor.tick(10)
        now[0] += 1.0
    assert governor.report.pauses == queue.drains == 2
    assert sum(slept) == pytest.approx(16)
    assert max(slept) <= 0.25
    assert len(checks) == len(slept)

    class CancelError(Exception):
        pass

    def cancel():
        raise CancelError

    governor.finish()
    governor.check_cancel = cancel
    governor.tick(1)
    now[0] += 61
    with pytest.raises(CancelError):
        governor.tick(1)
    assert sum(slept) == pytest.approx(16), "a cancelled pause does not sleep"


@pytest.mark.parametrize("window", [4, 16])
def test_on_the_simulated_device(window):
    with SimulatedDevice(DeviceSpec(max_queue=window * 3)) as dev:
        governor = Governor(window, 3, event_factory=dev.event, drain=dev.synchronize)
        x = torch.zeros(8)
        for _ in range(100):
            x = (x + 1).mul(2).relu()
            governor.tick(3)
    assert dev.launches == governor.report.launches + 1  # zeros
    assert 0 < dev.max_depth <= window * 3


def test_ungoverned_work_exceeds_the_same_limit():
    def work():
        x = torch.zeros(8)
        for _ in range(100):
            x = x + 1

    with SimulatedDevice(DeviceSpec(max_queue=12)) as dev, pytest.raises(QueueOverflowError):
        work()
    assert dev.max_depth == 13


def test_stall_watch_speaks_once_and_only_on_a_stall():
    said = []
    with StallWatch(said.append, first_s=30, stall_s=0.1) as watch:
        for _ in range(5):
            watch.beat()
            time.sleep(0.02)
        assert not said
        time.sleep(0.4)
        watch.beat()
    assert len(said) == 1
    assert "no progress on the device" in said[0]
    assert watch.stalled == said[0]
    quiet = []
    with StallWatch(quiet.append, first_s=30, stall_s=0.05):
        time.sleep(0.2)  # the first operation may compile for minutes
    assert not quiet


def test_a_hang_is_noticed_from_the_side():
    said = threading.Event()
    with SimulatedDevice() as dev:
        dev.hang(20)
        governor = Governor(2, 2, event_factory=dev.event, drain=dev.synchronize)
        with StallWatch(lambda text: said.set(), stall_s=0.1) as watch:
            governor.on_tick = watch.beat

            def rescue():
                said.wait(10)
                dev.release()

            helper = threading.Thread(target=rescue)
            helper.start()
            x = torch.zeros(4)
            for _ in range(30):
                x = x + 1
                governor.tick(1)
            helper.join()
    assert dev.hanging.is_set()
    assert said.is_set()
    assert watch.stalled is not None
