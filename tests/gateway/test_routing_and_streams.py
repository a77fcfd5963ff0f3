"""Pure functions: the choice of a replica, and the stream of an engine's messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire_submits import wire_submit

from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import BadRequest, EngineFailed, NotFound, Unavailable
from moiety_platform.inference.request_body import decode_body
from moiety_platform.openai_api.schemas import ChatBody
from moiety_platform.routing.choose import choose
from moiety_wire.classes import FLEX, PRIORITY
from moiety_wire.engine_load import ClassLoad, Load, SleepState
from moiety_wire.messages import (
    Abort,
    Accepted,
    Extend,
    Finished,
    FinishReason,
    ModelCard,
    Tokens,
)
from moiety_wire.seeds import seed_of_choice
from moiety_wire.trace_events import Phases, Reason

from .conftest import NewCard

ACCEPTED = Accepted("r", 0, "standard", Reason.IN_TIME)


def load(**changes: Any) -> Load:
    fields: dict[str, Any] = dict.fromkeys(Load.__struct_fields__, 0) | {
        "engine_id": "e",
        "draining": False,
        "classes": [],
    }
    fields["sleep"] = SleepState.AWAKE
    return Load(**{**fields, **changes})


def state(card: ModelCard, address: str, *, healthy: bool = True, inflight: int = 0, **loads: Any) -> EngineState:
    return EngineState(address, healthy, "" if healthy else "gone", card, load(**loads) if loads else None, inflight)


def test_the_engine_with_the_least_to_do_is_chosen(new_card: NewCard) -> None:
    engines = [
        state(new_card(), "a", num_running=3),
        state(new_card(), "b", num_running=1, num_waiting=1),
        state(new_card(), "c", num_running=0, inflight=9),
        state(new_card(model="other"), "d"),
        state(new_card(), "e", healthy=False),
        state(new_card(), "f", draining=True),
        state(new_card(), "g", sleep=SleepState.FALLING_ASLEEP),
    ]
    assert choose(engines, "tiny").address == "b"
    assert choose(engines, "other").address == "d"


def busy(
    card: ModelCard, address: str, predicted_ttft_s: float | None, *, age_s: float = 0.5, **loads: Any
) -> EngineState:
    classes = [class_load("priority", predicted_ttft_s=predicted_ttft_s), class_load("flex", predicted_ttft_s=0.0)]
    return EngineState(address, True, "", card, load(classes=classes, **loads), 0, age_s)


def class_load(name: str, **changes: Any) -> ClassLoad:
    fields: dict[str, Any] = dict.fromkeys(ClassLoad.__struct_fields__, 0) | {
        "rejected_total": {},
        "preempted_total": {},
    }
    return ClassLoad(**{**fields, "name": name, **changes})


def test_the_engine_with_the_shortest_predicted_wait_in_the_class_is_chosen_and_then_the_one_with_least_to_do(
    new_card: NewCard,
) -> None:
    card = new_card()
    engines = [busy(card, "long", 2.0), busy(card, "short", 0.3, num_running=9), busy(card, "idle", 0.5, num_running=2)]
    assert choose(engines, "tiny", PRIORITY).address == "short"
    assert choose(engines, "tiny", FLEX).address == "long"  # no wait anywhere, and the least to do
    alike = [busy(card, "a", 0.20, num_running=9), busy(card, "b", 0.24, num_running=2)]
    assert choose(alike, "tiny", PRIORITY).address == "b"  # such a difference is noise


def test_an_engine_that_has_not_been_heard_for_long_comes_after_those_that_have(new_card: NewCard) -> None:
    card = new_card()
    engines = [busy(card, "stale", 0.0, age_s=3.0), busy(card, "slow", 9.0, num_running=9)]
    assert choose(engines, "tiny", PRIORITY).address == "slow"
    assert choose(engines[:1], "tiny", PRIORITY).address == "stale"


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_a_choice_is_always_healthy_and_none_is_better(any_card: ModelCard, engines: Any) -> None:
    card = any_card
    states = [
        state(card, str(i), healthy=healthy, inflight=inflight, draining=draining, num_running=running)
        for i, (healthy, draining, running, inflight) in enumerate(engines)
    ]
    able = [engine for engine in states if engine.healthy and not engine.draining]
    if not able:
        with pytest.raises(Unavailable):
            choose(states, card.model)
    else:
        chosen = choose(states, card.model)
        assert chosen in able
        work = [max(engine.load.num_running, engine.num_inflight) for engine in able]
        assert max(chosen.load.num_running, chosen.num_inflight) == min(work)


def test_a_request_goes_to_an_engine_whose_context_holds_it(new_card: NewCard) -> None:
    short = state(new_card(max_context_tokens=100), "short")
    long = state(new_card(max_context_tokens=200), "long", num_running=9)
    assert choose([short, long], "tiny", context_tokens=100).address == "short"
    assert choose([short, long], "tiny", context_tokens=101).address == "long"
    with pytest.raises(Unavailable):  # the one that held it has gone
        choose([short], "tiny", context_tokens=101)


def test_an_unknown_model_is_not_found_only_when_some_model_is_known(new_card: NewCard) -> None:
    with pytest.raises(NotFound, match="available: tiny"):
        choose([state(new_card(), "a", healthy=False)], "other")
    with pytest.raises(Unavailable):
        choose([state(None, "a", healthy=False)], "other")


def opened(credit_tokens: int = 10) -> tuple[Any, ...]:
    sent: list[Any] = []
    return EngineStream(wire_submit(credit_tokens=credit_tokens), None, sent.append), sent


def finished(seq: Any, num_output_tokens: int, reason: Any = FinishReason.STOP) -> Finished:
    return Finished("r", seq, reason, 1, 0, num_output_tokens, Phases(0))


async def test_messages_in_order_pass_and_the_end_brings_the_exact_count() -> None:
    stream, _ = opened()
    for message in (ACCEPTED, Tokens("r", 1, 0, [1, 2], "ab"), Tokens("r", 2, 2, [3], "c"), finished(3, 4)):
        stream.deliver(message)
    assert [message.text async for message in stream.messages()] == ["ab", "c", ""]
    assert (stream.ended, stream.num_output_tokens) == (True, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        Tokens("r", 2, 0, [1], "a"),  # a message was lost
        Tokens("r", 0, 0, [1], "a"),  # a message came twice
        Tokens("r", 1, 1, [1], "a"),  # a token was lost
        Tokens("r", 1, 0, [1] * 11, "a"),  # beyond the credit
    ],
)
async def test_a_gap_a_repeat_or_more_than_the_credit_breaks_the_stream_off(wrong: Any) -> None:
    stream, sent = opened(credit_tokens=10)
    stream.deliver(ACCEPTED)
    stream.deliver(wrong)
    with pytest.raises(EngineFailed) as caught:
        async for _ in stream.messages():
            pass
    assert caught.value.code == "engine_protocol_violation"
    assert sent == [Abort("r", 1)]


async def test_tokens_before_the_verdict_break_the_stream_off() -> None:
    stream, sent = opened()
    stream.deliver(Tokens("r", 0, 0, [1], "a"))
    with pytest.raises(EngineFailed, match="before the admission decision"):
        await stream.inbox.get()
    assert sent == [Abort("r", 1)]


async def test_credit_only_grows_and_nothing_is_sent_after_the_end() -> None:
    stream, sent = opened(credit_tokens=10)
    stream.extend(20)
    stream.extend(15)
    stream.deliver(finished(0, 0))
    stream.extend(30)
    stream.abort()
    assert sent == [Extend("r", 1, 20)]


async def test_an_unrequested_abort_is_a_failure_and_not_a_short_answer() -> None:
    stream, _ = opened()
    stream.deliver(finished(0, 3, FinishReason.ABORT))
    with pytest.raises(EngineFailed):
        await stream.inbox.get()
    assert stream.num_output_tokens == 3


@given(st.none() | st.integers(-(2**63), 2**63 - 1))
def test_seeds_of_choices_differ_fit_the_wire_and_begin_with_the_request_s_own(seed: Any) -> None:
    seeds = [seed_of_choice(seed, choice) for choice in range(16)]
    assert seeds[0] == seed
    if seed is not None:
        assert len(set(seeds)) == 16
        assert all(-(2**63) <= value < 2**63 for value in seeds)


_nested = st.recursive(
    st.none() | st.text('[]{}"\\ab', max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text('[{"\\', max_size=3), children, max_size=3)
    ),
    max_leaves=40,
)


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


@given(_nested, st.integers(1, 6))
def test_the_limit_of_depth_counts_brackets_outside_of_strings_only(value: Any, limit: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(ChatBody, msgspec.json.encode({"x": value}), limit)
    assert (caught.value.code == "json_too_deep") == (1 + _depth(value) > limit)


def test_an_engine_proves_that_it_holds_nothing_only_if_it_ran_all_the_while(new_card: NewCard) -> None:
    """Also to a gateway that was started later, as the only one is after its predecessor was killed."""

    def told(**loads: Any) -> EngineState:
        fields = {"unacknowledged_replicas": [], **loads}
        return EngineState("a", True, "", new_card(), load(**fields), 0, 0.1, connected_for_s=3.0)

    assert told(running_for_s=60.0).has_settled_for("dead", 30.0)
    assert not told(running_for_s=20.0).has_settled_for("dead", 30.0)
    assert not told(running_for_s=60.0, unacknowledged_replicas=["dead"]).has_settled_for("dead", 30.0)
