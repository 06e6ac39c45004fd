"""``run.py convert``: files in, files out, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from supir_xpu.tests import old_workflows as old

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def convert(tool):
    return tool("convert")


@pytest.fixture
def save(tmp_path):
    def save(data, name="old.json", encoding="utf-8"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding=encoding)
        return path

    return save


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_file_becomes_a_file_beside_it_and_the_report_is_printed(convert, save, capsys):
    source = save(old.structure_a())
    before = source.read_bytes()
    assert convert.main([str(source)]) == 0
    assert source.read_bytes() == before
    new = read(source.with_name("old.supir_xpu.json"))
    assert "SUPIR_XPU_Sample" in {n["type"] for n in new["nodes"]}
    printed = capsys.readouterr().out
    assert "6 old node(s) converted." in printed
    assert "restore_cfg" in printed


def test_the_report_as_json_and_letters_outside_ascii(convert, save, tmp_path, capsys):
    prompt = old.structure_d(a_prompt="épreuve テスト")
    target = tmp_path / "новый" / "neu.json"
    assert convert.main([str(save(prompt)), "-o", str(target), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["complete"] is True
    assert report["format"] == "prompt"
    assert "épreuve テスト" in target.read_text(encoding="utf-8")
    assert [p.name for p in target.parent.iterdir()] == ["neu.json"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": 1}', "neither a workflow"),
        ("[1]", "neither a workflow"),
        ('{"1": {"class_type": "LoadImage", "inputs": {}}}', "nothing to convert"),
    ],
)
def test_what_is_no_old_workflow_is_refused_and_nothing_is_written(
    convert, save, capsys, data, words
):
    source = save(data)
    assert convert.main([str(source)]) == 1
    assert words in capsys.readouterr().err
    assert list(source.parent.iterdir()) == [source]


def test_text_in_another_encoding_is_refused(convert, save, capsys):
    assert convert.main([str(save(old.structure_d(), encoding="utf-16"))]) == 1
    assert "UTF-8" in capsys.readouterr().err


def test_text_with_a_byte_order_mark_is_read(convert, save):
    assert convert.main([str(save(old.structure_d(), encoding="utf-8-sig"))]) == 0


def test_existing_files_stay_unless_forced_and_the_input_always(convert, save, capsys):
    source, there = save(old.structure_d()), save("mine", "new.json")
    arguments = [str(source), "-o", str(there)]
    assert convert.main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert there.read_text(encoding="utf-8") == "mine"
    assert convert.main([*arguments, "--force"]) == 0
    assert "SUPIR_XPU_Upscale" in there.read_text(encoding="utf-8")
    assert convert.main([str(source), "-o", str(source), "--force"]) == 1
    assert "never overwritten" in capsys.readouterr().err
    assert read(source) == old.structure_d()


def test_a_folder_keeps_its_shape_and_skips_what_has_no_old_nodes(convert, save, tmp_path, capsys):
    save(old.structure_d(), "in/a.json")
    save(old.structure_c(), "in/deep/b.json")
    save({"1": {"class_type": "LoadImage", "inputs": {}}}, "in/other.json")
    target = tmp_path / "out"
    assert convert.main([str(tmp_path / "in"), "-o", str(target)]) == 0
    assert sorted(p.relative_to(target).as_posix() for p in target.rglob("*.json")) == [
        *("a.json", "deep/b.json"),
    ]
    assert "2 converted, 1 left alone (no old nodes), 0 failed" in capsys.readouterr().err
    save("{", "in/broken.json")
    assert convert.main([str(tmp_path / "in"), "-o", str(target), "--force"]) == 1
    assert "1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "output", "words"),
    [
        ("absent.json", None, "does not exist"),
        ("folder", None, "-o"),
        ("folder", "folder", "itself"),
        ("folder", "file.json", "is a file"),
        ("file.json", "folder", "is a folder"),
        ("empty", "out", "no .json file"),
    ],
)
def test_paths_that_make_no_sense(convert, save, tmp_path, capsys, source, output, words):
    save(old.structure_d(), "file.json")
    save(old.structure_d(), "folder/a.json")
    (tmp_path / "empty").mkdir()
    rest = [] if output is None else ["-o", str(tmp_path / output)]
    assert convert.main([str(tmp_path / source), *rest]) == 1
    assert words in capsys.readouterr().err


def test_run_py_converts_in_the_python_that_calls_it_with_the_standard_library(save, tmp_path):
    """-S and -I leave out site-packages, so anything but the standard library would fail."""
    source, target = save(old.structure_b()), tmp_path / "new.json"
    command = [sys.executable, "-S", "-I", str(ROOT / "run.py"), "convert"]
    ended = subprocess.run(
        [*command, str(source), "-o", str(target)], capture_output=True, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert "SUPIR_XPU_Tiles" in {n["type"] for n in read(target)["nodes"]}


def test_other_json_of_a_folder_is_left_alone_and_any_case_of_the_ending_is_read(
    convert, save, tmp_path, capsys
):
    save(old.structure_d(), "in/A.JSON")
    save({"name": "package", "version": "1"}, "in/package.json")
    assert convert.main([str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["A.JSON"]
    said = capsys.readouterr().err
    assert "Left alone: " in said
    assert "1 converted, 1 left alone (no old nodes), 0 failed" in said


def test_an_output_that_ends_with_a_separator_is_a_folder(convert, save, tmp_path):
    assert convert.main([str(save(old.structure_d())), "-o", f"{tmp_path / 'new'}/"]) == 0
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["old.json"]


def test_a_new_file_has_the_permissions_of_any_new_file(convert, save, tmp_path):
    usual = save("x", "usual.txt")
    target = tmp_path / "new.json"
    assert convert.main([str(save(old.structure_d())), "-o", str(target)]) == 0
    assert target.stat().st_mode == usual.stat().st_mode


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_reading_it(convert, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.json")
    assert convert.main([str(tmp_path / "pipe.json")]) == 1
    assert "no regular file" in capsys.readouterr().err
