"""Where the text comes from that Streamlit renders as Markdown or HTML: a check of the dashboard's source code.

Each argument of a rendering call must be a literal, a number, or the result of the escaping function. The check follows
local variables, constants of modules, returned values, and parameters to every call of their function. Whatever it
does not understand is a finding."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from .source_names import (
    PACKAGE,
    UNCLEAR,
    Module,
    Scope,
    arguments_of,
    bindings_of,
    calls_of,
    defaults_of,
    given_to,
    names_in,
    own_nodes,
    parameters_of,
)

HTML_ESCAPES = {"html.escape"}
MARKDOWN_ESCAPES = {f"{PACKAGE}.escaping.as_text"}
MAX_DEPTH = 24  # names and calls that are followed from one value
# Parameters that are never rendered as Markdown, of every method.
PLAIN = {
    *("key", "type", "width", "height", "gap", "border", "anchor", "disabled", "args", "kwargs"),
    *("on_click", "on_change", "on_select", "selection_mode", "use_container_width", "horizontal"),
    *("horizontal_alignment", "text_alignment", "vertical_alignment", "label_visibility", "language"),
    *("wrap_lines", "color", "chart_data", "chart_type", "layout", "initial_sidebar_state", "page_icon"),
    *("position", "query_params", "path", "url_path", "hide_index", "run_every", "value", "min_value"),
    *("max_value", "step", "index", "default", "placeholder", "autocomplete", "accept_new_options"),
    *("format", "timezone", "required", "pinned", "func", "spec", "data", "file_name", "mime", "page"),
    *("pages", "clear", "format_func", "column_config", "max_chars", "url", "provider", "self"),
    *("unsafe_allow_javascript",),
}
OF_METHOD = {  # … and of these
    "code": {"body"},
    "text": {"body"},
    "selectbox": {"options"},
    "multiselect": {"options"},
    "SelectboxColumn": {"options"},
    "altair_chart": {"altair_chart"},
    "columns": {"spec"},
    "Page": {"title", "icon"},  # of a View, which only PAGES makes
}
RENDERED = {"metric": {"value", "delta"}}  # although they are plain elsewhere
RENDERS_ANYTHING = {
    *("write", "write_stream", "image", "logo", "table", "exception", "help", "iframe", "video", "audio"),
    *("link_button", "LinkColumn", "ImageColumn", "MarkdownColumn", "VideoColumn", "json", "latex"),
    *("chat_message", "mermaid_chart", "vega_lite_chart", "graphviz_chart", "echarts_chart"),
    *("components",),
}
FORBIDDEN = {"unsafe_allow_html", "unsafe_allow_javascript"}
NOT_ON_PAGES = {"map"}  # renders no text, and is a method of pandas
NO_TEXT = {"int", "float", "len", "round", "bool", "ord", "abs", "sum"}
KEEPS = {"str", "list", "tuple", "sorted", "enumerate", "zip", "dict", "map", "next", "iter", "reversed"}
KEEPS_METHODS = {"replace", "strip", "removeprefix", "removesuffix", "join", "items", "keys", "values", "get", "split"}
NUMERIC = (ast.Sub, ast.Div, ast.FloorDiv, ast.Pow)


def rendering_methods() -> dict[str, inspect.Signature]:
    """Return whatever Streamlit offers that a page calls, with its signature."""
    found: dict[str, inspect.Signature] = {}
    for holder in (st.column_config, st, DeltaGenerator):
        for name in dir(holder):
            member = getattr(holder, name)
            if name.startswith("_") or not callable(member) or name in NOT_ON_PAGES:
                continue
            try:
                found[name] = inspect.signature(member)
            except (TypeError, ValueError):
                continue
    return found


METHODS = rendering_methods()


@dataclass
class Check:
    """The check of all files of the dashboard, together."""

    modules: Mapping[str, Module]
    findings: list[str] = field(default_factory=list)
    _needed: set[tuple[str, str, str, bool]] = field(default_factory=set)  # module, function, parameter, as HTML
    _followed: set[tuple[str, str, str, bool]] = field(default_factory=set)

    def run(self) -> list[str]:
        """Return what is rendered without being escaped, as file, line and source."""
        for module in self.modules.values():
            self._look_at_imports(module)
            for call, scope in calls_of(module):
                self._look_at(call, scope)
        while waiting := self._needed - self._followed:
            for needed in waiting:
                self._followed.add(needed)
                self._follow(*needed)
        return sorted(set(self.findings))

    def _look_at_imports(self, module: Module) -> None:
        called = {id(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
        decorators = {id(one) for node in module.functions.values() for one in node.decorator_list}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module == "streamlit":
                self._note(module, node, "import the module, so that its calls can be seen")
            by_name = isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0])
            if by_name and module.imports.get(by_name) == "streamlit":
                self._note(module, node, "a method that no check can see")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_streamlit = module.imports.get(node.value.id) == "streamlit"
                is_plain = node.attr in ("session_state", "query_params", "user", "secrets", "context", "column_config")
                if is_streamlit and not is_plain and id(node) not in called | decorators and node.attr in METHODS:
                    self._note(module, node, "a method under another name")

    def _look_at(self, call: ast.Call, scope: Scope) -> None:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in METHODS:
            return
        name, holder = call.func.attr, call.func.value
        if isinstance(holder, ast.Name) and scope.module.imports.get(holder.id, "streamlit") != "streamlit":
            return  # a function of another module
        if isinstance(holder, ast.Constant | ast.JoinedStr):
            return  # a method of a string
        if name in RENDERS_ANYTHING and (call.args or call.keywords):
            self._note(scope.module, call, f"{name} renders whatever it is given")
            return
        as_html = name == "html"
        plain = (PLAIN | OF_METHOD.get(name, set())) - RENDERED.get(name, set())
        for parameter, value in arguments_of(call, METHODS[name], scope):
            if parameter in FORBIDDEN:
                if parameter == "unsafe_allow_javascript" and self._is_own_script(call, scope):
                    continue
                self._note(scope.module, call, parameter)
            elif parameter is None:
                self._note(scope.module, call, "arguments that no check can see")
            elif parameter == "options" and name not in OF_METHOD:
                shown = next((one.value for one in call.keywords if one.arg == "format_func"), None)
                escaped = shown is not None and self._dotted(shown, scope) in MARKDOWN_ESCAPES
                if not escaped and not self.is_ours(value, scope, as_html):
                    self._note(scope.module, call, "options that are rendered as Markdown")
            elif parameter is not None and parameter not in plain and not self.is_ours(value, scope, as_html):
                self._note(scope.module, call, f"{parameter}={ast.unparse(value)}")

    def _is_own_script(self, call: ast.Call, scope: Scope) -> bool:
        """Return whether the call renders nothing but a constant of a module that is a literal string."""
        if len(call.args) != 1 or not isinstance(call.args[0], ast.Name | ast.Attribute):
            return False
        found = self._constant_of(call.args[0], scope)
        return found is not None and isinstance(found[0], ast.Constant) and isinstance(found[0].value, str)

    def _follow(self, module_name: str, function: str, parameter: str, as_html: bool) -> None:
        """Look at what every call gives for a parameter that is rendered."""
        node = self.modules[module_name].functions[function]
        num_calls = 0
        for module in self.modules.values():
            called = {id(one.func) for one in ast.walk(module.tree) if isinstance(one, ast.Call)}
            for other in ast.walk(module.tree):
                is_reference = isinstance(other, ast.Name | ast.Attribute) and id(other) not in called
                if is_reference and self._function_of(other, Scope(module)) == (module_name, function):
                    self._note(module, other, f"{function}, whose {parameter} is rendered, under another name")
            for call, scope in calls_of(module):
                if self._function_of(call.func, scope) != (module_name, function):
                    continue
                num_calls += 1
                given = given_to(node, call)
                value = given.get(parameter)
                if given is UNCLEAR or (value is not None and not self.is_ours(value, scope, as_html)):
                    self._note(module, call, f"{parameter} of {function}")
        if num_calls == 0:
            self._note(self.modules[module_name], node, f"{parameter} of {function}, which nobody is seen to call")

    def _note(self, module: Module, node: ast.AST, what: str) -> None:
        self.findings.append(f"{module.name}:{getattr(node, 'lineno', 0)}: {what}")

    def is_ours(  # noqa: PLR0911 - a return for each kind of expression
        self, node: ast.expr | None, scope: Scope, as_html: bool = False, depth: int = 0
    ) -> bool:
        """Return whether a value holds nothing but literals, numbers and escaped text."""

        def ours(*nodes: ast.expr | None) -> bool:
            return all(self.is_ours(one, scope, as_html, depth) for one in nodes)

        if depth > MAX_DEPTH:
            return False
        match node:
            case None | ast.Constant() | ast.Compare():
                return True
            case ast.JoinedStr(values=values):
                return ours(*values)
            case ast.FormattedValue(value=value, format_spec=spec):
                return (spec is not None and only_numbers(spec)) or ours(value)
            case ast.BinOp(left=left, op=op, right=right):
                return isinstance(op, NUMERIC) or ours(left, right)
            case ast.UnaryOp(operand=operand):
                return isinstance(node.op, ast.Not | ast.USub) or ours(operand)
            case ast.BoolOp(values=values):
                return ours(*values)
            case ast.IfExp(body=body, orelse=orelse):
                return ours(body, orelse)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return ours(*elements)
            case ast.Dict(keys=keys, values=values):
                return ours(*keys, *values)
            case ast.Starred(value=value) | ast.Subscript(value=value) | ast.NamedExpr(value=value):
                return ours(value)
            case ast.GeneratorExp(elt=element, generators=loops) | ast.ListComp(elt=element, generators=loops):
                return self._is_ours_within(element, loops, scope, as_html, depth)
            case ast.Attribute(attr="__name__"):
                return True
            case ast.Attribute():
                found = self._constant_of(node, scope)
                return found is not None and self.is_ours(found[0], found[1], as_html, depth + 1)
            case ast.Name(id=name):
                return self._is_name_ours(name, scope, as_html, depth)
            case ast.Call():
                return self._is_call_ours(node, scope, as_html, depth)
        return False

    def _is_ours_within(
        self, element: ast.expr, loops: Sequence[ast.comprehension], scope: Scope, as_html: bool, depth: int
    ) -> bool:
        given = {}
        for loop in loops:
            for name in names_in(loop.target):
                given[name] = loop.iter, scope
        inner = Scope(scope.module, None, given, scope)
        return self.is_ours(element, inner, as_html, depth + 1)

    def _is_name_ours(  # noqa: PLR0911 - a return for each kind of binding
        self, name: str, scope: Scope, as_html: bool, depth: int
    ) -> bool:
        if scope.given is not None and name in scope.given:
            value, outside = scope.given[name]
            return self.is_ours(value, outside, as_html, depth + 1)
        if scope.function is not None:
            bound, is_clear = bindings_of(name, scope.function)
            if not is_clear:
                return False
            if name in parameters_of(scope.function):
                if scope.given is not None:  # a call is followed, and it leaves this parameter at its default
                    default = defaults_of(scope.function).get(name)
                    return default is not None and all(
                        self.is_ours(one, scope, as_html, depth + 1) for one in (default, *bound)
                    )
                self._needed.add((scope.module.name, scope.function.name, name, as_html))
                bound = [*bound, *filter(None, [defaults_of(scope.function).get(name)])]
                return all(self.is_ours(one, scope, as_html, depth + 1) for one in bound)
            if bound:
                return all(self.is_ours(one, scope, as_html, depth + 1) for one in bound)
        if scope.outer is not None:
            return self._is_name_ours(name, scope.outer, as_html, depth)
        found = self._constant_of(ast.Name(name), scope)
        return found is not None and self.is_ours(found[0], found[1], as_html, depth + 1)

    def _is_call_ours(self, call: ast.Call, scope: Scope, as_html: bool, depth: int) -> bool:
        name = ast.unparse(call.func)
        escapes = HTML_ESCAPES if as_html else MARKDOWN_ESCAPES
        if name in NO_TEXT or self._dotted(call.func, scope) in escapes:
            return True
        values = [*call.args, *(one.value for one in call.keywords)]
        if name in KEEPS:
            return all(self.is_ours(one, scope, as_html, depth + 1) for one in values)
        found = self._function_of(call.func, scope)
        if found is not None:
            module = self.modules[found[0]]
            function = module.functions[found[1]]
            given = given_to(function, call)
            if given is UNCLEAR:
                return False
            inner = Scope(module, function, {one: (value, scope) for one, value in given.items()})
            returns = [one.value for one in own_nodes(function) if isinstance(one, ast.Return)]
            return bool(returns) and all(self.is_ours(one, inner, as_html, depth + 1) for one in returns)
        if isinstance(call.func, ast.Attribute) and call.func.attr in KEEPS_METHODS:
            return all(self.is_ours(one, scope, as_html, depth + 1) for one in (call.func.value, *values))
        return False

    def _dotted(self, node: ast.expr, scope: Scope) -> str | None:
        """Return the dotted name that a reference to a module's member means."""
        if isinstance(node, ast.Name):
            return scope.module.imports.get(node.id, f"{scope.module.name}.{node.id}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            base = scope.module.imports.get(node.value.id)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def _function_of(self, node: ast.expr, scope: Scope) -> tuple[str, str] | None:
        module, _, name = (self._dotted(node, scope) or "").rpartition(".")
        known = self.modules.get(module)
        return (module, name) if known is not None and name in known.functions else None

    def _constant_of(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope] | None:
        module, _, name = (self._dotted(node, scope) or "").rpartition(".")
        known = self.modules.get(module)
        return (known.constants[name], Scope(known)) if known is not None and name in known.constants else None


def only_numbers(spec: ast.expr) -> bool:
    """Return whether a format fails for text, so that its result is a number or a time."""
    if not isinstance(spec, ast.JoinedStr) or not all(isinstance(one, ast.Constant) for one in spec.values):
        return False
    try:
        format("text", "".join(str(one.value) for one in spec.values if isinstance(one, ast.Constant)))
    except ValueError:
        return True
    return False


def check_sources(sources: Mapping[str, str]) -> list[str]:
    """Return the findings in sources by the dotted names of their modules."""
    return Check({name: Module(name, ast.parse(text)) for name, text in sources.items()}).run()


def read_sources(folder: Path) -> dict[str, str]:
    """Return a package's sources by dotted name."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__init__.py" or path.parent == folder / "views"
    }
