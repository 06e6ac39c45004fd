"""``run.py bench``: run the registered benchmarks.

A benchmark is a file ``tools/bench_<name>.py`` with ``run() -> list[Row]`` (a row: dict by column)
and, if its name and the first paragraph of its docstring do not do, ``TITLE`` and ``DESCRIPTION``.
``--full`` runs full_size.py instead of them. ``--write`` puts the results into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

from benchmark_table import machine, put_section, section, show

TOOLS = Path(__file__).resolve().parent
DOCUMENT = TOOLS.parent / "docs" / "benchmarks.md"


def registered(folder: Path = TOOLS) -> list[str]:
    """Names of the small benchmarks, sorted."""
    return sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))


def run_one(module: ModuleType, write: bool, document: Path = DOCUMENT) -> None:
    """Run a benchmark, print its rows and, if asked to, keep them."""
    title = getattr(module, "TITLE", module.__name__.removeprefix("bench_").capitalize())
    print(f"{title} ...")
    rows = module.run()
    print("\n" + show(title, rows))
    if write:
        about = getattr(module, "DESCRIPTION", (module.__doc__ or "").split("\n\n")[0].strip())
        put_section(document, title, section(title, f"{about}\n\nMachine: {machine()}.", rows))
        print(f"\nWritten to {document}")


def main(arguments: list[str]) -> int:
    """Run what the command line asks for; an error of a benchmark is printed and returned as 1."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    names = registered()
    parser = argparse.ArgumentParser(prog="run.py bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which ones: {', '.join(names)}")
    parser.add_argument("--full", action="store_true", help="true-size models; heavy")
    parser.add_argument("--write", action="store_true", help="keep the results in docs/")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(names)}")
    small = [f"bench_{name}" for name in options.names or names]
    chosen = ["full_size"] if options.full else small
    for name in chosen:
        try:
            run_one(importlib.import_module(name), options.write)
        except (
            RuntimeError,
            TimeoutError,
        ) as error:  # PromptError, ServerError, FullSizeError, ...
            print(f"{name} failed. {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("Stopped.", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
