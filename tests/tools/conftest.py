"""Give the tests in this folder the modules of ``tools/``, which are scripts, not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="session")
def tool():
    """``tool("setup_env")`` imports tools/setup_env.py as a running script of tools/ would."""
    sys.path.insert(0, str(TOOLS))
    yield _load
    sys.path.remove(str(TOOLS))


def _load(name: str) -> ModuleType:
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == TOOLS
    return module


@pytest.fixture
def setup_env(tool):
    return tool("setup_env")


@pytest.fixture
def fetch_host(tool):
    return tool("fetch_host")


@pytest.fixture
def host_server(tool):
    return tool("host_server")


@pytest.fixture
def command_line(tool):
    return tool("command_line")


@pytest.fixture
def stress(tool):
    return tool("stress")


@pytest.fixture
def loop(tool):
    return tool("stress_loop")


@pytest.fixture
def log(tmp_path):
    """Where ``run.py stress`` would leave its breadcrumbs."""
    return tmp_path / "output" / "stress.jsonl"
