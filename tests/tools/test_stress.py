"""``run.py stress``: the loop at tiny size on the processor, and every way it can end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from supir_xpu.xpu import boot

RUN_PY = Path(__file__).resolve().parents[2] / "run.py"


@pytest.fixture
def tiny(loop):
    """A job a processor does in a moment; real geometry otherwise."""
    return loop.Job("cpu", 8, 8, 1, 2, "float32", 60.0, 3, 32)


def lines(log):
    return [json.loads(row) for row in log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("rows", [1, 3, 4, 64])
def test_pieces_are_the_attention_they_stand_for(loop, rows):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 64) for _ in "qkv")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (loop.attend(q, k, v, rows) - want).abs().max() < 1e-5


def test_the_geometry_is_that_of_sdxl_and_of_the_report(loop):
    """At 168 x 168: 7,056 tokens and 10 heads in 14 pieces; 1,764 tokens and 20 heads whole."""
    job = loop.Job()
    attention, convolutions = loop.make_inputs(job, "meta")
    shapes = [tuple(q.shape) for q, _, _ in attention]
    assert shapes == [(2, 10, 7056, 64), (2, 20, 1764, 64)]
    assert [tuple(w.shape) for _, w in convolutions] == [
        (c, c, 3, 3) for c in (320, 640, 1280)
    ]  # fmt: skip
    from supir_xpu.xpu.counting import count

    found, _ = count(lambda: loop.burst(job, attention, convolutions), track_live=False)
    assert found.kinds["softmax"] == math.ceil(7056 / 512) + 6
    assert found.kinds["conv"] == 3
    assert found.dtypes == {torch.float16}
    assert loop.launches_of(job) == found.launches > 90


def said_by(loop, job, **options):
    said = []
    ended = loop.run(job, lambda event, **numbers: said.append((event, numbers)), **options)
    return ended, said


def test_a_run_says_each_burst_before_it_begins(loop, tiny):
    begun = []

    def one(*args):
        begun.append(len(begun) + 1)
        return loop.burst(*args)

    said = []

    def say(event, **numbers):
        said.append((event, numbers["burst"], len(begun)))

    assert loop.run(tiny, say, one=one) == "done"
    assert said == [(e, n, n - (e == "before")) for n in (1, 2, 3) for e in ("before", "after")]


def test_the_time_is_bounded(loop, tiny):
    now = iter(range(1000))
    job = replace(tiny, bursts=0, seconds=30.0)
    ended, said = said_by(loop, job, clock=lambda: float(next(now)))
    assert ended == "done"
    assert 5 < len(said) < 30


def spoilt(loop, at, change):
    """A burst whose nth call is changed."""
    calls = []

    def one(*args):
        calls.append(1)
        results = loop.burst(*args)
        return change(results) if len(calls) == at else results

    return one


def nan(results):
    results[1] = results[1].clone()
    results[1].view(-1)[0] = float("nan")
    return results


def failing(_):
    raise RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, "non-finite: result 1"),
        (
            lambda results: [*results[:-1], results[-1] * 1.5],
            "wrong numbers: a result changed by 5",
        ),
        (failing, "error: RuntimeError: level_zero"),
    ],
)
def test_it_stops_at_the_first_thing_that_is_wrong(loop, tiny, change, words):
    ended, said = said_by(loop, tiny, one=spoilt(loop, 2, change))
    assert ended.startswith(words)
    assert [numbers["burst"] for event, numbers in said if event == "before"] == [1, 2]


@pytest.mark.parametrize(("slow_s", "ended"), [(4.0, "done"), (6.0, "time outlier")])
def test_a_burst_that_takes_far_too_long_is_an_anomaly(loop, tiny, slow_s, ended):
    time_s = [0.0]

    def one(*args):
        time_s[0] += slow_s if time_s[0] == 7.0 else 1.0
        return loop.burst(*args)

    found, said = said_by(loop, replace(tiny, bursts=9), one=one, clock=lambda: time_s[0])
    assert found.startswith(ended)
    assert len(said) == (18 if ended == "done" else 16)


def test_the_whole_command_on_the_processor(stress, loop, tiny, log, capsys):
    assert stress.main(["--yes"], log=log, job=tiny) == 0
    out = capsys.readouterr().out
    burst = loop.launches_of(tiny)
    assert f"at least {burst} launches" in out
    assert f"3 bursts in 0 s, at least {3 * burst} launches" in out
    assert "no proof" in out
    events = [line["event"] for line in lines(log)]
    assert events == ["session", "ready", "before", "before", "before", "end"]
    assert lines(log)[-1]["ended"] == "done"


def test_a_device_that_is_not_there_is_told_in_a_line(stress, tiny, log, capsys):
    assert stress.main(["--yes"], log=log, job=replace(tiny, device="xpu:0")) == 2
    out = capsys.readouterr().out
    assert "xpu:0 cannot be used here" in out
    assert "run.py doctor" in out
    assert lines(log)[-1]["event"] == "end"


def end_of_file(_):
    raise EOFError


@pytest.mark.parametrize("answer", ["", "no", "yess", end_of_file])
def test_nothing_starts_without_consent(stress, log, capsys, monkeypatch, answer):
    monkeypatch.setattr(stress, "watched", None)
    ask = answer if callable(answer) else lambda question: answer
    assert stress.main([], log=log, ask=ask) == 2
    out = capsys.readouterr().out
    assert "can crash or freeze" in out
    assert "1344x1344 px" in out
    assert str(log) in out
    assert not log.exists()


def test_with_consent_the_asked_job_starts(stress, log, monkeypatch):
    jobs = []
    monkeypatch.setattr(stress, "watched", lambda job, log, deadlines: jobs.append(job) or 0)
    words = ["--minutes", "2", "--latent", "64", "--rows", "128", "--dtype", "bfloat16"]
    assert stress.main([*words, "--device", "xpu:1"], log=log, ask=lambda _: " Yes\n") == 0
    (job,) = jobs
    assert (job.device, job.height, job.width, job.rows) == ("xpu:1", 64, 64, 128)
    assert (job.dtype, job.seconds, job.batch) == ("bfloat16", 120.0, 2)


def test_breadcrumbs_that_cannot_be_written_stop_it(stress, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stress, "watched", None)
    (tmp_path / "output").write_bytes(b"")
    assert stress.main(["--yes"], log=tmp_path / "output" / "stress.jsonl") == 2
    assert "cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "owner", "words"),
    [
        ("machine", {"boot_id": "linux:other"}, "the computer went down in or after burst 7"),
        ("process", {"pid": 2**30}, "its process was gone in or after burst 7"),
        ("running", {}, "still going on: in or after burst 7"),
    ],
)
def test_a_death_is_told_at_the_next_start(
    stress, tool, log, capsys, monkeypatch, kind, owner, words
):
    stress_log = tool("stress_log")
    me = {**asdict(boot.current_owner()), **owner}
    stress_log.start_session(log, me, "xpu:0")
    crumbs = stress_log.Breadcrumbs(log)
    crumbs.write({"event": "ready", "launches": 100})
    for burst in range(1, 8):
        crumbs.write({"event": "before", "burst": burst})
    crumbs.close()
    with log.open("a", encoding="utf-8") as file:
        file.write('{"event": "bef')  # the write the crash cut off
    monkeypatch.setattr(stress, "watched", lambda *_: 0)
    assert stress.main(["--yes"], log=log) == (2 if kind == "running" else 0)
    out = capsys.readouterr().out
    assert words in out
    assert "about 700 launches" in out


def test_a_session_that_ended_is_not_a_death(tool, log):
    stress_log = tool("stress_log")
    me = {**asdict(boot.current_owner()), "boot_id": "linux:other"}
    assert stress_log.last_unfinished(log, boot) == (None, 0)
    stress_log.start_session(log, me, "xpu:0")
    assert stress_log.last_unfinished(log, boot)[0].kind == "machine"
    stress_log.end_session(log, "done")
    stress_log.end_session(log, "again")
    assert stress_log.last_unfinished(log, boot) == (None, 0)
    assert [line.get("ended") for line in lines(log)] == [None, "done"]


def test_the_file_is_bounded(tool, log, monkeypatch):
    stress_log = tool("stress_log")
    monkeypatch.setattr(stress_log, "MOST_BYTES", 10)
    for _ in range(3):
        stress_log.start_session(log, asdict(boot.current_owner()), "xpu:0")
    assert len(lines(log)) == 1


LOOPS = {
    "silence": "time.sleep(60)",
    "death": "os._exit(3)",
    "error: x": 'say(event="end", ended="error: x")',
}


@pytest.mark.parametrize("ended", LOOPS)
def test_what_ends_the_loop_is_seen_from_outside(
    stress, tiny, log, tmp_path, capsys, monkeypatch, ended
):
    script = tmp_path / "loop.py"
    script.write_text(
        "import json, os, time\n"
        "def say(**line): print(json.dumps(line), flush=True)\n"
        'say(event="ready", launches=7)\nprint("noise", flush=True)\n'
        'say(event="before", burst=1)\nsay(event="after", burst=1, seconds=0.5)\n'
        'open("pid.txt", "w").write(str(os.getpid()))\n'
        f'say(event="before", burst=2)\n{LOOPS[ended]}\n',
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stress, "LOOP", script)
    deadlines = stress.Deadlines(start_s=20.0, first_s=0.5, least_s=0.5, exit_s=5.0)
    assert stress.main(["--yes"], log=log, job=tiny, deadlines=deadlines) == 1
    out = capsys.readouterr().out
    assert f"Stopped in burst 2: {ended}" in out
    assert "1 bursts in 0 s, at least 7 launches, 14 launches/s" in out
    if ended == "death":
        assert "exit code 3" in out
    pid = int((tmp_path / "pid.txt").read_text(encoding="utf-8"))
    assert boot.process_start(pid) is None
    assert lines(log)[-1]["ended"].startswith(ended)


def test_ctrl_c_ends_the_loop_and_is_no_anomaly(stress, tiny, log, tmp_path, capsys, monkeypatch):
    def interrupted(process, progress, deadlines):
        raise KeyboardInterrupt

    script = tmp_path / "loop.py"
    script.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    monkeypatch.setattr(stress, "LOOP", script)
    monkeypatch.setattr(stress, "listen", interrupted)
    assert stress.main(["--yes"], log=log, job=tiny) == 130
    assert "stopped by the user" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "61"], ["--latent", "4"],
                                   ["--rows", "0"], ["--minutes", "nan"]])  # fmt: skip
def test_run_py_passes_the_command_on_and_limits_are_told(words):
    """In a real process: nothing is set up, and importing needs the standard library only."""
    env = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-S", str(RUN_PY), "stress", *words]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", env=env, timeout=60)
    assert ended.returncode == 2
    assert words[0] in ended.stderr


def test_the_command_is_in_the_overview(command_line):
    assert "stress [--minutes N]" in command_line.USAGE
