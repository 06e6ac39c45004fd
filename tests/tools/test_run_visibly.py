"""Showing a long command."""

from __future__ import annotations

import os
import sys

import pytest


@pytest.fixture
def run_visibly(tool):
    return tool("run_visibly").run_visibly


def python(script):
    return [sys.executable, "-c", script]


def test_lines_pass_through_but_not_the_noise(run_visibly):
    said = []
    script = "print('Collecting x'); print('Requirement already satisfied: y'); print('')"
    assert run_visibly(python(script), dict(os.environ), said.append) == (0, False)
    assert said == ["  Collecting x"]


def test_exit_code_and_whether_packages_changed(run_visibly):
    script = "print('Installing collected packages: x'); raise SystemExit(3)"
    assert run_visibly(python(script), dict(os.environ), lambda _: None) == (3, True)


def test_silence_is_broken(run_visibly):
    said = []
    script = "import time; time.sleep(0.5)"
    run_visibly(python(script), dict(os.environ), said.append, silence_seconds=0.1)
    assert any("still working" in line for line in said)


def test_any_bytes_are_shown(run_visibly):
    said = []
    script = r"import sys; sys.stdout.buffer.write(b'\xff\xfeok\n')"
    run_visibly(python(script), dict(os.environ), said.append)
    assert said[0].endswith("ok")
