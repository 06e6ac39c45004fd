"""The command line of ``run.py doctor``. The devices are simulated or absent."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
from supir_xpu.xpu import probe_child, probe_stages_basic
from supir_xpu.xpu.journal import Journal, RunInfo
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


@pytest.mark.parametrize(
    "device",
    ["", "\u0446\u043f\u0443", "xpu:9999999999", "xpu:128", "xpu:-1", "xpu:01", "xpu:", "xpu:\u0661",
     "XPU", "xpu:0\n", "cuda:0", "cpu:0", "x" * 5000],
)  # fmt: skip
def test_a_device_there_cannot_be_is_refused_in_a_sentence(doctor, capsys, device):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--device", device], answers(BAD))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("--device is '")
    assert len(err.splitlines()) == 1
    assert "give cpu, xpu or xpu:N" in err


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", "cpu"), ("xpu", "xpu:0"), ("xpu:0", "xpu:0"), ("xpu:127", "xpu:127")],
)
def test_a_device_is_asked_by_the_name_the_nodes_use(doctor, text, device):
    run = answers(GOOD)
    assert doctor.main(["--device", text], run) == 0
    assert run.calls[0][0].device == device


def test_a_device_this_torch_was_not_built_for_is_told_as_such():
    """The child's own first question, asked of a build without any XPU."""
    from supir_xpu.xpu.probe_identity import judge_identity

    for name in ("xpu:0", "xpu:7"):
        said = io.StringIO()
        module = types.SimpleNamespace(
            _is_compiled=lambda: False, device_count=lambda: 0, get_arch_list=list
        )
        device = probe_child.Device(name, SimpleTorch(module))
        bench = probe_child.Bench(device, {}, said)
        bench.check("device count", lambda b=bench: probe_stages_basic._count(b))
        check = Check.from_mapping(json.loads(said.getvalue().splitlines()[-1]))
        verdict = judge_identity(Battery(name, checks=[check]))
        assert verdict.status == "absent"
        assert "built without XPU support" in verdict.reason


class SimpleTorch:
    """As much of torch as the child's ``Device`` asks at its start."""

    def __init__(self, module):
        self.get_device_module = lambda name: module


def test_the_verdict_is_kept_where_the_nodes_look_for_it(doctor, tmp_path):
    run = answers(GOOD)
    doctor.main(["--user", str(tmp_path)], run)
    assert run.calls[0][1] == tmp_path


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


@pytest.fixture
def user(tmp_path):
    """A ComfyUI user folder whose journal holds one run that died and one that is open."""
    folder = tmp_path / "ComfyUI" / "user"
    folder.mkdir(parents=True)
    journal = Journal(folder / "supir_xpu_journal.sqlite3", boot_id="linux:before")
    home, who, where = str(Path.home()), getpass.getuser(), platform.node()
    summary = f"Sample 2816x1920 px of {home}/Aunt-Mary.png by {who}, on {where}"
    run = RunInfo("r", "Arc B580", "1.6.33578", "2.14", "math", 4321, 77.5, True, summary)
    row = journal.open_phase(run, "sample")
    journal.progress(row, step=7, launches=1234)
    journal.find_deaths()
    later = Journal(folder / "supir_xpu_journal.sqlite3", boot_id="linux:now")
    later.find_deaths()
    later.close_phase(later.open_phase(run, "decode"), "ok")
    later.close()
    return folder


@pytest.mark.parametrize("name", ["out.txt", "out.zip"])
def test_a_report_holds_journal_and_plan_without_names(doctor, tmp_path, user, name):
    path = tmp_path / name
    assert doctor.main(["--report", str(path), "--user", str(user)], answers(BAD)) == 1
    if name == "out.txt":
        text = path.read_text(encoding="utf-8")
    else:
        with zipfile.ZipFile(path) as archive:
            text = archive.read("report.txt").decode("utf-8")
    for words in (
        "== Last plan ==", "Sample 2816x1920 px", "planned launches 4321", "attention math",
        "decode: ok", "sample: died", "machine died in sample, device at work",
        "step 7, 1234 of 4321 launches",
    ):  # fmt: skip
        assert words in text, words
    assert "Aunt-Mary" not in text
    assert "<picture>" in text
    assert f"by {getpass.getuser()}," not in text
    assert f"on {platform.node()}" not in text


def test_the_journal_is_found_in_the_comfyui_around_it_and_never_changed(doctor, user, tmp_path):
    pack = user.parent / "custom_nodes" / "supir"
    pack.mkdir(parents=True)
    assert doctor.user_folder(pack) == user
    assert doctor.user_folder(tmp_path / "elsewhere" / "supir") is None
    before = {p.name: p.read_bytes() for p in user.iterdir()}
    doctor.journal_sections(user)
    assert {p.name: p.read_bytes() for p in user.iterdir() if p.name in before} == before
    assert "--user" in doctor.journal_sections(None)["Journal"]


@pytest.mark.parametrize("content", [None, b"", b"no database, but a text of some length" * 99])
def test_a_journal_that_is_not_one_is_said_in_a_line(doctor, tmp_path, content):
    if content is not None:
        (tmp_path / "supir_xpu_journal.sqlite3").write_bytes(content)
    (text,) = doctor.journal_sections(tmp_path).values()
    assert "journal" in text
    assert "\n" not in text


def test_the_name_of_the_journal_is_the_nodes():
    assert 'JOURNAL_FILE = "supir_xpu_journal.sqlite3"' in (
        ROOT / "nodes" / "journal.py"
    ).read_text(encoding="utf-8")


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
