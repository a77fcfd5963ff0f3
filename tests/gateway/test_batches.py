"""Files and batches with the real `openai` package against a gateway on loopback."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import openai
import pytest

from moiety_platform.batches.execution import MAX_FAILURES
from moiety_platform.engine_client.fake import FakeEngineClient, report_counts
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit

from .batch_requests import CHAT, MODEL, chat_line, jsonl, results, submit, upload, usage_rows, wait_answered, wait_for
from .conftest import NewCard, RunningGateway, StartGateway, Until


async def test_a_batch_of_chats_is_answered_line_by_line_in_the_order_of_the_input(gateway: RunningGateway) -> None:
    lines = [chat_line(f"line {number}", max_tokens=1 + number % 4) for number in range(40)]
    batch = await submit(gateway, lines, metadata={"for": "the test"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "the test"})
    batch = await wait_for(gateway, batch, "completed")
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert (batch.error_file_id, batch.errors) == (None, None)
    moments = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert moments == sorted(moments)
    assert batch.expires_at == batch.created_at + 24 * 3600
    output = await results(gateway, batch.output_file_id)
    assert [one["custom_id"] for one in output] == [line["custom_id"] for line in lines]
    for number, one in enumerate(output):
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        body = one["response"]["body"]
        assert body["choices"][0]["message"]["content"] == " ".join(str(i + 1) for i in range(1 + number % 4))
        assert body["id"] == one["response"]["request_id"]
    assert len({one["id"] for one in output}) == 40
    rows = {row.request_id: row for row in await usage_rows(gateway)}
    assert len(rows) == 40
    for one in output:
        row, usage = rows[one["response"]["request_id"]], one["response"]["body"]["usage"]
        assert (row.prompt_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (row.service_class, row.outcome, row.endpoint) == ("batch", "length", CHAT)
    assert batch.usage.output_tokens == sum(row.output_tokens for row in rows.values())


async def test_completions_run_in_a_batch_and_a_line_without_answer_goes_to_the_error_file(
    gateway: RunningGateway,
) -> None:
    def line(custom_id: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, **body}}

    lines = [
        line("good", prompt=["a", "b"], max_tokens=2, echo=True),
        line("long", prompt="x" * 600),
        line("also good", prompt="c", max_tokens=1),
    ]
    batch = await wait_for(gateway, await submit(gateway, lines, "/v1/completions"), "completed")
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    output = await results(gateway, batch.output_file_id)
    assert [one["custom_id"] for one in output] == ["good", "also good"]
    assert [choice["text"] for choice in output[0]["response"]["body"]["choices"]] == ["a1 2", "b1 2"]
    (error,) = await results(gateway, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("long", 400)
    assert error["response"]["body"]["error"]["code"] == "context_length_exceeded"
    rows = {row.request_id: row for row in await usage_rows(gateway)}
    assert rows[error["response"]["request_id"]].prompt_tokens == 0
    assert sum(row.output_tokens for row in rows.values()) == batch.usage.output_tokens == 5


async def test_a_file_with_bad_lines_fails_as_a_whole_and_names_each(gateway: RunningGateway) -> None:
    good = chat_line("one")
    lines = [
        json.dumps(good),
        "",  # blank lines count, and nothing more
        "{not json",
        json.dumps({**good, "custom_id": "two", "method": "GET"}),
        json.dumps({**good, "custom_id": "three", "url": "/v1/completions"}),
        json.dumps(good),
        json.dumps(chat_line("four", temperature=9)),
        json.dumps(chat_line("five", stream=True)),
        json.dumps({"custom_id": "six"}),
        json.dumps({**good, "custom_id": "\0"}),
        json.dumps([1]),
        "[" * 100_000,
        '{"custom_id": "\ud800"}'.encode("utf-8", "surrogatepass").decode("latin-1"),
    ]
    batch = await submit(gateway, "\n".join(lines).encode("latin-1"))
    batch = await wait_for(gateway, batch, "failed")
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (3, "invalid_json_line"),
        (4, "invalid_method"),
        (5, "mismatched_endpoint"),
        (6, "duplicate_custom_id"),
        (7, "invalid_request"),
        (8, "invalid_request"),
        (9, "invalid_line"),
        (10, "invalid_custom_id"),
        (11, "invalid_line"),
        (12, "json_too_deep"),
        (13, "invalid_json_line"),
    ]
    assert "line 1" in batch.errors.data[3].message
    assert batch.errors.data[4].param == "temperature"
    assert (batch.failed_at is not None, batch.request_counts.total, batch.output_file_id) == (True, 0, None)
    assert gateway.engine.submits == []


async def test_batch_errors_are_listed_up_to_a_bound_and_too_many_lines_are_refused(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_batch_lines=300) as gateway:
        batch = await wait_for(gateway, await submit(gateway, b"nonsense\n" * 200), "failed")
        assert [error.line for error in batch.errors.data] == [*range(1, 101), None]
        assert batch.errors.data[-1].code == "too_many_errors"
        batch = await submit(gateway, [chat_line(str(number)) for number in range(301)])
        batch = await wait_for(gateway, batch, "failed")
        assert [error.code for error in batch.errors.data] == ["too_many_lines"]
        batch = await wait_for(gateway, await submit(gateway, b"\n \n"), "failed")
        assert [error.code for error in batch.errors.data] == ["empty_file"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
async def test_a_bad_batch_is_refused_with_the_field_that_is_wrong(
    gateway: RunningGateway, asked: dict[str, Any], param: str
) -> None:
    file = await upload(gateway, jsonl([chat_line("a")]))
    whole: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **asked}
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client.batches.create(**whole)
    assert caught.value.param.startswith(param)


async def test_a_cancelled_batch_keeps_its_answers_and_lists_the_other_lines(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card, token_s=0.01)
    async with start_gateway([engine], batch_concurrency=4) as gateway:
        batch = await submit(gateway, [chat_line(str(number), max_tokens=4) for number in range(200)])
        await wait_answered(gateway, batch, 10)
        cancelling = await gateway.client.batches.cancel(batch.id)
        assert (cancelling.status, cancelling.cancelling_at is not None) == ("cancelling", True)
        batch = await wait_for(gateway, batch, "cancelled")
        counts = batch.request_counts
        assert 10 <= counts.completed < 200
        assert counts.completed + counts.failed == counts.total == 200
        output = await results(gateway, batch.output_file_id)
        assert [one["custom_id"] for one in output] == sorted((one["custom_id"] for one in output), key=int)
        errors = await results(gateway, batch.error_file_id)
        assert {(one["response"], one["error"]["code"]) for one in errors} == {(None, "batch_cancelled")}
        assert {one["custom_id"] for one in [*output, *errors]} == {str(number) for number in range(200)}
        assert len(await usage_rows(gateway)) == len(output) == counts.completed
        assert (await gateway.client.batches.cancel(batch.id)).status == "cancelled"
        assert len(engine.submits) <= counts.completed + 4, "what ran was aborted, and nothing more begun"


async def test_a_batch_whose_window_is_over_expires_with_what_it_has(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.01)], batch_concurrency=4) as gateway:
        batch = await submit(gateway, [chat_line(str(number), max_tokens=4) for number in range(200)])
        await wait_answered(gateway, batch, 1)
        gateway.store_clock.ahead_ms = 24 * 3600 * 1000
        batch = await wait_for(gateway, batch, "expired")
        assert batch.expired_at >= batch.expires_at
        counts = batch.request_counts
        assert counts.completed + counts.failed == counts.total == 200
        assert len(await results(gateway, batch.output_file_id)) == counts.completed == len(await usage_rows(gateway))
        assert {one["error"]["code"] for one in await results(gateway, batch.error_file_id)} == {"batch_expired"}
        with pytest.raises(openai.ConflictError):
            await gateway.client.batches.cancel(batch.id)


async def test_a_revoked_key_fails_its_batch_and_says_so(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.02)], batch_concurrency=4) as gateway:
        batch = await submit(gateway, [chat_line(str(number)) for number in range(100)])
        await wait_for(gateway, batch, "in_progress")
        key_id = gateway.key.removeprefix("mty_").partition(".")[0]
        made = await gateway.admin("POST", f"/keys/{key_id}/rotate", {"grace_s": 3600}, expect=201)
        gateway.client.api_key = made["secret"]
        await gateway.admin("POST", f"/keys/{key_id}/revoke")
        batch = await wait_for(gateway, batch, "failed")
        (error,) = batch.errors.data
        assert (error.code, "revoked" in error.message) == ("key_revoked", True)
        told = await results(gateway, batch.error_file_id)
        assert {one["error"]["code"] for one in told} == {"key_revoked"}
        assert len(told) + batch.request_counts.completed == 100


async def test_an_engine_that_fails_or_is_away_costs_a_line_nothing_but_time(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    tries: Counter[Any] = Counter()

    def script(submit: Submit) -> Any:
        prompt = bytes(submit.prompt_ids).decode("latin-1")
        tries[prompt] += 1
        if tries[prompt] == 1:
            return Failed(submit.request_id, 0, FailureCode.ENGINE_FAILED, "out of luck")
        return report_counts(submit)

    engine = FakeEngineClient(card, script)
    async with start_gateway([engine]) as gateway:
        engine.die()
        batch = await submit(gateway, [chat_line(str(number), f"line {number}") for number in range(5)])
        await wait_for(gateway, batch, "in_progress")
        await engine.start()
        batch = await wait_for(gateway, batch, "completed")
        assert batch.request_counts.completed == 5
        assert sorted(tries.values()) == [2] * 5
        rows = await usage_rows(gateway)
        assert [(row.outcome, row.output_tokens) for row in rows] == [("length", 3)] * 5
        assert batch.usage.output_tokens == 15


async def test_a_line_that_always_fails_ends_in_the_error_file_after_some_tries(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    failing = FakeEngineClient(card, lambda s: Failed(s.request_id, 0, FailureCode.ENGINE_FAILED, "never"))
    async with start_gateway([failing]) as gateway:
        batch = await wait_for(gateway, await submit(gateway, [chat_line("a")]), "completed")
        (error,) = await results(gateway, batch.error_file_id)
        assert (error["response"]["status_code"], error["response"]["body"]["error"]["code"]) == (502, "engine_failed")
        assert len(failing.submits) == MAX_FAILURES
        (row,) = await usage_rows(gateway)
        assert (row.outcome, row.prompt_tokens, row.cost_nanodollars) == ("failed", 0, 0)


async def test_a_line_whose_answer_is_not_finite_is_not_tried_again_and_fails_alone(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    def answer(submit: Submit) -> Any:
        is_bad = len(submit.prompt_ids) > 60
        return Failed(submit.request_id, 1, FailureCode.NON_FINITE, "not finite") if is_bad else [(65, "a")] * 3

    engine = FakeEngineClient(card, answer)
    async with start_gateway([engine], stores_usage=True) as gateway:
        lines = [chat_line("good"), chat_line("bad", messages=[{"role": "user", "content": "x" * 90}])]
        batch = await wait_for(gateway, await submit(gateway, lines), "completed")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (error,) = await results(gateway, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "non_finite_output"
        assert len(engine.submits) == 2
        rows = {row.error_code: row for row in await usage_rows(gateway)}
        assert (rows["non_finite_output"].prompt_tokens, rows["non_finite_output"].cost_nanodollars) == (0, 0)


async def test_lines_cost_half_and_keep_to_the_limits_of_their_key(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", {"model": MODEL, "input": "2", "output": "8"})
        await gateway.admin("PATCH", "/classes/batch", {"price_factor": 0.5})  # as it is shipped
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        quota: dict[str, Any] = {"level": "tenant", "scope_id": tenant["id"], "kind": "concurrent_requests", "cap": 2}
        await gateway.admin("PUT", "/quotas", quota)
        spent: dict[str, Any] = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": 10**9}
        spent = await gateway.admin("PUT", "/quotas", spent)
        batch = await submit(gateway, [chat_line(str(number)) for number in range(30)])
        batch = await wait_for(gateway, batch, "completed")
        rows = await usage_rows(gateway)
        assert len(rows) == batch.request_counts.completed == 30
        for row in rows:
            assert row.cost_nanodollars == row.prompt_tokens * 1000 + row.output_tokens * 4000
        used = (await gateway.admin("GET", f"/quotas/{spent['id']}"))["used"]
        assert used == batch.usage.total_tokens


async def test_a_model_that_the_key_may_not_use_is_refused_line_by_line(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        (project,) = (await gateway.admin("GET", "/projects"))["data"]
        asked: dict[str, Any] = {"name": "narrow", "project_id": project["id"], "allowed_models": ["another"]}
        gateway.client.api_key = (await gateway.admin("POST", "/keys", asked, expect=201))["secret"]
        batch = await wait_for(gateway, await submit(gateway, [chat_line("a")]), "completed")
        (error,) = await results(gateway, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "model_not_found"
        assert gateway.engine.submits == []


async def test_another_tenants_files_and_batches_are_not_there(gateway: RunningGateway) -> None:
    batch = await submit(gateway, [chat_line("a")])
    batch = await wait_for(gateway, batch, "completed")
    tenant = await gateway.admin("POST", "/tenants", {"name": "other"}, expect=201)
    project = await gateway.admin("POST", "/projects", {"name": "p", "tenant_id": tenant["id"]}, expect=201)
    key = (await gateway.admin("POST", "/keys", {"name": "k", "project_id": project["id"]}, expect=201))["secret"]
    other = gateway.client.with_options(api_key=key)
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (other.files.retrieve, other.files.delete, other.files.content):
            with pytest.raises(openai.NotFoundError):
                await call(file_id)
    for use in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await use(batch.id)
    with pytest.raises(openai.NotFoundError):
        await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert (await other.files.list()).data == (await other.batches.list()).data == []
    with pytest.raises(openai.BadRequestError):
        await other.batches.list(after=batch.id)
    for path in ("/v1/files", "/v1/batches", f"/v1/files/{batch.input_file_id}/content"):
        assert (await gateway.request("GET", path, key="mty_no.such"))[0] == 401
        assert (await gateway.request("GET", path, key=gateway.admin_key))[0] == 403


async def test_batches_are_listed_newest_first_page_by_page(gateway: RunningGateway) -> None:
    file = await upload(gateway, jsonl([chat_line("a")]))
    made = [
        await gateway.client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for _ in range(5)
    ]
    listed = [batch.id async for batch in gateway.client.batches.list(limit=2)]
    assert sorted(listed) == sorted(batch.id for batch in made)
    page = await gateway.client.batches.list(limit=2, after=listed[1])
    assert ([batch.id for batch in page.data], page.has_more) == (listed[2:4], True)
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError):
            await gateway.client.batches.list(limit=limit)


async def test_number_of_open_batches_is_limited(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], max_open_batches_per_tenant=2) as gateway:
        engine.die()
        for _ in range(2):
            await submit(gateway, [chat_line("a")])
        with pytest.raises(openai.RateLimitError) as caught:
            await submit(gateway, [chat_line("a")])
        assert caught.value.code == "too_many_batches"


async def test_a_gateway_that_drains_gives_back_at_once_what_it_has_not_begun(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    slow, never = FakeEngineClient(new_card("a", "begun"), token_s=0.05), FakeEngineClient(new_card("b"), token_s=3600)
    fast = [FakeEngineClient(new_card("a", "begun")), FakeEngineClient(new_card("b"))]
    lines = [chat_line(f"begun-{number}", model="begun", max_tokens=16) for number in range(2)]
    lines += [chat_line(f"waits-{number}") for number in range(6)]
    async with (
        start_gateway([slow, never], batch_concurrency=7, drain_s=30, batch_lease_s=3600) as draining,
        start_gateway([FakeEngineClient(new_card("c"))], beside=draining, batch_concurrency=0) as client,
    ):
        batch = await submit(draining, lines)
        await until(lambda: len(slow.submits) + len(never.submits) == 7 and slow.state.load.output_tokens_total > 4)
        async with start_gateway(fast, beside=draining) as other:
            draining.stop()
            batch = await wait_for(client, batch, "completed")
            assert [len(engine.submits) for engine in (slow, *fast)] == [2, 0, 6]
            assert len(never.submits) == 5, "nothing is claimed while it drains"
            assert len(await usage_rows(other)) == batch.request_counts.completed == 8


async def test_a_stop_gives_lines_back_and_the_next_start_answers_them(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.05)], batch_concurrency=8) as gateway:
        batch = await submit(gateway, [chat_line(str(number), max_tokens=1 + number) for number in range(40)])
        await wait_answered(gateway, batch, 1)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        batch = await wait_for(gateway, batch, "completed")
        output = await results(gateway, batch.output_file_id)
        tokens = [one["response"]["body"]["usage"]["completion_tokens"] for one in output]
        assert tokens == [1 + number for number in range(40)]
        rows = await usage_rows(gateway)
        assert sorted(row.output_tokens for row in rows) == tokens


NOTHING = ("tokens_per_day", "requests_per_minute", "concurrent_requests", "money_per_month")


@pytest.mark.parametrize(
    ("kind", "cap"), [("tokens_per_minute", 40), ("tokens_per_day", 40), *((kind, 0) for kind in NOTHING)]
)
async def test_a_line_that_never_fits_a_limit_fails_at_once_and_alone(
    start_gateway: StartGateway, card: ModelCard, kind: Any, cap: Any
) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        limit: dict[str, Any] = {"level": "tenant", "scope_id": tenant["id"], "kind": kind, "cap": cap}
        await gateway.admin("PUT", "/quotas", limit)
        await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "2", "output": "10"})
        lines = [chat_line("too long", "hello " * 8), *([chat_line("short", "a", max_tokens=1)] if cap else [])]
        batch = await wait_for(gateway, await submit(gateway, lines), "completed")
        assert (batch.request_counts.failed, batch.request_counts.completed) == (1, len(lines) - 1)
        (failed,) = await results(gateway, batch.error_file_id)
        assert failed["custom_id"] == "too long"
        assert "request_exceeds_quota" in json.dumps(failed)


async def test_a_byte_order_mark_before_the_first_line_is_skipped(gateway: RunningGateway) -> None:
    lines = [chat_line("first"), chat_line("second")]
    batch = await wait_for(gateway, await submit(gateway, b"\xef\xbb\xbf" + jsonl(lines)), "completed", "failed")
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    assert [one["custom_id"] for one in await results(gateway, batch.output_file_id)] == ["first", "second"]
