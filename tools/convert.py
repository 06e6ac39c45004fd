"""``run.py convert``: workflows of the older SUPIR wrapper into workflows of this pack.

Runs in the Python that calls it, standard library only, no ComfyUI, nothing set up. Reads and
writes files; the conversion itself is the package ``migrate/``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LARGEST_FILE = 64 << 20
"""Bytes above which a file is not read (our choice; workflows have kilobytes)."""

LEFT_ALONE = ("no_old_nodes", "not_a_workflow")
"""Why a file of a folder is no failure: it is no workflow, or one without old nodes."""

EXAMPLES = """\
examples:
  python run.py convert old.json                    writes old.supir_xpu.json beside it
  python run.py convert old.json -o new.json
  python run.py convert folder -o other_folder      every .json file in it with old nodes
"""


class ConvertError(RuntimeError):
    """A file could not be converted; the message says why and what to do.

    Attributes:
        skip: in a folder this is no failure: the file has nothing to convert.
    """

    def __init__(self, message: str, skip: bool = False) -> None:
        super().__init__(message)
        self.skip = skip


def load_migrate() -> ModuleType:
    """Import the package ``migrate`` by its path: this folder's name may be anything."""
    name = "supir_xpu_migrate"
    if name not in sys.modules:
        init = ROOT / "migrate" / "__init__.py"
        spec = importlib.util.spec_from_file_location(
            name, init, submodule_search_locations=[str(init.parent)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises: ConvertError."""
    try:
        if not path.is_file():
            raise ConvertError(f"{path} is no regular file. Give a .json file or a folder.")
        if path.stat().st_size > LARGEST_FILE:
            raise ConvertError(f"{path} has more than {LARGEST_FILE >> 20} MiB: no workflow.")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConvertError(
            f"{path} is not JSON: it is no text in UTF-8. Give a workflow saved by ComfyUI; for a "
            "picture, open it in ComfyUI and save its workflow."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path} is not JSON: {error}.") from error


def convert_file(source: Path, target: Path, force: bool) -> Any:
    """Convert one file; return the report. Raises: ConvertError, also for an existing target."""
    if _same(source, target):
        raise ConvertError(f"{target} is the input itself, which is never overwritten. Change -o.")
    if target.is_dir():
        raise ConvertError(f"{target} is a folder. Name a file with -o.")
    migrate = load_migrate()
    try:
        converted = migrate.convert(read_json(source))
    except migrate.MigrateError as error:
        raise ConvertError(f"{source}: {error}", skip=error.code in LEFT_ALONE) from error
    if target.exists() and not force:
        raise ConvertError(f"{target} exists. Choose another name with -o, or add --force.")
    try:
        write_whole(target, text_of(converted.workflow))
    except OSError as error:
        raise ConvertError(f"{target} cannot be written: {error.strerror or error}.") from error
    return converted.report


def _same(source: Path, target: Path) -> bool:
    """Say whether two paths are one file, also through links and letter case."""
    with contextlib.suppress(OSError):
        return os.path.samefile(source, target)
    return source.resolve() == target.resolve()


def text_of(workflow: Any) -> str:
    """Return a workflow as text; letters stay readable unless UTF-8 cannot hold them."""
    text = json.dumps(workflow, indent=2, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(workflow, indent=2)
    return text + "\n"


def write_whole(target: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="utf-8", newline="\n") as file:  # a new file's permissions
            file.write(text)
        os.replace(part, target)
    except BaseException:  # also Ctrl-C: no half file stays
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def jobs(source: Path, named: str | None) -> list[tuple[Path, Path]]:
    """Return (input, output) of every file to convert. Raises: ConvertError.

    Args: named: the output as typed; with a separator at its end it is a folder.
    """
    if not source.exists():
        raise ConvertError(f"{source} does not exist.")
    output = None if named is None else Path(named)
    if not source.is_dir():
        if output is not None and named is not None and named.endswith(("/", os.sep)):
            return [(source, output / source.name)]
        return [(source, output or source.with_name(f"{source.stem}.supir_xpu.json"))]
    if output is None:
        raise ConvertError(f"{source} is a folder. Name the folder for the new files with -o.")
    if output.exists() and not output.is_dir():
        raise ConvertError(f"{output} is a file, but {source} is a folder. Name a folder with -o.")
    if _same(source, output):
        raise ConvertError(f"{output} is the input folder itself. Name another one with -o.")
    inside = output.resolve()
    files = sorted(p for p in source.rglob("*") if p.suffix.lower() == ".json" and p.is_file())
    files = [p for p in files if inside not in p.resolve().parents]
    if not files:
        raise ConvertError(f"{source} has no .json file.")
    return [(path, output / path.relative_to(source)) for path in files]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py convert",
        description="Turn workflows and API prompts of the older SUPIR wrapper (ComfyUI-SUPIR) into "
        "workflows of SUPIR XPU, with a report of what changed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a .json file, or a folder of them")
    parser.add_argument("-o", "--output", help="the new file, or folder (a / at its end says so)")
    parser.add_argument("--force", action="store_true", help="overwrite existing output files")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Convert a file or a folder; return 0, or 1 when nothing was converted or a file failed."""
    for stream in (sys.stdout, sys.stderr):  # no console may stop us with its encoding
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    options = parse(arguments)
    try:
        todo = jobs(options.source, options.output)
    except ConvertError as error:
        print(error, file=sys.stderr)
        return 1
    failed, reports = 0, list[dict[str, Any]]()
    for source, target in todo:
        try:
            report = convert_file(source, target, options.force)
        except ConvertError as error:
            skip = error.skip and options.source.is_dir()
            failed += not skip
            print(f"Left alone: {error}" if skip else error, file=sys.stderr)
            continue
        reports.append({"input": str(source), "output": str(target), **report.as_dict()})
        if not options.json:
            print(f"{source} -> {target}\n{report.text()}\n")
    if options.json:
        print(json.dumps(reports, indent=2))
    if len(todo) > 1:
        skipped = len(todo) - len(reports) - failed
        words = f"{len(reports)} converted, {skipped} left alone (no old nodes), {failed} failed."
        print(words, file=sys.stderr)
    return 1 if failed or not reports else 0
