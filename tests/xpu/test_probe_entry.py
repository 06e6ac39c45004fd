"""An entry of the preflight's file that is damaged costs another preflight, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import time
from dataclasses import replace

import pytest
from supir_xpu.xpu import probe_cache
from supir_xpu.xpu.probe import remembered
from supir_xpu.xpu.probe_cache import FILE_NAME, CacheKey, ProbeCache, Remembered
from supir_xpu.xpu.probe_types import Battery, Check

KEY = CacheKey("xpu:0", "uuid", "1.6", "2.14", "linux:a")
OTHER = replace(KEY, driver="1.7")
FOUND = {"properties": {"name": "Arc", "uuid": "u", "total_memory": 2**33, "architecture": 1}}
BATTERY = Battery(
    "xpu:0",
    frozenset(range(10)),
    [
        Check(0, "device properties", numbers=FOUND),
        Check(0, "torch", numbers={"arch_list": ["bmg"], "compiled": True}),
        Check(
            2, "sum", "wrong", "float32", "t", "contiguous", ("contiguous",), 0.5, {"error": 0.1}
        ),
        Check(6, "attention", numbers={"dim_head": 64, "kernel": "fused", "error": 0.0}),
        Check(7, "allocate 0.50 GiB", "error", text="no"),
        Check(7, "allocate 0.10 GiB", numbers={"allocated": 10**8, "size": 10**8}),
        Check(8, "block rate", numbers={"flops_per_s": 1e12, "block_s": 0.1}),
        Check(9, "matmul, 3 times", "wrong", numbers={"error": 1e-4}),
    ],
    ["w"],
    ["e"],
    ["l"],
    True,
    True,
    3.5,
)
ENTRY = Remembered(KEY, BATTERY, "degraded", when=1234.5)
STAGES = frozenset(range(4))

ODD = [None, True, -1, 2**70, 10**400, 1e300, math.inf, math.nan, "", "x", [], ["x"], {}, {"a": 1}]
"""What a damaged or edited file may hold in place of a value."""


@pytest.fixture
def kept(tmp_path):
    """The file with two entries, of which the first is to be damaged."""
    cache = ProbeCache(tmp_path)
    cache.keep(ENTRY)
    cache.keep(replace(ENTRY, key=OTHER))
    probe_cache._tell_once.cache_clear()
    return tmp_path


def damaged(folder, change):
    path = folder / FILE_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data["entries"][0])
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def check(number, **values):
    return lambda entry: entry["battery"]["checks"][number].update(values)


def battery(**values):
    return lambda entry: entry["battery"].update(values)


def emptied(entry):
    entry["status"] = "retreat"
    entry["battery"].update(stages=[], checks=[])


DAMAGES = {
    "stages Infinity": battery(stages=[0, math.inf]),
    "stages True": battery(stages=[True]),
    "no checks": battery(checks=[]),
    "retreat of nothing": emptied,
    "another device": battery(device="xpu:1"),
    "stage Infinity": check(2, stage=math.inf),
    "rate 10**400": check(6, numbers={"flops_per_s": 10**400}),
    "rate Infinity": check(6, numbers={"flops_per_s": math.inf}),
    "rate below 1": check(6, numbers={"flops_per_s": 1e-300}),
    "time negative": check(6, numbers={"sync_s": -5}),
    "workaround zzz": check(2, workaround="zzz"),
    "workaround not tried": check(2, workaround="dtype"),
    "workaround of another stage": check(2, workaround="read_back", tried=["read_back"]),
    "workaround of silence": check(7, workaround="zzz"),
    "status zzz": check(2, status="zzz"),
    "status list": check(2, status=["ok"]),
    "allocation x": check(4, name="x"),
    "allocation null": check(4, name=None),
    "allocated x": check(5, numbers={"allocated": "x"}),
    "dim_head x": check(3, numbers={"dim_head": "x"}),
    "error abc": check(7, numbers={"error": "abc"}),
    "numbers null": check(3, numbers=None),
    "arch_list 5": check(1, numbers={"arch_list": 5}),
    "name 5": check(0, numbers={"properties": {"name": 5}}),
    "memory abc": check(0, numbers={"properties": {"total_memory": "abc"}}),
    "architecture huge": check(0, numbers={"properties": {"architecture": 10**30}}),
    "nested": check(1, numbers={"more": [[[[[[[1]]]]]]]}),
    "status healthy": lambda entry: entry.update(status="healthy"),
    "status retreat": lambda entry: entry.update(status="retreat"),
    "when Infinity": lambda entry: entry.update(when=math.inf),
    "when NaN": lambda entry: entry.update(when=math.nan),
    "when 9e12": lambda entry: entry.update(when=9e12),
    "key without boot": lambda entry: entry["key"].pop("boot"),
    "key with more": lambda entry: entry["key"].update(more=""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_as_if_absent_and_told_once(kept, caplog, name):
    damaged(kept, DAMAGES[name])
    with caplog.at_level(logging.WARNING):
        assert remembered(kept, KEY, STAGES) is None
        assert remembered(kept, KEY, STAGES) is None
        assert remembered(kept, OTHER, STAGES).verdict.status == "degraded", "the other one holds"
    assert [FILE_NAME in text for text in caplog.messages] == [True]
    ProbeCache(kept).keep(ENTRY)
    assert remembered(kept, KEY, STAGES).verdict.status == "degraded"


def places(value, path=()):
    """Every place in an entry that holds a value."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            yield from places(value[key], (*path, key))


def test_no_value_anywhere_raises_or_is_told_as_something_else(kept, monkeypatch):
    """Each value of the file replaced by each odd one, and left out."""
    path = kept / FILE_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    good = data["entries"][0]
    monkeypatch.setattr(probe_cache, "_tell_once", lambda path, why: None)
    tried = 0
    for place in places(good):
        for odd in [*ODD, KeyError]:
            entry = copy.deepcopy(good)
            holder = entry
            for key in place[:-1]:
                holder = holder[key]
            if odd is KeyError:
                del holder[place[-1]]
            else:
                holder[place[-1]] = odd
            tried += 1
            try:
                found = probe_cache.entry_from(entry)
            except ValueError:
                continue
            assert found.status == "degraded", (place, odd)
            assert math.isfinite(found.when), (place, odd)
    assert tried > 1000


@pytest.mark.parametrize(
    "content",
    ["[" * 200000, '{"format": 1, "entries": null}', '{"format": 1, "entries": "abc"}',
     '{"format": 1, "entries": {"a": 1}}', "Infinity", '{"format": 1, "entries": [' + "9" * 5000 + "]}"],
)  # fmt: skip
def test_a_file_of_something_else(kept, content):
    (kept / FILE_NAME).write_text(content, encoding="utf-8")
    assert remembered(kept, KEY, STAGES) is None
    ProbeCache(kept).keep(ENTRY)
    assert remembered(kept, KEY, STAGES) is not None


def test_a_hang_between_two_allocations_is_judged(tmp_path):
    checks = [*BATTERY.checks, Check(7, "what follows allocate 0.50 GiB", "hang", text="t")]
    hang = replace(ENTRY, battery=replace(BATTERY, checks=checks), status="retreat")
    ProbeCache(tmp_path).keep(hang)
    assert remembered(tmp_path, KEY).verdict.criterion == "hang"


def test_a_device_lost_while_it_was_checked_elsewhere_stays_spoilt(tmp_path):
    """The checks began before the loss and are kept after it."""
    cache = ProbeCache(tmp_path)
    now = time.time()
    cache.spoil("xpu:0", "lost in conv")
    cache.keep(replace(ENTRY, when=now + 1.0))
    assert cache.find(KEY, STAGES, None) is None
    assert cache.was_seen("xpu:0")
    cache.keep(replace(ENTRY, when=time.time() + 60.0))  # begun after it
    assert cache.find(KEY, STAGES, None) is not None


def test_a_change_of_another_process_in_between_is_not_undone(kept, monkeypatch):
    write = ProbeCache._write
    others = [lambda: ProbeCache(kept).spoil("xpu:0", "lost elsewhere")]
    monkeypatch.setattr(probe_cache, "_one_at_a_time", contextlib.nullcontext())

    def slow(cache, content, stamp):
        if others:
            others.pop()()
        return write(cache, content, stamp)

    monkeypatch.setattr(ProbeCache, "_write", slow)
    ProbeCache(kept).keep(replace(ENTRY, when=time.time()))
    monkeypatch.undo()
    assert ProbeCache(kept).find(OTHER, STAGES, None) is None
    assert ProbeCache(kept).find(KEY, STAGES, None) is None, "begun before the loss"
    assert os.listdir(kept) == [FILE_NAME]
