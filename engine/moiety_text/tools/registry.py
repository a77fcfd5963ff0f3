"""All tool-call formats, in the order in which a chat template is compared with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused, UnknownFormat
from moiety_text.tools.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from moiety_text.tools.families.deepseek_dsml import DEEPSEEK_V4, DEEPSEEK_V32
from moiety_text.tools.families.gemma import GEMMA4
from moiety_text.tools.families.glm import GLM, HUNYUAN
from moiety_text.tools.families.hermes import HERMES
from moiety_text.tools.families.kimi import KIMI_K2
from moiety_text.tools.families.lists import (
    COHERE_COMMAND,
    GRANITE,
    HUNYUAN_A13B,
    JSON_LIST,
    NEMOTRON_JSON,
    PHI4_MINI,
    PHI4_MINI_JSON,
)
from moiety_text.tools.families.llama import LLAMA_JSON
from moiety_text.tools.families.minimax import DOTS, MINIMAX_M2
from moiety_text.tools.families.minimax_m3 import MINIMAX_M3
from moiety_text.tools.families.mistral import MISTRAL
from moiety_text.tools.families.pythonic import LFM2, LLAMA4_PYTHONIC
from moiety_text.tools.families.qwen_coder import MIMO, QWEN3_CODER, SEED_OSS
from moiety_text.tools.families.step import STEP3
from moiety_text.tools.formats import ToolFamily, ToolFormat
from moiety_text.tools.history import ArgumentsForm

AUTO = "auto"
FAMILIES: tuple[ToolFamily, ...] = (
    *(MISTRAL, MINIMAX_M3, MINIMAX_M2, DOTS, SEED_OSS, QWEN3_CODER, MIMO, HUNYUAN, GLM, KIMI_K2),
    *(DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4, STEP3, GEMMA4, COHERE_COMMAND, NEMOTRON_JSON),
    *(HUNYUAN_A13B, PHI4_MINI, PHI4_MINI_JSON, GRANITE, LFM2, HERMES, LLAMA4_PYTHONIC, LLAMA_JSON, JSON_LIST),
)
FORMAT_NAMES = tuple(sorted(family.name for family in FAMILIES))

_PROBE_ARGUMENT = "moiety_probe"


def check_tool_format(name: str) -> None:
    """Raise UnknownFormat unless a format has this name, or it is `auto`."""
    if name != AUTO and name not in FORMAT_NAMES:
        raise UnknownFormat(f"--tool-format {name[:64]!r} is not known; use {AUTO}, {', '.join(FORMAT_NAMES)}")


def find_tool_format(template: str, name: str = AUTO) -> ToolFormat | None:
    """Return the format by name, or the one that the chat template implies.

    With `auto`, None where it is unknown, or where the template would omit the calls of earlier answers. Raises
    UnknownFormat.
    """
    family = find_tool_family(template, name)
    return None if family is None else family.format_of(template)


def find_tool_family(template: str, name: str = AUTO) -> ToolFamily | None:
    """Return the named format as `find_tool_format` chooses it, before it is fitted to the template."""
    check_tool_format(name)
    if name == AUTO and "tool_calls" not in template:
        return None
    for family in FAMILIES:
        if family.name == name or (name == AUTO and family.is_of(template)):
            return family
    return None


def adapt_to_template(form: ToolFormat, template: ChatTemplate) -> ToolFormat:
    """Return the format with the arguments of calls that the template renders: objects, texts or both.

    A template that renders neither gets objects, so that its own error is reported.
    """
    if not _renders_call(template, f'{{"{_PROBE_ARGUMENT}": 1}}'):
        return form
    takes_objects = _renders_call(template, {_PROBE_ARGUMENT: 1})
    return replace(form, arguments=ArgumentsForm.ANY if takes_objects else ArgumentsForm.TEXT)


def _renders_call(template: ChatTemplate, arguments: Any) -> bool:
    """Return whether the template renders a call with these arguments."""
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "1"},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    try:
        return _PROBE_ARGUMENT in template.render(messages, tools=[tool])
    except TemplateRefused:
        return False
