"""The repository's structure, where import-linter's contracts do not reach."""

from __future__ import annotations

import ast
import graphlib
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ["platform", "engine", "kernels", "dashboard", "migrations"]
MAX_FILE_LINES = 450
FRAGMENT = re.compile(r"(Of|What|That|Which|Who|Whose|Whether|Where|When|How|As|By|For|With|From|In|To)\b")


def test_no_module_imports_itself_by_a_detour() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    graph = grimp.build_graph(*settings["tool"]["importlinter"]["root_packages"], cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    order = list(graphlib.TopologicalSorter(imports).static_order())  # a CycleError names the modules
    assert set(order) >= set(graph.modules)


def test_no_source_root_is_a_package() -> None:
    """`platform/__init__.py` would shadow the standard library's module for everything run from here."""
    assert [root for root in SOURCE_ROOTS if (ROOT / root / "__init__.py").exists()] == []


def test_every_package_of_a_source_root_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    found = {f"{root}/{init.parent.name}" for root in SOURCE_ROOTS for init in (ROOT / root).glob("*/__init__.py")}
    assert packages == found


@pytest.mark.every_value
@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_no_class_name_occurs_twice_in_a_source_root(root: str) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / root).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_python_file_is_too_long() -> None:
    files = [path for root in (*SOURCE_ROOTS, "helm", "tests", "benchmarks") for path in (ROOT / root).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lengths) > 1000
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_docstring_opens_as_a_fragment_that_continues_the_name() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}": text
        for root in (*SOURCE_ROOTS, "helm", "benchmarks")
        for path in (ROOT / root).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    }
    assert len(found) > 10_000
    assert [place for place, text in found.items() if FRAGMENT.match(text)] == []
