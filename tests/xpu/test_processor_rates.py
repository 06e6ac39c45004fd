"""What a processor is measured to do: plausible, and in the right direction."""

from __future__ import annotations

import importlib

import pytest
import torch


def test_rates_are_those_of_a_processor():
    from supir_xpu.xpu.processor_rates import measure_processor

    rates = measure_processor()
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bw_bytes_per_s < 1e13
    assert 1e-8 < rates.launch_s < 1e-2


def test_the_shortest_run_counts_and_the_first_does_not(monkeypatch):
    from supir_xpu.xpu import processor_rates

    clock = iter([0.0, 0.1, 0.0, 7.0, 0.0, 3.0, 0.0, 5.0])
    monkeypatch.setattr(processor_rates.time, "perf_counter", lambda: next(clock))
    assert processor_rates._best(lambda: None) == 3.0


@pytest.mark.host
def test_a_processor_is_planned_for_with_what_it_was_measured_to_do(monkeypatch):
    from supir_xpu.xpu.processor_rates import ProcessorRates

    machine_module = importlib.import_module("supir_xpu.nodes.machine")
    rates = ProcessorRates(flops_per_s=5e9, bw_bytes_per_s=4e9, launch_s=3e-6)
    monkeypatch.setattr(machine_module, "measure_processor", lambda: rates)
    monkeypatch.setattr(machine_module.mm, "get_torch_device", lambda: torch.device("cpu"))
    facts = machine_module.read_machine().now()
    assert (facts.flops_per_s, facts.bw_bytes_per_s, facts.launch_s) == (5e9, 4e9, 3e-6)
