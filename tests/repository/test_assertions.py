"""Every test can fail: it asserts, expects an error, or calls a function of the tests that does so."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
EXPECTATIONS = {"pytest.fail", "pytest.raises", "pytest.warns"}
RESULT_CHECKS = {"assert_outcomes", "fnmatch_lines"}  # methods of the result of a run of pytest
CHECKERS = {"run_state_machine_as_test", "torch.testing.assert_close"}  # functions of libraries that assert
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """A file of the tests: its definitions at module level, and what it imports from other files of the tests."""

    path: Path
    definitions: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)  # name → file, and the name there


def parse_source(path: Path, text: str) -> Source:
    source = Source(path)
    for node in ast.parse(text).body:
        if isinstance(node, Function | ast.ClassDef):
            source.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            source.definitions |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (file := imported_file(path, node)):
            source.imports |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return source


@functools.cache
def read_source(path: Path) -> Source:
    return parse_source(path, path.read_text(encoding="utf-8"))


def imported_file(path: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file of the tests that is imported from, or None if the import is of another package."""
    folder = path.parents[node.level - 1] if node.level else TESTS.parent
    file = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
    return file if file.is_relative_to(TESTS) and file.is_file() else None


def resolve(source: Source, name: str) -> tuple[Source, ast.AST] | None:
    """Return the definition of a name in its own file, an imported one, or a conftest (a fixture)."""
    if name in source.definitions:
        return source, source.definitions[name]
    if name in source.imports:
        file, original = source.imports[name]
        return resolve(read_source(file), original)
    for folder in source.path.parents:
        conftest = folder / "conftest.py"
        if folder.is_relative_to(TESTS) and conftest != source.path and conftest.is_file():
            conftest_source = read_source(conftest)
            if name in conftest_source.definitions or name in conftest_source.imports:
                return resolve(conftest_source, name)
    return None


def find_method(source: Source, caller: ast.AST, call: ast.Attribute) -> tuple[Source, ast.AST] | None:
    """Return the method that is called on a parameter whose annotation is a class of the tests."""
    if not isinstance(caller, Function) or not isinstance(call.value, ast.Name):
        return None
    annotations = {one.arg: one.annotation for one in (*caller.args.args, *caller.args.kwonlyargs)}
    annotation = annotations.get(call.value.id)
    found = resolve(source, annotation.id) if isinstance(annotation, ast.Name) else None
    return (found[0], method) if found and (method := member(found[1], call.attr)) else None


def member(owner: ast.AST, name: str) -> Function | None:
    body = owner.body if isinstance(owner, ast.ClassDef) else []
    return next((node for node in body if isinstance(node, Function) and node.name == name), None)


def is_check(node: ast.AST) -> bool:
    """Return whether a statement or call raises by itself if something is not as expected."""
    if isinstance(node, ast.Raise) and node.exc:
        return ast.unparse(node.exc).startswith("AssertionError")
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Call)
        and (ast.unparse(node.func) in EXPECTATIONS | CHECKERS or getattr(node.func, "attr", "") in RESULT_CHECKS)
    )


def find_callee(source: Source, caller: ast.AST, call: ast.Call) -> tuple[Source, ast.AST] | None:
    function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    if isinstance(function, ast.Name):
        return resolve(source, function.id)
    return find_method(source, caller, function) if isinstance(function, ast.Attribute) else None


def can_fail(source: Source, node: ast.AST | None, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """Return whether code checks something, or calls code that does. `seen`: the code that called it."""
    if node is None or node in seen:
        return False
    seen |= {node}
    if isinstance(node, ast.ClassDef):
        return can_fail(source, member(node, "__init__") or member(node, "__post_init__"), seen)
    if isinstance(node, ast.Dict):  # a table of functions: each of them
        return bool(node.values) and all(can_fail(source, ast.Call(value, [], []), seen) for value in node.values)
    parts = list(ast.walk(node))
    callees = (find_callee(source, node, part) for part in parts if isinstance(part, ast.Call))
    return any(map(is_check, parts)) or any(can_fail(*callee, seen) for callee in callees if callee)


def is_failing_machine(source: Source, node: ast.AST) -> bool:
    """Return whether a state machine of Hypothesis has a rule or an invariant that can fail."""
    return isinstance(node, ast.ClassDef) and any(can_fail(source, part) for part in node.body)


def list_machines(source: Source) -> Iterator[tuple[str, tuple[Source, ast.AST] | None]]:
    """Yield the name of each `TestX = Machine.TestCase`, and the machine."""
    for name, value in source.definitions.items():
        if name.startswith("Test") and isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            yield name, resolve(source, value.value.id)


def list_tests(source: Source) -> Iterator[Function]:
    classes = [node for node in source.definitions.values() if isinstance(node, ast.ClassDef)]
    methods = [node for one in classes if one.name.startswith("Test") for node in one.body]
    for node in (*source.definitions.values(), *methods):
        if isinstance(node, Function) and node.name.startswith("test_"):
            yield node


def test_every_test_asserts_or_expects_an_error() -> None:
    sources = [read_source(path) for path in sorted(TESTS.rglob("test_*.py"))]
    tests = [(source, test) for source in sources for test in list_tests(source)]
    assert len(tests) > 2000
    assert [
        f"{source.path.relative_to(TESTS)}:{test.lineno} {test.name}"
        for source, test in tests
        if not can_fail(source, test)
    ] == []


def test_every_state_machine_asserts() -> None:
    sources = [read_source(path) for path in sorted(TESTS.rglob("test_*.py"))]
    machines = {name: machine for source in sources for name, machine in list_machines(source)}
    assert machines
    assert [name for name, machine in machines.items() if not machine or not is_failing_machine(*machine)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def test_it(): run()", False),
        ("def run(): return 1\ndef test_it(): run()", False),
        ("def run(): assert True\ndef test_it(): other()", False),
        ("class Case:\n def check(self): assert self.x\ndef test_it(): Case()", False),
        ("def run(): assert True\nTABLE = {1: run, 2: print}\ndef test_it(): TABLE[1]()", False),
        ("from tests.conftest import free_port\ndef test_it(): free_port()", False),
        ("def test_it(): assert run()", True),
        ("def test_it():\n with pytest.raises(ValueError): run()", True),
        ("def run(): assert True\ndef test_it(): run()", True),
        ("class Case:\n def check(self): assert self.x\ndef test_it(case: Case): case.check()", True),
        ("def run(): assert True\nTABLE = {1: run}\ndef test_it(): TABLE[1]()", True),
        ("from tests.conftest import wait_for\ndef test_it(): wait_for(run, 'it')", True),
    ],
)
def test_a_test_that_cannot_fail_is_found(text: str, expected: bool) -> None:
    source = parse_source(TESTS / "planted.py", text)
    (test,) = list_tests(source)
    assert can_fail(source, test) is expected
