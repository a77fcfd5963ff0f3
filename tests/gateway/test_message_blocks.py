"""System messages and content blocks of Anthropic's Messages API, as the real `anthropic` package sends them."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from moiety_platform.anthropic_api.thinking_signatures import omitted_signature_of
from moiety_platform.engine_client.fake import FakeEngineClient

from .conftest import RunningGateway, StartGateway, ToolCard
from .message_requests import ASKED, HELLO, IGNORED, applied_edits, last_prompt, plain, raw
from .test_reasoning import thinking, writes

__all__ = ["plain", "thinking"]  # fixtures

ALTERNATING = (
    "{% for message in messages %}{% if message['role'] == 'system' and loop.index0 %}"
    "{{ raise_exception('the system message must be the first') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}<|assistant|>"
)


async def test_system_messages_may_stand_anywhere(plain: RunningGateway) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": [{"type": "text", "text": "gone"}], "clear_at": "next_user_message"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": [{"type": "text", "text": "e"}], "clear_at": "next_user_message"},
    ]
    await raw(plain, messages=turns, betas=["mid-conversation-system-2026-04-07"])
    prompt = last_prompt(plain)
    assert prompt == "<|user|>a\n<|system|>b\n<|assistant|>c\n<|user|>d\n<|system|>e\n<|assistant|>"
    counted = await plain.anthropic.beta.messages.count_tokens(model="hermes", messages=turns)
    assert counted.input_tokens == len(plain.engine.submits[-1].prompt_ids)


async def test_a_template_that_wants_them_first_reads_later_ones_as_the_users(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("hermes", template=ALTERNATING)
    async with start_gateway([FakeEngineClient(card)]) as gateway, gateway.anthropic:
        turns: list[Any] = [*HELLO, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
        await raw(gateway, messages=turns, system="s")
        prompt = last_prompt(gateway)
        assert prompt == "<|system|>s\n<|user|>hello\n<system>\nb\n</system>\nc\n<|assistant|>"


async def test_the_system_block_for_anthropics_billing_is_left_out(plain: RunningGateway) -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.7d4; cc_entrypoint=cli;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
    ]
    _, headers = await raw(plain, system=blocks)
    assert last_prompt(plain).startswith("<|system|>You help.\n") and headers[IGNORED] == "system.0"


BLOCKS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}},
        '<document title="T">\nC\nD\n</document>',
    ),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}},
        "<document>\nD\n</document>",
    ),
    (
        {"type": "search_result", "source": "u", "title": 'a"b', "content": [{"type": "text", "text": "R"}]},
        '<search_result source="u" title="a&quot;b">\nR\n</search_result>',
    ),
    ({"type": "compaction", "content": "earlier: x"}, "earlier: x"),
]


@pytest.mark.parametrize(("block", "text"), BLOCKS)
async def test_blocks_with_text_are_read_as_text(plain: RunningGateway, block: dict[str, Any], text: str) -> None:
    content = [{"type": "text", "text": "see", "citations": None}, block | {"cache_control": {"type": "ephemeral"}}]
    message, _ = await raw(plain, messages=[{"role": "user", "content": content}])
    assert last_prompt(plain) == f"<|user|>see\n{text}\n<|assistant|>"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (0, len(plain.engine.submits[-1].prompt_ids))


async def test_blocks_of_anthropics_own_tools_are_read_as_json_and_empty_ones_skipped(plain: RunningGateway) -> None:
    found = {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "secret"}
    content: list[Any] = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
        {"type": "text", "text": "So."},
        {"type": "container_upload", "file_id": "f"},
    ]
    turns = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    _, headers = await raw(plain, messages=turns)
    prompt = last_prompt(plain)
    assert '<server_tool_use>\n{"name":"web_search","input":{"query":"q"}}\n</server_tool_use>' in prompt
    assert '[{"url":"u","title":"t"}]' in prompt and "secret" not in prompt
    assert headers[IGNORED] == "messages.1.content.0, messages.1.content.4"


async def test_only_a_system_message_is_cleared(plain: RunningGateway) -> None:
    await raw(plain, messages=[{"role": "user", "content": "Hi", "clear_at": "next_user_message"}])
    assert "Hi" in last_prompt(plain)


async def test_a_tools_image_is_replaced_by_a_text_and_the_loop_continues(tool_gateway: RunningGateway) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    results: list[Any] = [
        {"type": "text", "text": "ok"},
        image,
        {"type": "tool_reference", "tool_name": "now"},
        {"type": "browser_state", "tabs": [1]},
    ]
    call = {"type": "tool_use", "id": "u", "name": "mcp.read:file", "input": {}, "caller": {"type": "direct"}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": results}]},
    ]
    tools = [{"name": "mcp.read:file", "input_schema": {"type": "object"}}]
    _, headers = await raw(tool_gateway, messages=turns, tools=tools)
    prompt = last_prompt(tool_gateway)
    assert "ok\n[This image is not shown: the model reads text only.]\nTool found: now\n<browser_state>" in prompt
    assert headers[IGNORED] == "messages.2.content.0.content.1"
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        await raw(tool_gateway, messages=[{"role": "user", "content": [results[0], image]}])


async def test_a_thinking_block_is_signed_whole_and_streamed_and_taken_back(thinking: Any) -> None:
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm, 17.\n</think>\n\nYes.")
        asked = {**ASKED, "thinking": {"type": "adaptive"}, "max_tokens": 900}
        whole = await gateway.anthropic.messages.create(**asked)
        async with gateway.anthropic.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        assert whole.content[0].signature == streamed.content[0].signature != ""
        assert whole.usage.output_tokens_details.thinking_tokens == len("\nHm, 17.\n") + 2
        turns = [*HELLO, {"role": "assistant", "content": streamed.content}, *HELLO]
        await gateway.anthropic.messages.create(**asked | {"messages": turns})


@pytest.mark.parametrize("stream", [False, True])
async def test_omitted_reasoning_comes_back_in_its_signature(thinking: Any, stream: bool) -> None:
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm, 17.\n</think>\n\nYes.")
        asked: dict[str, Any] = {**ASKED, "thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 900}
        if stream:
            async with gateway.anthropic.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await gateway.anthropic.messages.create(**asked)
        thought, text = message.content
        assert (thought.thinking, thought.signature, text.text) == ("", omitted_signature_of("Hm, 17."), "Yes.")


async def test_reasoning_of_earlier_answers_is_cleared_as_asked(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    template = "{% for m in messages %}<{{ m.reasoning_content or '' }}>{{ m.content }}{% endfor %}"
    async with start_gateway([FakeEngineClient(tool_card("hermes", template=template))]) as gateway, gateway.anthropic:
        answers = [
            [{"type": "thinking", "thinking": "t1", "signature": "s"}, {"type": "text", "text": "1"}],
            [
                {"type": "thinking", "thinking": "", "signature": omitted_signature_of("t2")},
                {"type": "text", "text": "2"},
            ],
        ]
        turns = [turn for one in answers for turn in (*HELLO, {"role": "assistant", "content": one})] + HELLO
        for keep, expected in (("all", "<t1>1"), ({"type": "thinking_turns", "value": 1}, "<>1"), (None, "<>1")):
            edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
            edits = {"edits": [edit, {"type": "compact_20260112"}]}
            message, headers = await raw(gateway, messages=turns, context_management=edits)
            assert last_prompt(gateway) == f"<>hello{expected}<>hello<t2>2<>hello"
            assert headers[IGNORED] == "context_management.edits.1"
            applied = [(one.cleared_thinking_turns, one.cleared_input_tokens) for one in applied_edits(message)]
            assert applied == ([] if keep == "all" else [(1, len("t1"))])
