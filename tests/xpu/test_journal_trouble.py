"""Trouble with the journal's file: a run goes on, it is said once, nothing is thrown away."""

import logging
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

from supir_xpu.tests.xpu.journal_machine import DEVICE, DRIVER, Machine, crash_with, finish, job
from supir_xpu.xpu import journal as journal_module
from supir_xpu.xpu import journal_file
from supir_xpu.xpu.history import JobSize
from supir_xpu.xpu.journal import Journal, RunInfo


def use(journal):
    """One ordinary run; every call must come back."""
    assert journal.find_deaths() == []
    run = job()
    with journal.phase(run, "sample") as phase_id:
        journal.progress(phase_id, step=1, launches=10)
    journal.close_run(run, "ok")
    assert journal.history(DEVICE, DRIVER).max_clean("fused") == JobSize(1000, 100.0)
    assert journal.deaths() == []


def says_once(caplog, path):
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert str(path) in warnings[0].getMessage()


def test_a_corrupt_file_is_kept_and_said_once(machine, caplog):
    damaged = b"this is no database at all " * 500
    machine.path.write_bytes(damaged)
    journal = machine.start()
    use(journal)
    use(journal)
    assert journal.in_memory
    says_once(caplog, machine.path)
    assert machine.path.read_bytes() == damaged
    journal.forget()  # the user's word: start anew, keep the old bytes aside
    assert machine.path.with_name("journal.db.damaged").read_bytes() == damaged
    assert not journal.in_memory
    use(journal)
    journal.close()
    assert machine.start().history(DEVICE, DRIVER).max_clean("fused") == JobSize(1000, 100.0)


def test_a_file_damaged_in_the_middle(machine, caplog):
    journal = machine.start()
    for number in range(40):
        finish(journal, job(f"run {number}" + "." * 900))
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    journal.close()
    content = bytearray(machine.path.read_bytes())
    content[5000:30000] = os.urandom(25000)
    machine.path.write_bytes(bytes(content))
    use(machine.start())
    says_once(caplog, machine.path)


def test_a_file_of_a_newer_version_is_left_alone(machine, caplog):
    machine.start().close()
    with sqlite3.connect(machine.path) as db:
        db.execute("PRAGMA user_version=99")
    journal = machine.start()
    use(journal)
    assert "newer version" in journal.problem
    says_once(caplog, machine.path)


def test_a_path_that_cannot_be_a_file(tmp_path, caplog):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path / "file" / "journal.db", tmp_path):
        caplog.clear()
        use(Machine(path).start())
        says_once(caplog, path)


def test_a_read_only_file(machine, caplog):
    """SQLite's own answer to a write it may not make."""

    def read_only(path):
        db = journal_file.connect(path)
        db.execute("PRAGMA query_only=ON")
        return db

    machine.start().close()
    journal = machine.start(connect=read_only)
    use(journal)
    assert "readonly" in journal.problem
    says_once(caplog, machine.path)


READ_ONLY_CHILD = """
import logging, os, sqlite3, sys, types
logging.basicConfig(stream=sys.stdout, format="%(levelname)s", level=logging.WARNING)
pack = types.ModuleType("jx"); pack.__path__ = [sys.argv[1]]; sys.modules["jx"] = pack
from jx.boot import current_owner
from jx.journal import Journal, RunInfo
me = current_owner()
if os.getuid() == 0:  # root may write anywhere
    os.setgid(65534)
    os.setuid(65534)
journal = Journal(sys.argv[2], owner=me)
run = RunInfo("r", "dev", "1", "2", "fused", 10, 1.0)
with journal.phase(run, "sample") as i:
    journal.progress(i, step=1, launches=2)
journal.close_run(run, "ok")
print(journal.in_memory, len(journal.history("dev", "1").clean), len(journal.deaths()))
"""


if os.name == "posix":

    def test_a_read_only_folder_still_knows_the_crashes(tmp_path):
        """A real folder without write permission, and a process without the right to ignore it."""
        shared = tmp_path / "shared"
        shared.mkdir()
        machine = Machine(shared / "journal.db")
        journal = crash_with(machine, job())
        journal.find_deaths()
        journal.close()
        machine.path.chmod(0o444)
        shared.chmod(0o555)
        folders = [p for p in (tmp_path, *tmp_path.parents) if p.stat().st_uid == os.getuid()]
        modes = {p: p.stat().st_mode for p in folders}
        code = str(Path(journal_module.__file__).parent)
        try:
            for folder, mode in modes.items():
                folder.chmod(stat.S_IMODE(mode) | stat.S_IXOTH | stat.S_IROTH)
            child = subprocess.run(
                [sys.executable, "-S", "-B", "-c", READ_ONLY_CHILD, code, str(machine.path)],
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            for folder, mode in modes.items():
                folder.chmod(stat.S_IMODE(mode))
            shared.chmod(0o755)
        assert child.stdout.splitlines() == ["WARNING", "True 1 1"], child.stderr


def test_a_full_disk_in_the_middle_of_a_run(machine, caplog):
    """SQLite's own answer when no page can be added."""
    journal = machine.start()
    journal._db.execute("PRAGMA max_page_count=1").fetchall()
    run = RunInfo("r" * 9000, DEVICE, DRIVER, "2.14", "fused", 1000, 100.0)
    with journal.phase(run, "sample") as phase_id:
        journal.progress(phase_id, step=1, launches=10)
    use(journal)
    assert "full" in journal.problem
    says_once(caplog, machine.path)
    assert machine.start().find_deaths() == []


def test_a_locked_file(machine, monkeypatch, caplog):
    monkeypatch.setattr(journal_file, "BUSY_TIMEOUT_S", 0.1)
    machine.start().close()
    other = sqlite3.connect(machine.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    journal = machine.start()
    use(journal)
    assert "locked" in journal.problem
    says_once(caplog, machine.path)
    other.execute("ROLLBACK")
    other.close()


def test_locked_in_the_middle_of_a_run(machine, monkeypatch, caplog):
    """The row that is open on disk is closed there as soon as the file allows it."""
    monkeypatch.setattr(journal_file, "BUSY_TIMEOUT_S", 0.1)
    journal = machine.start()
    phase_id = journal.open_phase(job(), "sample")
    other = sqlite3.connect(machine.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.progress(phase_id, step=1, launches=10)
    journal.close_phase(phase_id, "ok")
    assert journal.in_memory
    says_once(caplog, machine.path)
    other.execute("ROLLBACK")
    other.close()
    journal.close()
    machine.living.clear()
    assert machine.start().find_deaths() == []


def test_a_short_lock_is_waited_for(machine):
    journal = machine.start()
    other = sqlite3.connect(machine.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    release.start()
    journal.open_phase(job(), "sample")
    release.join()
    other.close()
    assert not journal.in_memory


def test_what_a_broken_file_knew_is_still_used(machine):
    """Crashes read before the trouble keep counting while the session is in memory."""
    journal = crash_with(machine, job())
    journal.find_deaths()
    journal._db.execute("PRAGMA query_only=ON")
    finish(journal, job(launches=5, seconds=5.0))
    assert journal.in_memory
    history = journal.history(DEVICE, DRIVER)
    assert history.crash_weights() == (1.0, 0.0)
    assert history.max_clean("fused") == JobSize(5, 5.0)


def test_no_path_means_memory(caplog):
    use(Journal(None, boot_id="boot:1"))
    assert caplog.records == []
