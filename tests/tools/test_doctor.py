"""The command line of ``run.py doctor``. The devices are simulated or absent."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from supir_xpu.xpu.probe import Preflight
from supir_xpu.xpu.probe_types import FULL_STAGES, QUICK_STAGES, Battery, Check, Verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def doctor(tool):
    return tool("doctor")


def answers(verdict: Verdict, battery: Battery | None = None):
    calls = []

    def run(request, folder, **options):
        calls.append((request, folder, options))
        options["progress"]("finding the device: torch")
        options["progress"]("attention: a")
        options["progress"]("attention: b")
        options["progress"]("norms: a, compiling kernels (up to 600 s)")
        return Preflight(verdict, battery or Battery("xpu:0"), False)

    run.calls = calls
    return run


GOOD = Verdict("healthy", "all-passed", "All 81 checks passed.", device_name="Arc\u2122 B580")
ABSENT = Verdict("absent", "absent", "This machine has no XPU: none.", host_device="cuda")
NO_DRIVER = Verdict("retreat", "no-driver", "No device can be listed: x.", "Install the driver.")
BAD = Verdict("retreat", "hang", "The device stopped answering.", "Restart.")


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        (GOOD, 0, "HEALTHY"),
        (Verdict("degraded", "workaround", "r"), 0, "DEGRADED"),
        (BAD, 1, "RETREAT"),
        (ABSENT, 0, "ComfyUI will use the CUDA"),
        (NO_DRIVER, 0, "Install the driver"),
    ],
)
def test_verdict_and_exit_code(doctor, capsys, verdict, code, words):
    run = answers(verdict)
    assert doctor.main([], run) == code
    out, err = capsys.readouterr()
    assert words in out
    assert (len(out.splitlines()) == 1) is (verdict in (ABSENT, NO_DRIVER))
    assert err.count("attention") == 1
    assert "compiling kernels (up to 600 s)" in err
    request, folder, options = run.calls[0]
    assert (request.device, request.groups, folder) == ("xpu:0", FULL_STAGES, None)
    assert options["refresh"] is True


def test_options_reach_the_preflight(doctor, tmp_path):
    run = answers(GOOD)
    doctor.main(["--quick", "--device", "xpu:1", "--cache", str(tmp_path)], run)
    request, folder, _ = run.calls[0]
    assert (request.device, request.groups, folder) == ("xpu:1", QUICK_STAGES, tmp_path)


def test_report_without_names(doctor, tmp_path, capsys):
    home = str(Path.home())
    text = f"File {home}/x.py on {platform.node()} by {getpass.getuser()}, C:\\Users\\Zoe\\p.png"
    battery = Battery("xpu:0", checks=[Check(2, "sum", "error", text=text)], stderr=[text])
    for name in ("out.txt", "out.zip"):
        path = tmp_path / name
        assert doctor.main(["--report", str(path)], answers(BAD, battery)) == 1
        assert str(path) in capsys.readouterr().out
        if name == "out.txt":
            found = [path.read_text(encoding="utf-8")]
        else:
            with zipfile.ZipFile(path) as archive:
                assert archive.namelist() == ["report.txt", "checks.json"]
                found = [archive.read(entry).decode("utf-8") for entry in archive.namelist()]
        for part in found:
            assert "sum" in part
            assert f"{home}/" not in part
            assert platform.node() not in part
            assert "Zoe" not in part
            assert f"by {getpass.getuser()}," not in part


def test_a_report_that_cannot_be_written(doctor, tmp_path, capsys):
    assert doctor.main(["--report", str(tmp_path / "no" / "x.txt")], answers(GOOD)) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError("x"), 2)])
def test_interrupted_or_not_startable(doctor, error, code):
    def run(*_args, **_options):
        raise error

    assert doctor.main([], run) == code


def test_without_torch(doctor, monkeypatch, capsys):
    def missing(_name):
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(doctor, "load", missing)
    assert doctor.main([]) == 2
    assert "ComfyUI's own Python" in capsys.readouterr().out


def test_importing_it_needs_the_standard_library_only():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import doctor; "
        "assert not {'torch', 'numpy', 'supir_xpu'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(ROOT / "tools")], check=True)


@pytest.mark.slow
def test_the_real_command_on_an_old_console():
    """On a machine without an XPU: one line, exit code 0."""
    env = {**os.environ, "PYTHONIOENCODING": "cp932"}
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), "--quick"]
    ended = subprocess.run(command, capture_output=True, env=env, timeout=120)
    out = ended.stdout.decode("cp932")
    if "ComfyUI will use" in out:
        assert len(out.splitlines()) == 1
        assert ended.returncode == 0
        assert ended.stderr == b""
    else:
        assert out.split(" ")[0].strip(":") in ("HEALTHY", "DEGRADED", "RETREAT")
