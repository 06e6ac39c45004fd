"""Make and repair the repository's own environment, ``.venv``.

The only file that calls pip. Standard library only. What is installed is written to a stamp in
``.venv`` after everything went well, so a set-up that was stopped half-way is noticed and put
right by the next call, and a complete one costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_visibly import run_visibly

FORMAT = 1
"""Raise to make every existing environment install again."""

TORCH = "torch==2.14.1"
TORCHVISION = "torchvision==0.29.1"
TORCHAUDIO = "torchaudio==2.11.1"
"""The tested set. This torchaudio declares an older torch, so it is installed apart, without its
dependencies."""

TEST_TOOLS = ("pytest", "pytest-xdist>=3.8", "hypothesis")
LINT_TOOLS = ("ruff==0.17.6", "pyright==1.1.414")
HOST_EXTRAS = (TORCHVISION, "torchsde")
BROWSER_DRIVER = ("playwright",)
"""Drives a browser the system has; its package brings none, and nothing here fetches one."""

STAMP_NAME = "supir_xpu_setup.json"
MARKER_NAME = "supir_xpu_installing"

Run = Callable[[Sequence[str], dict[str, str]], tuple[int, bool]]
"""``run(command, env)`` shows the command's output and returns its exit code, and whether it had
begun to change the environment when it ended."""


class SetupError(RuntimeError):
    """The environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Profile:
    """What a command needs.

    Attributes:
        name: ``fast`` (unit tests), ``lint`` or ``full``.
        requirements: for pip, resolved together.
        apart: installed afterwards without dependencies.
        modules: importable afterwards; looked for at every start.
    """

    name: str
    requirements: tuple[str, ...]
    apart: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


def fast_profile(root: Path) -> Profile:
    """Enough for the tests that need no ComfyUI."""
    modules = ("torch", "safetensors", "einops", "numpy", "PIL", "omegaconf", "pytest")
    needs = (TORCH, *read_requirements(root / "requirements.txt"), *TEST_TOOLS)
    return Profile("fast", needs, modules=(*modules, "hypothesis", "xdist"))


def lint_profile(root: Path) -> Profile:
    """The fast set and the two checkers (the type checker reads torch's types)."""
    fast = fast_profile(root)
    modules = (*fast.modules, "ruff", "pyright")
    return Profile("lint", (*fast.requirements, *LINT_TOOLS), modules=modules)


def full_profile(root: Path, host: Path) -> Profile:
    """Everything: also what the ComfyUI in ``host`` asks for."""
    lint = lint_profile(root)
    wanted = read_requirements(host / "requirements.txt")
    wanted = [line for line in wanted if requirement_name(line) != "torchaudio"]
    return Profile(
        "full",
        (*lint.requirements, *HOST_EXTRAS, *BROWSER_DRIVER, *wanted),
        apart=(TORCHAUDIO,),
        modules=(
            *(*lint.modules, "torchvision", "torchaudio", "torchsde", "aiohttp", "transformers"),
            *BROWSER_DRIVER,
        ),
    )


def read_requirements(path: Path) -> list[str]:
    """The requirement lines of a file, without comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    stripped = (line.split("#", 1)[0].strip() for line in lines)
    return [line for line in stripped if line]


def requirement_name(line: str) -> str:
    """``Torch_Audio>=2`` -> ``torch-audio``."""
    for end, char in enumerate(line):
        if not (char.isalnum() or char in "-_."):
            return line[:end].lower().replace("_", "-")
    return line.lower().replace("_", "-")


class Environment:
    """The ``.venv`` of one repository.

    Args:
        root: the repository; ``.venv`` and ``.cache`` are made below it and nothing elsewhere.
        run: runs a command visibly; tests pass their own.
        say: prints one line.
    """

    def __init__(
        self, root: Path, run: Run = run_visibly, say: Callable[[str], None] = print
    ) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.cache = root / ".cache"
        self._run = run
        self._say = say

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def _marker(self) -> Path:
        """Lies in the environment while something may be changing it."""
        return self.folder / MARKER_NAME

    def holds(self, profile: Profile) -> bool:
        """Whether the profile is installed completely and the environment still starts."""
        done = self._done().get(profile.name, {})
        return done.get("key") == key(profile) and self._ailment(profile.modules) is None

    def make(self) -> None:
        """Make the bare environment, or make it again if it is broken or half-finished."""
        if not self.folder.exists():
            self._say("Making .venv ...")
        else:
            stamped = [module for done in self._done().values() for module in done["modules"]]
            ailment = self._ailment(("pip", *stamped))
            if ailment is None:
                return
            self._say(f"Making .venv again: {ailment}.")
            self._remove()
        self.folder.mkdir()
        self._marker.write_text("", encoding="ascii")
        command = [_base_python(), "-m", "venv", str(self.folder)]
        code, _ = self._run(command, _clean_env(self.cache))
        if code != 0 or not self.python.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            raise SetupError(
                f"Python's venv module failed (exit code {code}). On Debian or Ubuntu install the "
                "package python3-venv; an embedded Python cannot make one: use a full Python."
            )
        self._marker.unlink()

    def install(self, profile: Profile) -> None:
        """Install a profile, then stamp it. The environment must have been made."""
        if sys.platform == "linux":
            self._say(
                "Note: on Linux the default torch packages bring GPU libraries along: about 3 GB "
                "to fetch, 7 GB on disk."
            )
        self._say(f"Installing the packages of the {profile.name} set into .venv ...")
        self._pip("install", *profile.requirements)
        if profile.apart:
            self._pip("install", "--no-deps", *profile.apart)
        ailment = self._ailment(profile.modules)
        if ailment is not None:
            raise SetupError(f"pip reported success, but {ailment}. Delete .venv and try again.")
        done = self._done()
        done[profile.name] = {"key": key(profile), "modules": list(profile.modules)}
        partial = self.folder / (STAMP_NAME + ".partial")
        partial.write_text(json.dumps({"done": done}, indent=1), encoding="utf-8")
        os.replace(partial, self.folder / STAMP_NAME)

    def download_source(self, requirement: str, sha256: str, folder: Path) -> None:
        """Fetch a source archive; pip itself refuses one with another SHA-256 before reading it."""
        pinned = folder / "pinned.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="ascii")
        self._pip(
            *("download", "--no-deps", "--no-binary=:all:", "--require-hashes"),
            *("--python-version", "3.12", "-d", str(folder), "-r", str(pinned)),
        )

    def front_end(self, version: str) -> Path:
        """The files of one version of ComfyUI's front end, installed beside ``.venv`` once."""
        folder = self.cache / f"frontend-{version}"
        static = Path("comfyui_frontend_package") / "static"
        if not (folder / static / "index.html").is_file():
            self._say(f"Installing ComfyUI's front end {version} beside .venv ...")
            partial = self.cache / f"{folder.name}.partial"
            for left_over in (partial, folder):
                shutil.rmtree(left_over, ignore_errors=True)
            requirement = f"comfyui-frontend-package=={version}"
            self._pip("install", "--no-deps", "--target", str(partial), requirement)
            os.replace(partial, folder)
        return folder / static

    def _pip(self, *arguments: str) -> None:
        """Run pip. The marker stays if pip was killed, or failed after it began to change things."""
        installs = arguments[0] == "install" and "--target" not in arguments
        if installs:
            self._marker.write_text("", encoding="ascii")
        command = [str(self.python), "-m", "pip", *arguments]
        code, changing = self._run(command, _clean_env(self.cache))
        if installs and (code == 0 or not changing):
            self._marker.unlink()
        if code != 0:
            raise SetupError(
                f"pip {arguments[0]} failed with exit code {code}; its own words are above. "
                "Usual causes: no network, a full disk, or no package for this system. "
                "Call the same command again to continue."
            )

    def _ailment(self, modules: Sequence[str] = ()) -> str | None:
        """Why the environment cannot be used as it is, or None."""
        if self._marker.exists():
            return "an earlier installation was interrupted"
        wanted = ".".join(map(str, sys.version_info[:2]))
        said = _ask(self.python, modules)
        if said is None:
            return "its Python does not start (moved, or its base Python is gone)"
        version, missing = said
        if version != wanted:
            return f"it was made by Python {version}, and this is Python {wanted}"
        if missing:
            return f"{', '.join(missing)} cannot be found in it"
        return None

    def _remove(self) -> None:
        if Path(sys.prefix).resolve() == self.folder.resolve():
            raise SetupError(
                "run.py runs on the Python inside .venv, which has to be made again. "
                "Call it with the Python outside (deactivate first)."
            )
        try:
            shutil.rmtree(self.folder)
        except OSError as error:
            raise SetupError(
                f".venv cannot be deleted: {error}. Close what uses it, delete it by hand, "
                "and try again."
            ) from error

    def _done(self) -> dict[str, Any]:
        """What the stamp says is installed; nothing if there is none, or none that can be read."""
        try:
            stamp = json.loads((self.folder / STAMP_NAME).read_text(encoding="utf-8"))
            return {n: {"key": d["key"], "modules": d["modules"]} for n, d in stamp["done"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def key(profile: Profile) -> str:
    """A digest of everything an installed profile depends on."""
    facts = [
        FORMAT,
        [profile.name, profile.requirements, profile.apart],
        [sys.implementation.name, *sys.version_info[:2]],
        [sys.platform, platform.machine()],
    ]
    return hashlib.sha256(json.dumps(facts).encode("utf-8")).hexdigest()


@contextlib.contextmanager
def only_one(path: Path, say: Callable[[str], None] = print) -> Generator[None, None, None]:
    """Let one set-up run at a time; the system frees the lock when its owner dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if not _try_lock(file.fileno()):
            say("Another run.py is setting up; waiting for it ...")
            while not _try_lock(file.fileno()):
                time.sleep(0.5)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ask(python: Path, modules: Sequence[str]) -> tuple[str, list[str]] | None:
    """An interpreter's version and which modules it cannot find, or None if it does not start."""
    script = (
        "import sys, importlib.util as u; print('%d.%d' % sys.version_info[:2]);"
        "print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    )
    try:
        said = subprocess.run(
            [str(python), "-I", "-c", script, *modules],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            cwd=python.parent,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = said.stdout.splitlines()
    return (lines[0], lines[1].split()) if said.returncode == 0 and len(lines) == 2 else None


def _base_python() -> str:
    """The interpreter outside any virtual environment."""
    return getattr(sys, "_base_executable", None) or sys.executable


def _clean_env(cache: Path) -> dict[str, str]:
    """This process's variables, less those that send packages elsewhere; pip's cache in ours."""
    gone = {
        "PYTHONPATH",
        "PYTHONHOME",
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_REQUIRE_HASHES",
    }
    env = {name: value for name, value in os.environ.items() if name.upper() not in gone}
    if "PIP_CACHE_DIR" not in env and "PIP_NO_CACHE_DIR" not in env:
        env["PIP_CACHE_DIR"] = str(cache / "pip")
    return {**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
