"""Remembered preflights: what they hold for, and what a bad file costs."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from supir_xpu.xpu.probe import remembered
from supir_xpu.xpu.probe_cache import FILE_NAME, MOST_ENTRIES, CacheKey, ProbeCache, Remembered
from supir_xpu.xpu.probe_types import Battery, Check

KEY = CacheKey("xpu:0", "uuid", "1.6", "2.14", "linux:a")
QUICK, FULL = frozenset(range(4)), frozenset(range(10))
BATTERY = Battery(
    "xpu:0",
    QUICK,
    [Check(2, "sum", "wrong", "float32", "t", "contiguous", ("contiguous",), 0.5, {"error": 0.1})],
    ["w"],
    ["e"],
    ["libsycl.so.8"],
    True,
    False,
    3.5,
)
ENTRY = Remembered(KEY, BATTERY, "degraded")
HANG = replace(BATTERY, checks=[Check(2, "sum", "hang", text="no answer")])
WELL = replace(BATTERY, checks=[Check(2, "sum")])


def test_comes_back_as_it_was(tmp_path):
    cache = ProbeCache(tmp_path / "not" / "there" / "yet")
    cache.keep(ENTRY)
    assert cache.find(KEY, QUICK, None) == ENTRY
    assert [path.name for path in (tmp_path / "not" / "there" / "yet").iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "change",
    [
        {"selector": "xpu:1"},
        {"device": "other"},
        {"driver": "1.7"},
        {"torch": "2.15"},
        {"boot": "linux:b"},
    ],
)
def test_any_change_ends_it(tmp_path, change):
    cache = ProbeCache(tmp_path)
    cache.keep(ENTRY)
    assert cache.find(replace(KEY, **change), QUICK, None) is None


def test_boot_times_may_drift(tmp_path):
    cache = ProbeCache(tmp_path)
    cache.keep(replace(ENTRY, key=replace(KEY, boot="time:1000.0")))
    assert cache.find(replace(KEY, boot="time:1004.0"), QUICK, None) is not None
    assert cache.find(replace(KEY, boot="time:1006.0"), QUICK, None) is None


def test_a_short_battery_does_not_serve_a_full_one_unless_it_ended_in_retreat(tmp_path):
    cache = ProbeCache(tmp_path)
    cache.keep(ENTRY)
    assert cache.find(KEY, FULL, None) is None
    cache.keep(replace(ENTRY, status="retreat", battery=HANG))
    assert cache.find(KEY, FULL, None) is not None


def test_a_kept_judgement_is_remembered_with_its_age_and_without_a_process(tmp_path):
    cache = ProbeCache(tmp_path)
    cache.keep(replace(ENTRY, when=1234.5))
    found = remembered(tmp_path, KEY)
    assert found is not None
    assert (found.from_cache, found.when, found.battery) == (True, 1234.5, BATTERY)
    assert remembered(tmp_path, replace(KEY, driver="other")) is None
    assert remembered(tmp_path, KEY, FULL) is None
    unasked = replace(KEY, device="", driver="")
    cache.keep(replace(ENTRY, key=unasked, status="retreat", battery=HANG, when=1.0))
    assert remembered(tmp_path, KEY).when == 1.0, "a device that could not even be asked"


def test_a_fault_in_a_run(tmp_path):
    cache = ProbeCache(tmp_path)
    cache.keep(ENTRY)
    assert cache.find(KEY, QUICK, "lost in conv") is None
    cache.keep(replace(ENTRY, after_fault="lost in conv"))  # probed after it
    assert cache.find(KEY, QUICK, "lost in conv") is not None
    assert cache.find(KEY, QUICK, None) is not None
    cache.spoil("xpu:1", "lost")
    assert cache.find(KEY, QUICK, None) is not None
    cache.spoil("xpu:0", "lost")
    assert cache.find(KEY, QUICK, None) is None
    assert cache.was_seen("xpu:0")
    assert not cache.was_seen("xpu:1")


def test_is_bounded_and_keeps_one_per_key(tmp_path):
    cache = ProbeCache(tmp_path)
    for number in range(MOST_ENTRIES + 5):
        cache.keep(replace(ENTRY, key=replace(KEY, driver=str(number))))
        cache.keep(
            replace(ENTRY, key=replace(KEY, driver=str(number)), status="healthy", battery=WELL)
        )
    entries = json.loads((tmp_path / FILE_NAME).read_text(encoding="utf-8"))["entries"]
    assert len(entries) == MOST_ENTRIES
    assert {entry["status"] for entry in entries} == {"healthy"}
    assert entries[-1]["key"]["driver"] == str(MOST_ENTRIES + 4)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"format": 99, "entries": []}', b'{"format": 1}',
        b'{"format": 1, "entries": [5]}',
        b'{"format": 1, "entries": [{"key": {"a": 1}, "status": "x", "battery": {}}]}',
    ],
)  # fmt: skip
def test_a_corrupt_file_is_ignored_and_replaced(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    cache = ProbeCache(tmp_path)
    assert cache.find(KEY, QUICK, None) is None
    cache.keep(ENTRY)
    assert cache.find(KEY, QUICK, None) == ENTRY


def test_a_check_that_makes_no_sense_spoils_the_file_only(tmp_path):
    cache = ProbeCache(tmp_path)
    cache.keep(ENTRY)
    path = tmp_path / FILE_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    data["entries"][0]["battery"]["checks"][0]["stage"] = 77
    path.write_text(json.dumps(data), encoding="utf-8")
    assert cache.find(KEY, QUICK, None) is None


def test_no_folder_and_a_folder_that_cannot_be_made(tmp_path):
    nowhere = ProbeCache(None)
    nowhere.keep(ENTRY)
    assert nowhere.find(KEY, QUICK, None) is None
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    cache = ProbeCache(blocked / "sub")
    cache.keep(ENTRY)
    assert cache.find(KEY, QUICK, None) is None


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    cache = ProbeCache(tmp_path)
    cache.keep(ENTRY)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    cache.keep(replace(ENTRY, key=replace(KEY, driver="9")))
    assert cache.find(KEY, QUICK, None) == ENTRY
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
