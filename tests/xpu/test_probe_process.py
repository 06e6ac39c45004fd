"""One child process: deadlines kept from outside, ends, environment. The children are scripted."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from supir_xpu.xpu import boot, probe_process
from supir_xpu.xpu.probe_process import (
    child_command,
    child_environment,
    exit_words,
    left_out_variables,
    run_child,
)
from supir_xpu.xpu.probe_types import Deadlines

FAST = Deadlines(start_s=20.0, first_op_s=1.6, compile_s=4.0, op_s=0.7, exit_s=5.0)

PRELUDE = """
import json, os, sys, time
def say(event, **values):
    sys.stdout.write(json.dumps({"event": event, **values}) + "\\n")
    sys.stdout.flush()
def start(name, stage=2):
    say("start", stage=stage, name=name)
def result(name, stage=2, **values):
    say("result", stage=stage, name=name, status="ok", **values)
say("ready")
"""


def run(tmp_path: Path, body: str, deadlines: Deadlines = FAST, **options):
    script = tmp_path / "child.py"
    script.write_text(PRELUDE + body, encoding="utf-8")
    return run_child(child_command({}, script), os.environ, deadlines, **options)


def gone(pid: int) -> bool:
    """No such process, not even one that waits to be collected."""
    return boot.process_start(pid) is None and not Path(f"/proc/{pid}").exists()


def test_a_child_that_ends_well(tmp_path):
    seen = []
    body = "start('a'); result('a', numbers={'x': 1}); say('warnings', texts=['w']); say('done')"
    outcome = run(tmp_path, body, progress=seen.append)
    assert outcome.ended == "done"
    assert [(c.stage, c.name, c.numbers["x"]) for c in outcome.checks] == [(2, "a", 1)]
    assert (outcome.warnings, seen, outcome.exit_code) == (["w"], ["reductions: a"], 0)
    assert gone(outcome.pid)


def test_a_spinning_child_is_killed_and_collected(tmp_path):
    body = "start('a'); result('a'); start('sum')\nwhile True: pass"
    started = time.monotonic()
    outcome = run(tmp_path, body)
    assert FAST.op_s < time.monotonic() - started < FAST.op_s + 20
    assert outcome.ended == "hang"
    last = outcome.checks[-1]
    assert (last.stage, last.name, last.status) == (2, "sum", "hang")
    assert "0.7 s" in last.text
    assert gone(outcome.pid)


@pytest.mark.parametrize(
    ("before", "covered", "seconds", "ended"),
    [
        ("", True, 1.0, "done"),  # the first operation may take longer than a later one
        ("", True, 2.2, "hang"),
        ("", False, 2.2, "done"),  # kernels are compiled
        ("start('a'); result('a')", True, 1.2, "hang"),
        ("start('a'); result('a')", False, 1.2, "hang"),  # compiled already
        ("start('a', 3); result('a', 3)", False, 1.2, "done"),  # another kind: compiled now
        ("start('a', 3); result('a', 3)", True, 1.2, "hang"),
    ],
)
def test_which_deadline_is_active(tmp_path, before, covered, seconds, ended):
    seen = []
    body = f"{before}\nstart('op'); time.sleep({seconds}); result('op'); say('done')"
    outcome = run(tmp_path, body, covered=covered, progress=seen.append)
    assert outcome.ended == ended
    compiles = not covered and "2" not in before and "start('a');" not in before
    assert any("compiling kernels (up to 4 s)" in text for text in seen[-1:]) is compiles


def test_silence_before_the_first_word(tmp_path):
    script = tmp_path / "child.py"
    script.write_text("import time; time.sleep(60)", encoding="utf-8")
    limits = Deadlines(start_s=0.6, exit_s=5.0)
    outcome = run_child(child_command({}, script), os.environ, limits)
    assert outcome.ended == "hang"
    assert outcome.checks[-1].name == "starting torch"
    assert gone(outcome.pid)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.abort()", "SIGABRT" if os.name != "nt" else "0xC0000409"),
        ("os._exit(7)", "exit code 7"),
        ("import faulthandler; faulthandler._sigsegv()", "SIGSEGV"),
    ],
)
def test_a_child_that_dies(tmp_path, code, words):
    outcome = run(tmp_path, f"start('bmm', 4)\nsys.stderr.write('last words\\n'); {code}")
    assert outcome.ended == "crash"
    last = outcome.checks[-1]
    assert (last.stage, last.name, last.status) == (4, "bmm", "crash")
    assert words in last.text or os.name == "nt"
    assert "last words" in outcome.stderr
    assert gone(outcome.pid)


def test_a_grandchild_that_keeps_the_pipes_open_hides_nothing(tmp_path):
    grandchild = "[sys.executable, '-c', 'import time; time.sleep(20)']"
    body = f"import subprocess\np = subprocess.Popen({grandchild}); start(str(p.pid)); os._exit(3)"
    started = time.monotonic()
    outcome = run(tmp_path, body, Deadlines(20, 30, 30, 30, 5))
    os.kill(int(outcome.checks[-1].name), signal.SIGTERM)
    assert time.monotonic() - started < 12
    assert outcome.ended == "crash"


def test_lines_that_make_no_sense_are_passed_over(tmp_path):
    body = (
        "print('[1, 2'); print('{\"event\": 5}'); print('null'); print('{}')\n"
        "say('result', stage=99, name='x'); say('result', stage=2); say('start')\n"
        "say('result', stage=2, name='y', numbers=3)\n"
        "result('good'); say('done')"
    )
    outcome = run(tmp_path, body)
    assert (outcome.ended, [c.name for c in outcome.checks]) == ("done", ["good"])


def test_standard_error_is_bounded(tmp_path):
    body = "[sys.stderr.write(f'line {n}\\n') for n in range(5000)]; say('done')"
    outcome = run(tmp_path, body)
    assert outcome.ended == "done"
    assert len(outcome.stderr) == probe_process.STDERR_LINES
    assert outcome.stderr[-1] == "line 4999"


class StopError(Exception):
    pass


def test_cancelling_ends_the_child(tmp_path):
    pids = []
    calls = []

    def cancel():
        calls.append(time.monotonic())
        mark = tmp_path / "pid"
        if mark.is_file() and mark.read_text(encoding="utf-8"):
            pids.append(int(mark.read_text(encoding="utf-8")))
            raise StopError

    path = repr(str(tmp_path / "pid"))
    body = f"open({path}, 'w').write(str(os.getpid()))\nstart('op')\nwhile True: pass"
    with pytest.raises(StopError):
        run(tmp_path, body, Deadlines(60, 60, 60, 60, 5), check_cancel=cancel)
    assert gone(pids[0])
    assert len(calls) > 1


def test_the_environment_is_an_allow_list(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_process.site, "getusersitepackages", lambda: str(tmp_path / "u"))
    given = {
        "PATH": "p",
        "Temp": "t",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:0",
        "ZE_AFFINITY_MASK": "0",
        "PYTORCH_ALLOC_CONF": "x",
        "SYCL_UR_USE_LEVEL_ZERO_V2": "0",
        "AWS_SECRET": "s",
        "PYTHONSTARTUP": "evil.py",
    }
    env = child_environment(given, tmp_path / "site" / "torch")
    assert {k: v for k, v in env.items() if k in given} == {
        key: given[key] for key in ("PATH", "Temp", "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK")
    }
    assert "PYTHONPATH" not in env
    # -s hides the user's own packages; torch must be found all the same
    assert child_environment({}, tmp_path / "u" / "torch")["PYTHONPATH"] == str(tmp_path / "u")
    assert left_out_variables(given) == ["PYTORCH_ALLOC_CONF", "SYCL_UR_USE_LEVEL_ZERO_V2"]


def test_the_command_is_a_file_by_path():
    command = child_command({"device": "xpu:0"})
    assert command[:4] == [sys.executable, "-s", "-X", "faulthandler"]
    assert Path(command[4]).name == "probe_child.py"
    assert Path(command[4]).is_file()
    assert json.loads(command[5]) == {"device": "xpu:0"}
    assert "-m" not in command


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3221225477, "exit code 0xC0000005"),
        (-1073741819, "exit code 0xC0000005"),
        (1, "exit code 1"),
        (-11, "signal SIGSEGV"),
        (-250, "exit code -250"),
    ],
)
def test_exit_codes_in_words(code, words):
    assert exit_words(code) == words


def test_deadlines_scale():
    assert Deadlines().scaled(0.5) == Deadlines(60.0, 30.0, 300.0, 10.0, 5.0)
