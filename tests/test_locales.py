"""The translations are complete and alike, and the panel says only what they hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("en", "zh", "ja", "de")
OTHERS = LANGUAGES[1:]


def read(language, name):
    return json.loads((ROOT / "locales" / language / name).read_text(encoding="utf-8"))


def flat(words, path=""):
    found = {}
    for key, value in words.items():
        here = f"{path}.{key}" if path else key
        found.update(flat(value, here) if isinstance(value, dict) else {here: value})
    return found


def said(language):
    return flat(read(language, "main.json")["supirXpu"])


def node_ids():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "nodes").glob("*.py"))
    return set(re.findall(r'node_id="(SUPIR_XPU_\w+)"', text))


@pytest.mark.parametrize("language", OTHERS)
def test_every_language_says_the_same_things(language):
    english, other = said("en"), said(language)
    assert set(other) == set(english)
    for key, words in english.items():
        assert set(re.findall(r"\{\w+\}", other[key])) == set(re.findall(r"\{\w+\}", words)), key
    assert read(language, "commands.json").keys() == read("en", "commands.json").keys()


@pytest.mark.parametrize("language", OTHERS)
def test_every_node_has_a_name_in_every_language(language):
    names = read(language, "nodeDefs.json")
    assert set(names) == node_ids()
    for words in names.values():
        assert words["display_name"]
        assert words["description"]


def test_every_risk_code_has_a_title():
    from supir_xpu.xpu.risk import CODES

    assert {key.partition(".")[2] for key in said("en") if key.startswith("codes.")} == set(CODES)


def test_every_phase_has_a_name():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "nodes").glob("*.py"))
    phases = set(re.findall(r'guard\.phase\("(\w+)"\)', text))
    assert phases
    assert {f"phases.{name}" for name in phases} <= set(said("en"))


def test_the_panel_says_only_what_the_translations_hold():
    words = said("en")
    scripts = [*(ROOT / "web").glob("*.js"), *(ROOT / "web" / "lib").glob("*.js")]
    keys = {key for p in scripts for key in re.findall(r'say\("([\w.]+)"', p.read_text("utf-8"))}
    assert len(keys) > 30
    assert keys <= set(words)
    starts = {s for p in scripts for s in re.findall(r"say\(`([\w.]+)\$", p.read_text("utf-8"))}
    for start in starts:
        assert any(key.startswith(start) for key in words), start
