"""The crash journal: what it finds, what it learns, and how large it gets."""

import threading

import pytest
from supir_xpu.tests.xpu.journal_machine import DEVICE, DRIVER, crash_with, finish, job
from supir_xpu.xpu import journal as journal_module
from supir_xpu.xpu.history import JobSize
from supir_xpu.xpu.journal import RunInfo

# -- deaths ------------------------------------------------------------------------------------


def test_nothing_to_find_at_first(machine):
    journal = machine.start()
    assert journal.find_deaths() == []
    history = journal.history(DEVICE, DRIVER)
    assert (history.clean, history.crashes, history.last_end) == ((), (), None)
    assert not journal.in_memory


def test_the_machine_died(machine):
    journal = machine.start()
    with journal.phase(job(), "encode"):
        pass
    phase_id = journal.open_phase(job(), "sample", launches=40)
    machine.now += 5
    journal.progress(phase_id, step=3, launches=321)
    machine.crash()
    journal = machine.start()
    (death,) = journal.find_deaths()
    assert (death.kind, death.phase, death.step, death.launches) == ("machine", "sample", 3, 321)
    assert death.run == job()
    assert (death.opened, death.when) == (1000.0, 1005.0)
    for part in ("sample", "step 3", "321", "2944 x 2944", DEVICE, DRIVER, "500 launches", "50 s"):
        assert part in death.message
    assert journal.find_deaths() == []  # once
    assert journal.deaths() == [death]  # and still known
    (crash,) = journal.history(DEVICE, DRIVER).crashes
    assert (crash.kind, crash.size, crash.weight(DRIVER)) == ("machine", JobSize(1000, 100.0), 1.0)


def test_a_process_died(machine):
    first = machine.start()
    first.open_phase(job(), "decode", step=1, launches=7)
    machine.kill(first)
    journal = machine.start()
    (death,) = journal.find_deaths()
    assert (death.kind, death.phase) == ("process", "decode")
    assert "closed by hand" in death.message
    assert journal.history(DEVICE, DRIVER).crash_weights() == (0.0, 0.5)


def test_a_process_that_died_with_the_device_idle_is_no_death(machine):
    first = machine.start()
    first.open_phase(job(), "load from disk", xpu=False)
    machine.kill(first)
    journal = machine.start()
    assert journal.find_deaths() == []
    assert journal.history(DEVICE, DRIVER).crashes == ()


def test_a_machine_that_died_with_the_device_idle_tightens_nothing(machine):
    journal = machine.start()
    journal.open_phase(job(), "load from disk", xpu=False)
    machine.crash()
    journal = machine.start()
    (death,) = journal.find_deaths()
    assert not death.device_at_work
    assert "Nothing changed" in death.message
    assert journal.history(DEVICE, DRIVER).crash_weights() == (0.0, 0.0)


@pytest.mark.parametrize("result", ["ok", "error", "cancel"])
def test_a_closed_phase_is_no_death(machine, result):
    journal = machine.start()
    journal.close_phase(journal.open_phase(job(), "sample"), result)
    machine.crash()
    assert machine.start().find_deaths() == []


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "ok"),
        (ValueError, "error"),
        (KeyboardInterrupt, "cancel"),
        (InterruptedError, "cancel"),
        (SystemExit, "cancel"),
    ],
)
def test_phase_closes_however_the_block_ends(machine, error, result):
    journal = machine.start()

    def run():
        with journal.phase(job(), "sample", cancelled_by=(InterruptedError,)):
            if error:
                raise error("stop")

    if error:
        with pytest.raises(error):
            run()
    else:
        run()
    rows = [tuple(r) for r in journal._db.execute("SELECT phase, result FROM phases")]
    assert rows == [("sample", result)]


def test_nested_phases_are_one_death_at_the_innermost(machine):
    journal = machine.start()
    journal.open_phase(job(), "upscale", xpu=False)
    journal.open_phase(job(), "sample", step=2)
    machine.crash()
    (death,) = machine.start().find_deaths()
    assert (death.phase, death.device_at_work) == ("sample", True)


def test_two_runs_of_one_crash_count_once(machine):
    one, two = machine.start(), machine.start()
    one.open_phase(job("a"), "sample")
    two.open_phase(job("b"), "decode")
    machine.crash()
    journal = machine.start()
    assert len(journal.find_deaths()) == 2
    assert journal.history(DEVICE, DRIVER).crash_weights() == (1.0, 0.0)


def test_two_crashes_count_twice(machine):
    crash_with(machine, job("a")).find_deaths()
    journal = crash_with(machine, job("b"))
    journal.find_deaths()
    assert journal.history(DEVICE, DRIVER).crash_weights() == (2.0, 0.0)


def test_a_living_process_is_never_reported(machine):
    one, two = machine.start(), machine.start()
    phase_id = one.open_phase(job(), "sample")
    assert two.find_deaths() == []
    assert one.find_deaths() == []
    assert two.history(DEVICE, DRIVER).busy
    assert not one.history(DEVICE, DRIVER).busy  # one's own work is not somebody else's
    one.close_phase(phase_id, "ok")
    assert not two.history(DEVICE, DRIVER).busy


def test_a_reused_process_number_is_not_the_old_process(machine):
    first = machine.start(pid=50, started="t1")
    first.open_phase(job(), "sample")
    machine.kill(first)
    other = machine.start(pid=50, started="t2")
    (death,) = other.find_deaths()
    assert death.kind == "process"


def test_a_death_is_reported_to_one_caller_only(machine):
    journal = machine.start()
    for number in range(20):
        journal.open_phase(job(str(number)), "sample")
    machine.crash()
    starters = [machine.start() for _ in range(4)]
    found, barrier = [], threading.Barrier(4)

    def look(mine):
        barrier.wait()
        found.extend(d.run.run_id for d in mine.find_deaths())

    threads = [threading.Thread(target=look, args=(s,)) for s in starters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=int) == [str(n) for n in range(20)]


def test_closing_on_purpose(machine):
    one, two = machine.start(), machine.start()
    one.open_phase(job("a"), "sample")
    two.open_phase(job("b"), "sample")
    one.close()
    one.close_open_rows()  # for example at exit, after close
    one.open_phase(job("c"), "sample")
    machine.crash()
    assert [d.run.run_id for d in machine.start().find_deaths()] == ["b"]


def test_close_handler_may_interrupt_a_write(machine):
    """A signal handler runs in the middle of a transaction of the same thread."""
    journal = machine.start()
    journal.open_phase(job(), "sample")

    def interrupted(db):
        db.execute("UPDATE phases SET step=9")
        journal.close_open_rows()
        assert not db.in_transaction  # on disk now: the process may end here
        return True

    assert journal._do(interrupted, False)
    machine.crash()
    assert machine.start().find_deaths() == []


# -- learning ----------------------------------------------------------------------------------


def test_clean_jobs_form_a_frontier(machine):
    journal = machine.start()
    for launches, seconds in [(100, 10.0), (50, 5.0), (80, 20.0), (100, 10.0), (300, 1.0)]:
        finish(journal, job(launches=launches, seconds=seconds))
    finish(journal, job(policy="math", launches=7, seconds=7.0))
    history = journal.history(DEVICE, DRIVER)
    assert set(history.clean) == {
        ("fused", JobSize(100, 10.0)),
        ("fused", JobSize(80, 20.0)),
        ("fused", JobSize(300, 1.0)),
        ("math", JobSize(7, 7.0)),
    }
    assert history.max_clean("fused") == JobSize(300, 20.0)
    assert history.is_proven("fused", JobSize(90, 10.0))
    assert not history.is_proven("fused", JobSize(90, 15.0))
    assert not history.is_proven("math", JobSize(90, 1.0))
    assert history.max_clean("fused_pieces") is None
    assert journal.history(DEVICE, "other driver").clean == ()
    assert journal.history("other device", DRIVER).clean == ()


@pytest.mark.parametrize("result", ["error", "cancel"])
def test_a_run_that_did_not_end_well_teaches_nothing(machine, result):
    journal = machine.start()
    journal.close_run(job(), result)
    assert journal.history(DEVICE, DRIVER).clean == ()


@pytest.mark.parametrize(
    ("clean", "weight"), [(0, 1.0), (2, 1.0), (3, 0.5), (5, 0.5), (6, 0.25), (9, 0.125)]
)
def test_three_clean_jobs_halve_a_crash(machine, clean, weight):
    journal = crash_with(machine, job())
    journal.find_deaths()
    for _ in range(clean):
        finish(journal, job(launches=1000, seconds=100.0))
    assert journal.history(DEVICE, DRIVER).crash_weights()[0] == weight


@pytest.mark.parametrize(("launches", "seconds"), [(999, 100.0), (1000, 99.0), (10, 1.0)])
def test_smaller_clean_jobs_prove_nothing(machine, launches, seconds):
    journal = crash_with(machine, job())
    journal.find_deaths()
    for _ in range(9):
        finish(journal, job(launches=launches, seconds=seconds))
    assert journal.history(DEVICE, DRIVER).crash_weights()[0] == 1.0


def test_a_new_driver_halves_and_never_erases(machine):
    journal = crash_with(machine, job())
    journal.find_deaths()
    new = "32.0.101.9999"
    assert journal.history(DEVICE, new).crash_weights()[0] == 0.5
    for _ in range(30):
        finish(journal, job(driver=new))
    assert 0 < journal.history(DEVICE, new).crash_weights()[0] < 0.001
    assert journal.history(DEVICE, DRIVER).crash_weights()[0] == 1.0  # on going back, all of it
    assert journal.history("another card", DRIVER).crashes == ()


def test_smallest_crash_per_policy(machine):
    for launches, seconds, policy in [(900, 50.0, "math"), (500, 90.0, "math"), (1, 1.0, "fused")]:
        journal = crash_with(machine, job(launches=launches, seconds=seconds, policy=policy))
        journal.find_deaths()
    history = journal.history(DEVICE, DRIVER)
    assert history.min_crashed("math") == JobSize(500, 50.0)
    assert history.min_crashed("chunk_loop") is None


def test_last_work_of_the_device(machine):
    journal = machine.start()
    with journal.phase(job(heavy=True), "sample"):
        machine.now += 50
    with journal.phase(job(), "save", xpu=False):
        machine.now += 50
    history = machine.start().history(DEVICE, DRIVER)
    assert (history.last_end, history.last_heavy) == (1050.0, True)
    assert machine.start().history("other", DRIVER).last_end is None


def test_a_dead_row_ends_at_its_last_sign_of_life(machine):
    journal = crash_with(machine, job())
    before = machine.now
    machine.now += 500
    journal.find_deaths()
    assert journal.history(DEVICE, DRIVER).last_end == before - 60


def test_forgetting_is_explicit_and_per_device(machine):
    journal = crash_with(machine, job())
    journal.find_deaths()
    finish(journal, job(launches=1, seconds=1.0))
    assert journal.forget("another card") == 0
    assert journal.history(DEVICE, DRIVER).crashes
    assert journal.forget(DEVICE) == 1
    history = journal.history(DEVICE, DRIVER)
    assert (history.crashes, history.clean, journal.deaths()) == ((), (), [])


# -- size --------------------------------------------------------------------------------------


def test_rotation_bounds_the_file_and_keeps_every_crash(machine):
    journal = crash_with(machine, job("crashed"))
    journal.find_deaths()
    journal.close()
    journal = machine.start(max_bytes=60_000)
    kept_open = journal.open_phase(job("open"), "outer")
    for number in range(300):
        with journal.phase(job(f"run {number}" + "." * 400), "sample"):
            pass
    for number in range(40):
        journal.close_run(job(launches=number, seconds=float(40 - number)), "ok")
    closed = journal._db.execute("SELECT COUNT(*) FROM phases").fetchone()[0]
    assert closed < 150
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert machine.path.stat().st_size < 90_000
    assert machine.path.with_name("journal.db-wal").stat().st_size < 600_000
    history = journal.history(DEVICE, DRIVER)
    assert len(history.crashes) == 1
    assert len(history.clean) == journal_module.KEEP_CLEAN
    row = journal._db.execute("SELECT closed FROM phases WHERE id=?", (kept_open,)).fetchone()
    assert row["closed"] is None


def test_a_long_summary_is_cut(machine):
    journal = machine.start()
    journal.open_phase(
        RunInfo("r", DEVICE, DRIVER, "2", "fused", 1, 1.0, False, "x" * 99999), "sample"
    )
    machine.crash()
    (death,) = machine.start().find_deaths()
    assert len(death.run.summary) == journal_module.SUMMARY_CHARS


def test_threads_share_one_journal(machine):
    journal = machine.start()

    def work(number):
        for turn in range(20):
            run = job(f"{number}/{turn}")
            with journal.phase(run, "sample") as phase_id:
                journal.progress(phase_id, step=turn, launches=turn)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = journal._db.execute("SELECT COUNT(*) FROM phases WHERE result='ok'").fetchone()[0]
    assert rows == 80
    assert not journal.in_memory
