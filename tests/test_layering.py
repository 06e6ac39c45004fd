"""Who may import whom, and what importing may do. Reads the source; runs it in child processes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ["torch", "safetensors", "einops", "numpy", "pillow", "omegaconf"]
LIBRARIES = {"torch", "safetensors", "einops", "numpy", "PIL", "omegaconf", "yaml"}
"""What the six distributions bring; yaml belongs to omegaconf."""
HOST_EXCEPTION = "supir/host_blocks.py"
HOST_EXCEPTION_MAY = ("comfy.ldm", "comfy.ops")

MAY_USE = {"supir": {"supir"}, "xpu": {"xpu"}, "migrate": {"migrate"}}
"""What these layers may import of the pack; the others may use every layer."""

LAYERS = {
    name: sorted((ROOT / name).rglob("*.py"), key=str)
    for name in ("supir", "xpu", "migrate", "nodes")
}
PRODUCT = [ROOT / "__init__.py", *(path for paths in LAYERS.values() for path in paths)]
SCRIPTS = [ROOT / "run.py", *sorted((ROOT / "tools").glob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Each imported module: (dotted name, relative?). Relative ones are resolved from the root."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            # "from comfy import ldm" imports comfy.ldm as much as "import comfy.ldm" does
            yield from ((f"{node.module}.{alias.name}", False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            climbed = node.level - 1
            if climbed > len(package):
                yield f"<above the pack>.{node.module}", True
                continue
            base = [*package[: len(package) - climbed], *(node.module or "").split(".")]
            prefix = ".".join(part for part in base if part)
            yield from ((f"{prefix}.{a.name}".strip("."), True) for a in node.names)


def offences(path: Path, tree: ast.Module) -> list[str]:
    """Every import of a file that its layer may not make."""
    layer = path.relative_to(ROOT).parts[0]
    found = []
    for module, relative in imports(path, tree):
        top = module.split(".")[0]
        if relative:
            fine = top in MAY_USE.get(layer, {"supir", "xpu", "migrate", "nodes"})
        elif layer == "migrate":
            fine = top in sys.stdlib_module_names
        elif layer in ("supir", "xpu"):
            fine = top in sys.stdlib_module_names or top in LIBRARIES
            if name_of(path) == HOST_EXCEPTION:
                fine = fine or module.startswith(HOST_EXCEPTION_MAY)
        else:
            fine = top not in ("supir", "xpu", "migrate", "supir_xpu")
        if not fine:
            found.append(f"{name_of(path)} imports {module}")
    return found


def nested(path: Path, tree: ast.Module) -> list[str]:
    """Imports by other means than an import statement."""
    return [
        f"{name_of(path)}:{node.lineno}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "__import__")
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("import_module", "spec_from_file_location")
        )
    ]


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_imports_follow_the_layers(path):
    tree = tree_of(path)
    assert offences(path, tree) == []
    if path.relative_to(ROOT).parts[0] in ("supir", "xpu"):
        assert nested(path, tree) == []


@pytest.mark.parametrize(
    ("where", "line", "refused"),
    [
        ("supir/a.py", "from ..xpu import device", True),
        ("supir/a.py", "from .. import nodes", True),
        ("supir/sub/a.py", "from ..errors import X", False),
        ("supir/sub/a.py", "from ...xpu.device import X", True),
        ("supir/a.py", "from ... import other_pack", True),
        ("supir/a.py", "def f():\n    import comfy.utils", True),
        ("supir/a.py", "from comfy.ldm import modules", True),
        ("supir/host_blocks.py", "from comfy.ldm import modules", False),
        ("supir/host_blocks.py", "import comfy.model_management", True),
        ("xpu/a.py", "from .errors import X\nimport torch, json", False),
        ("xpu/a.py", "import folder_paths", True),
        ("xpu/a.py", "import scipy", True),
        ("xpu/a.py", "from ..supir import plan", True),
        (
            "nodes/a.py",
            "from ..supir import plan\nfrom ..xpu import risk\nimport comfy.utils",
            False,
        ),
        ("nodes/a.py", "from ..migrate import convert", False),
        ("migrate/a.py", "import json\nfrom .report import Report", False),
        ("migrate/a.py", "import torch", True),
        ("migrate/a.py", "from ..supir import plan", True),
        ("nodes/a.py", "from supir import plan", True),
        ("nodes/a.py", "from ..tools import demo", True),
    ],
)
def test_the_rule_itself(where, line, refused):
    assert bool(offences(ROOT / where, ast.parse(line))) is refused


def test_there_is_something_to_check():
    assert all(LAYERS.values())
    assert len(PRODUCT) > 20


def files_that_reach_the_host() -> set[str]:
    """host_blocks and every module of supir that imports it, directly or not."""
    reach = {HOST_EXCEPTION[:-3].replace("/", ".")}
    graph = {}
    for path in LAYERS["supir"]:
        graph[name_of(path)[:-3].replace("/", ".").removesuffix(".__init__")] = {
            module for module, relative in imports(path, tree_of(path)) if relative
        }
    while True:
        more = {
            name
            for name, used in graph.items()
            if any(module == r or module.startswith(r + ".") for module in used for r in reach)
        }
        if more <= reach:
            return reach
        reach |= more


IMPORT_ALONE = """
import importlib.util, sys, torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("comfy", "comfy_api", "folder_paths", "server", "execution"):
            raise AssertionError(f"{name} was imported")

def touched(*_, **__):
    raise AssertionError("a device was touched")

sys.meta_path.insert(0, Refuse())
for device in ("cuda", "xpu", "mps", "accelerator"):
    module = getattr(torch, device, None)
    for name in ("is_available", "device_count", "current_device", "get_device_properties", "init", "_lazy_init"):
        if hasattr(module, name):
            setattr(module, name, touched)

def load(name, path, where):
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=where)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

root = sys.argv[1]
before = list(sys.path)
load("pack", root + "/__init__.py", [root])
for name in sys.argv[2:]:
    importlib.import_module("pack." + name)
assert sys.path == before, "sys.path was changed"
"""


def test_importing_touches_neither_host_nor_device():
    """Each importable module of the lower layers, in one fresh process."""
    reach = files_that_reach_the_host()
    names = [
        name_of(path)[:-3].replace("/", ".").removesuffix(".__init__")
        for path in (*LAYERS["supir"], *LAYERS["xpu"])
    ]
    command = [sys.executable, "-c", "import importlib\n" + IMPORT_ALONE, ROOT.as_posix()]
    ended = subprocess.run(
        [*command, *(name for name in names if name not in reach)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_the_pack_itself_loads_without_torch():
    """ComfyUI reads the root module at every start; its weight belongs to comfy_entrypoint."""
    script = IMPORT_ALONE.replace(", torch", "").split("sys.meta_path")[0] + (
        "spec = importlib.util.spec_from_file_location('pack', sys.argv[1])\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "assert not {'torch', 'comfy_api', 'comfy'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(ROOT / "__init__.py")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_requirements_are_the_six_without_versions():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split("\n")
    assert lines == [*DISTRIBUTIONS, ""]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert declared is not None
    assert re.findall(r'"([^"]+)"', declared[1]) == DISTRIBUTIONS


POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty", "syslog"}
POSIX_CALLS = {
    "os": re.compile(
        "(fork(pty)?|killpg|[gs]et(s|pg|eu|u|g)id|mkfifo|mknod|uname|statvfs|sysconf|getloadavg"
        "|sched_[gs]etaffinity|chown|wait|waitid|nice)$"
    ),
    "signal": re.compile("(SIG(KILL|HUP|QUIT|USR1|USR2|ALRM|CHLD)|alarm|pause)$"),
    "select": re.compile("(poll|epoll|kqueue)$"),
    "time": re.compile("(tzset|clock_gettime)$"),
}
WINDOWS_BRANCH = re.compile(r"os\.name (==|!=)|sys\.platform|hasattr\(")
"""A function that asks for the system first may use what that system has."""


def is_posix_call(module: str, name: str) -> bool:
    pattern = POSIX_CALLS.get(module)
    return pattern is not None and pattern.match(name) is not None


def posix_only(tree: ast.Module) -> list[str]:
    """Uses of what Windows does not have, outside functions that ask which system this is."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and WINDOWS_BRANCH.search(ast.unparse(node)):
            return
        if isinstance(node, ast.Import):
            found.extend(a.name for a in node.names if a.name in POSIX_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module in POSIX_MODULES:
                found.append(str(node.module))
            found.extend(a.name for a in node.names if is_posix_call(str(node.module), a.name))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and is_posix_call(node.value.id, node.attr)
        ):
            found.append(f"{node.value.id}.{node.attr}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def without_encoding(tree: ast.Module) -> list[str]:
    """Text files opened in whatever encoding the system prefers."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        words += [k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)]
        binary = any(isinstance(w, str) and re.fullmatch(r"[rwax+]*b[rwax+]*", w) for w in words)
        is_method = isinstance(node.func, ast.Attribute)
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        text_open = name == "open" and not binary and owner not in ("Image", "os", "tarfile")
        text_open = text_open and not owner.endswith("opener")
        if text_open or (is_method and name in ("read_text", "write_text")):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", [*PRODUCT, *SCRIPTS], ids=name_of)
def test_runs_on_windows(path):
    tree = tree_of(path)
    assert posix_only(tree) == []
    if path.name != "interpreters.py":  # old Pythons' open() has no encoding; it opens os.devnull
        assert without_encoding(tree) == []


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("import fcntl", False),
        ("def f():\n    import fcntl", False),
        ("def f():\n    if os.name != 'nt':\n        import fcntl", True),
        ("os.fork()", False),
        ("from os import fork", False),
        ("os.kill(1, signal.SIGKILL)", False),
        ("signal.SIGINT", True),
        ("open('x')", False),
        ("open('x', 'rb')", True),
        ("p.open()", False),
        ("open('x', encoding='utf-8')", True),
        ("p.read_text()", False),
        ("p.read_text(encoding='utf-8')", True),
        ("Image.open(p)", True),
    ],
)
def test_the_windows_rule_itself(line, clean):
    tree = ast.parse(line)
    assert (posix_only(tree) + without_encoding(tree) == []) is clean


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_product_code_leaves_sys_path_alone(path):
    for node in ast.walk(tree_of(path)):
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path")
        assert not (
            isinstance(node, ast.ImportFrom)
            and node.module == "sys"
            and "path" in [alias.name for alias in node.names]
        )
