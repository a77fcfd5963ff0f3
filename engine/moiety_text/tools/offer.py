"""Tools that a conversation lets the model call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INPUT_TERMINAL = "RULE_START"


@dataclass(frozen=True, slots=True)
class InputFaults:
    """Reasons why a custom tool's grammar cannot be expressed in a form of InputGrammar; "" for a form that it has."""

    escaped: str = ""
    plain: str = ""
    terminals: str = ""


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """Grammar of a custom tool's input, in Lark's syntax; "" where it cannot be expressed.

    `escaped` is of the input as it is escaped in a JSON string, `plain` of the input as it is. `terminals` are
    terminals of the same, of which INPUT_TERMINAL is the whole input; a grammar that refers to itself has none.
    `definition` is the client's, in the `syntax` "lark" or "regex".
    """

    escaped: str
    plain: str
    terminals: str
    syntax: str
    definition: str
    faults: InputFaults = InputFaults()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False  # arguments must match the schema
    input_grammar: InputGrammar | None = None  # of the only argument, a string

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Offer of at least one tool. `forced` names the tool that must be called, exactly once."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    forced: str | None = None
    parallel: bool = True  # several calls in one answer are allowed

    @property
    def names(self) -> frozenset[str]:
        """Names of the callable tools."""
        return frozenset([self.forced] if self.forced is not None else [tool.name for tool in self.tools])

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the tools' arguments, by name."""
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def is_strict(self) -> bool:
        return any(tool.strict for tool in self.tools)

    @property
    def first_call(self) -> str | None:
        """Name of the tool that must be called first, where there is no choice."""
        return next(iter(self.names)) if self.must_call and len(self.names) == 1 else None

    @property
    def max_calls(self) -> int | None:
        return None if self.parallel and self.forced is None else 1
