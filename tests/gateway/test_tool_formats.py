"""Tool formats of other families through the gateway, by the template or the card, whole and streamed, in the APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer

from .conftest import StartGateway, ToolCard

TEMPLATES = Path(__file__).parents[1] / "text" / "templates"
AROUND = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}{% set ids = m.tool_calls %}{% set calls = ids | map(attribute='function') | list %}CALLS"
    "{% endif %}{% endfor %}<|assistant|>"
)
ASKED: list[Any] = [{"role": "user", "content": "How warm is it?"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}]
QWEN = (
    "<tool_call>\n<function=forecast>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    "</function>\n</tool_call>"
)
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{"city": "12", '
    '"days": 12}<|tool_call_end|><|tool_calls_section_end|>'
)
JSON_LIST = '[{"name": "forecast", "arguments": {"city": "12", "days": 12}}]'
ANSWERS = {"qwen3_coder": QWEN, "kimi_k2": KIMI, "json_list": JSON_LIST}


def template_of(name: str) -> str:
    """Return a chat template whose calls are those of the format with this name."""
    return AROUND.replace("CALLS", (TEMPLATES / f"{name}.jinja").read_text())


def says(text: str) -> Any:
    return lambda submit: [(65, character) for character in text]


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_are_typed_by_the_schema_whole_and_streamed_in_every_api(
    start_gateway: StartGateway, tool_card: ToolCard, name: str
) -> None:
    template = template_of(name)
    card = tool_card(name, template=template)
    if name == "json_list":
        card = msgspec.structs.replace(card, tool_format="json_list")
    engine = FakeEngineClient(card, says("Yes. " * (name != "json_list") + ANSWERS[name]))
    async with start_gateway([engine]) as gateway:
        asked: dict[str, Any] = {"model": name, "messages": ASKED, "tools": TOOLS}
        whole = await gateway.client.chat.completions.create(**asked)
        (call,) = whole.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("forecast", {"city": "12", "days": 12})
        arguments = ""
        async for chunk in await gateway.client.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                arguments += delta.function.arguments or ""
        assert arguments == call.function.arguments
        body = {
            "model": name,
            "max_tokens": 400,
            "messages": ASKED,
            "tools": [{"name": "forecast", "input_schema": SCHEMA}],
        }
        status, _, message = await gateway.post("/v1/messages", body)
        assert status == 200
        assert json.loads(message)["content"][-1]["input"] == {"city": "12", "days": 12}
        history = [*ASKED, whole.choices[0].message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "17"})
        await gateway.client.chat.completions.create(**asked | {"messages": history})
        tokenizer = Tokenizer.from_json(card.tokenizer_json)
        prompt = tokenizer.decode(engine.submits[-1].prompt_ids, skip_special_tokens=False)
        assert ANSWERS[name] in prompt and "17" in prompt


async def test_a_card_names_the_reasoning_format_where_the_template_does_not_show_it(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("magistral", template="{{ messages[0].content }}")
    card = msgspec.structs.replace(card, reasoning_format="mistral")
    async with start_gateway([FakeEngineClient(card, says("[THINK]Hm.[/THINK]Yes."))]) as gateway:
        answer = await gateway.client.chat.completions.create(model="magistral", messages=ASKED)
        message = answer.choices[0].message
        assert ((message.model_extra or {})["reasoning_content"], message.content) == ("Hm.", "Yes.")
