"""Chat templates: rendering of messages to the prompt text that the model was trained on.

A template comes with a checkpoint and is external code: it runs in Jinja's immutable sandbox, without a loader, with a
budget of loop turns and bounded values. It may use what `transformers` offers, and gives the same text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moiety_text.errors import TemplateRefused

MAX_LOOP_TURNS = 200_000  # per rendering, macro calls included
MAX_VALUE_LENGTH = 20_000_000  # characters or items of one value, and of the whole prompt

_PRINTING_FILTERS = frozenset({"join", "tojson", "string", "replace", "format", "pprint", "urlencode", "xmlattr"})
_WIDE_FIELD = re.compile(r"\d{6}")

_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})  # set by the rendering itself

_remaining_turns: ContextVar[list[int]] = ContextVar("remaining_turns")


class _OverLimit(jinja2.TemplateRuntimeError):
    pass


def _too_large() -> NoReturn:
    raise _OverLimit(f"the template builds a value of more than {MAX_VALUE_LENGTH:,} characters")


def _bounded(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple) and len(value) > MAX_VALUE_LENGTH:
        _too_large()
    return value


def _weighed(value: Any) -> Any:
    """Return `value` if its printed form is within the limit, however often it holds the same object."""
    weight, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        weight += len(item) if isinstance(item, str | bytes) else 1
        if isinstance(item, list | tuple):
            weight += len(item)
            waiting.extend(item if weight <= MAX_VALUE_LENGTH else ())
        elif isinstance(item, Mapping):
            waiting.extend((*item.keys(), *item.values()))
        if weight > MAX_VALUE_LENGTH:
            _too_large()
    return value


def _check_size(arguments: Sequence[Any]) -> None:
    """Refuse a large number as argument of a method or filter: it may be a width, and no honest one is that large."""
    if any(isinstance(argument, int) and argument > MAX_VALUE_LENGTH for argument in arguments):
        raise _OverLimit(f"the template uses a number above {MAX_VALUE_LENGTH:,} as an argument")


def _check_method(method: Any, arguments: Sequence[Any]) -> None:
    """Refuse methods of text whose result can be much longer than their input."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in ("format", "format_map") and _WIDE_FIELD.search(text):
        raise _OverLimit("the template formats with a very wide field")
    if name in ("join", "format"):
        _weighed(list(arguments))
    if name == "replace" and len(arguments) > 1 and len(text) * len(str(arguments[1])) > MAX_VALUE_LENGTH:
        _too_large()


class _Limits(Extension):
    """Extension that counts loop turns, bounds concatenation, and renders `{% generation %}` blocks as usual.

    These blocks are training masks.
    """

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

    def take_turn(self) -> str:
        remaining = _remaining_turns.get()
        remaining[0] -= 1
        if remaining[0] < 0:
            raise _OverLimit(f"the template loops more than {MAX_LOOP_TURNS:,} times")
        return ""

    def join(self, *parts: Any) -> str:
        return str(_bounded("".join(map(str, parts))))

    def instrument(self, tree: nodes.Template) -> None:
        """Insert the count into every loop and macro, and replace `~` by bounded joins."""
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            body: list[nodes.Node] = getattr(node, "body")  # noqa: B009 - the three kinds share no type that has it
            body.insert(0, nodes.ExprStmt(self.call_method("take_turn"), lineno=node.lineno))
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, "string", [], [], None, None, lineno=block.lineno)
        for parent in [tree, *tree.find_all(nodes.Node)]:
            for name, value in list(parent.iter_fields()):
                if isinstance(value, nodes.Concat):
                    setattr(parent, name, self._joined(value))
                elif isinstance(value, list):
                    setattr(parent, name, [self._joined(v) if isinstance(v, nodes.Concat) else v for v in value])
        tree.set_environment(self.environment)

    def _joined(self, concat: nodes.Concat) -> nodes.Call:
        parts = [self._joined(part) if isinstance(part, nodes.Concat) else part for part in concat.nodes]
        return self.call_method("join", parts, lineno=concat.lineno)


_NO_NULLS: frozenset[str] = frozenset()


class _Message(dict[str, Any]):
    """A message without its null fields, as `transformers` omits them.

    Most templates print "None" for a null, or fail, and expect a null field to be missing.
    """

    __slots__ = ("nulls",)

    def __init__(self, message: Mapping[str, Any]) -> None:
        if None not in message.values():  # nearly always
            super().__init__(message)
            self.nulls: Collection[str] = _NO_NULLS
            return
        super().__init__((name, value) for name, value in message.items() if value is not None)
        self.nulls = message.keys() - self.keys()


class _Undefined(jinja2.Undefined):
    """A missing value.

    A null field of a message also has the methods of an empty text, for templates that test for null and otherwise
    treat it as text.
    """

    __slots__ = ()

    def _was_null(self) -> bool:
        message = self._undefined_obj
        return isinstance(message, _Message) and self._undefined_name in message.nulls

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) and self._was_null() else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other if isinstance(other, str) and self._was_null() else super().__radd__(other)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr("", name) and self._was_null():
            return getattr("", name)
        return super().__getattr__(name)


_DICT_METHODS = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a message's field by key before an attribute lookup.

        Jinja tries attributes first and keys only after that fails; most template expressions are fields of messages.
        """
        if type(obj) in (dict, _Message) and attribute not in _DICT_METHODS and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        limits = self.extensions[_Limits.identifier]
        assert isinstance(limits, _Limits)
        limits.instrument(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            sizes = [len(v) for v in (left, right) if isinstance(v, str | bytes | list | tuple)]
            factors = [v for v in (left, right) if isinstance(v, int)]
            if sizes and factors and sizes[0] * factors[0] > MAX_VALUE_LENGTH:
                _too_large()
        if operator == "**" and isinstance(right, int) and right > 64:
            raise _OverLimit("the template raises a number to a power above 64")
        if operator == "%" and isinstance(left, str):
            _check_size(right if isinstance(right, tuple) else (right,))
            _weighed(right)
            if _WIDE_FIELD.search(left):
                raise _OverLimit("the template formats with a very wide field")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), _Limits):
            return obj(*args)  # the counter itself, which no template can name
        if not isinstance(obj, Macro):  # the template's own, whose body is checked
            _check_size((*args, *kwargs.values()))
        _check_method(obj, args)
        return _bounded(super().call(context, obj, *args, **kwargs))


def _within_limits(function: Callable[..., Any], weigh: bool) -> Callable[..., Any]:
    """Return the filter with bounded numbers and result, and with bounded input where it prints its input."""

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        own = [arg for arg in args if not isinstance(arg, jinja2.Environment | EvalContext)]
        _check_size((*own[1:], *kwargs.values()))  # the first one is the filtered value, which is not a size
        if weigh:
            _weighed(own)
        return _bounded(function(*args, **kwargs))

    return limited


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _printable(value: Any) -> Any:
    return value if isinstance(value, str) else _weighed(value)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = str(value)
    _check_method(text.replace, (old, new))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _texts_in(tree: nodes.Node) -> Iterator[str]:
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        text = node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", None)
        if isinstance(text, str):
            yield text


class ChatTemplate:
    """A compiled template.

    Immutable; may render in several threads.

    `own_variables` are set by the rendering. `variables` are the names that it reads and a caller may set,
    `compared_texts` the texts that it compares with.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile a template.

        `special_tokens` are variables of the template (`bos_token` …); `now` is local time for `strftime_now`. Raises
        TemplateRefused if the template does not parse.
        """
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Limits, loopcontrols],
            finalize=_printable,
            undefined=_Undefined,
        )
        environment.filters["tojson"] = _to_json
        environment.filters["replace"] = _replace
        for name, function in environment.filters.items():
            environment.filters[name] = _within_limits(function, weigh=name in _PRINTING_FILTERS)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._special_tokens = dict(special_tokens)
        self.literals = "\n".join([source, *map(str, special_tokens.values())])  # contains what the template spells out
        self.own_variables = _OWN_VARIABLES | self._special_tokens.keys()
        try:
            tree = environment.parse(source)
            self.knows_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
            self.compared_texts = frozenset(
                text for comparison in tree.find_all(nodes.Compare) for text in _texts_in(comparison)
            )
            self._written = tuple(_texts_in(tree))
            names = meta.find_undeclared_variables(environment.parse(source))  # this folds constants of its tree
            self.variables = names - self.own_variables
            self._template = environment.from_string(tree)
            self._template.globals = dict(self._template.globals)  # each rendering copies them: fast from a dict
        except jinja2.TemplateSyntaxError as exc:
            raise TemplateRefused(f"the chat template does not parse, line {exc.lineno}: {exc.message}") from exc
        except (SyntaxError, ValueError) as exc:  # errors of the generated Python, such as a break outside of loops
            raise TemplateRefused(f"the chat template does not parse: {exc}") from exc
        except (RecursionError, MemoryError) as exc:  # Python's own parser raises MemoryError for deep nesting
            raise TemplateRefused("the chat template is nested too deeply") from exc

    def spells(self, text: str) -> bool:
        """Return whether `text` occurs in the template's own text or in a text that it compares with."""
        return any(text in written for written in self._written)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt; null fields of messages are omitted.

        `extra` are further variables of the template (such as `enable_thinking`); they do not replace the arguments
        here. Raises TemplateRefused with the template's message.
        """
        variables = {
            **self._special_tokens,
            **(extra or {}),
            "messages": list(map(_Message, messages)),
            "tools": tools,
            "documents": (extra or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        outer = _remaining_turns.set([MAX_LOOP_TURNS])
        try:
            parts, length = [], 0
            for part in self._template.generate(variables):
                length += len(part)
                if length > MAX_VALUE_LENGTH:
                    raise _OverLimit(f"the prompt has more than {MAX_VALUE_LENGTH:,} characters")
                parts.append(part)
            return "".join(parts)
        except jinja2.TemplateError as exc:
            raise TemplateRefused(str(exc.message or "the chat template rejected the messages")) from exc
        except RecursionError as exc:
            raise TemplateRefused("the chat template recurses without end") from exc
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as exc:
            raise TemplateRefused(f"the chat template cannot render these messages: {exc}") from exc
        finally:
            _remaining_turns.reset(outer)
