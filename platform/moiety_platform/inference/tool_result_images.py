"""Images in results of tools, for chat templates that show them there and for those that do not.

Published templates of models that see differ: Qwen3-VL's writes the images of a tool's message in their place, others
leave them out or refuse them. For the others an image moves to a user's message right after the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moiety_platform.inference.generation import PromptImage
from moiety_platform.inference.prompt_images import has_images, image_part, is_image, joined_contents, text_part
from moiety_platform.inference.tool_fields import call_for_template
from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused
from moiety_text.tools.formats import ToolFormat

MOVED_IMAGE_TEXT = "[The image is in the next message.]"
_PROBE = "text of the result"
_CALL = "call00000"  # of nine characters, which all templates accept

Message = Mapping[str, Any]


def shows_result_images(template: ChatTemplate | None, placeholder: str | None, tool_format: ToolFormat | None) -> bool:
    """Return whether the template writes one placeholder for an image in a tool's message, beside its text."""
    if template is None or placeholder is None or tool_format is None:
        return False
    messages: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call_for_template(_CALL, "look", {})]},
        {"role": "tool", "tool_call_id": _CALL, "content": [text_part(_PROBE), image_part(PromptImage())]},
    ]
    try:
        rendered = template.render(tool_format.adapted(messages))
    except (TemplateRefused, TypeError):
        return False
    return rendered.count(placeholder) == 1 and _PROBE in rendered and PromptImage.__name__ not in rendered


def with_images_after_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the images of consecutive results in a user's message after them.

    The images keep their order. A user's message that follows already becomes one with theirs.
    """
    found: list[Message] = []
    moved: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            if has_images(content):
                moved += filter(is_image, content)
                content = text_of_result(content)
        elif moved:
            if message["role"] == "user":
                content = joined_contents(moved, content)
            else:
                found.append({"role": "user", "content": moved})
            moved = []
        found.append(message if content is message["content"] else {**message, "content": content})
    return [*found, {"role": "user", "content": moved}] if moved else found


def text_of_result(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a result whose images have moved to the next message."""
    return "\n".join(MOVED_IMAGE_TEXT if is_image(part) else part["text"] for part in parts)
