"""The commands of ``run.py``: what each needs set up, and what it then runs inside ``.venv``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import browser
import fetch_host
import setup_env
from host_table import HOSTS, NEWEST, TESTED, HostSource, find_host

ROOT = Path(__file__).resolve().parents[1]

USAGE = """\
usage: python run.py COMMAND [options]

  demo                  restore the bundled photograph with the real ComfyUI; writes to output/
  test [--fast] [...]   run the tests on the newest ComfyUI, then those that need one on the
                        oldest; --fast leaves out those that need ComfyUI or a browser;
                        everything else goes to pytest, e.g. test tests/parity -k edm
  doctor [...]          judge the GPU of the Python that calls it (ComfyUI's); sets nothing up.
                        --user FOLDER: ComfyUI's user folder, for the crash journal;
                        --report FILE: pack everything for a report; doctor --help tells all
  stress [--minutes N]  load that GPU for N minutes (5) as the first crash report did; asks first,
                        stops at anything odd, and says at its next start where a crash was
  convert OLD [-o NEW]  turn workflows of the older SUPIR wrapper into ours, with a report of what
                        changed; files or folders, in the Python that calls it, nothing set up;
                        --force overwrites, --json prints the report as JSON
  smoke [VERSION ...]   start every ComfyUI version the pack is made for, run one small picture
  bench [NAME ...]      run the benchmarks attention, guard, plan, vae, walk, or those named;
                        --full: true-size random-weight models instead, about 10 GB of scratch
                        disk and 18 GB of memory; --write: into docs/benchmarks.md
  lint                  ruff and pyright

  --comfyui PATH        with demo, test, bench: use the ComfyUI in PATH instead of fetching one
  --host VERSION        with test: only on this version of ComfyUI, e.g. 0.16.3

The first call that needs them makes .venv/ and .cache/ in this folder (several GB); demo, stress and
the browser tests write to output/; nothing else is touched.
"""

PYTEST = "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main())"
"""``python -m pytest`` would put this folder on sys.path, where nodes/ hides ComfyUI's nodes.py."""

MOST_WORKERS = 4
"""Test processes at a time; each file of tests stays in one (so that one server serves it)."""

NOTHING_COLLECTED = 5
"""pytest's exit code when no test was left to run."""

THREADS_BY_US = "SUPIR_XPU_TEST_THREADS"
"""Tells the tests that OMP_NUM_THREADS is run.py's choice, so that servers do without it."""

FRONT_END = "COMFYUI_FRONT_END"
"""Tells the tests which front end files a server has to be started with."""

ON_OLDER_HOSTS = "(host or web) and not newest"
"""Which tests run on a ComfyUI that is not the newest."""

CLEAN_UP_SECONDS = 30.0

HELP = {"-h", "--help"}
"""Words that ask for the usage, wherever they stand; nothing is set up for them."""

Call = Callable[[Sequence[str], dict[str, str]], int]
"""``call(command, env)`` runs a command in the repository and returns its exit code."""


@dataclass
class Options:
    """A command line, taken apart. ``rest`` is passed on as it is."""

    command: str
    comfyui: Path | None = None
    host: HostSource | None = None
    fast: bool = False
    rest: list[str] = field(default_factory=list)


class UsageError(ValueError):
    """The command line makes no sense; the message says why."""


def parse(arguments: Sequence[str], folder: Path) -> Options:
    """Take a command line apart; relative paths are read from ``folder``.

    Raises: UsageError.
    """
    left = list(arguments)
    comfyui: Path | None = None
    host: HostSource | None = None
    rest: list[str] = []
    fast = False
    while left:
        word = left.pop(0)
        name, _, value = word.partition("=")
        if name in ("--comfyui", "--host") and not value:
            value = left.pop(0) if left else ""
        if name == "--comfyui":
            if not value:
                raise UsageError("--comfyui needs a path: the folder with ComfyUI's main.py.")
            comfyui = folder / Path(value).expanduser()
        elif name == "--host":
            host = known_host(value)
        elif word == "--fast":
            fast = True
        else:
            rest.append(word)
    command = rest.pop(0) if rest else ""
    if command not in COMMANDS:
        raise UsageError(f"No such command: {command}" if command else "No command given.")
    if fast and command != "test":
        raise UsageError(f"--fast belongs to test, not to {command}.")
    if comfyui is not None and (fast or command == "lint"):
        raise UsageError("--comfyui has no use here: this runs without ComfyUI.")
    if comfyui is not None and command == "smoke":
        raise UsageError("--comfyui has no use here: smoke runs on pinned versions of ComfyUI.")
    if host is not None and (fast or comfyui is not None or command != "test"):
        raise UsageError("--host belongs to test, without --fast and --comfyui.")
    if command == "smoke":
        for word in rest:
            known_host(word)
    if rest and command in ("demo", "lint"):
        raise UsageError(f"{command} does not know {' '.join(rest)}.")
    return Options(command, comfyui, host, fast, rest)


def known_host(version: str) -> HostSource:
    """The table's entry of a version. Raises: UsageError."""
    found = find_host(version)
    if found is None:
        known = ", ".join(host.version for host in HOSTS)
        raise UsageError(f"ComfyUI {version!r} is not one of those that can be had: {known}.")
    return found


class Session:
    """One call of run.py."""

    def __init__(self, environment: setup_env.Environment, call: Call) -> None:
        self.environment = environment
        self.root = environment.root
        self._call = call

    def prepare_small(self, profile: setup_env.Profile) -> None:
        """Provide a profile that needs no ComfyUI, unless a larger one is there already."""
        host = self.environment.cache / NEWEST.folder_name
        larger = [setup_env.lint_profile(self.root)]
        if (host / "requirements.txt").is_file():
            larger.insert(0, setup_env.full_profile(self.root, host))
        if not any(self.environment.holds(candidate) for candidate in (*larger, profile)):
            with self._alone():
                self._provide(profile)

    def prepare_host(self, source: HostSource) -> Path:
        """Return the folder of a pinned ComfyUI, fetched if need be."""
        host = fetch_host.present(self.environment.cache, source)
        if host is None:
            with self._alone():
                host = fetch_host.fetch(self.environment.cache, self._download, source)
        return host

    def prepare_front_end(self, source: HostSource) -> Path | None:
        """Return the front end files an older ComfyUI asks for; None: those in ``.venv`` are it."""
        if source is NEWEST:
            return None
        with self._alone():
            return self.environment.front_end(source.front_end)

    def prepare_full(self, comfyui: Path | None) -> Path:
        """Provide everything; return the folder of the ComfyUI to use."""
        environment = self.environment
        host = self.prepare_host(NEWEST) if comfyui is None else fetch_host.existing(comfyui)
        profile = setup_env.full_profile(self.root, host)
        if not environment.holds(profile):
            with self._alone():
                self._provide(profile)
        return host

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> int:
        """Run the environment's Python in the repository; return its exit code."""
        command = [str(self.environment.python), *arguments]
        return self._call(command, {**os.environ} if env is None else env)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return setup_env.only_one(self.environment.cache / "setup.lock")

    def _provide(self, profile: setup_env.Profile) -> None:
        if not self.environment.holds(profile):  # another run.py may just have done it
            self.environment.make()
            self.environment.install(profile)

    def _download(self, requirement: str, sha256: str, folder: Path) -> None:
        self.environment.make()
        self.environment.download_source(requirement, sha256, folder)


def child_env(options: Options, host: Path | None, cache: Path) -> dict[str, str]:
    """This process's variables for tests and tools, with ``host`` as the ComfyUI to use."""
    env = {**os.environ}
    for name in ("COMFYUI_ROOT", FRONT_END, THREADS_BY_US):
        env.pop(name, None)
    if host is not None:
        env["COMFYUI_ROOT"] = str(host)
    if options.comfyui is not None:  # leave no byte code in somebody else's folder
        env["PYTHONPYCACHEPREFIX"] = str(cache / "pycache")
    if env.get("SUPIR_GOLDEN_DIR"):  # tests run in the repository, the user may be elsewhere
        env["SUPIR_GOLDEN_DIR"] = os.path.abspath(env["SUPIR_GOLDEN_DIR"])
    return env


def one_thread(env: dict[str, str]) -> dict[str, str]:
    """One thread for the tests' own process: busy threads on shared cores wait for each other."""
    if "OMP_NUM_THREADS" in env:
        return env
    return {**env, "OMP_NUM_THREADS": "1", THREADS_BY_US: "1"}


def run_test(session: Session, options: Options) -> int:
    """Run pytest: without ComfyUI, on the user's, or on the newest and then on the oldest."""
    cache = session.environment.cache
    if options.fast:
        session.prepare_small(setup_env.fast_profile(session.root))
        env = one_thread(child_env(options, None, cache))
        only = ("-m", "not host and not web and not slow", *spread(options.rest))
        return session.run("-c", PYTEST, *only, *options.rest, env=env)
    newest = session.prepare_full(options.comfyui)
    if options.comfyui is not None:
        env = one_thread(child_env(options, newest, cache))
        words = (*selection(""), *spread(options.rest), *options.rest)
        code = session.run("-c", PYTEST, *words, env=env)
        print(left_out(), end="")
        return code
    results: list[tuple[HostSource, int, float]] = []
    for source in (options.host,) if options.host else TESTED:
        started = time.monotonic()
        code = test_on(session, options, source)
        results.append((source, code, time.monotonic() - started))
    print("\nSummary")
    for source, code, seconds in results:
        print(f"  ComfyUI {source.version}: {outcome(code)} ({seconds:.0f} s)")
    print(left_out(), end="")
    return combined([code for _, code, _ in results])


def test_on(session: Session, options: Options, source: HostSource) -> int:
    """Run the tests on one ComfyUI; on all but the newest only those that need ComfyUI."""
    env = one_thread(child_env(options, session.prepare_host(source), session.environment.cache))
    front_end = session.prepare_front_end(source)
    if front_end is not None:
        env[FRONT_END] = str(front_end)
    older = source is not NEWEST
    only = selection(ON_OLDER_HOSTS if older else "")
    print(f"\nTests on ComfyUI {source.version}{', those that need it' if older else ''}")
    return session.run("-c", PYTEST, *only, *spread(options.rest), *options.rest, env=env)


def has_browser() -> bool:
    """Whether the tests in a browser are run: one is there, or they fail for want of it."""
    return browser.is_required() or browser.find_browser() is not None


def selection(marks: str) -> list[str]:
    """Words that select tests by their marks (all for an empty text), without a browser less."""
    if not has_browser():
        marks = f"({marks}) and not web" if marks else "not web"
    return ["-m", marks] if marks else []


def left_out() -> str:
    """What a person without a browser is told; an empty text with one."""
    if has_browser():
        return ""
    return f"  Not run: the tests in a browser (tests/web). To run them, {browser.ADVICE}.\n"


def spread(rest: Sequence[str]) -> list[str]:
    """Words that let pytest use the processor's cores, unless the user chose otherwise."""
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    own = ("-n", "--numprocesses", "--pdb", "--trace", "-p")
    if workers < 2 or any(word.startswith(own) for word in rest):
        return []
    order = "--no-loadscope-reorder"  # as collected: those with servers are long, and first
    return ["-n", str(workers), "--dist", "loadfile", order]


def outcome(code: int) -> str:
    """pytest's exit code in words."""
    words = {0: "passed", 1: "FAILED", NOTHING_COLLECTED: "no test selected"}
    return words.get(code, f"ended with exit code {code}")


def combined(codes: Sequence[int]) -> int:
    """The first code that is not 0; "no test selected" counts only if it holds for all."""
    ran = [code for code in codes if code != NOTHING_COLLECTED]
    return next((code for code in ran if code), 0) if ran else NOTHING_COLLECTED


def run_smoke(session: Session, options: Options) -> int:
    """Run tools/smoke.py on every pinned ComfyUI, or on those named."""
    session.prepare_full(None)
    chosen = [source for source in HOSTS if not options.rest or source.version in options.rest]
    places = [f"{source.version}={session.prepare_host(source)}" for source in chosen]
    env = child_env(options, None, session.environment.cache)
    return session.run(str(session.root / "tools" / "smoke.py"), *places, env=env)


def run_lint(session: Session, options: Options) -> int:
    session.prepare_small(setup_env.lint_profile(session.root))
    env = {**os.environ, "PYRIGHT_PYTHON_CACHE_DIR": str(session.environment.cache / "pyright")}
    codes = [
        session.run("-m", *arguments, env=env)
        for arguments in (
            ("ruff", "check", "."),
            ("ruff", "format", "--check", "."),
            ("pyright", "--pythonpath", str(session.environment.python)),
        )
    ]
    return 1 if any(codes) else 0


def run_tool(session: Session, options: Options) -> int:
    """``demo`` and ``bench``: the script of that name in tools/."""
    host = session.prepare_full(options.comfyui)
    script = str(session.root / "tools" / f"{options.command}.py")
    env = child_env(options, host, session.environment.cache)
    return session.run(script, *options.rest, env=env)


COMMANDS: dict[str, Callable[[Session, Options], int]] = {
    "demo": run_tool,
    "test": run_test,
    "smoke": run_smoke,
    "bench": run_tool,
    "lint": run_lint,
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code (2: the command line, 1: the set-up failed)."""
    for stream in (sys.stdout, sys.stderr):  # no console of the world may stop us with its encoding
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    if not arguments or arguments[0] == "help" or HELP.intersection(arguments):
        print(USAGE, end="")
        return 0 if arguments else 2
    try:
        options = parse(arguments, Path.cwd())
    except UsageError as error:
        print(f"{error}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    environment = setup_env.Environment(ROOT)
    started = time.monotonic()
    try:
        return COMMANDS[options.command](Session(environment, call_in_root), options)
    except (setup_env.SetupError, fetch_host.HostError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Stopped after {time.monotonic() - started:.0f} s.", file=sys.stderr)
        return 130


def call_in_root(command: Sequence[str], env: dict[str, str]) -> int:
    """Run a command in the repository. Ctrl-C reaches it too; it gets time to clean up."""
    with subprocess.Popen(list(command), cwd=ROOT, env=env) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_SECONDS)
            process.kill()
            raise
