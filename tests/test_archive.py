"""What the registry publishes: its file list, its metadata, and that its commands run there.

That ComfyUI loads it from such a folder is tested in tests/host/test_old_workflows.py.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from supir_xpu.tests import archive, old_workflows

ROOT = Path(__file__).resolve().parents[1]
AWKWARD = "p.ack é 名 1.0"
"""A folder name with dots, spaces and letters outside ASCII."""

LARGEST_MIB = 20


@pytest.fixture(scope="module")
def names():
    return {str(path) for path in archive.files()}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return archive.unpack(tmp_path_factory.mktemp("custom.nodes ü") / AWKWARD)


def test_it_holds_the_pack_and_nothing_else(names):
    tops = {name.split("/")[0] for name in names}
    assert {"__init__.py", "nodes", "supir", "xpu", "migrate", "web", "run.py"} <= tops
    assert {"LICENSE", "NOTICE.md", "README.md", "pyproject.toml", "requirements.txt"} <= tops
    assert not {"tests", "output", ".venv", ".cache", ".ci", ".git", ".pytest_cache"} & tops
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert "example_workflows/restore_photo.jpg" in names
    assert {"tools/doctor.py", "tools/stress.py", "tools/convert.py"} <= names
    assert not {"tools/setup_env.py", "tools/fetch_host.py", "tools/command_line.py"} & names
    size = sum((ROOT / name).stat().st_size for name in names)
    assert size < LARGEST_MIB << 20


def test_nothing_in_it_calls_an_installer(names):
    for name in sorted(n for n in names if n.endswith(".py")):
        text = (ROOT / name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.List):
                words = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                assert "pip" not in words, name


def test_its_tools_need_no_tool_that_is_left_out(names):
    tools = {Path(n).stem for n in names if n.startswith("tools/") and n.endswith(".py")}
    every = {path.stem for path in (ROOT / "tools").glob("*.py")}
    for tool in tools:
        tree = ast.parse((ROOT / "tools" / f"{tool}.py").read_text(encoding="utf-8"))
        used = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        used |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) if not n.level}
        tops = {str(name).split(".")[0] for name in used}
        assert tops & every <= tools, tool


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("a.pyc", True),
        ("nodes/a.pyc", True),
        ("nodes/__pycache__/a.txt", True),
        ("tests/a.py", True),
        ("nodes/tests/a.py", False),
        ("tools/setup_env.py", True),
        ("tools/photo/a.jpg", True),
        ("tools/doctor.py", False),
        ("nodes/output/a.py", False),
        ("output/a.png", True),
    ],
)
def test_the_patterns_mean_what_git_means_by_them(path, out):
    rules = archive.patterns((ROOT / ".comfyignore").read_text(encoding="utf-8"))
    assert archive.left_out(PurePosixPath(path), rules) is out


def test_the_metadata_is_what_the_registry_asks_for():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = text[text.index("[project]") : text.index("[tool.pytest")]
    name = re.search(r'^name = "(.*)"$', project, re.MULTILINE)[1]
    assert re.fullmatch(r"[a-z](?:[a-z0-9]|[-_.](?![-_.])){0,98}", name)
    assert "comfyui" not in name
    assert re.search(r'^version = "\d+\.\d+\.\d+"$', project, re.MULTILINE)
    assert re.search(r'^license = \{ file = "LICENSE" \}$', project, re.MULTILINE)
    for key in ("PublisherId", "DisplayName", "requires-comfyui"):
        assert re.search(rf'^{key} = "\S.*"$', project, re.MULTILINE), key
    assert not re.search(r"^web =", project, re.MULTILINE), "WEB_DIRECTORY is enough"


@pytest.mark.host
def test_comfyui_reads_the_metadata():
    from comfy_config.config_parser import extract_node_configuration

    read = extract_node_configuration(str(ROOT))
    assert read.project.name == "supir-xpu"
    assert "GPU :: Intel Arc" in read.project.supported_accelerators
    assert read.project.supported_os == ["OS Independent"]
    assert read.project.supported_comfyui_version == ">=0.16.3"
    assert read.tool_comfy.publisher_id == "supir-xpu"


def call(installed, *words):
    return subprocess.run(
        [sys.executable, str(installed / "run.py"), *words],
        capture_output=True,
        cwd=installed.parent,
    )


def test_its_commands_run_there(installed):
    old = installed.parent / "älter.json"
    old.write_text(json.dumps(old_workflows.structure_a()), encoding="utf-8")
    assert call(installed, "convert", str(old)).returncode == 0
    assert (installed.parent / "älter.supir_xpu.json").is_file()
    for command in ("doctor", "stress"):
        ended = call(installed, command, "--help")
        assert ended.returncode == 0, ended.stderr
    ended = call(installed, "demo")
    assert ended.returncode == 1
    assert b"doctor, stress and convert" in ended.stderr
