"""Fixtures of a running gateway, its engines' model cards, its spans and its log."""

from __future__ import annotations

import asyncio
import io
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from tests.framework_caches import share_framework_caches

from moiety_platform.engine_client.base import EngineClient
from moiety_platform.engine_client.fake import FakeEngineClient, Script
from moiety_platform.logs import configure_logging
from moiety_platform.traces.span import Span
from moiety_platform.traces.tracing import Sender
from moiety_wire.messages import Failed, ModelCard

from .cards import (
    MODEL,
    TOOL_TEMPLATES,
    NewCard,
    ToolCard,
    any_card,
    card,
    make_card,
    new_card,
    seeing,
    thinking_card,
    tool_card,
    write_tokenizer,
)
from .running_gateway import DEADLINE_S, PEPPER, RunningGateway, StartGateway, StartOver, make_store, run_gateway

__all__ = [
    "DEADLINE_S",
    "MODEL",
    "PEPPER",
    "TOOL_TEMPLATES",
    "NewCard",
    "RunningGateway",
    "StartGateway",
    "StartOver",
    "ToolCard",
    "any_card",
    "card",
    "make_card",
    "make_store",
    "new_card",
    "run_gateway",
    "seeing",
    "thinking_card",
    "tool_card",
    "write_tokenizer",
]

share_framework_caches()


def always(failed: Failed) -> Script:
    """Return a script by which every request fails with this error."""
    return lambda submit: msgspec.structs.replace(failed, request_id=submit.request_id)


class SpanList:
    """Spans in memory."""

    name = "list"
    num_sent = 0

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped: Counter[str] = Counter()

    def put(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        """Do nothing: there is nothing to send."""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def unanswering_port(is_listening: bool) -> Iterator[int]:
    """Yield a port that accepts connections and never answers, or one at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        if not is_listening:
            listener.close()
        yield port


@asynccontextmanager
async def run_reasoning(
    start_gateway: StartGateway, card: ModelCard, *, is_ours: bool
) -> AsyncIterator[RunningGateway]:
    """Run a gateway with one engine: an engine of ours controls reasoning and follows grammars, others do not."""
    card = msgspec.structs.replace(card, controls_reasoning=is_ours, follows_grammars=is_ours)
    async with start_gateway([FakeEngineClient(card)]) as running, running.anthropic:
        yield running


Until = Callable[[Callable[[], object]], Awaitable[None]]
_logged = io.StringIO()


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Return the stream of the process's log, in JSON and at the most detailed level. All tests of the process share
    the stream, since a logger keeps writing to the first one that it was given."""
    _logged.seek(0)
    _logged.truncate()
    configure_logging("debug", "json", _logged)
    yield _logged
    structlog.reset_defaults()


@pytest.fixture
def spans() -> SpanList:
    return SpanList()


@pytest.fixture
def until() -> Until:
    """`await until(condition)`: returns once it holds, fails after a deadline. For states that announce no change."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what is watched has no event
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
async def tool_gateway(start_gateway: StartGateway, tool_card: ToolCard) -> AsyncIterator[RunningGateway]:
    """A gateway with a model of each family that supports tool calls."""
    engines = [FakeEngineClient(tool_card(family)) for family in ("hermes", "llama", "mistral")]
    async with start_gateway(engines) as running, running.anthropic:
        yield running


@pytest.fixture
def start_gateway(tmp_path: Path) -> StartGateway:
    """`async with start_gateway(engines, **settings) as gateway`."""

    def start(
        engines: Sequence[EngineClient], sender: Sender | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[RunningGateway]:
        return run_gateway(tmp_path, engines, sender, **settings)

    return start


@pytest.fixture
def start_over(start_gateway: StartGateway, until: Until) -> StartOver:
    """`async with start_over(*engines, **settings) as gateway`: once all are connected."""

    @asynccontextmanager
    async def start(*engines: Any, **settings: Any) -> AsyncIterator[RunningGateway]:
        async with start_gateway(list(engines), **settings) as gateway:
            await until(lambda: all(engine.state.healthy for engine in engines))
            yield gateway

    return start


@pytest.fixture
async def gateway(start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[RunningGateway]:
    async with start_gateway([FakeEngineClient(card)]) as running:
        yield running
