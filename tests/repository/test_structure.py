"""The repository's structure, where import-linter's contracts do not reach."""

from __future__ import annotations

import graphlib
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ["platform", "engine", "kernels", "dashboard", "migrations"]


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
