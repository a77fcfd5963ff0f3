"""The real `anthropic` package, connected to a gateway on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import pytest

from .conftest import RunningGateway

MODEL = "tiny"
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
HELLO_TOKENS = len("<|user|>hello\n<|assistant|>")


@pytest.fixture
def open_client() -> Callable[..., anthropic.AsyncAnthropic]:
    """`async with open_client(gateway) as client`."""

    def make(gateway: RunningGateway, **options: Any) -> Any:
        return anthropic.AsyncAnthropic(
            **{"base_url": gateway.url, "api_key": gateway.key, "max_retries": 0, "timeout": 10.0, **options}
        )

    return make


@pytest.fixture
async def client(
    gateway: RunningGateway, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with open_client(gateway) as opened:
        yield opened
