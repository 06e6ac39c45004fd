"""The end of a process, forgetting while the file is in trouble, and a file that goes away."""

import logging
import os
import sqlite3
import threading
from contextlib import closing

import pytest
from supir_xpu.tests.xpu.journal_machine import DEVICE, DRIVER, Machine, crash_with, finish, job
from supir_xpu.xpu import journal_file
from supir_xpu.xpu.journal import ForgetError


def open_rows(machine):
    with closing(sqlite3.connect(machine.path)) as db:
        return db.execute("SELECT COUNT(*) FROM phases WHERE closed IS NULL").fetchone()[0]


def crashes(machine):
    with closing(sqlite3.connect(machine.path)) as db:
        return db.execute("SELECT COUNT(*) FROM deaths").fetchone()[0]


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# -- ending ------------------------------------------------------------------------------------


def test_nothing_is_opened_after_the_deliberate_end(machine):
    journal = machine.start()
    phase_id = journal.open_phase(job("a"), "sample")
    journal.close_open_rows()
    journal.progress(phase_id, step=9, launches=99)
    with journal.phase(job("b"), "sample") as late:
        journal.progress(late, step=1, launches=1)
    assert journal.open_phase(job("c"), "sample") == 0
    journal.close_run(job("b"), "ok")
    rows = [tuple(r) for r in journal._db.execute("SELECT run_id, step, result FROM phases")]
    assert rows == [("a", 0, "cancel")]
    machine.crash()
    assert machine.start().find_deaths() == []


def test_a_worker_that_goes_on_while_the_process_ends(machine):
    journal = machine.start()
    stop, opened = threading.Event(), threading.Event()

    def work():
        while not stop.is_set():
            journal.open_phase(job(), "sample")
            opened.set()

    worker = threading.Thread(target=work)
    worker.start()
    opened.wait(10)
    journal.close_open_rows()
    left = [open_rows(machine) for _ in range(20)]
    stop.set()
    worker.join()
    assert left == [0] * 20
    assert open_rows(machine) == 0


def test_an_end_in_the_middle_of_opening(machine):
    """A signal handler of the same thread runs just before the row is written."""
    journal = machine.start()
    inside = journal._insert_phase

    def interrupted(*values):
        journal.close_open_rows()
        return inside(*values)

    journal._insert_phase = interrupted
    journal.open_phase(job(), "sample")
    assert open_rows(machine) == 0


# -- forgetting --------------------------------------------------------------------------------


def lock(machine):
    other = sqlite3.connect(machine.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


@pytest.mark.parametrize("device", [DEVICE, None])
@pytest.mark.parametrize("locked_before_start", [True, False])
def test_a_locked_file_is_neither_forgotten_nor_moved(
    machine, monkeypatch, device, locked_before_start
):
    monkeypatch.setattr(journal_file, "BUSY_TIMEOUT_S", 0.05)
    journal = crash_with(machine, job())
    journal.find_deaths()
    if locked_before_start:
        journal.close()
        other = lock(machine)
        journal = machine.start()
        assert journal.in_memory
    else:
        other = lock(machine)
    with pytest.raises(ForgetError, match=r"Nothing was forgotten.*journal\.db.*locked"):
        journal.forget(device)
    other.execute("ROLLBACK")
    other.close()
    assert not list(machine.path.parent.glob("*.damaged"))
    assert crashes(machine) == 1
    assert len(journal.history(DEVICE, DRIVER).crashes) == 1
    assert journal.forget(device) == 1  # now it can be written
    assert crashes(machine) == 0
    assert journal.history(DEVICE, DRIVER).crashes == ()


def test_a_file_of_a_newer_version_is_not_forgotten(machine):
    machine.start().close()
    with closing(sqlite3.connect(machine.path)) as db, db:
        db.execute("PRAGMA user_version=99")
    before = machine.path.read_bytes()
    journal = machine.start()
    with pytest.raises(ForgetError, match="newer version"):
        journal.forget()
    assert machine.path.read_bytes() == before
    assert os.listdir(machine.path.parent) == [machine.path.name]


@pytest.mark.parametrize("pragma", ["query_only=ON", "max_page_count=1"])
def test_a_file_that_takes_no_write_is_not_moved(machine, pragma):
    """SQLite's own answers to a file without the right to write, and to a full disk."""
    journal = crash_with(machine, job())
    journal.find_deaths()
    inside = journal_file.connect

    def refusing(path):
        db = inside(path)
        db.execute("PRAGMA query_only=ON")
        return db

    journal._connect = refusing
    journal._db.execute(f"PRAGMA {pragma}").fetchall()
    if pragma != "query_only=ON":
        journal.open_phase(job("r" * 9000), "sample")
        assert "full" in journal.problem
    with pytest.raises(ForgetError, match="readonly"):
        journal.forget()
    assert not list(machine.path.parent.glob("*.damaged"))
    assert crashes(machine) == 1


def test_a_damaged_file_is_kept_when_only_one_device_is_named(machine):
    machine.path.write_bytes(b"this is no database at all " * 500)
    journal = machine.start()
    with pytest.raises(ForgetError, match="not a database"):
        journal.forget(DEVICE)
    assert os.listdir(machine.path.parent) == [machine.path.name]


def test_a_damaged_file_that_cannot_be_moved(machine, monkeypatch):
    machine.path.write_bytes(b"this is no database at all " * 500)
    journal = machine.start()

    def in_use(old, new):
        raise PermissionError(13, "in use", str(old))

    monkeypatch.setattr(journal_file.os, "replace", in_use)
    with pytest.raises(ForgetError, match="in use"):
        journal.forget()
    assert journal.in_memory
    finish(journal, job())  # and a run still goes on


# -- a file that goes away ---------------------------------------------------------------------


def test_a_file_cut_short_while_in_use(machine, caplog):
    for size in (100, 0):
        caplog.clear()
        journal = machine.start()
        finish(journal, job())
        os.truncate(machine.path, size)
        journal.open_phase(job(), "sample")
        assert journal.in_memory
        assert "cut short" in journal.problem
        finish(journal, job())
        (said,) = warnings(caplog)
        assert str(machine.path) in said
        machine.living.clear()
        for path in machine.path.parent.iterdir():
            path.unlink()


if os.name == "posix":  # elsewhere an open file can be neither deleted nor replaced

    def test_a_file_deleted_while_in_use_is_written_anew(machine, caplog):
        journal = crash_with(machine, job())
        journal.find_deaths()
        outer = journal.open_phase(job("outer"), "outer")
        for _ in range(2):
            for path in machine.path.parent.iterdir():
                path.unlink()
            inner = journal.open_phase(job("inner"), "sample")
            assert machine.path.is_file()
            assert not journal.in_memory
            assert open_rows(machine) == 2
            journal.close_phase(inner, "ok")
        assert crashes(machine) == 1
        journal.close_phase(outer, "ok")
        assert open_rows(machine) == 0
        (said,) = warnings(caplog)
        assert "deleted" in said
        assert str(machine.path) in said

    def test_a_deleted_file_is_noticed_when_the_state_is_asked(machine):
        journal = machine.start()
        machine.path.unlink()
        journal.history(DEVICE, DRIVER)
        assert machine.path.is_file()
        assert not journal.in_memory

    def test_a_deleted_folder_that_cannot_be_made_again(tmp_path, caplog):
        folder = tmp_path / "user"
        machine = Machine(folder / "journal.db")
        journal = machine.start()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("no folder", encoding="utf-8")
        finish(journal, job())
        finish(journal, job())
        assert journal.in_memory
        assert len(warnings(caplog)) == 1

    def test_a_replaced_file_is_used_and_old_ids_close_nothing_in_it(machine, tmp_path, caplog):
        other = Machine(tmp_path / "other.db")
        theirs = other.start()
        theirs.open_phase(job("theirs"), "sample")
        theirs._db.close()
        journal = machine.start()
        mine = journal.open_phase(job("mine"), "sample")
        os.replace(other.path, machine.path)
        for name in ("journal.db-wal", "journal.db-shm"):
            machine.path.with_name(name).unlink()
        machine.now += 1
        journal.progress(mine, step=5, launches=5)
        journal.close_phase(mine, "ok")
        assert open_rows(machine) == 1
        later = journal.open_phase(job("later"), "sample")
        assert later != mine
        journal.close_phase(later, "ok")
        assert open_rows(machine) == 1
        (said,) = warnings(caplog)
        assert "replaced" in said

    def test_a_copy_in_the_same_place_is_the_same_journal(machine, tmp_path, caplog):
        """Some network folders give a file a new number from time to time."""
        journal = machine.start()
        mine = journal.open_phase(job(), "sample")
        journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        copy = tmp_path / "copy"
        copy.write_bytes(machine.path.read_bytes())
        os.replace(copy, machine.path)
        journal.close_phase(mine, "ok")
        assert open_rows(machine) == 0
        assert warnings(caplog) == []
