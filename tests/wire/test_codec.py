from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_wire.classes import PRIORITY, STANDARD, OverloadAction
from moiety_wire.codec import decode_to_engine, decode_to_gateway, encode, join_in_frames
from moiety_wire.engine_load import ClassLoad, Load
from moiety_wire.errors import UndecodableMessage
from moiety_wire.messages import (
    Abort,
    Accepted,
    Extend,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    ModelCard,
    Sampling,
    Stopping,
    Submit,
    TokenLogprob,
    TokenRules,
    Tokens,
    TopLogprob,
)
from moiety_wire.trace_events import Event, EventKind, Phases, Reason

SUBMIT = Submit(
    request_id="r",
    seq=0,
    model="m",
    tenant_id="t",
    service=msgspec.structs.replace(PRIORITY, on_overload=OverloadAction.DOWNGRADE),
    fallback=STANDARD,
    prompt_ids=[1, 2, 3],
    sampling=Sampling(
        temperature=0.5,
        logit_bias={7: -1.5},
        seed=2**63 - 1,
        num_logprobs=0,
        token_rules=TokenRules((1, 2), ((3,), (4, 5)), ("a", "b c")),
    ),
    stopping=Stopping(max_tokens=4, stop=("é", "\n\n"), stop_token_ids=(9,)),
    credit_tokens=16,
    cache_salt=b"\x00\xff",
    arrival_unix_ns=1_800_000_000_000_000_000,
    deadline_unix_ns=1_800_000_000_000_000_001,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
TO_ENGINE = [Hello("g"), Heartbeat(3), SUBMIT, Extend("r", 1, 32, last=True), Abort("r", 2)]
LOGPROBS = [TokenLogprob("\N{REPLACEMENT CHARACTER}", b"\xe6", -0.25, [TopLogprob("a", b"a", -1.0)])]
EVENT = Event(5, EventKind.PREEMPTED, Reason.URGENT_NEEDS_BLOCKS, "other")
CLASS_LOAD = ClassLoad("flex", 1, 2, 0.5, 3, {"shed": 1}, 0, {"over_share": 2}, 0, 1, 9)
CARD = ModelCard("e", "m", "qwen3_moe", "{}", "", {"eos_token": "</s>"}, (2,), 4096, 32000, 20, 1, "bfloat16", "cpu")
TO_GATEWAY = [
    CARD,
    Accepted("r", 0, "standard", Reason.IN_TIME, 0.25),
    Tokens("r", 1, 0, [5, 6], "", LOGPROBS),
    Finished("r", 2, FinishReason.STOP, 3, 0, 2, Phases(1, 2, 3, 4), "é", "flex", [EVENT], 7, "\n\n"),
    Failed("r", 0, FailureCode.OVERLOADED, "later", 0, Reason.PREDICTED_LATE, 1.5),
    Load(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        engine_id="e",
        seq=0,
        draining=True,
        host_blocks_total=2,
        classes=[CLASS_LOAD],
    ),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_to_an_engine_come_back_as_they_were(message: object) -> None:
    assert decode_to_engine(encode(message)) == [message]


@pytest.mark.parametrize("message", TO_GATEWAY, ids=lambda message: type(message).__name__)
def test_messages_to_a_gateway_come_back_as_they_were(message: object) -> None:
    assert decode_to_gateway(encode(message)) == [message]


def test_a_frame_brings_several_messages_in_their_order() -> None:
    assert decode_to_engine(encode(*TO_ENGINE)) == TO_ENGINE
    assert decode_to_gateway(encode(*TO_GATEWAY)) == TO_GATEWAY
    with pytest.raises(UndecodableMessage, match="engine"):
        decode_to_engine(encode(SUBMIT, TO_GATEWAY[1]))


def test_a_message_is_refused_by_the_side_that_it_is_not_for() -> None:
    with pytest.raises(UndecodableMessage, match="engine"):
        decode_to_engine(encode(TO_GATEWAY[1]))
    with pytest.raises(UndecodableMessage, match="gateway"):
        decode_to_gateway(encode(SUBMIT))


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_undecodable(data: bytes) -> None:
    for decode, side in ((decode_to_engine, "an engine"), (decode_to_gateway, "a gateway")):
        try:
            decode(data)
        except UndecodableMessage as exc:
            assert f"message to {side}" in str(exc)


@given(data=st.data())
def test_a_damaged_message_is_a_message_or_undecodable(data: st.DataObject) -> None:
    whole = bytearray(encode(SUBMIT))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        decode_to_engine(cut)
    except UndecodableMessage as exc:
        assert "message to an engine" in str(exc)


def test_a_field_of_a_later_version_does_no_harm() -> None:
    assert decode_to_engine(encode(Hello("g")).replace(b"\x84", b"\x85", 1) + b"\xa3new\x01") == [Hello("g")]


def test_deep_nesting_is_undecodable_or_skipped_but_never_an_accident() -> None:
    hello = encode(Hello("g"))
    nested = b"\x85" + hello[1:] + b"\xa3new" + b"\x91" * 200_000 + b"\x01"
    with pytest.raises(UndecodableMessage):
        decode_to_engine(nested)


@given(st.lists(st.sampled_from(TO_ENGINE)), st.integers(1, 2000))
def test_messages_in_frames_arrive_whole_and_in_order_and_only_one_alone_is_larger_than_the_bound(
    messages: Any, max_bytes: Any
) -> None:
    frames = list(join_in_frames(map(encode, messages), max_bytes))
    arrived = [decode_to_engine(frame) for frame, _ in frames]
    assert [message for some in arrived for message in some] == messages
    assert [len(some) for some in arrived] == [num_messages for _, num_messages in frames]
    assert all(len(frame) <= max_bytes + 5 or num_messages == 1 for frame, num_messages in frames)


def test_releases_that_know_roles_and_those_that_do_not_understand_each_other() -> None:
    told = msgspec.msgpack.decode(encode(SUBMIT))
    assert not {"hand_over", "transfer_id"} & told.keys(), "an older engine is told nothing that it does not know"
    older = msgspec.msgpack.decode(encode(CARD))
    for name in ("role", "hands_over", "kv_address", "kv_host", "kv_secret", "kv_ranks"):
        del older[name]
    assert decode_to_gateway(msgspec.msgpack.encode(older)) == [CARD]
    assert decode_to_gateway(msgspec.msgpack.encode({**older, "what_comes_next": 1})) == [CARD]
