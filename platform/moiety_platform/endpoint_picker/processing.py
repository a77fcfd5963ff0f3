"""One stream of Envoy's external processing: a request's headers are answered with its endpoint.

Bodies are not needed, and the first answer asks the proxy not to send them. A proxy that sends them nevertheless gets
them back unchanged.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog

from moiety_platform.endpoint_picker.members import PoolMembers
from moiety_platform.endpoint_picker.messages import OVERWRITE_OR_ADD, BodyMode, HeaderMode, ProcessingResponse
from moiety_platform.endpoint_picker.metrics import PickerMetrics
from moiety_platform.endpoint_picker.picking import PickOutcome
from moiety_platform.errors import Unavailable

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
CREDENTIALS = ("authorization", "x-api-key")
RETRY_AFTER_S = 1

log = structlog.get_logger(__name__)


async def process_stream(
    endpoints: PoolMembers, requests: AsyncIterator[Any], metrics: PickerMetrics
) -> AsyncIterator[Any]:
    """Yield the answer to each message of one HTTP request's stream."""
    pick, request_mode, response_mode = None, BodyMode.NONE, BodyMode.NONE
    try:
        async for message in requests:
            if pick is not None and has_response_ended(message):
                endpoints.end_pick(pick, has_ended=True)  # before the proxy sends the response to the client
            if message.HasField("protocol_config"):  # in the first message
                request_mode = message.protocol_config.request_body_mode
                response_mode = message.protocol_config.response_body_mode
            if message.observability_mode:
                continue  # the proxy ignores answers
            part = message.WhichOneof("request")
            if part == "request_headers":
                begin_s = time.perf_counter()
                affinity = affinity_of(message.request_headers.headers.headers)
                chosen, pick = endpoints.pick(affinity, subset_of(message.metadata_context))
                has_members = bool(endpoints.all())
                answer = destination_answer(chosen) if chosen else no_endpoint_answer(has_members)
                missing = PickOutcome.NONE_READY if has_members else PickOutcome.NO_MEMBERS
                metrics.note_pick(missing if pick is None else pick.outcome, time.perf_counter() - begin_s)
                yield answer
            elif part == "request_body":
                yield body_answer(part, message.request_body, request_mode)
            elif part == "response_body":
                yield body_answer(part, message.response_body, response_mode)
            elif part is not None:
                answer = ProcessingResponse()
                getattr(answer, part).SetInParent()
                yield answer
    finally:
        if pick is not None:
            endpoints.end_pick(pick, has_ended=False)


def affinity_of(headers: Any) -> bytes | None:
    """Return the hash of the client's credentials; None if the request has none."""
    fields = _fields_of(headers)
    for name in CREDENTIALS:
        if credentials := fields.get(name):
            scheme, _, token = credentials.partition(b" ")
            return hashlib.sha256(token.strip() if scheme.lower() == b"bearer" else credentials).digest()
    return None


def has_response_ended(message: Any) -> bool:
    """Return whether the request is over. The headers of a response that is not streamed come when it is computed."""
    part = message.WhichOneof("request")
    if part == "response_headers":
        content_type = _fields_of(message.response_headers.headers.headers).get("content-type", b"")
        return not content_type.startswith(b"text/event-stream")
    return part == "response_trailers" or (part == "response_body" and bool(message.response_body.end_of_stream))


def _fields_of(headers: Any) -> dict[str, bytes]:
    return {one.key.lower(): one.raw_value or one.value.encode() for one in headers}


def subset_of(metadata: Any) -> set[str] | None:
    """Return the addresses that the proxy permits; None if it permits all."""
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return {one.string_value.strip() for one in value.list_value.values}
    return {one.strip() for one in value.string_value.split(",") if one.strip()}


def destination_answer(chosen: list[str]) -> Any:
    """Return the answer that sends a request to the first of these endpoints, in a header and in metadata."""
    destination = ",".join(chosen)
    answer = ProcessingResponse()
    header = answer.request_headers.response.header_mutation.set_headers.add(append_action=OVERWRITE_OR_ADD)
    header.header.key, header.header.raw_value = DESTINATION, destination.encode()
    answer.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION: destination}})
    _ask_for_headers_only(answer.mode_override)
    return answer


def no_endpoint_answer(has_members: bool) -> Any:
    """Return the answer that ends a request with 503, in the form of the gateway's errors."""
    why = "no gateway is ready" if has_members else "there is no gateway"
    error = Unavailable(f"{why}; try again, or see /readyz of the gateways", retry_after_s=RETRY_AFTER_S)
    fields = {"message": error.message, "type": error.type, "param": None, "code": error.code}
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = 503
    for name, value in (("content-type", "application/json"), ("retry-after", str(RETRY_AFTER_S))):
        header = immediate.headers.set_headers.add(append_action=OVERWRITE_OR_ADD)
        header.header.key, header.header.raw_value = name, value.encode()
    immediate.body = msgspec.json.encode({"error": fields})
    immediate.details = "no_ready_endpoint"
    return answer


def body_answer(part: str, body: Any, mode: int) -> Any:
    """Return the answer that leaves a part of a body as it is."""
    answer = ProcessingResponse()
    common = getattr(answer, part).response
    common.SetInParent()
    if mode == BodyMode.FULL_DUPLEX_STREAMED:  # the proxy forwards only what it gets back
        common.body_mutation.streamed_response.body = body.body
        common.body_mutation.streamed_response.end_of_stream = body.end_of_stream
    return answer


def _ask_for_headers_only(mode: Any) -> None:
    mode.response_header_mode = HeaderMode.SEND  # they say that a request has ended
    mode.request_body_mode = mode.response_body_mode = BodyMode.NONE
    mode.request_trailer_mode = mode.response_trailer_mode = HeaderMode.SKIP
