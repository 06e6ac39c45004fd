"""What several tests of the machine layer share."""

from __future__ import annotations

import pytest
from supir_xpu.tests.xpu.journal_machine import Machine


@pytest.fixture
def machine(tmp_path):
    """A made-up computer whose journal lies in a file."""
    return Machine(tmp_path / "journal.db")
