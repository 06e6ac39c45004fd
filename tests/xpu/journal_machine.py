"""A make-believe machine for the journal tests: boots, processes and a clock."""

from supir_xpu.xpu.boot import Owner
from supir_xpu.xpu.journal import Journal, RunInfo

DEVICE, DRIVER = "Arc Pro B70", "32.0.101.8629"


class Machine:
    """Boots, processes and a clock, without a real machine."""

    def __init__(self, path):
        self.path, self.boot, self.now, self.pid = path, 1, 1000.0, 0
        self.living = {}

    def start(self, pid=None, started="t0", **options):
        self.pid = pid or self.pid + 1
        self.living[self.pid] = started
        owner = Owner(f"boot:{self.boot}", self.pid, started)
        return Journal(
            self.path,
            owner=owner,
            clock=lambda: self.now,
            start_of=self.living.get,
            **options,
        )

    def kill(self, journal):
        self.living.pop(journal.owner.pid, None)
        journal._db.close()

    def crash(self):
        self.living.clear()
        self.boot += 1
        self.now += 60


def job(run_id="r", launches=1000, seconds=100.0, policy="fused", driver=DRIVER, heavy=False):
    return RunInfo(run_id, DEVICE, driver, "2.14", policy, launches, seconds, heavy, "2944 x 2944")


def finish(journal, run):
    with journal.phase(run, "sample"):
        pass
    journal.close_run(run, "ok")


def crash_with(machine, run, phase="sample"):
    journal = machine.start()
    phase_id = journal.open_phase(run, phase)
    journal.progress(phase_id, step=3, launches=300)
    machine.crash()
    journal._db.close()
    return machine.start()
