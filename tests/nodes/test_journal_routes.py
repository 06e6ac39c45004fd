"""The journal as this ComfyUI opens it, and forgetting over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sqlite3

import pytest

pytestmark = pytest.mark.host


@pytest.fixture
def journals(tmp_path, monkeypatch):
    """The pack's journal module, with an empty user folder."""
    import folder_paths

    module = importlib.import_module("supir_xpu.nodes.journal")
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path))
    module.set_journal(None)
    yield module
    module.set_journal(None)


@pytest.fixture
def forget(monkeypatch):
    """``forget(body)`` posts to the route; returns status and JSON."""
    routes = importlib.import_module("supir_xpu.nodes.prompt_routes")

    class Request:
        content_type = "application/json"

    def post(body):
        async def read(_):
            return body

        monkeypatch.setattr(routes, "read_object", read)
        answer = asyncio.run(routes.post_forget(Request()))
        return answer.status, json.loads(answer.text)

    return post


def died(journals):
    """Leave a death in the journal of the user folder."""
    from supir_xpu.xpu.boot import Owner
    from supir_xpu.xpu.journal import Journal, RunInfo

    run = RunInfo("r", "card", "1.0", "2", "fused", 100, 9.0)
    gone = Journal(journals.journal_path(), owner=Owner("another boot", 1, "1", "here"))
    gone.open_phase(run, "sample", launches=10)


def test_a_device_name_that_cannot_be_stored_forgets_nothing(journals, forget):
    died(journals)
    assert forget({"confirm": True, "device": "\ud800"})[0] == 400
    assert len(journals.open_journal().deaths()) == 1


def test_forgetting_where_nothing_was_recorded_makes_no_file(journals, forget, tmp_path):
    assert forget({"confirm": True}) == (200, {"forgotten": 0})
    assert list(tmp_path.iterdir()) == []


def test_a_crash_of_an_earlier_start_is_found_before_it_is_forgotten(journals, forget):
    died(journals)
    assert forget({"confirm": True}) == (200, {"forgotten": 1})
    assert journals.open_journal().deaths() == []


def test_a_journal_that_cannot_be_written_is_said_and_keeps_its_crash(journals, forget):
    died(journals)
    other = sqlite3.connect(journals.journal_path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("supir_xpu.xpu.journal_file.BUSY_TIMEOUT_S", 0.05)
        journals.open_journal()
        other.execute("BEGIN IMMEDIATE")
        status, said = forget({"confirm": True})
        other.execute("ROLLBACK")
    other.close()
    assert status == 503
    assert said["error"]["type"] == "supir_xpu_not_forgotten"
    assert journals.journal_path() in said["error"]["message"]
    assert len(journals.open_journal().deaths()) == 1


def test_a_journal_that_cannot_be_searched_for_crashes_still_opens(journals, monkeypatch, caplog):
    from supir_xpu.xpu.journal import Journal

    def fail(self):
        raise ValueError("rows of another kind")

    monkeypatch.setattr(Journal, "find_deaths", fail)
    with caplog.at_level(logging.WARNING):
        assert journals.open_journal() is journals.open_journal()
    assert "cannot be reported" in caplog.text
    assert journals.deaths_found() == []
