"""What a conversation lets the model call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False  # arguments must keep to the schema

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """At least one tool. `forced` names the one that must be called, exactly once."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    forced: str | None = None
    parallel: bool = True  # whether there may be several calls in one answer

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset([self.forced] if self.forced is not None else [tool.name for tool in self.tools])

    @property
    def is_strict(self) -> bool:
        return any(tool.strict for tool in self.tools)

    @property
    def first_call(self) -> str | None:
        """The name of the tool that must be called first, where there is no choice."""
        return next(iter(self.names)) if self.must_call and len(self.names) == 1 else None

    @property
    def max_calls(self) -> int | None:
        return None if self.parallel and self.forced is None else 1
