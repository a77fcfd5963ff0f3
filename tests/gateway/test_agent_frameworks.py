"""One tool loop each of LangChain and of the OpenAI Agents SDK against a gateway on loopback.

Each SDK is imported by its test alone, since every worker imports this module.
"""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import RunningGateway
from .test_tool_loops import hermes, says

QUESTION = "How warm is it in Basel?"
CALL = hermes(("temperature_of", '{"city": "Basel"}'))


def temperature_of(city: str) -> str:
    """Tells how warm it is in a city."""
    return f"17 degrees in {city}"


@pytest.mark.parametrize("stream", [False, True])
async def test_langchains_tool_loop_comes_to_its_answer(tool_gateway: RunningGateway, stream: bool) -> None:
    from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    tool_gateway.of["hermes"].script = says(CALL, "It is 17 degrees.")
    told: dict[str, Any] = {
        "base_url": f"{tool_gateway.url}/v1",
        "api_key": tool_gateway.key,
        "max_retries": 0,
        "stream_usage": True,
    }
    chat = ChatOpenAI(model="hermes", **told)
    temperature = tool(temperature_of)
    model = chat.bind_tools([temperature])

    async def ask(messages: list[BaseMessage]) -> Any:
        if not stream:
            return await model.ainvoke(messages)
        whole: Any = None
        async for chunk in model.astream(messages):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
        return whole

    messages: list[BaseMessage] = [HumanMessage(QUESTION)]
    asked = await ask(messages)
    messages.append(asked)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("temperature_of", {"city": "Basel"})
    messages.append(await temperature.ainvoke(call))
    assert isinstance(messages[-1], ToolMessage)
    final = await ask(messages)
    assert (final.content, final.tool_calls) == ("It is 17 degrees.", [])
    assert final.usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_the_agents_sdks_loop_comes_to_its_answer(tool_gateway: RunningGateway, api: str, stream: bool) -> None:
    import agents

    agents.set_tracing_disabled(True)  # it would send traces to its vendor
    tool_gateway.of["hermes"].script = says(CALL, "It is 17 degrees.")
    agent = agents.Agent(
        name="weather",
        instructions="Answer in one sentence.",
        model=getattr(agents, api)("hermes", tool_gateway.client),
        model_settings=agents.ModelSettings(include_usage=True),  # which it asks of others only if told to
        tools=[agents.function_tool(temperature_of)],
    )
    result: agents.RunResult | agents.RunResultStreaming
    if stream:
        result = agents.Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
    else:
        result = await agents.Runner.run(agent, QUESTION)
    assert result.final_output == "It is 17 degrees."
    (output,) = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert output == "17 degrees in Basel"
    assert sum(response.usage.output_tokens for response in result.raw_responses) > 0
