"""Chat template variables from a request's options: reasoning, effort, and variables by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import Conversation
from moiety_text.chat import ChatTemplate
from moiety_text.reasoning import SWITCHES, ThoughtFormat

EFFORT = "reasoning_effort"
NO_EFFORT = "none"


class TemplateOptions:
    """Chat template options of one model. Immutable."""

    def __init__(self, model: str, template: ChatTemplate, thoughts: ThoughtFormat | None) -> None:
        self._model = model
        self._variables = template.variables
        self._thoughts = thoughts
        self._switch = None if thoughts is None else thoughts.switch

    def variables_of(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template's variables beside the messages.

        Options by name override an effort. Raises BadRequest for an option that the template does not read, and if the
        model's reasoning cannot be switched.
        """
        options = dict(conversation.template_options)
        thinks = conversation.thinks
        for name in SWITCHES:  # a client may use another template's name of the switch
            if name in options and name not in self._variables:
                thinks = self._as_switch(name, options.pop(name))
        self._check_known(options)
        variables: dict[str, Any] = {}
        effort = conversation.effort
        if thinks is None and effort is not None and not options.keys() & set(SWITCHES):
            thinks = self._thinks_by(effort)
        if thinks is not None:
            variables |= self._switched(thinks=thinks)
        if effort not in (None, NO_EFFORT) and thinks is not False and EFFORT in self._variables:
            variables[EFFORT] = effort
        return variables | options

    def _thinks_by(self, effort: str) -> bool | None:
        """Return whether an effort turns reasoning on or off.

        It is turned on only where it is off by default, otherwise None.
        """
        if effort == NO_EFFORT:
            return False
        return True if self._switch is not None and not self._switch.is_on_by_default else None

    def _switched(self, *, thinks: bool) -> Mapping[str, Any]:
        if self._switch is not None:
            return self._switch.variables(thinks=thinks)
        if thinks == (self._thoughts is not None):
            return {}  # the model's only behavior
        does = "always reasons before it answers" if self._thoughts is not None else "does not support reasoning"
        raise BadRequest(
            f"the model {self._model!r} {does}, and its chat template has no switch for it; leave the option out, or "
            "use another model",
            code="thinking_not_supported",
        )

    def _as_switch(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise BadRequest(f"'{name}' must be true or false, not {value!r:.64}", param="chat_template_kwargs")
        return value

    def _check_known(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in self._variables:
                known = ", ".join(sorted(self._variables)) or "none"
                raise BadRequest(
                    f"the chat template of the model {self._model!r} has no variable {name[:64]!r} that a request may "
                    f"set; it reads these: {known}",
                    param="chat_template_kwargs",
                )
