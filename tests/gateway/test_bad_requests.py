"""Whatever is sent, bad input is answered by a 4xx in OpenAI's shape, and every authenticated request leaves a row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import RunningGateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COUNT_TOKENS = "/v1/messages/count_tokens"
RECORDED = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
GOOD_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
GOOD_COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
GOOD_RESPONSE = {"model": "tiny", "input": "hi", "max_output_tokens": 1}
TEXT = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
NESTED = b"[" * 100_000 + b"]" * 100_000


def chat(**changes: Any) -> bytes:
    return json.dumps({**GOOD_CHAT, **changes}).encode()


def completion(**changes: Any) -> bytes:
    return json.dumps({**GOOD_COMPLETION, **changes}).encode()


def message(**fields: Any) -> Any:
    return chat(messages=[fields])


BAD = [
    # the bytes
    (CHAT, b"", 400, None, "not valid JSON"),
    (CHAT, b"{", 400, None, "not valid JSON"),
    (CHAT, b'{"model": "tiny",}', 400, None, "not valid JSON"),
    (CHAT, b"\xff\xfe\x00", 400, None, "not valid JSON"),
    (CHAT, b'{"model": "\xc3\x28"}', 400, None, "not valid JSON"),
    (CHAT, b'{"model": "\\ud800"}', 400, None, "not valid JSON"),
    (CHAT, b"[]", 400, None, "must be a JSON object"),
    (CHAT, b"null", 400, None, "must be a JSON object"),
    (CHAT, b'"text"', 400, None, "must be a JSON object"),
    (CHAT, b"7", 400, None, "must be a JSON object"),
    (CHAT, b"NaN", 400, None, "must be a JSON object"),
    (CHAT, NESTED, 400, None, "nested deeper than 64"),
    (CHAT, b'{"metadata":' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}", 400, None, "nested deeper than 64"),
    (CHAT, b'{"x": "' + b"[" * 5000, 400, None, "not valid JSON"),
    (CHAT, b'{"pad": "' + b"x" * 10_000_000 + b'"}', 413, None, "larger than"),
    # the model
    (CHAT, b"{}", 400, "model", "missing"),
    (CHAT, chat(model=7), 400, "model", "valid string"),
    (CHAT, chat(model=""), 400, "model", ""),
    (CHAT, chat(model="nope"), 404, "model", "available: tiny"),
    (CHAT, chat(model="x" * 10_000), 400, "model", ""),
    # the messages
    (CHAT, chat(messages=[]), 400, "messages", "is empty"),
    (CHAT, chat(messages="hi"), 400, "messages", ""),
    (CHAT, chat(messages=None), 400, "messages", ""),
    (CHAT, chat(messages=[7]), 400, "messages.0", ""),
    (CHAT, message(role="wizard", content="hi"), 400, "messages.0.role", "'wizard' is not a role"),
    (CHAT, message(role=None, content="hi"), 400, "messages.0.role", ""),
    (CHAT, message(content="hi"), 400, "messages.0.role", "missing"),
    (CHAT, message(role="user"), 400, "messages.0.content", "missing"),
    (CHAT, message(role="user", content=None), 400, "messages.0.content", "null is for the assistant and for results"),
    (CHAT, message(content=None, role="system"), 400, "messages.0.content", "null is for the assistant and for"),
    (CHAT, chat(messages=[{"role": "user", "content": ""}] * 2049), 400, "messages", "may have 2,048 entries"),
    (CHAT, chat(logit_bias={str(i): "x" for i in range(4097)}), 400, "logit_bias", "may have 4,096"),
    (CHAT, message(role="user", content=7), 400, "messages.0.content", "string or a list of parts"),
    (CHAT, message(role="user", content=[{"type": "image_url"}]), 400, "messages.0.content", "list of parts"),
    (CHAT, message(role="user", content=[TEXT, IMAGE]), 400, "messages", "reads text only"),
    (CHAT, message(role="user", content=[{"type": "input_audio"}]), 400, "messages.0.content", "part 0 is audio"),
    (CHAT, message(role="user", content=[{"type": "file"}]), 400, "messages.0.content", "list of parts"),
    (CHAT, message(role="user", content=[{"type": "hologram"}]), 400, "messages.0.content", "unknown type 'hologram'"),
    (CHAT, message(role="assistant", content="", audio={"id": "a"}), 400, "messages.0.audio", "not supported"),
    # numbers
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    (CHAT, chat(max_tokens=-5), 400, "max_tokens", ""),
    (CHAT, chat(max_tokens="5"), 400, "max_tokens", "valid integer"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens", "valid integer"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens", ""),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens", ""),
    (CHAT, b'{"max_tokens": 1' + b"0" * 6000 + b"}", 400, None, "not valid JSON"),
    (CHAT, chat(max_tokens=10_000), 400, None, "10000 are asked for"),
    (CHAT, chat(min_tokens=9), 400, None, "'min_tokens' (9)"),
    (CHAT, chat(temperature=-0.1), 400, "temperature", "greater than or equal to 0"),
    (CHAT, chat(temperature="hot"), 400, "temperature", ""),
    (CHAT, chat(temperature=False), 400, "temperature", ""),
    (CHAT, b'{"temperature": NaN, "model": "tiny", "messages": []}', 400, "temperature", "finite"),
    (CHAT, b'{"temperature": 1e999, "model": "tiny", "messages": []}', 400, "temperature", "finite"),
    (CHAT, chat(top_p=-0.1), 400, "top_p", "greater than or equal to 0"),
    (CHAT, chat(top_k=-2), 400, "top_k", ""),
    (CHAT, chat(presence_penalty=2.1), 400, "presence_penalty", ""),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", ""),
    (CHAT, chat(repetition_penalty=1e-39), 400, "repetition_penalty", "0.01"),
    (COMPLETIONS, completion(repetition_penalty=1e-300), 400, "repetition_penalty", "0.01"),
    (CHAT, chat(seed=2**63), 400, "seed", ""),
    (CHAT, chat(n=0), 400, "n", ""),
    (CHAT, chat(n=17), 400, "n", ""),
    (CHAT, chat(logit_bias={"a": 1}), 400, "logit_bias", "token ids"),
    (CHAT, chat(logit_bias={"5": 101}), 400, "logit_bias.5", ""),
    (CHAT, chat(logit_bias={"5": "1"}), 400, "logit_bias.5", ""),
    (CHAT, chat(logit_bias={"257": 1}), 400, "logit_bias", "below 257"),
    (CHAT, chat(logit_bias={"²": 1}), 400, "logit_bias", "token ids"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias", ""),
    (CHAT, chat(stop_token_ids=[257]), 400, "stop_token_ids", "below 257"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids.0", ""),
    # the rest
    (CHAT, chat(stop=""), 400, "stop", "none of them empty"),
    (CHAT, chat(stop=["a"] * 33), 400, "stop", "at most 32"),
    (CHAT, chat(stop=[1]), 400, "stop", ""),
    (CHAT, chat(stream="yes"), 400, "stream", ""),
    (CHAT, chat(stream_options={"include_usage": True}), 400, None, "'stream' is true"),
    (CHAT, chat(top_logprobs=2), 400, None, "'logprobs' is true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", ""),
    (CHAT, chat(functions=[{"name": ""}]), 400, "functions.0.name", "is not a valid name of a tool"),
    (CHAT, chat(continue_final_message=True), 400, None, "needs a last message of the assistant"),
    (CHAT, chat(add_generation_prompt=False), 400, None, "'continue_final_message'"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities", "text only"),
    (CHAT, chat(audio={"voice": "ash", "format": "wav"}), 400, "audio", "text only"),
    (CHAT, chat(moderation={"model": "m"}), 400, "moderation", "moderate them yourself"),
    (CHAT, chat(metadata={str(i): "x" for i in range(17)}), 400, "metadata", "16 at most"),
    (CHAT, chat(metadata={str(i): 0 for i in range(9999)}), 400, "metadata", "16 at most"),
    (CHAT, chat(cache_salt=""), 400, "cache_salt", "at least 1"),
    (CHAT, chat(use_beam_search=True), 400, "use_beam_search", "not supported"),
    (CHAT, chat(prompt_logprobs=1, stream=True), 400, None, "not available in a stream"),
    (CHAT, chat(prompt_logprobs=-1), 400, "prompt_logprobs", "greater than or equal to 0"),
    (CHAT, chat(allowed_token_ids=[]), 400, "allowed_token_ids", "at least one"),
    (CHAT, chat(allowed_token_ids=[1] * 4097), 400, "allowed_token_ids", "may have 4,096"),
    (CHAT, chat(allowed_token_ids=[257]), 400, "allowed_token_ids", "below 257"),
    (CHAT, chat(bad_words=["a", " "]), 400, "bad_words.1", ""),
    (CHAT, chat(bad_words=["a"] * 129), 400, "bad_words", "may have 128"),
    (CHAT, chat(bad_words=["a" * 65]), 400, "bad_words.0", "64"),
    (CHAT, chat(truncate_prompt_tokens=0), 400, None, "leaves no prompt"),
    (CHAT, chat(truncation_side="middle"), 400, "truncation_side", "'left'"),
    (CHAT, chat(logprob_token_ids=[5]), 400, "logprob_token_ids", "most likely tokens"),
    (CHAT, chat(logits_processors=["a.b"]), 400, "logits_processors", "runs no code of clients"),
    (CHAT, chat(chat_template="{{ messages }}"), 400, "chat_template", "cannot bring a chat template"),
    (CHAT, chat(structured_outputs={"structural_tag": "{}"}), 400, "structured_outputs.structural_tag", "'tools'"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", "'json_schema'"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format", "'json_schema' is missing"),
    (CHAT, chat(guided_json=[1]), 400, "guided_json", "as an object or as its text"),
    (CHAT, chat(structured_outputs={"choice": ["a", ""]}), 400, "structured_outputs.choice", "a choice is empty"),
    (CHAT, chat(guided_regex="a" * 70_000), 400, "guided_regex", "it may have 65,536"),
    (CHAT, chat(service_tier="gold"), 400, "service_tier", "'auto'"),
    # completions
    (COMPLETIONS, b'{"model": "tiny"}', 400, "prompt", ""),
    (COMPLETIONS, completion(prompt=""), 400, None, "'prompt' is empty"),
    (COMPLETIONS, completion(prompt=[]), 400, None, "'prompt' is empty"),
    (COMPLETIONS, completion(prompt=[[]]), 400, "prompt", "is empty"),
    (COMPLETIONS, completion(prompt=["a"] * 2049), 400, "prompt", "at most 2,048"),
    (COMPLETIONS, completion(prompt=["a", ""]), 400, None, "prompt is empty"),
    (COMPLETIONS, completion(prompt=[1, "a"]), 400, "prompt", "list of token ids"),
    (COMPLETIONS, completion(prompt=[1, True]), 400, "prompt", "list of token ids"),
    (COMPLETIONS, completion(prompt=[-1]), 400, "prompt", ""),
    (COMPLETIONS, completion(prompt=[257]), 400, "prompt", "below 257"),
    (COMPLETIONS, completion(prompt=[10**12]), 400, "prompt", ""),
    (COMPLETIONS, completion(prompt={"a": 1}), 400, "prompt", ""),
    (COMPLETIONS, completion(prompt=["a"] * 65, n=2), 400, "n", "may have 128"),
    (COMPLETIONS, completion(suffix="end"), 400, "suffix", "not supported"),
    (COMPLETIONS, completion(best_of=3), 400, None, "'best_of'"),
    (COMPLETIONS, completion(echo=True, logprobs=1, stream=True), 400, None, "'echo' together with 'logprobs'"),
    (COMPLETIONS, completion(logprobs=True), 400, "logprobs", ""),
    (COMPLETIONS, completion(echo=True, truncate_prompt_tokens=2), 400, None, "'echo' cannot be combined with"),
]


async def test_malformed_requests_get_4xx_that_name_the_field_and_leave_one_row_each(gateway: RunningGateway) -> None:
    for number, (path, body, status, param, words) in enumerate(BAD, 1):
        got, headers, answer = await gateway.post(path, body)
        shown = (body[:80], answer[:300])
        assert got == status, shown
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}, shown
        assert error["param"] == param, shown
        assert words in error["message"], shown
        assert error["type"] == "invalid_request_error" and error["code"], shown
        assert headers["content-type"] == "application/json" and headers["x-request-id"]
        rows = await gateway.rows.wait_for(number)
        assert len(rows) == number
        assert (rows[-1].outcome, rows[-1].http_status, rows[-1].output_tokens) == ("rejected", status, 0), shown
    assert gateway.engine.submits == []
    assert (await gateway.client.models.list()).data


async def test_a_body_without_a_length_is_cut_off_at_the_limit(gateway: RunningGateway) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    status, _, answer = await gateway.request(
        "POST", CHAT, chunk * 80 + b"0\r\n\r\n", headers={"Content-Length": None, "Transfer-Encoding": "chunked"}
    )
    assert (status, json.loads(answer)["error"]["code"]) == (413, "request_too_large")


async def test_unknown_routes_and_methods_have_openais_error_shape(gateway: RunningGateway) -> None:
    for method, path, status, code in [
        ("GET", "/v1/nothing", 404, "route_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ]:
        got, headers, answer = await gateway.request(method, path)
        error = json.loads(answer)["error"]
        assert (got, error["code"]) == (status, code)
        assert headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/audio/transcriptions", "send the transcript as text"),
        ("POST", "/v1/audio/speech", "audio is not supported"),
        ("GET", "/v1/realtime", "realtime sessions are not supported"),
        ("POST", "/v1/moderations", "use /v1/classify"),
        ("POST", "/v1/images/generations", "images are not generated"),
        ("GET", "/v1/vector_stores/vs_1/files", "use /v1/embeddings"),
        ("POST", "/v1/agents", "hosted agents are not run"),
        ("POST", "/v1/containers", "code is not run"),
        ("GET", "/v1/skills", "put their text into the system message"),
        ("POST", "/v1/complete", "use /v1/messages"),
    ],
)
async def test_an_endpoint_of_a_vendor_that_is_not_served_says_what_to_use(
    gateway: RunningGateway, method: str, path: str, words: str
) -> None:
    status, _, answer = await gateway.request(method, path, b"{}")
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (404, "endpoint_not_supported")
    assert words in error["message"] and path in error["message"]
    status, _, answer = await gateway.request(method, "/v1/audiobooks")
    assert (status, json.loads(answer)["error"]["code"]) == (404, "route_not_found")


@pytest.mark.parametrize("key", ["", "nonsense", "mty_x.y", "mty_" + "a" * 5000, "ключ".encode().decode("latin-1")])
async def test_without_a_good_key_there_is_a_401_and_no_row(gateway: RunningGateway, key: Any) -> None:
    for path in (CHAT, COMPLETIONS, MESSAGES, COUNT_TOKENS, "/tokenize"):
        status, _, answer = await gateway.post(path, GOOD_CHAT, headers={"Authorization": f"Bearer {key}"})
        assert status == 401, answer
        assert json.loads(answer)["error"]["type"] == "authentication_error"
    assert gateway.rows.rows == []


async def test_an_administrators_key_may_not_generate(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post(CHAT, GOOD_CHAT, key=gateway.admin_key)
    assert (status, json.loads(answer)["error"]["type"]) == (403, "permission_error")


async def test_an_unknown_field_and_ignored_ones_do_no_harm(gateway: RunningGateway) -> None:
    body = {**GOOD_CHAT, "user": "u", "metadata": {"a": "b"}, "tools": [], "hologram": 7, "top_k": -1, "stop": None}
    status, _, answer = await gateway.post(CHAT, body | {"temperature": None, "response_format": {"type": "text"}})
    assert status == 200, answer


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
_fields = st.sampled_from(
    [
        *("messages", "prompt", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
        *("seed", "stop", "stop_token_ids", "n", "logprobs", "top_logprobs", "echo", "stream", "stream_options"),
        *("service_tier", "response_format", "tools", "best_of", "suffix", "presence_penalty", "ignore_eos"),
        *("functions", "function_call", "documents", "continue_final_message", "add_generation_prompt", "cache_salt"),
        *("return_token_ids", "modalities", "prompt_cache_options", "structured_outputs", "chat_template_kwargs"),
        *("system", "stop_sequences", "metadata", "thinking", "tool_choice", "parallel_tool_calls", "model"),
    ]
)
_good = st.sampled_from([GOOD_CHAT, GOOD_COMPLETION, GOOD_RESPONSE])
_bodies = st.one_of(
    st.binary(max_size=200),
    _values.map(json.dumps).map(str.encode),
    st.tuples(_good, st.dictionaries(_fields, _values, max_size=3)).map(
        lambda pair: json.dumps({**pair[0], **pair[1]}).encode()
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([*RECORDED, COUNT_TOKENS, "/tokenize", "/detokenize"]), body=_bodies)
async def test_no_request_body_causes_a_5xx(gateway: RunningGateway, path: Any, body: Any) -> None:
    num_rows = len(gateway.rows.rows)
    status, _, answer = await gateway.post(path, body)
    assert status < 500, (path, body, answer)
    if path in RECORDED:
        rows = await gateway.rows.wait_for(num_rows + 1)
        assert (len(rows), rows[-1].http_status) == (num_rows + 1, status)
