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

    def holds(self, profile):
        return profile.name in self.held

    def make(self):
        pass

    def install(self, profile):
        self.installed.append(profile.name)


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch\n")
    return tmp_path


@pytest.fixture
def start(command_line, fetch_host, repo):
    """Run a command on a fake environment; return (exit code, calls, environment)."""
    host = repo / ".cache" / f"ComfyUI-{fetch_host.HOST_VERSION}"

    def start(*words, held=(), with_host=True, code=0):
        if with_host:
            host.mkdir(parents=True, exist_ok=True)
            (host / "main.py").touch()
            (host / "requirements.txt").touch()
            (host / fetch_host.STAMP_NAME).write_text(fetch_host.ARCHIVE_SHA256)
        environment, calls = FakeEnvironment(repo, held), []

        def call(command, env):
            calls.append((command, env))
            return code

        options = command_line.parse(words, repo)
        session = command_line.Session(environment, call)
        return command_line.COMMANDS[options.command](session, options), calls, environment

    start.host = host
    return start


def test_test_passes_arguments_and_exit_code_on(start, command_line):
    code, [(command, env)], environment = start("test", "tests/parity", "-k", "edm", code=5)
    assert code == 5
    assert command[1:3] == ["-c", command_line.PYTEST]
    assert command[3:] == ["tests/parity", "-k", "edm"]
    assert env["COMFYUI_ROOT"] == str(start.host)
    assert environment.installed == ["full"]


def test_fast_needs_no_host(start, monkeypatch):
    monkeypatch.setenv("COMFYUI_ROOT", "elsewhere")
    _, [(command, env)], environment = start("test", "--fast", "-x", with_host=False)
    assert command[3:] == ["-m", "not host and not web", "-x"]
    assert "COMFYUI_ROOT" not in env
    assert environment.installed == ["fast"]


@pytest.mark.parametrize("held", ["full", "lint", "fast"])
def test_fast_uses_what_is_there(start, held):
    _, _, environment = start("test", "--fast", held=[held])
    assert environment.installed == []


def test_variables_pass_through(start, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SUPIR_GOLDEN_DIR", "gold")
    _, [(_, env)], _ = start("test", held=["full"])
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["SUPIR_GOLDEN_DIR"] == os.path.abspath("gold")


def test_omp_threads_are_not_invented(start, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, [(_, env)], _ = start("test", held=["full"])
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
