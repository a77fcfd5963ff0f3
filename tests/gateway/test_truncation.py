"""Truncation of conversations: the fewest messages are left out, and the conversation is encoded a few times only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.errors import ContextTooLong
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.truncation import encode_fitting
from moiety_wire.messages import Sampling

from .conftest import make_card


class CountingText:
    """A tokenizer whose tokens follow from the lengths of messages, and that counts its calls."""

    def __init__(self, max_tokens: int, bytes_a_token: int) -> None:
        self.num_calls = 0
        self._max_tokens = max_tokens
        self._bytes_a_token = bytes_a_token

    def count(self, messages: Any) -> int:
        return sum(3 + len(message["content"]) // self._bytes_a_token for message in messages)

    async def encode_prompts(self, generation: Generation, _tenant_id: str) -> list[list[int]]:
        self.num_calls += 1
        prompt = generation.prompts[0]
        assert isinstance(prompt, Conversation)
        num_tokens = self.count(prompt.messages)
        if num_tokens > self._max_tokens:
            raise ContextTooLong(f"{num_tokens} tokens")
        return [[0] * num_tokens]


async def assert_fewest_left_out(lengths: list[int], context: int, bytes_a_token: int) -> tuple[int, int]:
    """Return the number of messages that are left out, and of encodings."""
    text: Any = CountingText(context, bytes_a_token)
    messages = tuple({"role": "user", "content": "x" * length} for length in lengths)
    conversation = Conversation(messages)
    generation = Generation(
        model="tiny", prompts=(conversation,), num_choices=1, sampling=Sampling(), max_tokens=8, truncates=True
    )
    record: Any = SimpleNamespace(adjusted_fields={}, principal=SimpleNamespace(tenant_id="ten_a"))
    _, (ids,) = await encode_fitting(text, generation, make_card(max_context_tokens=context), record)
    told = record.adjusted_fields.get("truncation", "0 of")
    num_dropped = int(told.split()[0])
    assert len(ids) == text.count(messages[num_dropped:]) <= context - 8
    assert num_dropped == 0 or text.count(messages[num_dropped - 1 :]) > context - 8, "no message was left out in vain"
    return num_dropped, text.num_calls


@given(st.lists(st.integers(0, 400), min_size=2, max_size=60), st.integers(200, 2000), st.sampled_from([1, 3, 4, 9]))
async def test_the_fewest_messages_are_left_out(lengths: list[int], context: int, bytes_a_token: int) -> None:
    await assert_fewest_left_out([*lengths, 10], context, bytes_a_token)


@pytest.mark.parametrize("bytes_a_token", [1, 4, 7])
async def test_a_long_conversation_is_encoded_a_few_times(bytes_a_token: int) -> None:
    lengths = [(number * 7919) % 900 for number in range(2000)]
    num_dropped, num_calls = await assert_fewest_left_out(lengths, 20_000, bytes_a_token)
    assert 1000 < num_dropped < 2000 and num_calls <= 8


async def test_sizes_that_say_nothing_of_the_tokens_still_lead_to_the_end() -> None:
    lengths = [0] * 1000 + [3_000] * 2 + [0] * 1000
    num_dropped, num_calls = await assert_fewest_left_out(lengths, 3_500, 1)
    assert num_dropped > 0 and num_calls <= 2 + 6 + 11
