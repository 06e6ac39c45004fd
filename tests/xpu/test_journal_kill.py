"""Real processes, really killed, while they write the journal.

The child loads the journal by path, without the pack and without torch, so that hundreds fit into
a short run. It announces every step on a pipe; what was announced before the kill decides what
the journal must, may and must not know afterwards.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from supir_xpu.xpu import journal as journal_module
from supir_xpu.xpu.journal import Journal

pytestmark = pytest.mark.slow

KILLS = 200
TOGETHER = 2
"""Children at work at once, on one file."""

CHILD = """
import os, sys, time, types
pack = types.ModuleType("jx"); pack.__path__ = [sys.argv[1]]; sys.modules["jx"] = pack
from jx.journal import Journal, RunInfo
name = sys.argv[3]
journal = Journal(sys.argv[2], boot_id=sys.argv[4] or None)
def say(*words): os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
number = 0
while True:
    run = RunInfo(f"{name}/{number}", "dev", "1", "2", "fused", 1000, 60.0)
    say("opening", number)
    phase = journal.open_phase(run, "sample")
    say("open", number)
    for step in range(1, 4):
        say("stepping", step)
        journal.progress(phase, step=step, launches=step * 10)
        say("step", step)
    say("closing", number)
    journal.close_phase(phase, "ok")
    say("closed", number)
    number += 1
    time.sleep(0.001)
    if name == "neighbour" and number == 1:
        journal.open_phase(run, "sample"); say("idle"); sys.stdin.read()
"""


def start(path, name, boot_id=""):
    code = str(Path(journal_module.__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", CHILD, code, str(path), name, boot_id],
        stdin=subprocess.PIPE,
        bufsize=0,  # reading one line must not swallow the next ones
        stdout=subprocess.PIPE,
    )


def expectation(lines):
    """Return (run that must be dead, run that may be dead, fewest step, most steps)."""
    must = may = None
    low = high = 0
    for line in lines:
        word, _, value = line.partition(" ")
        if word == "opening":
            may, low, high = value, 0, 0
        elif word == "open":
            must = value
        elif word == "stepping":
            high = int(value)
        elif word == "step":
            low = int(value)
        elif word == "closing":
            must = None
        elif word == "closed":
            may = None
    return must, may, low, high


@pytest.fixture(params=["same boot", "reboot"])
def boots(request):
    """(boot id of the children, of the finder, expected kind)"""
    return (
        ("", None, "process") if request.param == "same boot" else ("test:1", "test:2", "machine")
    )


def test_killed_at_random(tmp_path, boots):
    """Nothing lost, nothing corrupt, no false report, each death once."""
    child_boot, my_boot, kind = boots
    path = tmp_path / "journal.db"
    rng = random.Random(20)
    # A neighbour that lives through it all with a row open. It belongs to the finder's boot.
    neighbour = start(path, "neighbour", my_boot or "")
    while neighbour.stdout.readline() != b"idle\n":
        pass
    finder = Journal(path, boot_id=my_boot)
    reported, told = [], 0
    try:
        for turn in range(KILLS // 2 // TOGETHER):
            names = [f"{turn}.{i}" for i in range(TOGETHER)]
            children = [start(path, name, child_boot) for name in names]
            # It has begun; in three of four turns the first row is on disk too.
            begun = [
                [child.stdout.readline().decode().strip() for _ in range(2 if turn % 4 else 1)]
                for child in children
            ]
            time.sleep(rng.uniform(0.0, 0.04))
            for child in children:
                child.kill()
            outputs = [child.communicate()[0].decode().splitlines() for child in children]
            deaths = {d.run.run_id: d for d in finder.find_deaths()}
            for name, lines in zip(names, map(list.__add__, begun, outputs), strict=True):
                must, may, low, high = expectation(lines)
                mine = [d for run_id, d in deaths.items() if run_id.startswith(f"{name}/")]
                allowed = {f"{name}/{may}"} if may is not None else set()
                assert {d.run.run_id for d in mine} <= allowed, (lines, mine)
                assert mine or must is None, lines
                for death in mine:
                    assert (death.kind, death.phase) == (kind, "sample")
                    assert low <= death.step <= high
                    assert death.launches == death.step * 10
                told += must is not None
            reported.extend(deaths)
        assert told > KILLS // 20  # the kills did hit open phases
        assert len(reported) == len(set(reported))
        assert not any(run_id.startswith("neighbour") for run_id in reported)
        assert not finder.in_memory
        assert finder._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert len(finder.deaths(limit=10 * KILLS)) == len(reported)
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.communicate()
        finder.close()
    late = Journal(path, boot_id=my_boot)
    assert [d.run.run_id for d in late.find_deaths()] == ["neighbour/0"]
    late.close()


def test_children_are_the_ones_of_this_python():
    """The child needs nothing but the standard library."""
    code = str(Path(journal_module.__file__).parent)
    script = (
        "import sys, types\n"
        "pack = types.ModuleType('jx'); pack.__path__ = [sys.argv[1]]; sys.modules['jx'] = pack\n"
        "import jx.journal, jx.close_handlers\n"
        "print('torch' in sys.modules, 'omegaconf' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-E", "-c", script, code], capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["False", "False"]
    assert os.path.isdir(code)
