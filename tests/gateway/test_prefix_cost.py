"""A request goes to the engine at which it costs least, by the blocks that the engines publish."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import msgspec
from tests.wire_submits import wire_submit

from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.routing.choose import Prefix, choose
from moiety_platform.routing.prefix_cost import RUNNING_TOKENS
from moiety_platform.routing.prefix_names import SLICE_TOKENS, PrefixNames
from moiety_wire.block_hashes import block_hash, root_hash
from moiety_wire.classes import STANDARD
from moiety_wire.engine_load import Load
from moiety_wire.messages import ModelCard, Submit
from moiety_wire.prefix_events import PrefixEvents, block_name, pack_names

RANDOM = random.Random(1)
RUNNING = 20 * 16 // RUNNING_TOKENS - 1  # requests that cost less than 20 blocks
PROMPT = list(range(1000, 1640))
SUBMIT = wire_submit("r", tenant_id="t", prompt_ids=PROMPT, cache_salt=b"s")


def names_of(submit: Submit = SUBMIT) -> list[int]:
    prefix = PrefixNames(submit, 16)
    while not prefix.is_complete:
        prefix.hash_slice()
    return prefix.names


NAMES = names_of()


def engine(
    card: ModelCard,
    address: str,
    num_blocks: int | None,
    *,
    pending: int = 0,
    num_running: int = 0,
    unreported: int = 0,
) -> EngineState:
    """Return an engine with that many blocks of the prompt.

    It has `pending` tokens to prefill, and has computed 100 tokens of a prompt on average.
    """
    load = Load(
        *(num_running, 0, 0, 100, 0, 0, 16, 1, 1000, 0, 10, 10),
        engine_id=address,
        seq=0,
        pending_prefill_tokens=pending,
    )
    blocks = None
    if num_blocks is not None:
        blocks = PrefixBlocks()
        blocks.apply(PrefixEvents(0, pack_names(NAMES[:num_blocks]), is_start=True))
    return EngineState(address, True, "", card, load, unreported, 0.1, prefix_blocks=blocks, num_unreported=unreported)


def chosen(*engines: EngineState, prefix: Prefix | None = None) -> str:
    return choose(engines, "tiny", STANDARD, prefix or Prefix(SUBMIT), kv_aware=RANDOM).address


def test_the_longest_cached_prefix_decides_until_the_queue_costs_more(card: ModelCard) -> None:
    assert chosen(engine(card, "a", 10), engine(card, "b", 30), engine(card, "c", 0)) == "b"
    assert chosen(engine(card, "a", 10), engine(card, "b", 30, pending=300), engine(card, "c", 0)) == "b"
    assert chosen(engine(card, "a", 10), engine(card, "b", 30, pending=350), engine(card, "c", 0)) == "a"


def test_running_requests_and_those_sent_since_the_last_report_count(card: ModelCard) -> None:
    free, held = engine(card, "a", 10), partial(engine, card, "b", 30)
    assert chosen(free, held(num_running=RUNNING)) == "b"
    assert chosen(free, held(num_running=RUNNING + 2)) == "a"
    assert chosen(free, held(unreported=3)) == "b"
    assert chosen(free, held(unreported=4)) == "a", "they have about 400 tokens, more than 20 blocks"


def test_requests_sent_since_the_last_report_count_beside_those_of_other_gateways_in_it(card: ModelCard) -> None:
    free, held = engine(card, "a", 0), partial(engine, card, "b", 39, num_running=RUNNING)
    assert chosen(free, held()) == "b"
    assert chosen(free, held(unreported=4)) == "a", "all running requests are those of another gateway"


def test_after_its_eviction_a_prompt_goes_where_its_prefix_is(card: ModelCard) -> None:
    first, second = engine(card, "a", 30), engine(card, "b", 20)
    assert chosen(first, second) == "a"
    assert first.prefix_blocks is not None
    first.prefix_blocks.apply(PrefixEvents(1, b"", pack_names(NAMES[5:])))
    assert chosen(first, second) == "b"


def test_a_prefix_that_all_engines_have_is_spread_over_them(card: ModelCard) -> None:
    counts = Counter(chosen(*(engine(card, name, 39) for name in "abcd")) for _ in range(400))
    assert len(counts) == 4 and min(counts.values()) > 50


def test_an_engine_without_events_or_a_prompt_with_an_adapter_keeps_affinity(card: ModelCard) -> None:
    held = engine(card, "a", 30), engine(card, "b", 0)
    silent = [msgspec.structs.replace(one, prefix_blocks=None) for one in held]
    by_affinity = {chosen(*silent) for _ in range(20)}
    assert len(by_affinity) == 1
    assert {chosen(held[0], silent[1]) for _ in range(20)} == by_affinity
    adapted = Prefix(msgspec.structs.replace(SUBMIT, adapter="x"))
    assert adapted.block_names(16) is None
    assert {choose(held, "tiny", STANDARD, adapted, kv_aware=RANDOM).address for _ in range(20)} == by_affinity


def test_while_the_snapshot_of_an_engine_is_missing_prompts_keep_affinity(card: ModelCard) -> None:
    preferred = chosen(*(engine(card, name, None) for name in "ab"))
    (other,) = {"a", "b"} - {preferred}
    held = [engine(card, preferred, 0), engine(card, other, 39)]
    assert chosen(*held) == other
    assert held[0].prefix_blocks is not None
    assert not held[0].prefix_blocks.apply(PrefixEvents(2, b"")), "message 1 is missing"
    assert chosen(*held) == preferred


def test_without_kv_aware_routing_the_blocks_do_not_matter(card: ModelCard) -> None:
    held = [engine(card, name, 39 * (name == "a")) for name in "abc"]
    prompts = [Prefix(wire_submit("r", prompt_ids=[number] * 40, cache_salt=b"s")) for number in range(20)]
    assert len({choose(held, "tiny", STANDARD, prompt).address for prompt in prompts}) == 3


def test_a_hole_in_a_cached_prefix_is_found_before_the_engine_is_chosen(card: ModelCard) -> None:
    first, second = engine(card, "a", 39), engine(card, "b", 20)
    assert first.prefix_blocks is not None
    first.prefix_blocks.apply(PrefixEvents(1, b"", pack_names([NAMES[4]])))
    assert first.prefix_blocks.estimate_prefix(NAMES) == 39
    assert {chosen(first, second) for _ in range(20)} == {"b"}


def test_an_engine_whose_report_is_stale_is_chosen_only_if_all_are(card: ModelCard) -> None:
    stale = msgspec.structs.replace(engine(card, "a", 39), load_age_s=60.0)
    assert chosen(stale, engine(card, "b", 0)) == "b"
    assert chosen(stale, msgspec.structs.replace(engine(card, "b", 0), load_age_s=60.0)) == "a"


def test_a_tenant_that_fills_a_cache_moves_no_prompt_of_others_from_another_engine(card: ModelCard) -> None:
    hostile = [block_name(block_hash(root_hash("h", b"h"), [number])) for number in range(2000)]
    first, second = engine(card, "a", 30), engine(card, "b", 0)
    assert second.prefix_blocks is not None
    second.prefix_blocks.apply(PrefixEvents(1, pack_names(hostile)))
    assert {chosen(first, second) for _ in range(20)} == {"a"}
    other = Prefix(msgspec.structs.replace(SUBMIT, tenant_id="h"))
    assert {chosen(first, second, prefix=other) for _ in range(40)} == {"a", "b"}, "nothing of it is cached"


def test_the_names_are_those_of_the_engines_and_are_hashed_in_slices() -> None:
    ids = [7 * number % 1009 for number in range(2 * SLICE_TOKENS + 33)]
    submit = wire_submit("r", tenant_id="t", prompt_ids=ids, cache_salt=b"s")
    prefix, parent, expected = PrefixNames(submit, 16), root_hash("t", b"s"), []
    for begin in range(0, len(ids) - 1, 16):
        parent = block_hash(parent, ids[begin : begin + 16])
        expected.append(block_name(parent))
    for length in (SLICE_TOKENS // 16, 2 * SLICE_TOKENS // 16, len(ids) // 16):
        prefix.hash_slice()
        assert prefix.names == expected[:length]
    assert prefix.is_complete


def test_the_names_of_another_tenant_or_salt_differ_and_the_last_token_is_left_out() -> None:
    assert len(NAMES) == 39
    for change in ({"tenant_id": "u"}, {"cache_salt": b"z"}):
        other: dict[str, Any] = dict(change)
        assert not set(names_of(msgspec.structs.replace(SUBMIT, **other))) & set(NAMES)
