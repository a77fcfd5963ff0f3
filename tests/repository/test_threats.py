"""Each row of the threats page names a test, and forbidden code is searched for in the sources."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threats.md"
OF_OWN_DECLARATIONS = {"kernels/moiety_kernels/cpu/structs.py": ["eval"]}  # of the fields of structs in the source
OURS = ("platform", "engine", "kernels", "dashboard", "migrations")
UNPICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
EVALUATES = {"eval", "exec", "compile", "__import__"}
OF_DATA = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "numpy.load", "os.system", "os.popen"}
STATEMENT_OF = {"text", "exec_driver_sql", "execute", "scalar", "scalars", "executescript"}
FIXED = {"platform/moiety_platform/db/session.py": "pragma"}  # fixed text in statements there


def rows() -> dict[str, list[str]]:
    """Threat → its tests, as the page has them."""
    page = PAGE.read_text(encoding="utf-8").partition("\n## Unauthenticated clients and the network")[2]
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {
        one[0].removeprefix("| "): re.findall(r"`([\w/]+\.py::\w+)`", one[2]) for one in lines if one[2] != "tests |"
    }


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_threat_names_tests_that_there_are() -> None:
    named = rows()
    assert len(named) > 40
    assert [threat for threat, tests in named.items() if not tests] == []
    for place, _, name in (one.partition("::") for tests in named.values() for one in tests):
        file = ROOT / "tests" / place
        assert file.is_file(), place
        assert name in names_in(file), f"{place} has no {name}"


def sources(*parts: str) -> Iterator[tuple[str, ast.Module]]:
    for part in parts:
        for path in sorted((ROOT / part).rglob("*.py")):
            yield str(path.relative_to(ROOT)), parsed(path)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Dotted names of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def runs_code(tree: ast.Module) -> list[str]:
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [name for name in imported if name.partition(".")[0] in UNPICKLES]
    for name, call in calls(tree):
        in_a_shell = any(one.arg == "shell" and ast.unparse(one.value) != "False" for one in call.keywords)
        if name in EVALUATES or name in OF_DATA or in_a_shell:
            found.append(name)
    return found


def composes_statements(tree: ast.Module, fixed: str = "") -> list[str]:
    found = []
    for name, call in calls(tree):
        if name.rpartition(".")[2] in STATEMENT_OF and call.args:
            first = call.args[0]
            put_in = [ast.unparse(one.value) for one in ast.walk(first) if isinstance(one, ast.FormattedValue)]
            joined = isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add | ast.Mod)
            formatted = isinstance(first, ast.Call) and ast.unparse(first.func).endswith(".format")
            if joined or formatted or [one for one in put_in if one != fixed]:
                found.append(f"{name} in line {call.lineno}")
    return found


def allows_markup(tree: ast.Module) -> list[str]:
    return [name for name, call in calls(tree) if any(one.arg == "unsafe_allow_html" for one in call.keywords)]


def test_nothing_that_is_read_can_be_code() -> None:
    assert {name: found for name, tree in sources(*OURS) if (found := runs_code(tree))} == OF_OWN_DECLARATIONS


def test_no_statement_is_put_together_of_values() -> None:
    parts = sources("platform")  # migrations read no input
    assert {name: found for name, tree in parts if (found := composes_statements(tree, FIXED.get(name, "")))} == {}


def test_the_dashboard_lets_no_text_be_markup() -> None:
    assert {name: found for name, tree in sources("dashboard") if (found := allows_markup(tree))} == {}


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (runs_code, "import pickle"),
        (runs_code, "from joblib.numpy_pickle import load"),
        (runs_code, "torch.load(path)"),
        (runs_code, "eval(text)"),
        (runs_code, "subprocess.run(command, shell=True)"),
        (composes_statements, "session.execute(text(f'SELECT 1 WHERE a = {value}'))"),
        (composes_statements, "session.execute('SELECT ' + name)"),
        (composes_statements, "connection.exec_driver_sql('SELECT %s' % name)"),
        (composes_statements, "text('SELECT {}'.format(name))"),
        (allows_markup, "st.markdown(name, unsafe_allow_html=True)"),
    ],
)
def test_the_threat_search_finds_planted_code(look: Callable[[ast.Module], list[str]], source: str) -> None:
    assert look(ast.parse(source)) != []
