"""Grammars that crash or overrun their compiler, through the whole server: only their own request fails."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psutil
import pytest

INT64_MIN = -(2**63)
PAST_INT64 = -(10**19)
CRASHING = {
    "int64's least": {"guided_json": {"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MIN}},
    "beyond int64": {"guided_json": {"type": "integer", "minimum": PAST_INT64, "maximum": PAST_INT64}},
    "in Lark": {
        "guided_grammar": f'start: %json {{"type": "integer", "minimum": {INT64_MIN}, "maximum": {INT64_MIN}}}'
    },
}
SLOW = [{"guided_json": {"type": "integer", "multipleOf": number}} for number in (999_983, 999_979)]
LIST = {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}}
WORKER = "moiety_engine.structured_outputs.worker"


@pytest.fixture
def client(account: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=account.secret, base_url=f"{account.server.url}/v1", max_retries=0) as made:
        yield made


@pytest.fixture
def neighbour(server: Any) -> Iterator[openai.OpenAI]:
    """Return a key of another tenant."""
    tenant = server.admin.post("/admin/v1/tenants", json={"name": f"neighbour-{time.monotonic_ns()}"}).json()
    project = server.admin.post("/admin/v1/projects", json={"name": "p", "tenant_id": tenant["id"]}).json()
    made = server.admin.post("/admin/v1/keys", json={"name": "k", "project_id": project["id"]}).json()
    with openai.OpenAI(api_key=made["secret"], base_url=f"{server.url}/v1", max_retries=0) as other:
        yield other


def grammar_processes(server: Any) -> list[psutil.Process]:
    """Return the template process, and then those that were forked from it."""
    (template,) = [one for one in server.core_process().children() if WORKER in " ".join(one.cmdline())]
    return [template, *template.children()]


@pytest.mark.parametrize("kind", CRASHING)
def test_a_grammar_that_crashes_its_compiler_costs_nobody_else_anything(
    client: openai.OpenAI, neighbour: openai.OpenAI, server: Any, kind: str
) -> None:
    core = server.core_process().pid
    asked: dict[str, Any] = {"model": server.model, "prompt": "one", "max_tokens": 200, "temperature": 0}
    expected = neighbour.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stream = neighbour.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    texts = [next(stream).choices[0].text]
    for _ in range(2):
        try:
            answer = client.completions.create(
                model=server.model, prompt="one", max_tokens=40, extra_body=CRASHING[kind]
            )
            assert json.loads(answer.choices[0].text) in (INT64_MIN, PAST_INT64)
        except openai.BadRequestError as refused:
            assert refused.code == "unsupported_response_format"
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == expected
    assert server.core_process().pid == core


def test_batch_lines_with_hostile_grammars_fail_alone(
    client: openai.OpenAI, server: Any, until: Callable[..., Any]
) -> None:
    lines = []
    for number in range(6):
        body: dict[str, Any] = {"model": server.model, "prompt": "one", "max_tokens": 40}
        body |= {3: CRASHING["int64's least"], 4: {"guided_regex": "x?" * 30_000}}.get(number, {})
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    ended = until(
        lambda: (now := client.batches.retrieve(batch.id)).status in ("completed", "failed") and now, "the batch's end"
    )
    assert (ended.status, ended.request_counts.total) == ("completed", 6)
    assert ended.request_counts.failed >= 1
    errors = [json.loads(line) for line in client.files.content(ended.error_file_id).text.splitlines()]
    assert {error["custom_id"] for error in errors} <= {"3", "4"}
    assert {error["response"]["body"]["error"]["code"] for error in errors} == {"unsupported_response_format"}


def test_expensive_grammars_of_one_tenant_do_not_keep_another_waiting(
    client: openai.OpenAI, neighbour: openai.OpenAI, server: Any
) -> None:
    def ask(form: dict[str, Any]) -> None:
        with contextlib.suppress(openai.BadRequestError):
            client.completions.create(model=server.model, prompt="one", max_tokens=5, extra_body=form)

    threads = [threading.Thread(target=ask, args=(form,)) for form in SLOW]
    for thread in threads:
        thread.start()
    number = time.monotonic_ns()  # a grammar that no cache has
    choice: dict[str, Any] = {"structured_outputs": {"choice": [f"red {number}", f"green {number}"]}}
    answer = neighbour.completions.create(model=server.model, prompt="one", max_tokens=30, extra_body=choice)
    still_waiting = [thread for thread in threads if thread.is_alive()]
    for thread in threads:
        thread.join()
    assert answer.choices[0].text in choice["structured_outputs"]["choice"]
    assert still_waiting, "the neighbour's grammar was compiled only after both expensive ones"


def test_an_expression_that_takes_too_much_is_refused_within_its_limits(client: openai.OpenAI, server: Any) -> None:
    core = server.core_process()
    before_bytes = core.memory_info().rss
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model=server.model, prompt="one", max_tokens=5, extra_body={"guided_regex": "x?" * 30_000}
        )
    assert "simplify it" in str(refused.value)
    assert core.memory_info().rss - before_bytes < 100 << 20


def test_streams_go_on_exactly_when_grammar_processes_are_killed(client: openai.OpenAI, server: Any) -> None:
    asked: dict[str, Any] = {
        "model": server.model,
        "prompt": "one",
        "max_tokens": 240,
        "temperature": 0,
        "extra_body": LIST,
    }
    expected = client.completions.create(**asked).choices[0].text
    streams = [client.completions.create(**asked, stream=True) for _ in range(4)]
    texts = [[next(stream).choices[0].text] for stream in streams]
    template, *steppers = grammar_processes(server)
    for process in steppers:
        process.kill()
    for text, stream in zip(texts, streams, strict=True):
        text.append(next(stream).choices[0].text)
    template.kill()
    for text, stream in zip(texts, streams, strict=True):
        text += [chunk.choices[0].text for chunk in stream]
    assert ["".join(text) for text in texts] == [expected] * 4
    assert client.completions.create(**asked).choices[0].text == expected  # by new processes
    assert server.fresh_load()["grammar_worker_restarts_total"] >= 1
