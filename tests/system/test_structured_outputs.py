"""Structured outputs, by the real clients from the real model, which was not trained on JSON."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import openai
import pydantic
import pytest

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


class Continent(StrEnum):
    EUROPE = "Europe"
    ASIA = "Asia"


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=12)
    continent: Continent
    people: int = pydantic.Field(ge=0, le=9999)
    twins: list[bool] = pydantic.Field(max_length=2)


SCHEMA = Place.model_json_schema()


@pytest.fixture
def client(account: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=account.secret, base_url=f"{account.server.url}/v1", max_retries=0) as made:
        yield made


def test_the_clients_parse_gives_a_pydantic_object_from_chats_and_responses(client: Any, server: Any) -> None:
    chat = client.chat.completions.parse(
        model=server.model, messages=CAPITAL, response_format=Place, temperature=0, max_tokens=200
    )
    assert chat.choices[0].finish_reason == "stop"
    assert isinstance(chat.choices[0].message.parsed, Place)
    response = client.responses.parse(
        model=server.model, input="Where is it?", text_format=Place, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Place)
    assert (response.text.format.type, response.text.format.name) == ("json_schema", "Place")


def test_a_schema_holds_for_every_choice_streamed_with_stop_logprobs_and_a_seed(client: Any, server: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    asked = {"model": server.model, "messages": CAPITAL, "response_format": form, "seed": 5, "max_tokens": 200}
    whole = client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in whole.choices]
    assert all(Place.model_validate_json(text) for text in texts) and len(set(texts)) == 3
    assert "".join(token.token for token in whole.choices[0].logprobs.content[:-1]) == texts[0]
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[0]
    cut = client.chat.completions.create(**asked, stop=['"continent"'])
    assert cut.choices[0].message.content == texts[0].split('"continent"')[0]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["Paris", "Rome"]}, "Paris|Rome"),
        ({"structured_outputs": {"choice": ["<|im_end|>"]}}, r"<\|im_end\|>"),
        ({"structured_outputs": {"choice": ["a <think> b"]}}, "a <think> b"),
        ({"structured_outputs": {"grammar": 'start: TERM ("+" TERM)~2\nTERM: /[1-9]/'}}, r"[1-9](\+[1-9]){2}"),
        ({"guided_json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}}, r"\[ ?1 ?, ?1 ?\]"),
    ],
)
def test_completions_take_expressions_choices_grammars_and_schemas(
    client: Any, server: Any, form: dict[str, Any], pattern: str
) -> None:
    answer = client.completions.create(model=server.model, prompt="one two", max_tokens=60, extra_body=form)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_an_answer_ends_with_its_form_even_below_min_tokens(client: Any, server: Any) -> None:
    form = {"guided_choice": ["yes"], "min_tokens": 20}
    answer = client.completions.create(model=server.model, prompt="one", max_tokens=60, extra_body=form)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("yes", "stop")


def test_an_object_is_json_where_no_schema_says_more(client: Any, server: Any, account: Any) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=CAPITAL,
        response_format={"type": "json_object"},
        max_tokens=300,
        logit_bias=dict.fromkeys(_closing(account), 30),
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def _closing(account: Any) -> list[str]:
    """Tokens that end a string, a list or an object: the model would write on."""
    asked = {"model": account.server.model, "prompt": '"}]'}
    return [str(token_id) for token_id in account.post("/tokenize", asked).json()["tokens"]]


HOSTILE = {
    "not in the library": {"guided_json": {"not": {"type": "string"}}},
    "far away": {"guided_json": {"$ref": "https://example.com/schema.json"}},
    "without an end": {"guided_json": {"$ref": "#"}},
    "nested as text": {"guided_json": '{"items":' * 3000 + "{}" + "}" * 3000},
    "a huge enum": {"guided_json": {"enum": [f"value {i}" for i in range(100_000)]}},
    "combinations": {
        "guided_json": {
            "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(3)]} for i in range(14)]
        }
    },
    "terminals that double": {
        "guided_grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "x"'
    },
    "parentheses": {"guided_regex": "(" * 9000 + "a" + ")" * 9000},
    "no grammar": {"guided_grammar": "start: nothing"},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_form_is_refused_within_a_second_of_the_engines_time_with_a_sentence(
    client: Any, server: Any, kind: str
) -> None:
    begin_s = server.core_process().cpu_times().user
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=server.model, prompt="one", max_tokens=5, extra_body=HOSTILE[kind])
    assert refused.value.code == "unsupported_response_format"
    assert len(refused.value.body["message"].split()) > 4
    assert server.core_process().cpu_times().user - begin_s < 1


def test_a_form_that_takes_long_to_compile_does_not_hold_up_who_streams(client: Any, server: Any) -> None:
    slow = {"guided_json": {"enum": [f"{i:05}" * 2 for i in range(4500)]}}
    gaps, last_s = [], time.monotonic()
    stream = client.completions.create(
        model=server.model, prompt="one two", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    answers: list[str] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            client.completions.create(model=server.model, prompt="one", max_tokens=40, extra_body=slow).choices[0].text
        )
    )
    for number, _ in enumerate(stream):
        if number == 5:
            asking.start()
        gaps.append(time.monotonic() - last_s)
        last_s = time.monotonic()
    asking.join()
    assert json.loads(answers[0]) in slow["guided_json"]["enum"]
    assert max(gaps[3:]) < 1.0


def test_a_client_that_disconnects_during_grammar_compilation_leaves_nothing_behind(account: Any) -> None:
    body = {"model": account.server.model, "prompt": "one", "max_tokens": 40, "guided_regex": "[a-z]{40}x" * 40}
    with (
        pytest.raises(openai.APITimeoutError),
        openai.OpenAI(
            api_key=account.secret, base_url=f"{account.server.url}/v1", max_retries=0, timeout=0.02
        ) as impatient,
    ):
        impatient.completions.create(model=body["model"], prompt="one", extra_body=body)
    assert account.server.wait_until_idle()["num_running"] == 0


def test_incompatible_response_settings_are_refused(account: Any) -> None:
    more: dict[str, Any]
    for more in (
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "ignore_eos": True},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"structured_outputs": {}},
    ):
        answer = account.post("/v1/completions", {"model": account.server.model, "prompt": "one", **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_response_format"), more
