"""What an external engine sends, byte by byte: event streams, compressed content, counts, ends and errors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.errors import EngineFailed, EngineOverloaded, EngineRefused, UpstreamError
from moiety_platform.external_engines.completions import Completions
from moiety_platform.external_engines.dialect import MalformedAnswer, count_of
from moiety_platform.external_engines.events import DONE, MAX_EVENT_BYTES, EventParser
from moiety_platform.external_engines.failures import (
    MAX_RETRY_S,
    cleaned,
    error_of_answer,
    error_of_event,
    retry_seconds,
)
from moiety_wire.messages import FinishReason

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
EVENTS = [{"a": 1}, {"b": "é\r"}, {"c": [{}]}, DONE]
STREAM = b'data: {"a": 1}\n\n: kept alive\n\ndata:{"b": "\xc3\xa9\\r"}\n\ndata: {\ndata: "c": [{}]}\n\ndata: [DONE]\n\n'


def parsed(chunks: Any) -> list[Any]:
    parser = EventParser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events + parser.end()


def generic() -> Completions:
    return Completions(ExternalAddress.parse("openai+http://127.0.0.1:1/v1?model=m&kind=generic&tokenizer=t"))


@given(
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.booleans(),
    st.sampled_from([0, 1, 2]),
    st.lists(st.integers(1, 40), max_size=40),
)
def test_events_parse_alike_with_any_line_ends_and_chunks(line_end: Any, marked: Any, missing: Any, sizes: Any) -> None:
    data = (b"\xef\xbb\xbf" if marked else b"") + STREAM.replace(b"\n", line_end)
    data = data[: len(data) - missing * len(line_end)]
    chunks: list[Any] = []
    for size in sizes:
        chunks, data = [*chunks, data[:size]], data[size:]
    assert parsed([*chunks, data]) == EVENTS


def test_the_data_of_one_line_is_an_event_before_anything_follows() -> None:
    parser = EventParser()
    assert list(parser.feed(b'data: {"a": 1}\n')) == [{"a": 1}]
    assert list(parser.feed(b'data: {"a": 2}\r')) == [{"a": 2}]
    assert list(parser.feed(b"\ndata: [DONE]")) == []
    assert parser.end() == [DONE]


def test_an_event_that_is_cut_off_is_none_and_one_that_is_no_json_is_refused() -> None:
    assert parsed([b'data: {"a": 1}\n\ndata: {"b']) == [{"a": 1}]
    for data in (b"data: {what\n\n", b"data: [1]\n\n", b'data: {"a": "\xff"}\n\n'):
        with pytest.raises(MalformedAnswer):
            list(EventParser().feed(data))


def test_unparsable_chunks_do_not_affect_earlier_ones() -> None:
    events = EventParser().feed(b'data: {"a": 1}\n\ndata: {what\n\n')
    assert next(events) == {"a": 1}
    with pytest.raises(MalformedAnswer):
        next(events)


@pytest.mark.parametrize("chunk", [b"x" * 65536, b"data: {x\n" * 8192])
def test_neither_a_line_nor_an_event_grows_without_bound(chunk: bytes) -> None:
    parser = EventParser()
    with pytest.raises(MalformedAnswer, match="more than"):
        for _ in range(2 + 4 * MAX_EVENT_BYTES // len(chunk)):
            list(parser.feed(chunk))


def test_an_object_without_a_field_name_is_an_event() -> None:
    assert parsed([b'{"choices": []}']) == parsed([b'{"choices": []}\n']) == [{"choices": []}]


def test_error_events_of_every_format_are_errors() -> None:
    message = {"message": "no", "code": 503}
    for data in (
        b'data: {"error": {"message": "no", "code": 503}}\n\n',
        b'event: error\ndata: {"message": "no", "code": 503}\n\n',
        b'error: {"message": "no", "code": 503}\n\n',
    ):
        assert parsed([data]) == [{"error": message}]


def test_counts_are_read_from_what_servers_write_and_nonsense_is_none() -> None:
    assert [count_of(told) for told in (3, 3.0, "3", 0)] == [3, 3, 3, 0]
    nonsense: tuple[Any, ...] = (None, True, -1, 3.5, "3.0", "x", "", "９", "9" * 400, 1e300, float("nan"), [3], {})
    assert {count_of(told) for told in nonsense} == {None}


def test_only_known_finish_reasons_are_ends() -> None:
    def finish(word: Any) -> Any:
        return generic().read({"choices": [{"text": "a", "finish_reason": word}]})

    assert finish("stop").finish is finish("eos_token").finish is FinishReason.STOP
    assert finish("length").finish is FinishReason.LENGTH
    assert finish("content_filter").finish is FinishReason.CONTENT_FILTER
    word: Any
    for word in ("", "null", " ", "STOPPED", "insufficient_system_resource", None, 0, False, ["stop"], {}):
        assert finish(word).finish is None, word
    for word in ("error", "abort", "cancelled"):
        assert isinstance(finish(word), EngineFailed)


@pytest.mark.parametrize("choices", [{"choices": None}, {"choices": []}, {}])
def test_an_event_without_choices_brings_counts_only(choices: dict[str, Any]) -> None:
    piece = generic().read({**choices, "usage": {"completion_tokens": 3.0}})
    assert (piece.text, piece.num_output_tokens, piece.is_usage) == ("", 3, True)


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        (None, None),
        ("7", 7),
        ("7.25", 7.25),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90),
        ((NOW + timedelta(seconds=90)).strftime("%A, %d-%b-%y %H:%M:%S GMT"), 90),
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 1),
        ("-5", 1),
        ("0", 1),
        ("1e9", MAX_RETRY_S),
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_S),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
        ("9" * 200, None),
    ],
)
def test_retry_after_is_seconds_a_decimal_or_a_date_and_bounded(told: Any, seconds: Any) -> None:
    assert retry_seconds(told, NOW) == seconds


@given(st.text(max_size=40))
def test_retry_after_is_absent_or_bounded_for_any_header(told: Any) -> None:
    seconds = retry_seconds(told, NOW)
    assert seconds is None or 1 <= seconds <= MAX_RETRY_S


def test_every_status_has_one_judgement() -> None:
    for status in range(300, 600):
        error = error_of_answer(status, b'{"error": "no"}', {"retry-after": "5"}, NOW)
        assert error.upstream == UpstreamError(status, "no")
        if status in (429, 503, 529):
            assert isinstance(error, EngineOverloaded)
            assert (type(error), error.status, error.retry_after_s) == (EngineOverloaded, 503, 5)
            untold = error_of_answer(status, b"", {}, NOW)
            assert isinstance(untold, EngineOverloaded)
            assert (error.asks_to_wait, untold.asks_to_wait, untold.retry_after_s) == (True, False, 1)
        elif status in (408, 425, 499) or status >= 500:
            assert (type(error), error.status) == (EngineFailed, 502)
        else:
            assert isinstance(error, EngineRefused)
            assert (type(error), error.status, error.upstream_status) == (EngineRefused, 502, status)
            assert error.retry_after_s is None


@given(
    st.integers(300, 599),
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=8),
            lambda more: (
                st.lists(more, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["error", "message", "type", "code", "param", "detail", "status"]), more, max_size=4
                )
            ),
            max_leaves=8,
        ),
    ),
)
def test_error_text_of_external_engines_never_reaches_the_client(status: Any, told: Any) -> None:
    marked = {"error": {"message": "maximum context length xyzzy", "param": "xyzzy", "more": str(told)}}
    body = told if isinstance(told, bytes) else str(told).encode()
    for error in (
        error_of_answer(status, body, {}, NOW),
        error_of_event(told),
        error_of_answer(status, str(marked).replace("'", '"').encode(), {}, NOW),
    ):
        assert error.message.isascii()
        assert "xyzzy" not in error.message


def test_secrets_are_taken_out_of_what_the_operator_sees() -> None:
    message = "key hidden-key-1, sk-abcdefgh12345678 and\n\x1b[31m Bearer abc.def refused"
    shown = cleaned(UpstreamError(401, message), ["hidden-key-1"]).message
    assert not any(secret in shown for secret in ("hidden-key-1", "abcdefgh", "abc.def", "\n", "\x1b"))
    assert "refused" in shown
    assert len(cleaned(UpstreamError(401, "x " * 100_000), []).message) <= 500
