"""Settings: defaults, files and overrides merged, and mistakes named with source and key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import MISSING
from supir_xpu.supir.errors import SettingsError
from supir_xpu.supir.key_layouts import LAYOUTS_FILE, KeyLayouts, load_layouts
from supir_xpu.supir.settings import load_settings


@dataclass
class Tiles:
    size_px: int = 512
    overlap_px: int = 64

    def __post_init__(self):
        if self.overlap_px >= self.size_px:
            raise ValueError(f"tiles.overlap_px {self.overlap_px} must be below {self.size_px}")


@dataclass
class Example:
    name: str = "default"
    strength: float = 0.5
    quiet: bool = False
    tiles: Tiles = field(default_factory=Tiles)
    words: list[str] = field(default_factory=list)
    sets: dict[str, Tiles] = field(default_factory=dict)


@dataclass
class Required:
    source: str = MISSING


@pytest.fixture
def yaml(tmp_path):
    def write(text, name="settings.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return path

    return write


def refuse(*args, **kwargs):
    with pytest.raises(SettingsError) as caught:
        load_settings(*args, **kwargs)
    return str(caught.value)


def test_defaults_alone():
    assert load_settings(Example) == Example()


def test_later_sources_win_key_by_key(yaml):
    first = yaml("name: a\ntiles: {size_px: 256}\nwords: [x, y]", "first.yaml")
    second = yaml("name: b\ntiles: {overlap_px: 32}\nwords: [z]", "second.yaml")
    settings = load_settings(Example, first, str(second), overrides={"tiles.overlap_px": 16})
    assert settings == Example(name="b", tiles=Tiles(256, 16), words=["z"])


def test_overrides_may_be_nested_or_dotted():
    nested = load_settings(Example, overrides={"tiles": {"size_px": 128}, "quiet": True})
    dotted = load_settings(Example, overrides={"tiles.size_px": 128, "quiet": True})
    assert nested == dotted == Example(quiet=True, tiles=Tiles(128))


def test_dictionaries_of_dataclasses(yaml):
    settings = load_settings(Example, yaml("sets: {small: {size_px: 96}, big: {}}"))
    assert settings.sets == {"small": Tiles(96), "big": Tiles()}


def test_empty_file_and_byte_order_mark(yaml):
    assert load_settings(Example, yaml("")) == Example()
    assert load_settings(Example, yaml(b"\xef\xbb\xbfname: n\xc3\xa4h")).name == "näh"


@pytest.mark.parametrize(
    ("text", "key", "word"),
    [
        ("nope: 1", "'nope'", "name, strength, quiet, tiles, words, sets"),
        ("tiles: {size: 1}", "'tiles.size'", "size_px, overlap_px"),
        ("sets: {a: {width: 1}}", "'sets.a.width'", "size_px, overlap_px"),
        ("tiles: {size_px: wide}", "'tiles.size_px'", "wide"),
        ("tiles: {size_px: 1.5}", "'tiles.size_px'", "1.5"),
        ("tiles: 7", "'tiles'", "int"),
        ("sets: {a: {}, b: 7}", "'sets.b'", "int"),
        ("sets: [1]", "'sets'", "incompatible"),
        ("strength: [1]", "'strength'", "Float"),
        ("strength: null", "'strength'", "None"),
        ("quiet: maybe", "'quiet'", "maybe"),
        ("words: one", "'words'", "list"),
        ("words: [a, {b: c}]", "'words[1]'", "str"),
        ("name: ${missing}", "'name'", "missing"),
        ("name: ${oc.env:PATH}", "'name'", "oc.env"),
        ("words: [a, '${strength}']", "'words.1'", "strength"),
        ("tiles: {size_px: '${oc.env:PATH}'}", "'tiles.size_px'", "oc.env"),
        ("1: 2", "'1'", "name"),
    ],
)
def test_mistakes_name_file_and_key(yaml, text, key, word):
    message = refuse(Example, yaml(text))
    assert "settings.yaml" in message
    assert key in message
    assert word in message


def test_the_file_at_fault_is_named(yaml):
    good, bad = yaml("name: a", "good.yaml"), yaml("nme: b", "bad.yaml")
    assert "bad.yaml" in refuse(Example, good, bad)
    assert "good.yaml" not in refuse(Example, good, bad)
    assert "overrides" in refuse(Example, good, overrides={"nme": 1})
    assert "'tiles.size'" in refuse(Example, overrides={"tiles.size": 1})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: b: c", "line 1, column 5"),
        ("name: a\n\tquiet: true", "line 2"),
        ("name: a\nname: b", "duplicate key name"),
        ("[1, 2]", "holds a list"),
        ("42", "cannot be read"),
        ("[" * 3000, "nest"),
        ("[" * 900 + "]" * 900, "nest"),
        (b"name: \xff\xfe", "UTF-8"),
        ("? [1, 2]\n: 3", "unhashable"),
    ],
)
def test_broken_yaml_names_the_file_and_the_place(yaml, text, word):
    message = refuse(Example, yaml(text))
    assert "settings.yaml" in message
    assert word in message


def test_missing_file_and_folder(tmp_path):
    assert "gone.yaml" in refuse(Example, tmp_path / "gone.yaml")
    assert "cannot be read" in refuse(Example, tmp_path)


def test_missing_value_and_range(yaml):
    assert "'source'" in refuse(Required, yaml("{}"))
    assert load_settings(Required, overrides={"source": "x"}).source == "x"
    message = refuse(Example, yaml("tiles: {overlap_px: 512}"))
    assert "tiles.overlap_px 512" in message
    assert "settings.yaml" in message


def test_the_layouts_that_ship():
    layouts = load_layouts()
    assert list(layouts.layouts) == ["full", "short"]
    assert layouts.layouts["full"].control == "model.control_model."
    assert layouts.layouts["short"].adapters == "project_modules."
    assert layouts.dropped == ["mask_LQ"]


def test_a_layout_prefix_without_its_dot_is_refused():
    message = refuse(KeyLayouts, LAYOUTS_FILE, overrides={"layouts.full.control": "control"})
    assert "'control'" in message
    assert "dot" in message


@dataclass
class Open:
    """A setting whose items may be anything."""

    facts: dict[str, Any] = field(default_factory=dict)


def test_items_of_any_kind(yaml):
    read = load_settings(Open, yaml("facts: {kind: xpu, total_bytes: 5, list: [1, two]}"))
    assert read.facts == {"kind": "xpu", "total_bytes": 5, "list": [1, "two"]}
