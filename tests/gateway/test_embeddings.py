"""`/v1/embeddings`: the real `openai` package against a gateway on loopback, and what is counted and refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.trace_events import Reason

from .conftest import RunningGateway, StartGateway, Until

MODEL = "tiny"
PATH = "/v1/embeddings"
WIDTH = 8


def ramp(submit: Submit, width: int) -> Any:
    """A unit vector of unequal numbers that starts with the number of tokens."""
    numbers = [len(submit.prompt_ids), *range(1, width)]
    return [number / math.hypot(*numbers) for number in numbers]


def engine_of(card: ModelCard, **options: Any) -> FakeEngineClient:
    return FakeEngineClient(msgspec.structs.replace(card, embedding_width=WIDTH), **options)


@pytest.fixture
async def gateway(start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[RunningGateway]:
    async with start_gateway([engine_of(card, vector=ramp)]) as running:
        yield running


async def embed(gateway: RunningGateway, given: str = "hello", **more: Any) -> Any:
    return await gateway.client.embeddings.create(model=MODEL, input=given, **more)


def unit(num_tokens: int, width: int = WIDTH) -> Any:
    numbers = [num_tokens, *range(1, width)]
    return pytest.approx([number / math.hypot(*numbers) for number in numbers], abs=1e-6)


@pytest.mark.parametrize("more", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_every_form_of_input_gets_its_vectors_in_order(gateway: RunningGateway, more: dict[str, Any]) -> None:
    for given, lengths in (
        ("abc", [3]),
        (["abc", "de"], [3, 2]),
        ([5, 6, 7, 8], [4]),
        ([[5, 6], [7], [8, 9, 10]], [2, 1, 3]),
    ):
        answer = await embed(gateway, given, user="somebody", **more)
        found = [entry.embedding for entry in answer.data]
        if more.get("encoding_format") == "base64":
            found = [struct.unpack(f"<{WIDTH}f", base64.b64decode(one)) for one in found]
        assert [list(one) for one in found] == [unit(length) for length in lengths]
        assert [(entry.index, entry.object) for entry in answer.data] == [(i, "embedding") for i in range(len(lengths))]
        assert (answer.object, answer.model) == ("list", MODEL)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (sum(lengths), sum(lengths))


async def test_the_clients_default_is_base64_on_the_wire_and_the_apis_is_numbers(gateway: RunningGateway) -> None:
    _, _, plain = await gateway.post(PATH, {"model": MODEL, "input": "abc"})
    assert json.loads(plain)["data"][0]["embedding"] == unit(3)
    _, _, encoded = await gateway.post(PATH, {"model": MODEL, "input": "abc", "encoding_format": "base64"})
    data = base64.b64decode(json.loads(encoded)["data"][0]["embedding"])
    assert list(struct.unpack(f"<{WIDTH}f", data)) == json.loads(plain)["data"][0]["embedding"]


async def test_fewer_dimensions_are_the_first_ones_as_a_unit_vector_again(gateway: RunningGateway) -> None:
    for more in ({}, {"encoding_format": "float"}):
        answer = await embed(gateway, "abc", dimensions=3, **more)
        assert list(answer.data[0].embedding) == unit(3, width=3)
        assert list((await embed(gateway, "abc", dimensions=WIDTH, **more)).data[0].embedding) == unit(3)


async def test_shortened_to_nothing_but_zeros_a_vector_is_zeros(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([engine_of(card, vector=lambda _, width: [0.0] * (width - 1) + [1.0])]) as gateway:
        assert list((await embed(gateway, dimensions=2)).data[0].embedding) == [0.0, 0.0]


async def test_embedding_submits_ask_for_no_tokens_and_have_the_requests_deadline(
    gateway: RunningGateway,
) -> None:
    await embed(gateway, ["abc", "de"])
    submits = gateway.engine.submits
    assert [(s.embed, s.stopping.max_tokens, s.credit_tokens, s.sibling_tokens) for s in submits] == [
        (True, 0, 0, 2),
        (True, 0, 0, 3),
    ]


async def test_as_many_inputs_as_openai_takes_are_answered_in_order(gateway: RunningGateway) -> None:
    given = [[1] * (1 + i % 5) for i in range(2048)]
    answer = await embed(gateway, given)
    assert [list(entry.embedding) for entry in answer.data[:7]] == [unit(1 + i % 5) for i in range(7)]
    assert len(answer.data) == 2048
    (row,) = await gateway.rows.wait_for(1)
    assert (row.num_choices, row.prompt_tokens) == (2048, sum(map(len, given)))


BAD = [
    ({"input": []}, "input", "'input' is empty"),
    ({"input": ""}, "input", "'input' is empty"),
    ({"input": ["a", ""]}, "input", r"'input\.1' is empty"),
    ({"input": [[1], []]}, "input", r"'input\.1' is empty"),
    ({}, "input", "'input' is missing"),
    ({"input": None}, "input", "must be a string, a list of strings"),
    ({"input": {"text": "a"}}, "input", "must be a string, a list of strings"),
    ({"input": ["a", 1]}, "input", "must be a string, a list of strings"),
    ({"input": [1.5]}, "input", "must be a string, a list of strings"),
    ({"input": [True]}, "input", "must be a string, a list of strings"),
    ({"input": [-1]}, "input", "must be a string, a list of strings"),
    ({"input": [[["a"]]]}, "input", "must be a string, a list of strings"),
    ({"input": ["a"] * 2049}, "input", "at most 2,048"),
    ({"input": [[1]] * 2049}, "input", "at most 2,048"),
    ({"input": [257]}, "input", "token id 257 is not the model's"),
    ({"input": "x" * 513}, "input", "context length is 512 tokens, and an input has 513"),
    ({"input": ["a", [1]]}, "input", "must be a string, a list of strings"),
    ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"input": "a", "dimensions": 9}, "dimensions", "'dimensions' is 9, but the vectors of 'tiny' have 8"),
    ({"input": "a", "dimensions": "3"}, "dimensions", "'dimensions' must be a valid integer"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"input": "a", "user": 7}, "user", "'user' must be a valid string"),
    ({"input": "a", "service_tier": "gold"}, "service_tier", "'service_tier' must be"),
    ({"input": "a", "model": ""}, "model", "'model'"),
]


async def test_bad_bodies_are_refused_with_the_field_and_what_to_do(gateway: RunningGateway) -> None:
    for body, param, message in BAD:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await gateway.client.post("/embeddings", body={"model": MODEL, **body}, cast_to=object)
        assert (body, caught.value.param) == (body, param)
        assert caught.value.code in ("invalid_request", "unknown_token_id", "context_length_exceeded")
    rows = await gateway.rows.wait_for(len(BAD))
    assert {(row.outcome, row.http_status, row.prompt_tokens, row.endpoint) for row in rows} == {
        ("rejected", 400, 0, PATH)
    }
    assert not gateway.engine.submits


async def test_an_input_may_fill_the_context(gateway: RunningGateway) -> None:
    assert (await embed(gateway, "x" * 512)).usage.prompt_tokens == 512


async def test_embeddings_of_a_model_without_them_are_refused(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        with pytest.raises(openai.BadRequestError, match="does not support embeddings") as caught:
            await embed(gateway)
        assert (caught.value.code, caught.value.param) == ("embeddings_not_supported", "model")
        assert not gateway.engine.submits


async def test_an_unknown_model_and_a_bad_key_are_what_they_are_elsewhere(gateway: RunningGateway) -> None:
    with pytest.raises(openai.NotFoundError, match="available: tiny"):
        await gateway.client.embeddings.create(model="gpt-9", input="a")
    with pytest.raises(openai.AuthenticationError):
        await gateway.client.with_options(api_key="mty_no.such").embeddings.create(model=MODEL, input="a")


async def test_a_request_leaves_one_row_with_its_prompt_tokens_only(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    served = FakeVerdict("standard", num_cached_tokens=1)
    async with start_gateway([engine_of(card, verdict=lambda _: served)]) as gateway:
        _, headers, body = await gateway.post(PATH, {"model": MODEL, "input": ["abc", "de"], "service_tier": "flex"})
        assert json.loads(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert headers["x-moiety-admission"] == "in_time"
        (row,) = await gateway.rows.wait_for(1)
    assert (row.endpoint, row.model, row.outcome, row.http_status) == (PATH, MODEL, "stop", 200)
    assert (row.num_choices, row.prompt_tokens, row.cached_tokens, row.output_tokens) == (2, 5, 2, 0)
    assert (row.error_code, row.ttft_ms, row.slo_attained) == (None, None, True)
    assert row.request_id.startswith("embd-")


async def test_the_deadline_of_an_embeddings_request_follows_from_the_length_of_all_inputs(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([engine_of(card, token_s=0.2)]) as gateway:
        await gateway.admin("PATCH", "/classes/standard", {"ttft_s": 0.05, "ttft_per_1k_s": 100.0})
        await embed(gateway, "a")  # 0.05 s and 0.1 s for its token
        await embed(gateway, ["a"] * 30)
        rows = await gateway.rows.wait_for(2)
        assert [row.slo_attained for row in rows] == [False, True]


async def test_prompt_tokens_alone_are_charged_and_limited(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([engine_of(card)], stores_usage=True) as gateway:
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        price = {"model": MODEL, "input": "2", "cached_input": "0.5", "output": "10"}
        await gateway.admin("PUT", "/prices", price)
        limits = [
            await gateway.admin(
                "PUT", "/quotas", {"level": "tenant", "scope_id": tenant["id"], "kind": kind, "cap": cap}
            )
            for kind, cap in (("tokens_per_day", 12), ("money_per_day", 10**9))
        ]
        await embed(gateway, ["abcd", "efg"])
        await embed(gateway, "hello")  # which uses the limit up
        with pytest.raises(openai.RateLimitError) as refused:
            await embed(gateway, "h")
        assert refused.value.code == "quota_exceeded"
        await gateway.stored_usage.flush()
        used = [(await gateway.admin("GET", f"/quotas/{one['id']}"))["used"] for one in limits]
        assert used == [12, 12 * 2_000]
        rows = (await gateway.admin("GET", "/usage/requests"))["data"]
        assert [(row["outcome"], row["prompt_tokens"], row["output_tokens"]) for row in rows] == [
            ("rejected", 0, 0),
            ("stop", 5, 0),
            ("stop", 7, 0),
        ]
        assert [row["cost_nanodollars"] for row in rows] == [0, 10_000, 14_000]


async def test_a_client_that_leaves_ends_all_inputs_at_the_engine(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    async with start_gateway([engine_of(card, token_s=60.0)]) as gateway:
        body = json.dumps({"model": MODEL, "input": ["abc", "de", "f"]}).encode()
        _, writer = await asyncio.open_connection(*gateway.address)
        fields = f"Host: test\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {len(body)}"
        writer.write(f"POST {PATH} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        await until(lambda: gateway.engine.state.num_inflight == 3)
        writer.close()
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("disconnected", 499, "client_disconnected")
        assert (row.prompt_tokens, row.output_tokens) == (6, 0)
        assert gateway.engine.state.num_inflight == 0


async def test_one_input_that_is_turned_away_turns_the_request_away(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    def busy_at_the_second(submit: Submit) -> Any:
        if submit.request_id.endswith("-1"):
            return Failed(submit.request_id, 0, FailureCode.OVERLOADED, "too much", reason=Reason.PREDICTED_LATE)
        return []

    engine = engine_of(card, script=busy_at_the_second, token_s=60.0)
    async with start_gateway([engine]) as gateway:
        with pytest.raises(openai.RateLimitError) as caught:
            await embed(gateway, ["abc", "de", "f"])
        assert caught.value.code == "overloaded"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens, row.cost_nanodollars) == ("rejected", 0, 0)
        assert gateway.engine.state.num_inflight == 0


async def test_an_engine_lost_during_embeddings_is_a_failure_with_a_usage_row(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    async with start_gateway([engine_of(card, token_s=60.0)]) as gateway:
        asking = asyncio.create_task(embed(gateway))
        await until(lambda: gateway.engine.state.num_inflight == 1)
        gateway.engine.die()
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (502, "engine_failed")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.error_code) == ("failed", "engine_failed")


async def test_an_answer_that_a_stop_breaks_off_does_not_look_whole(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(msgspec.structs.replace(card, embedding_width=4096))
    async with start_gateway([engine], drain_s=0) as gateway:
        body = json.dumps({"model": MODEL, "input": ["abc"] * 1024}).encode()
        reader, writer = await asyncio.open_connection(*gateway.address, limit=1024)
        fields = f"Host: test\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {len(body)}"
        writer.write(f"POST {PATH} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        got = await reader.read(100)
        assert got.startswith(b"HTTP/1.1 200")
        gateway.stop()
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "server_stopping")
        with contextlib.suppress(ConnectionResetError):
            while more := await reader.read(1 << 16):
                got = more
        assert not got.endswith(b"0\r\n\r\n")
        writer.close()
