"""Chat template variables from a request's options: reasoning, effort, and variables by name.

What a client's API allows is never refused for the model's sake: an effort becomes the nearest level that the template
knows, and a switch or a variable that it does not read is left out. The answer's header names them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import Conversation
from moiety_text.chat import ChatTemplate
from moiety_text.efforts import EFFORT, NO_EFFORT, levels_of, nearest_level
from moiety_text.reasoning import SWITCHES, ThoughtSwitch
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET

BUDGET = "thinking_budget"  # variable of templates that tell the model its budget
ON, OFF, UNLIMITED, UNREAD = "on", "off", "unlimited", "unread"  # values in the header of adjusted fields
MAX_NAME_CHARS = 64  # of a variable that the header names
TEXT_OPTIONS = frozenset({"documents"})  # variables whose texts the model must see


def unread_option(name: str) -> dict[str, str]:
    """Return the entry of the adjusted fields for a variable that no template reads, if a header can have its name."""
    can_name = name.isascii() and name.isidentifier() and len(name) <= MAX_NAME_CHARS
    return {f"chat_template_kwargs.{name}": UNREAD} if can_name else {}


@dataclass(slots=True)
class _Resolved:
    """Template variables, and the values that are used instead of a client's, by its fields."""

    variables: dict[str, Any] = field(default_factory=dict)
    adjusted: dict[str, str] = field(default_factory=dict)


class TemplateOptions:
    """Chat template options of one model. Immutable."""

    def __init__(
        self, model: str, template: ChatTemplate, switch: ThoughtSwitch | None, *, thinks: bool, keeps_budget: bool
    ) -> None:
        """Create the options.

        `switch` turns the model's reasoning on and off. `thinks`: the model can reason. `keeps_budget`: its engine
        ends the reasoning when a budget is used.
        """
        self._model = model
        self._variables, self._own_variables = template.variables, template.own_variables
        self._switch = switch
        self._thinks = thinks
        self._levels = levels_of(template)
        self._keeps_budget = keeps_budget or BUDGET in self._variables

    def variables_of(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template's variables beside the messages.

        Options by name override an effort. Raises BadRequest for an option that the gateway sets itself, and for
        documents that the template does not read.
        """
        return self._resolve(conversation).variables

    def adjusted_fields(self, conversation: Conversation) -> dict[str, str]:
        """Return the fields whose values the model does not have, with what is used instead. Raises as above."""
        return self._resolve(conversation).adjusted

    def _resolve(self, conversation: Conversation) -> _Resolved:
        found, names = _Resolved(), conversation.reasoning_fields
        options, thinks, effort = dict(conversation.template_options), conversation.thinks, conversation.effort
        for name in SWITCHES:  # a client may use another template's name of the switch
            if name in options and name not in self._variables:
                thinks = self._as_switch(name, options.pop(name))
        self._leave_out_unread(options, found)
        by_effort = thinks is None and effort is not None and not options.keys() & set(SWITCHES)
        if by_effort:
            thinks = self._thinks_by(effort)
        budget = conversation.thought_budget
        if budget == 0 and self._switch is not None:
            thinks = False
        if thinks is not None:
            self._turn(found, names.effort if by_effort else names.switch, thinks=thinks)
        if effort not in (None, NO_EFFORT) and thinks is not False:
            self._set_effort(found, names.effort, effort)
        if budget is not None and self._thinks and thinks is not False:
            self._set_budget(found, names.budget, budget)
        found.variables |= options
        return found

    def _thinks_by(self, effort: str | None) -> bool | None:
        """Return whether an effort turns reasoning on or off.

        It is turned on only where it is off by default, otherwise None.
        """
        if effort == NO_EFFORT:
            return False
        return True if self._switch is not None and not self._switch.is_on_by_default else None

    def _turn(self, found: _Resolved, name: str, *, thinks: bool) -> None:
        """Turn the reasoning on or off, where the model's template can."""
        if self._switch is not None:
            found.variables |= self._switch.variables(thinks=thinks)
        elif thinks and not self._thinks:
            found.adjusted[name] = OFF
        elif self._thinks and not thinks:
            found.adjusted[name] = self._levels[0] if self._levels else ON
            found.variables |= {EFFORT: self._levels[0]} if self._levels else {}

    def _set_effort(self, found: _Resolved, name: str, effort: str) -> None:
        """Set the nearest level that the template knows."""
        if not self._thinks:
            found.adjusted[name] = OFF
        elif self._levels:
            level = found.variables[EFFORT] = nearest_level(effort, self._levels)
            if level != effort:
                found.adjusted[name] = level
        else:
            found.adjusted[name] = ON

    def _set_budget(self, found: _Resolved, name: str, budget: int) -> None:
        """Tell the template the budget, where it asks for one."""
        if BUDGET in self._variables:
            found.variables[BUDGET] = budget
        if not self._keeps_budget:
            found.adjusted[name] = UNLIMITED
        elif budget < MIN_THOUGHT_BUDGET:
            found.adjusted[name] = str(MIN_THOUGHT_BUDGET)

    def _as_switch(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise BadRequest(f"'{name}' must be true or false, not {value!r:.64}", param="chat_template_kwargs")
        return value

    def _leave_out_unread(self, options: dict[str, Any], found: _Resolved) -> None:
        """Remove the options that the template does not read. Raises BadRequest for those that are not optional."""
        for name in options.keys() - self._variables:
            if name in self._own_variables or name in TEXT_OPTIONS:
                known = ", ".join(sorted(self._variables)) or "none"
                raise BadRequest(
                    f"the chat template of the model {self._model!r} has no variable {name[:64]!r} that a request may "
                    f"set; it reads these: {known}",
                    param="chat_template_kwargs",
                )
            del options[name]
            found.adjusted |= unread_option(name)
