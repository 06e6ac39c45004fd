"""Taking run.py's command line apart, and what each command then runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN_PY = Path(__file__).resolve().parents[2] / "run.py"


class FakeEnvironment:
    """Everything is installed, or nothing is; installing is only noted."""

    def __init__(self, root: Path, held=()) -> None:
        self.root, self.cache = root, root / ".cache"
        self.python = root / "python"
        self.held = set(held)
        self.installed: list[str] = []
        self.front_ends: list[str] = []

    def holds(self, profile):
        return profile.name in self.held

    def make(self):
        pass

    def install(self, profile):
        self.installed.append(profile.name)

    def front_end(self, version):
        self.front_ends.append(version)
        return self.cache / f"frontend-{version}"


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch\n")
    return tmp_path


@pytest.fixture
def start(command_line, fetch_host, tool, repo):
    """Run a command on a fake environment; return (exit code, calls, environment).

    ``code``: what every call returns, or one code for each of them.
    """
    hosts = tool("host_table").HOSTS
    folders = {source.version: repo / ".cache" / source.folder_name for source in hosts}

    def start(*words, held=(), with_host=True, code=0):
        for source in hosts if with_host else ():
            host = folders[source.version]
            host.mkdir(parents=True, exist_ok=True)
            (host / "main.py").touch()
            (host / "requirements.txt").touch()
            (host / fetch_host.STAMP_NAME).write_text(source.sha256)
        environment, calls = FakeEnvironment(repo, held), []

        def call(command, env):
            calls.append((command, env))
            return code if isinstance(code, int) else code[len(calls) - 1]

        options = command_line.parse(words, repo)
        session = command_line.Session(environment, call)
        return command_line.COMMANDS[options.command](session, options), calls, environment

    start.host = folders["0.30.0"]
    start.oldest = folders["0.16.3"]
    return start


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.fixture(autouse=True)
def with_browser(monkeypatch):
    monkeypatch.setenv("SUPIR_XPU_BROWSER", "required")


SPREAD = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
OLDER = "(host or web) and not newest"


def test_test_runs_on_the_newest_host_and_what_needs_one_on_the_oldest(start, command_line):
    code, [newest, oldest], environment = start("test", "tests/parity", "-k", "edm")
    assert code == 0
    words = ["tests/parity", "-k", "edm"]
    assert newest[0][1:] == ["-c", command_line.PYTEST, *SPREAD, *words]
    assert newest[1]["COMFYUI_ROOT"] == str(start.host)
    assert "COMFYUI_FRONT_END" not in newest[1]
    options = ["-m", OLDER, *SPREAD, *words]
    assert oldest[0][1:] == ["-c", command_line.PYTEST, *options]
    assert oldest[1]["COMFYUI_ROOT"] == str(start.oldest)
    assert oldest[1]["COMFYUI_FRONT_END"].endswith("frontend-1.39.19")
    assert environment.front_ends == ["1.39.19"]
    assert environment.installed == ["full"]


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((2, 1), 2), ((0, 5), 0), ((5, 0), 0), ((5, 5), 5),
     ((5, 1), 1), ((1, 5), 1), ((0, 3), 3)],
)  # fmt: skip
def test_either_host_can_fail_the_test(start, capsys, codes, wanted):
    code, calls, _ = start("test", held=["full"], code=codes)
    assert code == wanted
    assert len(calls) == 2, "the second host runs whatever became of the first"
    summary = capsys.readouterr().out.split("Summary")[1]
    assert "ComfyUI 0.30.0: " in summary
    assert "ComfyUI 0.16.3: " in summary
    assert ("FAILED" in summary) == (1 in codes)


@pytest.mark.parametrize(("version", "only"), [("0.30.0", []), ("0.16.3", ["-m", OLDER])])
def test_one_host_can_be_chosen(start, version, only):
    code, [(words, env)], _ = start("test", "--host", version, "-x", held=["full"], code=5)
    assert code == 5
    assert words[3:] == [*only, *SPREAD, "-x"]
    assert env["COMFYUI_ROOT"].endswith(f"ComfyUI-{version}")


def test_without_a_browser_its_tests_are_left_out_and_that_is_said(start, monkeypatch, capsys):
    monkeypatch.delenv("SUPIR_XPU_BROWSER")
    monkeypatch.setattr("browser.find_browser", lambda: None)
    _, [newest, oldest], _ = start("test", "-x", held=["full"])
    assert newest[0][3:] == ["-m", "not web", *SPREAD, "-x"]
    assert oldest[0][3:] == ["-m", f"({OLDER}) and not web", *SPREAD, "-x"]
    said = capsys.readouterr().out
    assert "Not run: the tests in a browser" in said
    assert "apt-get install chromium" in said


def test_a_browser_that_is_there_is_used(start, monkeypatch, capsys):
    monkeypatch.delenv("SUPIR_XPU_BROWSER")
    monkeypatch.setattr("browser.find_browser", lambda: "/usr/bin/chromium")
    _, [(words, _)], _ = start("test", "--host", "0.30.0", held=["full"])
    assert words[3:] == SPREAD
    assert "Not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("env", "there", "found", "required"),
    [
        ({}, ["chromium"], "/bin/chromium", False),
        ({}, ["google-chrome"], "/bin/google-chrome", False),
        ({}, [], None, False),
        ({"SUPIR_XPU_BROWSER": "required"}, ["chromium"], "/bin/chromium", True),
        ({"SUPIR_XPU_BROWSER": "required"}, [], None, True),
        ({"SUPIR_XPU_BROWSER": "mine"}, ["mine", "chromium"], "/bin/mine", True),
        ({"SUPIR_XPU_BROWSER": "mine"}, ["chromium"], None, True),
    ],
)
def test_finding_a_browser(tool, env, there, found, required):
    browser = tool("browser")
    which = {name: f"/bin/{name}" for name in there}.get
    assert browser.find_browser(env, which) == found
    assert browser.is_required(env) is required


@pytest.mark.parametrize("own", [["-n", "0"], ["-n4"], ["--numprocesses=1"], ["--pdb"]])
def test_the_user_chooses_the_number_of_processes(start, own):
    _, [(words, _)], _ = start("test", "--fast", *own, held=["full"])
    assert words[5:] == own


def test_one_core_is_not_shared(start, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    _, [(words, _)], _ = start("test", "--fast", held=["full"])
    assert "-n" not in words


def test_smoke_runs_on_every_host_or_those_named(start, tool):
    code, [(words, env)], _ = start("smoke", held=["full"], code=1)
    assert code == 1
    assert words[1].endswith("smoke.py")
    assert [word.partition("=")[0] for word in words[2:]] == [
        host.version for host in tool("host_table").HOSTS
    ]
    assert words[2] == f"0.16.3={start.oldest}"
    assert "COMFYUI_ROOT" not in env
    _, [(words, _)], _ = start("smoke", "0.30.0", held=["full"])
    assert words[2:] == [f"0.30.0={start.host}"]


def test_fast_needs_no_host(start, monkeypatch):
    monkeypatch.setenv("COMFYUI_ROOT", "elsewhere")
    _, [(command, env)], environment = start("test", "--fast", "-x", with_host=False)
    assert command[3:] == ["-m", "not host and not web and not slow", *SPREAD, "-x"]
    assert "COMFYUI_ROOT" not in env
    assert environment.installed == ["fast"]


@pytest.mark.parametrize("held", ["full", "lint", "fast"])
def test_fast_uses_what_is_there(start, held):
    _, _, environment = start("test", "--fast", held=[held])
    assert environment.installed == []


def test_variables_pass_through(start, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SUPIR_GOLDEN_DIR", "gold")
    _, [(_, env), _], _ = start("test", held=["full"])
    assert "SUPIR_XPU_TEST_THREADS" not in env
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["SUPIR_GOLDEN_DIR"] == os.path.abspath("gold")


@pytest.mark.parametrize("words", [("test", "--host", "0.30.0"), ("test", "--fast")])
def test_tests_run_on_one_thread_and_say_whose_choice_that_is(start, monkeypatch, words):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, [(_, env)], _ = start(*words, held=["full"])
    assert (env["OMP_NUM_THREADS"], env["SUPIR_XPU_TEST_THREADS"]) == ("1", "1")


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_tools_choose_no_threads(start, monkeypatch, command):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, [(_, env)], _ = start(command, held=["full"])
    assert "OMP_NUM_THREADS" not in env


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_tools_run_inside_the_environment(start, repo, command):
    code, [(words, env)], environment = start(command, held=["full"], code=1)
    assert code == 1
    assert words == [str(repo / "python"), str(repo / "tools" / f"{command}.py")]
    assert env["COMFYUI_ROOT"] == str(start.host)
    assert environment.installed == []


def test_bench_options_reach_the_bench(start):
    _, [(words, _)], _ = start("bench", "--full", "--write", held=["full"])
    assert words[2:] == ["--full", "--write"]


def test_existing_comfyui_is_used(start, repo, command_line):
    ui = repo / "ui"
    ui.mkdir()
    (ui / "main.py").touch()
    (ui / "requirements.txt").touch()
    _, [(_, env)], _ = start("test", "--comfyui", "ui", held=["full"], with_host=False)
    assert env["COMFYUI_ROOT"] == str(ui.resolve())
    assert env["PYTHONPYCACHEPREFIX"].startswith(str(repo))


@pytest.mark.parametrize("code", [0, 1])
def test_lint_runs_all_three_and_tells_the_truth(start, code):
    result, calls, environment = start("lint", code=code)
    assert result == code
    assert [c[0][2:4] for c in calls] == [
        ["ruff", "check"],
        ["ruff", "format"],
        ["pyright", "--pythonpath"],
    ]
    assert environment.installed == ["lint"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "No command"),
        (("tset",), "No such command: tset"),
        (("demo", "--fast"), "--fast"),
        (("demo", "extra"), "extra"),
        (("test", "--comfyui"), "path"),
        (("test", "--fast", "--comfyui", "x"), "without ComfyUI"),
        (("lint", "--comfyui=x"), "without ComfyUI"),
        (("test", "--host"), "''"),
        (("test", "--host", "0.16.4"), r"'0\.16\.4'.*0\.16\.3, 0\.18\.0"),
        (("test", "--host=0.16.3", "--fast"), "--host"),
        (("test", "--host=0.16.3", "--comfyui=x"), "--host"),
        (("demo", "--host=0.16.3"), "--host"),
        (("smoke", "latest"), "'latest'"),
        (("smoke", "--comfyui=x"), "pinned"),
    ],
)
def test_senseless_command_lines_say_why(command_line, tmp_path, words, why):
    with pytest.raises(command_line.UsageError, match=why):
        command_line.parse(words, tmp_path)


@pytest.mark.parametrize("form", [["--comfyui", "sub/ui"], ["--comfyui=sub/ui"]])
def test_comfyui_path_is_read_from_the_callers_folder(command_line, tmp_path, form):
    options = command_line.parse([*form, "test", "-q"], tmp_path)
    assert options.comfyui == tmp_path / "sub" / "ui"
    assert (options.command, options.rest) == ("test", ["-q"])


def test_help_and_nonsense_from_the_shell():
    good = subprocess.run([sys.executable, RUN_PY, "--help"], capture_output=True, text=True)
    bad = subprocess.run([sys.executable, RUN_PY, "nonsense"], capture_output=True, text=True)
    assert (good.returncode, bad.returncode) == (0, 2)
    assert "demo" in good.stdout
    assert "nonsense" in bad.stderr


@pytest.mark.parametrize("words", [["demo", "--help"], ["lint", "-h"], ["test", "-k", "x", "-h"]])
def test_help_after_a_command_sets_nothing_up(command_line, monkeypatch, capsys, words):
    monkeypatch.setattr(command_line, "COMMANDS", {})
    assert command_line.main(words) == 0
    assert "usage: python run.py" in capsys.readouterr().out


@pytest.mark.parametrize("version", [(3, 9), (3, 14), (2, 7)])
def test_unsupported_python_gets_one_line_naming_one_that_works(tool, version):
    interpreters = tool("interpreters")
    installed = {"python3.12": "3.12", "python3.10": "3.10"}

    def ask(command):
        return installed.get(" ".join(command))

    line = interpreters.advice(version, (3, 10), (3, 13), ["run.py", "demo"], ask, windows=False)
    assert "\n" not in line
    assert "Python {}.{},".format(*version) in line
    assert line.endswith("Run: python3.12 run.py demo")


def test_unsupported_python_on_windows_and_with_none_installed(tool):
    interpreters = tool("interpreters")

    def ask(command):
        return "3.11" if command == ["py", "-3.11"] else None

    arguments = ((3, 14), (3, 10), (3, 13), ["run.py"])
    assert interpreters.advice(*arguments, ask, windows=True).endswith("Run: py -3.11 run.py")
    nothing = interpreters.advice(*arguments, lambda _: None, windows=False)
    assert nothing.endswith("Install Python 3.12 and call run.py with it.")


def test_run_py_refuses_an_unsupported_python():
    script = (
        "import runpy, sys; sys.version_info = (3, 9, 0); sys.argv = [sys.argv[1], 'demo'];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", script, RUN_PY], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "needs Python 3.10 to 3.13" in ended.stderr


def test_old_pythons_can_read_the_first_two_files(tool):
    """No syntax newer than Python 3.0 (as far as a current parser can tell)."""
    import ast

    for path in (RUN_PY, RUN_PY.parent / "tools" / "interpreters.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 0))
        newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Starred)
        assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
        assert not [a for a in ast.walk(tree) if isinstance(a, ast.arg) and a.annotation]
