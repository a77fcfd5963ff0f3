"""OpenAI's `/v1/responses` endpoint and the endpoints of stored responses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import msgspec
from litestar import Controller, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, SkipValidation
from litestar.response import Stream

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.db.keyset import Identified, list_fields
from moiety_platform.errors import BadRequest, Unavailable
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, SendLast, Serve, route
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse
from moiety_platform.inference.response_headers import field_headers
from moiety_platform.inference.run import InferenceRun
from moiety_platform.inference.text_answer import relay
from moiety_platform.known_parameters import IGNORED, SENT_BY_BETA_CLIENTS
from moiety_platform.openapi.described import EVENTS as EVENT_STREAM
from moiety_platform.openapi.described import JSON, Described, describes, event_of
from moiety_platform.openapi.documents import KEY
from moiety_platform.query_parameters import one_of, parse_whole, whole
from moiety_platform.responses_api.answer_types import (
    EVENTS,
    CompactedResponse,
    DeletedResponse,
    InputItemList,
    ResponseObject,
)
from moiety_platform.responses_api.answers import ID_PREFIX, Fields, ResponseHead, usage_fields
from moiety_platform.responses_api.background import LEASE_MS, BackgroundRuns
from moiety_platform.responses_api.compaction import CompactBody, CompactionOutput
from moiety_platform.responses_api.conversation_reader import ConversationReader
from moiety_platform.responses_api.events import LoggedEvents, ResponseEvents, StreamErrors
from moiety_platform.responses_api.item_lists import ITEM_LIST, ListRequestDependency
from moiety_platform.responses_api.items import COMPACTION, FIRST_INPUT, MESSAGE, THOUGHT, Item, with_id, without_id
from moiety_platform.responses_api.output import ResponseOutput
from moiety_platform.responses_api.reasoning_cipher import ReasoningCipher
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.resumed_streams import ResumedStreams
from moiety_platform.responses_api.schemas import ResponsesBody
from moiety_platform.responses_api.whole import ended_response, take_message
from moiety_text.reasoning import AnswerReader

PATH = "/v1/responses"
MAX_NUMBER = 2**31 - 1  # of an event
TAGS = ("responses",)
SECURITY = [{KEY: list[str]()}]

Streamed = Annotated[str | None, one_of("Whether to stream the events of a background response.", "true", "false")]
StartingAfter = Annotated[
    str | None, whole("The sequence number of the event after which a stream begins.", 0, MAX_NUMBER)
]

_SHOWN = EndpointDocs(
    tag="responses",
    summary="Answer a conversation, and store the response if requested",
    detail="OpenAI's Responses API. With `stream` the answer is sent as server-sent events. It is stored only with "
    "`store`.",
    answer=ResponseObject,
    event={"anyOf": [event_of(kind, name=name) for name, kind in EVENTS.items()]},
)


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Services of the endpoints of stored responses."""

    service: ResponseService
    runs: BackgroundRuns
    streams: ResumedStreams


def response_route(
    serve: Serve, service: ResponseService, cipher: ReasoningCipher, runs: BackgroundRuns, streams: ResumedStreams
) -> HTTPRouteHandler:
    """Return the handler of the endpoint that answers."""
    answers = ResponseAnswers(service, ConversationReader(service, cipher), runs)
    endpoint = Endpoint(
        PATH, "chat", ID_PREFIX, ResponsesBody, answers.answer, _SHOWN, answers.prepare, answers.accept,
        resume=partial(streams.open, starting_after=-1), ignored_parameters=SENT_BY_BETA_CLIENTS,
    )  # fmt: skip
    return route(endpoint, partial(runs.serve, serve))


@dataclass(frozen=True, slots=True)
class ResponseAnswers:
    """Answers requests with responses.

    A response with `store` is stored before its last bytes are sent, so that a client that has received it can continue
    it.
    """

    service: ResponseService
    reader: ConversationReader
    runs: BackgroundRuns

    async def prepare(self, body: ResponsesBody, record: RequestRecord) -> ResponsesBody:
        """Return the body together with the conversation that it continues.

        A request that neither stores nor continues does not query the store.
        """
        if body.store is None and self.service.limits.stores_by_default:
            body = body.model_copy(update={"store": True})
        if body.is_stored:
            await self.service.require_capacity(record.principal)
        if body.conversation_id is not None:
            await self.runs.lock_conversation(record.principal, body.conversation_id, record.request_id)
        body, ignored = await self.reader.resolve(body, record.principal)
        record.ignored_fields += ignored
        return body

    async def accept(self, body: ResponsesBody, record: RequestRecord, reply: HttpResponse) -> None:
        """Store a background response as queued, and let its request go on without the client. Raises Unavailable."""
        if not body.background:
            return
        queued = msgspec.json.encode(ResponseHead.of(body, record).queued())
        if not await self._store(queued, body, record, LEASE_MS):
            raise Unavailable("the response cannot be stored now, which 'background' needs; try again")
        headers = field_headers(record.ignored_fields, record.adjusted_fields)
        if body.wants_stream:
            await self.runs.current.detach_stream(record.request_id, queued, reply, headers)
        else:
            self.runs.current.detach(record.request_id, queued, reply, headers)

    async def answer(
        self, body: ResponsesBody, run: InferenceRun, record: RequestRecord, reply: HttpResponse
    ) -> SendLast:
        head, readers = ResponseHead.of(body, record), run.new_readers()
        output = self._output_of(body, record, None if readers is None else readers[0])
        if body.background:
            await self.runs.store_progress(record.request_id, msgspec.json.encode(head.in_progress()))
        if not body.wants_stream:
            async for _, message in run:
                take_message(output, message)
            reply.headers = record.response_headers()  # again, since the end of a compaction can add one
            return partial(self._send_whole, ended_response(head, output, run, record), body, record, reply)
        log = self.runs.current.events
        events = ResponseEvents(head, output) if log is None else LoggedEvents(head, output, log)
        reply.errors = StreamErrors(events, self.runs.current.note_error)
        await relay(events, run, record, reply)
        return partial(self._end_stream, events, ended_response(head, output, run, record), body, record, reply)

    def _output_of(self, body: ResponsesBody, record: RequestRecord, reader: AnswerReader | None) -> ResponseOutput:
        tenant_id = record.principal.tenant_id
        if body.wants_compaction:
            return CompactionOutput(record, reader, self.reader.encrypt_for(tenant_id, COMPACTION))
        encrypt = self.reader.encrypt_for(tenant_id, THOUGHT) if body.wants_encrypted_reasoning else None
        tools = {offered.tool.name: offered for offered in body.offered}
        return ResponseOutput(record.request_id, reader, tools, encrypt)

    async def _send_whole(
        self, response: Fields, body: ResponsesBody, record: RequestRecord, reply: HttpResponse
    ) -> None:
        await reply.whole(200, await self._keep(response, body, record))

    async def _end_stream(
        self, events: ResponseEvents, response: Fields, body: ResponsesBody, record: RequestRecord, reply: HttpResponse
    ) -> None:
        await reply.end_stream(events.end(await self._keep(response, body, record)))

    async def _keep(self, response: Fields, body: ResponsesBody, record: RequestRecord) -> bytes:
        """Store the response if requested, and return its encoding, which says whether it is stored."""
        encoded = msgspec.json.encode(response)
        if body.background:
            return await self.runs.store_end(record.request_id, encoded, self.runs.current.events)
        if not body.store and body.conversation is None:
            return encoded
        if not await self._store(encoded, body, record):
            return msgspec.json.encode({**response, "store": False, "conversation": None})
        self.runs.current.lock = None  # it ended in the same transaction
        return encoded

    async def _store(
        self, encoded: bytes, body: ResponsesBody, record: RequestRecord, lease_ms: int | None = None
    ) -> bool:
        items = [with_id(item, record.request_id, FIRST_INPUT + at) for at, item in enumerate(body.items())]
        parts = (record.principal, record.request_id, body.model, body.continued, items, encoded, lease_ms)
        has_events = lease_ms is not None and body.wants_stream
        return await self.service.keep(*parts, stores=body.is_stored, has_events=has_events)


def compaction_route(serve: Serve, service: ResponseService, cipher: ReasoningCipher) -> HTTPRouteHandler:
    """Return the handler of the endpoint that summarizes a conversation."""
    compactions = Compactions(ConversationReader(service, cipher))
    return route(
        Endpoint(
            f"{PATH}/compact",
            "chat",
            ID_PREFIX,
            CompactBody,
            compactions.answer,
            EndpointDocs(
                tag="responses",
                summary="Summarize a conversation",
                detail="OpenAI's compaction. The client continues with `output` instead of the conversation. `output` "
                "has the user's messages and the model's encrypted summary of the conversation.",
                answer=CompactedResponse,
            ),
            compactions.prepare,
            ignored_parameters=SENT_BY_BETA_CLIENTS,
        ),
        serve,
    )


@dataclass(frozen=True, slots=True)
class Compactions:
    """Answers requests for compactions."""

    reader: ConversationReader

    async def prepare(self, body: CompactBody, record: RequestRecord) -> CompactBody:
        """Return the body together with the conversation that it continues."""
        body, ignored = await self.reader.resolve(body, record.principal)
        record.ignored_fields += ignored
        return body

    async def answer(
        self, body: CompactBody, run: InferenceRun, record: RequestRecord, reply: HttpResponse
    ) -> SendLast:
        readers, encrypt = run.new_readers(), self.reader.encrypt_for(record.principal.tenant_id, COMPACTION)
        output = CompactionOutput(record, None if readers is None else readers[0], encrypt)
        async for _, message in run:
            take_message(output, message)
        reply.headers = record.response_headers()  # again, since the end can add one
        kept = [item for item in body.all_items() if item["type"] == MESSAGE and item["role"] == "user"]
        fields = {
            "id": record.request_id,
            "object": "response.compaction",
            "created_at": record.arrival_unix_ns // 1_000_000_000,
            "output": [
                *(with_id(without_id(item), record.request_id, FIRST_INPUT + at) for at, item in enumerate(kept)),
                *output.items,
            ],
            "usage": usage_fields(run.usage()),
        }
        return partial(reply.whole, 200, msgspec.json.encode(fields))


# what is stored is returned whole
_BETA: dict[str, Any] = {IGNORED: SENT_BY_BETA_CLIENTS | {"include", "include[]", "include_obfuscation"}}

StoredDependency = NamedDependency[SkipValidation[StoredResponses]]


class ResponseController(Controller):
    """Routes of stored responses."""

    path = PATH
    tags = TAGS
    security = SECURITY

    @get(
        "/{response_id:str}",
        opt={
            **_BETA,
            **describes(
                Described(answers={200: {JSON: ResponseObject, EVENT_STREAM: _SHOWN.event}}, errors=(400, 429))
            ),
        },
    )
    async def retrieve_response(
        self,
        owner: AuthenticatedClient,
        stored: StoredDependency,
        response_id: FromPath[str],
        stream: Streamed = None,
        starting_after: StartingAfter = None,
    ) -> Response[bytes] | Stream:
        """Return a stored response as it was answered, or the events of a streamed background response."""
        if stream not in (None, "true", "false"):
            raise BadRequest("'stream' must be true or false", param="stream")
        number = -1 if starting_after is None else parse_whole(starting_after, "starting_after")
        if number > MAX_NUMBER:
            raise BadRequest(f"'starting_after' must be at most {MAX_NUMBER:,}", param="starting_after")
        if stream == "true":
            events = await stored.streams.open(owner, response_id, max(-1, number))
            return Stream(events, media_type=EVENT_STREAM, headers={"x-accel-buffering": "no"})
        if starting_after is not None:
            raise BadRequest("'starting_after' is of streams; send 'stream=true' as well", param="starting_after")
        return Response(await stored.service.body(owner, response_id), media_type="application/json")

    @delete("/{response_id:str}", status_code=200, opt=_BETA)
    async def delete_response(
        self, owner: AuthenticatedClient, stored: StoredDependency, response_id: FromPath[str]
    ) -> DeletedResponse:
        """Delete a stored response. Responses that continue it can no longer be continued."""
        await stored.service.delete(owner, response_id)
        stored.runs.cancel(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @get("/{response_id:str}/input_items", dependencies=ITEM_LIST, opt=_BETA)
    async def list_input_items(
        self,
        owner: AuthenticatedClient,
        stored: StoredDependency,
        response_id: FromPath[str],
        list_request: ListRequestDependency,
    ) -> InputItemList:
        """List the input items of a stored response, the latest first unless `order` is asc."""
        items = await stored.service.input_items(owner, response_id)
        if list_request.newest_first:
            items.reverse()
        if list_request.after is not None:
            items = _after(items, list_request.after)
        shown = cast("list[Identified]", items[: list_request.limit])
        return list_fields(shown, has_more=len(items) > list_request.limit)

    @post(
        "/{response_id:str}/cancel",
        status_code=200,
        opt=_BETA | describes(Described(answers={200: {JSON: ResponseObject}}, errors=(400,))),
    )
    async def cancel_response(
        self, owner: AuthenticatedClient, stored: StoredDependency, response_id: FromPath[str]
    ) -> Response[bytes]:
        """Cancel a response that is made in the background. One that has ended is returned as it is."""
        body = await stored.service.cancel(owner, response_id)
        stored.runs.cancel(response_id)
        return Response(body, media_type="application/json")


def _after(items: list[Item], item_id: str) -> list[Item]:
    for number, item in enumerate(items):
        if item["id"] == item_id:
            return items[number + 1 :]
    raise BadRequest("'after' must be the id of an item in this list", param="after")
