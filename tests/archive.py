"""The registry's archive: the files of the repository that .comfyignore leaves in."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]


def patterns(text: str) -> list[str]:
    """Return the patterns of a .comfyignore or .gitignore.

    Of git's syntax only what these files use: no ``**``, and a slash at the start or end only, or
    behind a first slash.
    """
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    for line in found:
        body = line.removeprefix("!").strip("/")
        assert "**" not in line, line
        assert "/" not in body or line.removeprefix("!").startswith("/"), line
    return found


def left_out(path: PurePosixPath, rules: list[str], is_folder: bool = False) -> bool:
    """Say whether a file, or a folder it is in, matches; the last matching pattern decides."""
    for depth in range(1, len(path.parts) + 1):
        part, above = PurePosixPath(*path.parts[:depth]), depth < len(path.parts)
        verdict = False
        for rule in rules:
            if matches(part, rule.removeprefix("!"), above or is_folder):
                verdict = not rule.startswith("!")
        if verdict:
            return True
    return False


def matches(path: PurePosixPath, rule: str, is_folder: bool) -> bool:
    """Say whether one pattern names a path."""
    if rule.endswith("/") and not is_folder:
        return False
    body = rule.strip("/")
    if not rule.startswith("/"):
        return fnmatch.fnmatchcase(path.name, body)
    wanted = body.split("/")
    same_depth = len(wanted) == len(path.parts)
    return same_depth and all(map(fnmatch.fnmatchcase, path.parts, wanted))


def files(root: Path = ROOT) -> Iterator[PurePosixPath]:
    """Yield every file that goes into the archive, relative to the repository."""
    rules = patterns((root / ".comfyignore").read_text(encoding="utf-8"))
    for folder, names, found in os.walk(root):
        here = Path(folder).relative_to(root)
        inside = [PurePosixPath(here.as_posix(), name) for name in names]
        names[:] = [path.name for path in inside if not left_out(path, rules, is_folder=True)]
        for name in sorted(found):
            path = PurePosixPath(here.as_posix(), name)
            if not left_out(path, rules):
                yield path


def unpack(target: Path) -> Path:
    """Copy what the archive holds into a folder, as installing it would."""
    for path in files():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, place)
    return target
