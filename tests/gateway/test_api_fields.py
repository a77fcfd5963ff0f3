"""The reference of request fields is current, and it has every field of the vendors' own types."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import typing_extensions
from anthropic.types import content_block_param, message_count_tokens_params, message_create_params
from anthropic.types.beta import beta_content_block_param
from anthropic.types.beta import message_count_tokens_params as beta_message_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, decision_create_params
from openai.types.beta import beta_response_input_item_param
from openai.types.beta import response_create_params as beta_response_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
    response_input_item_param,
)
from pydantic import BaseModel, Field, TypeAdapter

from moiety_platform.anthropic_api.content_blocks import Blocks, OtherBlock
from moiety_platform.anthropic_api.schemas import ConversationBody
from moiety_platform.cli.field_reference import SCHEMAS, field_rows, fields_reference
from moiety_platform.inference.field_support import FieldTreatment, ignored, mapped, refused, support_of
from moiety_platform.responses_api.compaction import CompactBody
from moiety_platform.responses_api.input import InputItems
from moiety_platform.responses_api.token_count import InputTokensBody

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"
VENDORS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsNonStreaming),
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsStreaming),
    ("/v1/completions", completion_create_params.CompletionCreateParamsNonStreaming),
    ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming),
    ("/v1/responses", response_create_params.ResponseCreateParamsNonStreaming),
    ("/v1/responses", response_create_params.ResponseCreateParamsStreaming),
    ("/v1/responses", beta_response_create_params.ResponseCreateParamsNonStreaming),
    ("/v1/responses", beta_response_create_params.ResponseCreateParamsStreaming),
    ("/v1/decisions", decision_create_params.DecisionCreateParams),
    ("/v1/messages", message_create_params.MessageCreateParamsNonStreaming),
    ("/v1/messages", message_create_params.MessageCreateParamsStreaming),
    ("/v1/messages", beta_message_create_params.MessageCreateParamsNonStreaming),
    ("/v1/messages", beta_message_create_params.MessageCreateParamsStreaming),
]
HEADERS = {  # which the SDKs send as headers
    "/v1/messages": {"betas", "user_profile_id", "workspace_id"},
    "/v1/responses": {"betas"},
}
VALIDATED = {  # objects that a validator of their own reads, as its tests show
    "/v1/chat/completions": {"tool_choice", "function_call"},
    "/v1/responses": {"tool_choice"},
}
# Fields that no schema has yet, which ignores them without a notice.


class Inner(BaseModel):
    kept: int = 0
    renamed: Annotated[int, Field(alias="schema")] = 0
    dropped: Annotated[int | None, ignored("It has | no effect.")] = None


class Outer(BaseModel):
    option: Inner | None = None
    near: Annotated[Inner | None, mapped("Nearly.")] = None
    left: Annotated[Inner | None, ignored("Not read.")] = None
    wrong: Annotated[Any, refused("nothing has it", [False])] = None
    entries: list[Inner] | None = None


def opaque_fields(path: str) -> set[str]:
    """Return the fields of an API that are not walked: they have no effect as a whole, or a validator reads them."""
    _, schema = SCHEMAS[path]
    without_effect = (FieldTreatment.IGNORED, FieldTreatment.REFUSED)
    return {row.path for row in field_rows(schema) if row.support.treatment in without_effect} | VALIDATED.get(
        path, set()
    )


def is_within(field: str, opaque: set[str]) -> bool:
    parts = field.split(".")
    return any(".".join(parts[:number]) in opaque for number in range(1, len(parts)))


def vendor_paths(params: Any, within: str = "") -> Iterator[str]:
    for name, annotation in typing_extensions.get_type_hints(params).items():
        path = f"{within}{name}"
        yield path
        for one in objects_in(annotation):
            yield from vendor_paths(one, f"{path}.")


def types_in(union: Any) -> set[str]:
    """Return the values of `type` of all objects in a union."""
    hints = (typing_extensions.get_type_hints(one).get("type") for one in objects_in(union))
    return {str(value) for hint in hints for value in literals_in(hint)}


def literals_in(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for one in get_args(annotation):
            yield from literals_in(one)


def objects_in(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from objects_in(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from objects_in(one)
    elif typing.is_typeddict(annotation) or typing_extensions.is_typeddict(annotation):
        yield annotation


def test_the_page_is_what_is_declared() -> None:
    message = "write it anew: moiety config reference --api-fields > docs/api-fields.md"
    assert PAGE.read_text(encoding="utf-8") == fields_reference(), message


def test_every_field_of_the_vendors_types_is_known() -> None:
    unknown: dict[str, set[str]] = {}
    for path, params in VENDORS:
        _, schema = SCHEMAS[path]
        known, opaque = {row.path for row in field_rows(schema)}, opaque_fields(path)
        found = {one for one in vendor_paths(params) if one not in known and not is_within(one, opaque)}
        if found := found - HEADERS.get(path, set()):
            unknown.setdefault(path, set()).update(one for one in found if not is_within(one, found))
    assert unknown == {}


def test_the_vendors_types_are_walked_into_their_options() -> None:
    found = set(vendor_paths(chat_create_params.CompletionCreateParamsStreaming))
    assert {"model", "stream_options.include_usage", "response_format.json_schema.schema", "audio.voice"} <= found
    assert "thinking.budget_tokens" in set(vendor_paths(message_create_params.MessageCreateParamsNonStreaming))


def test_every_ignored_or_refused_field_has_its_reason() -> None:
    for _, schema in SCHEMAS.values():
        for row in field_rows(schema):
            assert row.support.treatment is FieldTreatment.SERVED or row.support.note, row.path


def test_rows_are_walked_into_options_that_have_an_effect() -> None:
    rows = {row.path: str(row) for row in field_rows(Outer)}
    assert set(rows) == {
        *("option", "option.kept", "option.schema", "option.dropped"),
        *("near", "near.kept", "near.schema", "near.dropped"),
        *("left", "wrong", "entries"),
    }
    assert rows["option.dropped"] == "| `option.dropped` | ignored | It has \\| no effect. |\n"
    assert rows["wrong"] == "| `wrong` | refused | Nothing has it. |\n"
    assert rows["entries"] == "| `entries` | served |  |\n"


@pytest.mark.parametrize("path", SCHEMAS)
def test_a_refused_field_may_be_null_and_an_ignored_one_may_be_left_out(path: str) -> None:
    _, schema = SCHEMAS[path]
    for name, field in schema.model_fields.items():
        if support_of(schema, name).treatment in (FieldTreatment.IGNORED, FieldTreatment.REFUSED):
            assert not field.is_required() and field.default is None, name


def test_literals_are_no_objects() -> None:
    assert list(objects_in(Literal["a"] | None)) == []


SECONDARY: list[tuple[Any, Any, set[str]]] = [  # schema, the vendor's type, fields that the SDK sends as headers
    (InputTokensBody, input_token_count_params.InputTokenCountParams, set()),
    (CompactBody, response_compact_params.ResponseCompactParams, set()),
    (ConversationBody, message_count_tokens_params.MessageCountTokensParams, {"user_profile_id", "workspace_id"}),
    (
        ConversationBody,
        beta_message_count_tokens_params.MessageCountTokensParams,
        {"betas", "user_profile_id", "workspace_id"},
    ),
]


@pytest.mark.parametrize(("schema", "params", "headers"), SECONDARY, ids=[str(row[1].__module__) for row in SECONDARY])
def test_every_field_of_requests_that_count_or_compact_is_known(schema: Any, params: Any, headers: set[str]) -> None:
    assert set(typing_extensions.get_type_hints(params)) - headers <= set(schema.model_fields)


@pytest.mark.parametrize(
    ("entries", "union"),
    [
        (InputItems, response_input_item_param.ResponseInputItemParam),
        (InputItems, beta_response_input_item_param.BetaResponseInputItemParam),
        (Blocks, content_block_param.ContentBlockParam),
        (Blocks, beta_content_block_param.BetaContentBlockParam),
    ],
    ids=["items", "beta items", "blocks", "beta blocks"],
)
def test_every_type_of_the_vendors_items_and_blocks_is_known(entries: Any, union: Any) -> None:
    kinds, adapter = types_in(union), TypeAdapter(entries)
    assert len(kinds) > 10
    unknown = {kind for kind in [*kinds, "nonsense"] if is_unknown(adapter, kind)}
    assert unknown == {"nonsense"}


def is_unknown(adapter: TypeAdapter[Any], kind: str) -> bool:
    try:
        (found,) = adapter.validate_python([{"type": kind}])
    except ValueError as exc:
        return "are unknown" in str(exc)
    return isinstance(found, OtherBlock)
