"""A journal with values that cannot be right, and a clock that jumped: nothing raises or waits
for ever, and no crash is lost."""

import logging
import sqlite3
from contextlib import closing

import pytest
from supir_xpu.tests.xpu.journal_machine import DEVICE, DRIVER, crash_with, finish, job
from supir_xpu.xpu import journal_read
from supir_xpu.xpu.auto_plan import needed_waits
from supir_xpu.xpu.device_profiles import load_profiles
from supir_xpu.xpu.history import Crash, History, JobSize
from supir_xpu.xpu.risk_types import JudgeSettings

PROFILE = next(p for p in load_profiles().profiles if p.gap_s > 0 and p.heavy_gap_s > 0)


def change(machine, sql, *values):
    with closing(sqlite3.connect(machine.path)) as db, db:
        db.execute(sql, values)


def waits(journal, machine):
    return needed_waits(PROFILE, journal.history(DEVICE, DRIVER), machine.now, JudgeSettings())


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("column", ["planned", "seconds", "step", "launches", "opened", "updated"])
@pytest.mark.parametrize("value", [float("inf"), -5, "abc"])
def test_a_death_with_an_odd_number_is_still_reported(machine, caplog, column, value):
    journal = crash_with(machine, job())
    change(machine, f"UPDATE phases SET {column}=?", value)
    (death,) = journal.find_deaths()
    named = {"updated": "happened"}.get(column, column)
    assert death.unknown == (named,)
    assert "The machine went down" in death.message
    assert ("unknown" in death.message or "?" in death.message) == (
        column in ("planned", "step", "launches", "updated")
    )
    assert journal.deaths() == [death]
    history = journal.history(DEVICE, DRIVER)
    assert history.crash_weights() == (1.0, 0.0)
    known = JobSize(1000, 100.0)
    assert history.crashes[0].size == {
        "planned": known._replace(launches=0),
        "seconds": known._replace(seconds=0.0),
    }.get(column, known)
    assert 0 <= waits(journal, machine).before_s <= PROFILE.heavy_gap_s
    (said,) = warnings(caplog)
    assert named in said
    assert str(machine.path) in said


@pytest.mark.parametrize(
    ("column", "value"),
    [("run_id", b"\xff"), ("phase", b"\xff"), ("updated", b"\xff"), ("updated", 1e300)],
)
def test_a_death_with_odd_bytes_is_still_reported(machine, column, value):
    journal = crash_with(machine, job())
    change(machine, f"UPDATE phases SET {column}=?", value)
    assert "The machine went down" in journal.find_deaths()[0].message
    assert journal.history(DEVICE, DRIVER).crash_weights() == (1.0, 0.0)


def test_text_that_is_no_utf8_is_read(machine, caplog):
    journal = crash_with(machine, job())
    change(machine, "UPDATE phases SET phase=CAST(x'ff41' AS TEXT)")
    assert journal.find_deaths()[0].phase == "\ufffdA"
    assert not journal.in_memory
    assert warnings(caplog) == []


@pytest.mark.parametrize("pid", ["x", -1, 2**40, 1e300])
def test_a_process_number_that_cannot_be_read_is_nobody_alive(machine, pid):
    journal = machine.start()
    journal.open_phase(job(), "sample")
    change(machine, "UPDATE phases SET pid=?", pid)
    asked = []
    other = machine.start()
    other._start_of = asked.append
    assert not other.history(DEVICE, DRIVER).busy
    assert other.find_deaths()[0].kind == "process"
    assert asked == []  # the system would refuse such a number


def test_a_crash_of_unknown_size_can_still_be_outlived(machine):
    journal = crash_with(machine, job())
    journal.find_deaths()
    change(machine, "UPDATE deaths SET planned='abc', seconds=?", float("inf"))
    for _ in range(3):
        finish(journal, job(launches=1, seconds=1.0))
    assert journal.history(DEVICE, DRIVER).crash_weights() == (0.5, 0.0)


@pytest.mark.parametrize("value", ["abc", float("inf"), -1])
def test_an_odd_clean_size_proves_nothing(machine, value):
    journal = machine.start()
    finish(journal, job())
    assert journal.history(DEVICE, DRIVER).is_proven("fused", JobSize(1, 1.0))
    change(machine, "UPDATE clean SET launches=?", value)
    assert not journal.history(DEVICE, DRIVER).is_proven("fused", JobSize(1, 1.0))


@pytest.mark.parametrize("value", ["many", -3, 1e300])
def test_odd_counts_of_clean_runs_lower_nothing(machine, value):
    journal = crash_with(machine, job())
    journal.find_deaths()
    change(machine, "UPDATE deaths SET clean_after=?, kind='alien'", value)
    assert journal.history(DEVICE, DRIVER).crash_weights() == (1.0, 0.0)


def test_a_run_with_values_no_file_takes_is_stored(machine):
    journal = machine.start()
    run = job("bad \udcff name", launches=10**30, seconds=float("nan"))
    with journal.phase(run, "sample"):
        pass
    journal.close_run(run, "ok")
    assert not journal.in_memory
    assert journal.history(DEVICE, DRIVER).last_end == machine.now


@pytest.mark.parametrize("end", ["abc", -7.0, 1e300, 1000.0 + 3e7])
def test_an_end_that_cannot_be_is_just_now_once(machine, end):
    journal = machine.start()
    finish(journal, job())
    change(machine, "UPDATE phases SET closed=?", end)
    machine.now += 500
    assert waits(journal, machine).before_s == PROFILE.gap_s  # all of it: the end is unknown
    machine.now += PROFILE.gap_s - 1
    assert waits(machine.start(), machine).before_s == 1  # the rest of it, in any process
    machine.now += 1
    assert waits(journal, machine).before_s == 0  # and then no more


def test_a_clock_set_back_neither_lifts_a_gap_nor_keeps_it(machine):
    journal = machine.start()
    machine.now = 90_000.0
    finish(journal, job(heavy=True))
    machine.now = 80_000.0
    assert waits(journal, machine).before_s == PROFILE.heavy_gap_s
    machine.now += 10
    finish(journal, job())  # a later job counts from its own end
    machine.now += 3
    assert waits(journal, machine).before_s == PROFILE.gap_s - 3
    machine.now += 100
    assert waits(journal, machine).before_s == 0


def test_a_clock_that_is_a_little_ahead_is_left_alone(machine):
    journal = machine.start()
    finish(journal, job())
    machine.now -= journal_read.FUTURE_S / 2
    assert journal.history(DEVICE, DRIVER).last_end == 1000.0


def test_the_block_names_an_unknown_size(machine):
    from supir_xpu.xpu.risk_rules_history import rule_crashed_before

    class Case:
        is_xpu, size = True, JobSize(5, 1.0)
        plan = type("Plan", (), {"attention_policy": "fused"})
        history = History(
            DRIVER, (), (Crash("machine", JobSize(0, 0.0), "fused", DRIVER, "sample", 0.0, "e"),)
        )

    found = rule_crashed_before(Case)
    assert found.severity == "block"
    assert "unknown number of launches" in found.message
    assert "half" not in found.action
