"""The house: imports run downwards and in no circle, names do not collide, and the tools of the trade are content."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("models", "analyses", "workbench")  # from the ground up
PLOTTING = {"matplotlib", "altair", "streamlit", "plotly", "seaborn", "PIL"}
COMMAND_LINE = {"typer", "click", "rich"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for floor in FLOORS
    for path in sorted((ROOT / floor).rglob("*.py"))
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def top_level(module: str) -> Iterator[ast.AST]:
    """Nodes that run on import: everything outside functions and outside `if TYPE_CHECKING`."""
    todo: list[ast.AST] = list(tree(module).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def imported(module: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Absolute dotted names that these nodes import; `from a import b` is a.b if that is one of our modules, else a."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return names


def imported_anywhere(module: str) -> set[str]:
    return imported(module, ast.walk(tree(module)))


def on(floor: str) -> list[str]:
    return [module for module in MODULES if module.partition(".")[0] == floor]


def test_every_floor_is_there_and_its_imports_are_seen():
    """So that the tests below do not pass for want of anything to look at."""
    assert all(on(floor) for floor in ("models", "analyses"))
    assert {"models.gpt", "models.checkpoint", "einops", "transformer_lens", "tokenizers"} <= imported_anywhere("models.hooked")
    assert "transformer_lens" not in imported("models.hooked", top_level("models.hooked"))
    assert {"models.protocol", "xarray"} <= imported_anywhere("analyses.axes")


@pytest.mark.parametrize("module", on("models") + on("analyses"))
def test_no_floor_imports_from_above(module):
    """Also inside functions."""
    above = FLOORS[FLOORS.index(module.partition(".")[0]) + 1 :]
    assert {name for name in imported_anywhere(module) if name.partition(".")[0] in above} == set()


@pytest.mark.parametrize(
    ("floor", "foreign"),
    [("models", PLOTTING | COMMAND_LINE | {"xarray", "pandas"}), ("analyses", PLOTTING | COMMAND_LINE)],
)
def test_the_lower_floors_know_no_plotting_and_no_interface(floor, foreign):
    found = {module: {name.partition(".")[0] for name in imported_anywhere(module)} & foreign for module in on(floor)}
    assert {module: names for module, names in found.items() if names} == {}


def test_imports_make_no_circle():
    """Among our own modules, as they are imported; inside a function an import may look back."""
    edges = {module: {name for name in imported(module, top_level(module)) if name in MODULES} for module in MODULES}
    clear: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, "imports in a circle: " + " -> ".join([*way[way.index(module) :], module])
        if module in clear:
            return
        for name in sorted(edges[module]):
            visit(name, (*way, module))
        clear.add(module)

    for module in MODULES:
        visit(module, ())


def test_nothing_under_the_dashboard_is_named_like_what_it_imports():
    """Streamlit puts the entry file's folder first on sys.path, where such a name would hide the package."""
    hidden = {"models", "analyses", "workbench", "pages", "streamlit", "altair"}
    assert [path for path in (ROOT / "workbench" / "dashboard").rglob("*") if path.stem in hidden] == []


def test_tests_do_not_hide_the_packages():
    """pytest puts the folder of a test on sys.path: with an __init__.py in it, tests/models would be `models`."""
    assert [name for name in FLOORS if (ROOT / "tests" / name / "__init__.py").exists()] == []


def names_in_code(module: str) -> set[str]:
    """Every identifier and imported name of a module; not its strings and comments."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= {*node.name.split("."), node.asname or ""}
    return found


def strings_in_code(module: str) -> set[str]:
    """Words of strings that may be code, as in quoted annotations, getattr and hasattr; sentences are not code."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found |= set(re.findall(r"\w+", node.value))
    return found


@pytest.mark.parametrize(("name", "module"), [("HookedTransformer", "models.hooked"), ("TransformerBridge", "models.bridge")])
def test_only_one_module_names_a_class_of_transformer_lens(name, module):
    """Under TransformerLens 4 even `hasattr(transformer_lens, "HookedTransformer")` raises."""
    assert [other for other in MODULES if name in names_in_code(other) | strings_in_code(other)] == [module]


def test_the_network_is_out_of_reach_of_tests():
    with socket.socket() as away, pytest.raises(pytest.fail.Exception, match="must not use the network"):
        away.connect(("192.0.2.1", 80))  # an address that belongs to nobody
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass  # this machine itself is within reach


def test_every_module_says_what_it_is_for():
    assert [module for module in MODULES if tree(module).body and not ast.get_docstring(tree(module))] == []


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_tool_is_content(tool):
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
