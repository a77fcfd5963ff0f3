"""System messages after the first message of a conversation, which not every chat template accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moiety_platform.inference.prompt_images import joined_contents
from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused

_PROBE = "late system message"


def takes_late_system(template: ChatTemplate) -> bool:
    """Return whether the template renders a system message after a user's."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": _PROBE}]
    try:
        return _PROBE in template.render(messages)
    except TemplateRefused:
        return False


def as_user_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages with late system messages as the user's.

    Consecutive messages of the user's become one then, since such templates want the roles to alternate.
    """
    late = {place for place, message in enumerate(messages) if place and message["role"] == "system"}
    if not late:
        return messages
    found: list[Mapping[str, Any]] = []
    for place, message in enumerate(messages):
        moved = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"} if place in late else message
        if found and found[-1]["role"] == moved["role"] == "user":
            moved = {**moved, "content": joined_contents(found.pop()["content"], moved["content"])}
        found.append(moved)
    return found
