"""Names in Python source code: where each is bound, and what each call passes to its function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

PACKAGE = "moiety_dashboard"


@dataclass
class Module:
    """One source file and the meanings of its names."""

    name: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)  # local name → dotted name
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    self.imports[one.asname or one.name] = one.name
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    self.imports[one.asname or one.name] = f"{node.module}.{one.name}"
            elif isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, node)
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                    self.constants[target.id] = node.value
                elif isinstance(target, ast.Tuple) and isinstance(node, ast.Assign):
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(target.elts)
                    self.constants |= {
                        one.id: value
                        for one, value in zip(target.elts, values, strict=True)
                        if isinstance(one, ast.Name)
                    }


@dataclass(frozen=True)
class Scope:
    """A function's body, with its arguments if one call is followed; None if every call counts."""

    module: Module
    function: ast.FunctionDef | None = None
    given: Mapping[str, tuple[ast.expr, Scope]] | None = None
    outer: Scope | None = None


UNCLEAR: dict[str, ast.expr] = {}


def calls_of(module: Module) -> Iterator[tuple[ast.Call, Scope]]:
    """Yield every call with the scope that it stands in."""

    def walk(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.Call, Scope]]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef):
                inner = Scope(module, child, None, scope if scope.function else None)
            elif isinstance(child, ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp):
                given = {name: (loop.iter, scope) for loop in child.generators for name in names_in(loop.target)}
                inner = Scope(module, None, given, scope)
            if isinstance(child, ast.Call):
                yield child, inner
            yield from walk(child, inner)

    yield from walk(module.tree, Scope(module))


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def parameters_of(function: ast.FunctionDef) -> list[str]:
    of = function.args
    names = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    return names + [one.arg for one in (of.vararg, of.kwarg) if one is not None]


def defaults_of(function: ast.FunctionDef) -> dict[str, ast.expr]:
    of = function.args
    listed = [*of.posonlyargs, *of.args]
    found = {one.arg: value for one, value in zip(listed[len(listed) - len(of.defaults) :], of.defaults, strict=True)}
    return found | {
        one.arg: value for one, value in zip(of.kwonlyargs, of.kw_defaults, strict=True) if value is not None
    }


def given_to(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """Return a call's arguments by the function's parameters; UNCLEAR where they are unpacked."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return UNCLEAR
    names = parameters_of(function)
    return {**dict(zip(names, call.args, strict=False)), **{one.arg: one.value for one in call.keywords if one.arg}}


def arguments_of(call: ast.Call, signature: inspect.Signature, scope: Scope) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield the arguments of a call of Streamlit with the names of their parameters; None where nobody can tell."""
    names = [name for name in signature.parameters if name != "self"]
    many = next((one.name for one in signature.parameters.values() if one.kind is one.VAR_POSITIONAL), None)
    for at, value in enumerate(call.args):
        known = names[at] if at < len(names) else many
        yield (None if isinstance(value, ast.Starred) else known), value
    for keyword in call.keywords:
        if keyword.arg is None:
            yield from _unpacked(keyword.value, scope)
        else:
            yield keyword.arg, keyword.value


def _unpacked(value: ast.expr, scope: Scope) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield the arguments of a dictionary that is written out in the same function."""
    bound, is_clear = [value], True
    if isinstance(value, ast.Name) and scope.function is not None and value.id not in parameters_of(scope.function):
        bound, is_clear = bindings_of(value.id, scope.function)
    for one in bound or [value]:
        if isinstance(one, ast.Dict) and is_clear and all(isinstance(key, ast.Constant) for key in one.keys):
            for key, given in zip(one.keys, one.values, strict=True):
                assert isinstance(key, ast.Constant)
                yield str(key.value), given
        else:
            yield None, value


def names_in(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def bindings_of(name: str, function: ast.FunctionDef) -> tuple[list[ast.expr], bool]:
    """Return what a function binds to a name, and whether that is all of it."""
    found: list[ast.expr] = []
    for node in own_nodes(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    found += _bound(name, target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                found += _bound(name, target, value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                found += _bound(name, target, value)
            case ast.For(target=target, iter=value):
                found += [value] * (name in names_in(target))
            case ast.With(items=items):
                if any(one.optional_vars is not None and name in names_in(one.optional_vars) for one in items):
                    return found, False
            case ast.ExceptHandler(name=caught) if caught == name:
                return found, False
            case ast.Call(func=ast.Attribute(value=ast.Name(id=holder), attr="append" | "extend" | "update")) if (
                holder == name
            ):
                found += node.args
    return found, True


def _bound(name: str, target: ast.expr, value: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [one for part, given in zip(target.elts, value.elts, strict=True) for one in _bound(name, part, given)]
    if isinstance(target, ast.Subscript):
        return [value] if name in names_in(target.value) else []
    return [value] if name in names_in(target) else []
