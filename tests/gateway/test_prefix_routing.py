"""Prompts with a common prefix go to the same engine, unless it has much more work than the others."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.routing.choose import BLOCK_TOKENS, SPARE_REQUESTS, choose, prefix_keys
from moiety_platform.routing.prefix_names import SLICE_TOKENS, PrefixNames
from moiety_platform.routing_settings import PrefixRouting
from moiety_wire.classes import STANDARD
from moiety_wire.engine_load import ClassLoad, Load, SleepState
from moiety_wire.messages import ModelCard
from moiety_wire.prefix_events import PrefixEvents, pack_names

from .conftest import NewCard, StartGateway

SALT = b"a tenant's"
NUM_PROMPTS = 1500


def prompt_of(number: int, num_tokens: int = 300) -> list[int]:
    return random.Random(number).choices(range(32_000), k=num_tokens)


PROMPTS = [prompt_of(number) for number in range(NUM_PROMPTS)]


def engine(card: ModelCard, address: str, *, inflight: int = 0, wait_s: float = 0.0) -> EngineState:
    fields: dict[str, Any] = dict.fromkeys(ClassLoad.__struct_fields__, 0) | {
        "rejected_total": {},
        "preempted_total": {},
    }
    standard = ClassLoad(**{**fields, "name": "standard", "predicted_ttft_s": wait_s})
    load = dict.fromkeys(Load.__struct_fields__, 0) | {"engine_id": "e", "draining": False, "classes": [standard]}
    load |= {"sleep": SleepState.AWAKE, "sleep_problem": ""}
    return EngineState(address, True, "", card, Load(**load), inflight, 0.1)


def idle(card: ModelCard, number: int) -> list[EngineState]:
    return [engine(card, f"tcp://engine-{i}:5757") for i in range(number)]


def chosen(engines: Any, prompt: Any, salt: bytes = SALT) -> str:
    return choose(engines, "tiny", STANDARD, prefix_keys(salt, prompt)).address


def test_a_prompt_has_one_key_for_each_depth_that_it_fills() -> None:
    prompt = prompt_of(1)
    assert [len(prefix_keys(SALT, prompt[:n])) for n in (15, 16, 63, 64, 255, 256, 300)] == [0, 1, 1, 2, 2, 3, 3]
    assert prefix_keys(SALT, prompt[:64]) == prefix_keys(SALT, prompt)[:2]
    changed = [*prompt[:20], prompt[20] + 1, *prompt[21:]]
    same = [a == b for a, b in zip(prefix_keys(SALT, prompt), prefix_keys(SALT, changed), strict=True)]
    assert same == [True, False, False]


def test_a_conversation_stays_where_it_began_whatever_the_order_of_the_engines(any_card: ModelCard) -> None:
    engines = idle(any_card, 5)
    for prompt in PROMPTS[:50]:
        turns = {chosen(random.sample(engines, 5), prompt[:length]) for length in (16, 40, 100, 300)}
        assert len(turns) == 1


def test_prompts_spread_evenly(any_card: ModelCard) -> None:
    counts = Counter(chosen(idle(any_card, 5), prompt) for prompt in PROMPTS)
    assert len(counts) == 5
    assert max(counts.values()) < 1.25 * NUM_PROMPTS / 5


def test_an_engine_that_joins_or_leaves_moves_only_what_is_its_own(any_card: ModelCard) -> None:
    four = idle(any_card, 5)[:4]
    five = idle(any_card, 5)
    moved = 0
    for prompt in PROMPTS:
        before, after = chosen(four, prompt), chosen(five, prompt)
        assert after in (before, five[4].address)
        moved += after != before
    assert 0.8 * NUM_PROMPTS / 5 < moved < 1.2 * NUM_PROMPTS / 5


def test_another_tenants_same_prompt_goes_independent_ways(any_card: ModelCard) -> None:
    engines = idle(any_card, 4)
    together = sum(chosen(engines, prompt) == chosen(engines, prompt, b"another's") for prompt in PROMPTS)
    assert 0.2 < together / NUM_PROMPTS < 0.3  # one in four, by chance
    assert not set(prefix_keys(SALT, PROMPTS[0])) & set(prefix_keys(b"another's", PROMPTS[0]))


@pytest.mark.parametrize("inflight", [0, 100])
def test_an_engine_with_much_more_to_do_gives_its_prompts_to_others(any_card: ModelCard, inflight: int) -> None:
    names = [state.address for state in idle(any_card, 4)]
    favourite = chosen(idle(any_card, 4), PROMPTS[0])
    spare = max(SPARE_REQUESTS, inflight // 4)
    near = [engine(any_card, n, inflight=inflight + spare * (n == favourite)) for n in names]
    far = [engine(any_card, n, inflight=inflight + (spare + 1) * (n == favourite)) for n in names]
    late = [engine(any_card, n, inflight=inflight, wait_s=9.0 * (n == favourite)) for n in names]
    assert chosen(near, PROMPTS[0]) == favourite
    assert chosen(far, PROMPTS[0]) != favourite
    assert chosen(late, PROMPTS[0]) != favourite
    like_it = [[*PROMPTS[0][:64], *prompt] for prompt in PROMPTS[:20]]  # of one conversation, or one system prompt
    ends = Counter(chosen(far, prompt) for prompt in like_it)
    assert favourite not in ends


def test_a_short_prompt_goes_to_the_least_loaded(any_card: ModelCard) -> None:
    engines = [engine(any_card, "a", inflight=2), engine(any_card, "b", inflight=1), engine(any_card, "c", inflight=3)]
    assert {chosen(engines, prompt[: BLOCK_TOKENS - 1]) for prompt in PROMPTS[:20]} == {"b"}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, NUM_PROMPTS - 1))
def test_no_engine_is_chosen_that_has_much_more_to_do_than_the_least_loaded(
    any_card: ModelCard, inflight: Any, number: Any
) -> None:
    engines = [engine(any_card, f"tcp://engine-{i}", inflight=count) for i, count in enumerate(inflight)]
    taken = next(e for e in engines if e.address == chosen(engines, PROMPTS[number]))
    least = min(inflight)
    assert taken.num_inflight <= least + max(SPARE_REQUESTS, least / 4)


async def test_the_turns_of_a_conversation_reach_one_engine(start_gateway: StartGateway, new_card: NewCard) -> None:
    engines = [FakeEngineClient(new_card(f"engine-{i}")) for i in range(3)]
    async with start_gateway(engines) as gateway:
        for conversation in range(4):
            messages: list[Any] = [{"role": "user", "content": f"this is conversation {conversation}, and it begins"}]
            before = [len(one.submits) for one in engines]
            for _ in range(3):
                answer = await gateway.client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
                messages += [answer.choices[0].message.model_dump(include={"role", "content"}), messages[0]]
            came = [len(one.submits) - count for one, count in zip(engines, before, strict=True)]
            assert sorted(came) == [0, 0, 3]


async def test_a_long_prompt_goes_where_its_blocks_are_until_the_setting_is_affinity(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(new_card(f"engine-{i}", max_context_tokens=100_000)) for i in range(3)]
    prompt = [token % 256 for token in prompt_of(1, 3 * SLICE_TOKENS)]
    async with start_gateway(engines) as gateway:

        async def receiver() -> int:
            before = [len(one.submits) for one in engines]
            await gateway.client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            (found,) = (i for i, one in enumerate(engines) if len(one.submits) > before[i])
            return found

        preferred = await receiver()  # by affinity, since no engine publishes its blocks
        names = PrefixNames(engines[preferred].submits[0], 16)
        while not names.is_complete:
            names.hash_slice()
        for engine in engines:
            engine.prefix_blocks = PrefixBlocks()
            assert engine.prefix_blocks.apply(PrefixEvents(0, b"", is_start=True))
        holder = (preferred + 1) % 3
        blocks = engines[holder].prefix_blocks
        assert blocks is not None and blocks.apply(PrefixEvents(0, pack_names(names.names), is_start=True))
        assert {await receiver() for _ in range(5)} == {holder}
        settings = gateway.live.now
        changes = await gateway.live.change(settings.model_copy(update={"prefix_routing": PrefixRouting.AFFINITY}))
        assert list(changes.at_once) == ["prefix_routing"]
        assert {await receiver() for _ in range(5)} == {preferred}
        await gateway.live.change(settings)
        assert {await receiver() for _ in range(5)} == {holder}


@contextmanager
def turns_of_hashing() -> Iterator[list[int]]:
    """Yield the turns of the event loop in which slices of prompts are hashed, one item for each slice."""
    found, turn, hashing = list[int](), 0, PrefixNames.hash_slice.__code__

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is hashing:
            found.append(turn)

    counting = asyncio.get_running_loop().create_task(count_turns())
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        counting.cancel()


@pytest.mark.parametrize("num_slices", [1, 2])
async def test_each_prompt_is_hashed_once_for_all_its_choices_and_in_turns_of_its_own(
    start_gateway: StartGateway, new_card: NewCard, num_slices: int
) -> None:
    engines = [FakeEngineClient(new_card(f"engine-{i}", max_context_tokens=100_000)) for i in range(2)]
    for one in engines:
        one.prefix_blocks = PrefixBlocks()
        assert one.prefix_blocks.apply(PrefixEvents(0, b"", is_start=True))
    prompts = [[token % 256 for token in prompt_of(number, num_slices * SLICE_TOKENS)] for number in range(3)]
    async with start_gateway(engines) as gateway:
        with turns_of_hashing() as turns:
            answer = await gateway.client.completions.create(model="tiny", prompt=prompts, n=4, max_tokens=1)
        assert len(answer.choices) == 12
        assert len(turns) == 3 and len(set(turns)) == 3
