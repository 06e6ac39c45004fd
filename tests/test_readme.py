"""What the README promises is there: codes, nodes, commands, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_risk_code_is_explained_in_the_rules_own_words():
    from supir_xpu.xpu.risk import CODES

    for code, text in CODES.items():
        assert f"| `{code}` | {text} |" in README


def test_every_file_that_is_named_exists():
    names = set(re.findall(r"`([\w/.-]+\.(?:md|py|txt|yaml))`", README))
    assert names
    missing = [n for n in names if not (ROOT / n).exists() and n != "supir_xpu.yaml"]
    assert not missing


def test_the_two_commands_are_there():
    for command in ("python run.py demo", "python run.py test"):
        assert command in README


@pytest.mark.host
def test_every_node_is_in_the_table():
    from supir_xpu.nodes import NODES

    for node in NODES:
        name = node.define_schema().display_name
        assert name in README, name


def test_every_risk_and_fault_code_has_its_row_in_troubleshooting():
    from supir_xpu.xpu.fault_table import FAULT_TABLE
    from supir_xpu.xpu.risk import CODES

    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted([*CODES, "SETTINGS_INVALID", *(f.code for f in FAULT_TABLE)])
    for fault in FAULT_TABLE:
        assert fault.advice in page, fault.code


def test_every_command_on_the_page_of_proofs_names_files_that_exist():
    page = (ROOT / "docs" / "proof.md").read_text(encoding="utf-8")
    named = re.findall(r"tests/[\w/]+(?:\.py)?", page)
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).exists(), name
