"""Protobuf messages of Envoy's external processing (ext_proc v3) and of gRPC health checks.

Only the fields that an endpoint picker reads or writes are declared; protobuf skips the others. The numbers are from
envoy/service/ext_proc/v3/external_processor.proto, envoy/config/core/v3/base.proto, envoy/type/v3/http_status.proto,
envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto and grpc/health/v1/health.proto. The classes are made at
import, so no generated file depends on a version of protobuf.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "moiety.ext_proc"  # the names of messages are not sent
FILE = "moiety/ext_proc.proto"
PROCESS_METHOD = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
HEALTH_METHOD = ("grpc.health.v1.Health", "Check")
STRUCT = "Struct"


class BodyMode(IntEnum):
    """Ways in which a proxy sends bodies (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class HeaderMode(IntEnum):
    """Mode in which a proxy sends headers or trailers (`ProcessingMode.HeaderSendMode`)."""

    DEFAULT = 0
    SEND = 1
    SKIP = 2


OVERWRITE_OR_ADD = 2  # HeaderValueOption.append_action
SERVING, NOT_SERVING = 1, 2  # HealthCheckResponse.status

# message → (field, number, type, oneof); `*` before a type: repeated, `map:`: a map from strings
_MESSAGES: dict[str, tuple[tuple[str, int, str, str], ...]] = {
    "HeaderValue": (("key", 1, "string", ""), ("value", 2, "string", ""), ("raw_value", 3, "bytes", "")),
    "HeaderMap": (("headers", 1, "*HeaderValue", ""),),
    "HeaderValueOption": (("header", 1, "HeaderValue", ""), ("append_action", 3, "int32", "")),
    "Metadata": (("filter_metadata", 1, f"map:{STRUCT}", ""),),
    "HttpStatus": (("code", 1, "int32", ""),),
    "HttpHeaders": (("headers", 1, "HeaderMap", ""), ("end_of_stream", 3, "bool", "")),
    "HttpBody": (("body", 1, "bytes", ""), ("end_of_stream", 2, "bool", "")),
    "HttpTrailers": (("trailers", 1, "HeaderMap", ""),),
    "ProtocolConfiguration": (("request_body_mode", 1, "int32", ""), ("response_body_mode", 2, "int32", "")),
    "ProcessingRequest": (
        ("request_headers", 2, "HttpHeaders", "request"),
        ("response_headers", 3, "HttpHeaders", "request"),
        ("request_body", 4, "HttpBody", "request"),
        ("response_body", 5, "HttpBody", "request"),
        ("request_trailers", 6, "HttpTrailers", "request"),
        ("response_trailers", 7, "HttpTrailers", "request"),
        ("metadata_context", 8, "Metadata", ""),
        ("observability_mode", 10, "bool", ""),
        ("protocol_config", 11, "ProtocolConfiguration", ""),
    ),
    "HeaderMutation": (("set_headers", 1, "*HeaderValueOption", ""), ("remove_headers", 2, "*string", "")),
    "StreamedBodyResponse": (("body", 1, "bytes", ""), ("end_of_stream", 2, "bool", "")),
    "BodyMutation": (("streamed_response", 3, "StreamedBodyResponse", "mutation"),),
    "CommonResponse": (
        ("status", 1, "int32", ""),
        ("header_mutation", 2, "HeaderMutation", ""),
        ("body_mutation", 3, "BodyMutation", ""),
        ("clear_route_cache", 5, "bool", ""),
    ),
    "HeadersResponse": (("response", 1, "CommonResponse", ""),),
    "BodyResponse": (("response", 1, "CommonResponse", ""),),
    "TrailersResponse": (("header_mutation", 1, "HeaderMutation", ""),),
    "ImmediateResponse": (
        ("status", 1, "HttpStatus", ""),
        ("headers", 2, "HeaderMutation", ""),
        ("body", 3, "bytes", ""),
        ("details", 5, "string", ""),
    ),
    "ProcessingMode": (
        ("request_header_mode", 1, "int32", ""),
        ("response_header_mode", 2, "int32", ""),
        ("request_body_mode", 3, "int32", ""),
        ("response_body_mode", 4, "int32", ""),
        ("request_trailer_mode", 5, "int32", ""),
        ("response_trailer_mode", 6, "int32", ""),
    ),
    "ProcessingResponse": (
        ("request_headers", 1, "HeadersResponse", "response"),
        ("response_headers", 2, "HeadersResponse", "response"),
        ("request_body", 3, "BodyResponse", "response"),
        ("response_body", 4, "BodyResponse", "response"),
        ("request_trailers", 5, "TrailersResponse", "response"),
        ("response_trailers", 6, "TrailersResponse", "response"),
        ("immediate_response", 7, "ImmediateResponse", "response"),
        ("dynamic_metadata", 8, STRUCT, ""),
        ("mode_override", 9, "ProcessingMode", ""),
    ),
    "HealthCheckRequest": (("service", 1, "string", ""),),
    "HealthCheckResponse": (("status", 1, "int32", ""),),
}
_SCALARS = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}  # FieldDescriptorProto.Type; enums are sent as int32
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def _type_name(kind: str) -> str:
    return ".google.protobuf.Struct" if kind == STRUCT else f".{PACKAGE}.{kind}"


def _add_field(message: Any, name: str, number: int, kind: str, oneof: str) -> None:
    field = message.field.add(name=name, number=number, label=_OPTIONAL)
    if kind.startswith("map:"):
        entry_name = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string", "")
        _add_field(entry, "value", 2, kind.removeprefix("map:"), "")
        field.label, field.type = _REPEATED, _MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry_name}"
        return
    if kind.startswith("*"):
        field.label, kind = _REPEATED, kind[1:]
    field.type = _SCALARS.get(kind, _MESSAGE)
    if kind not in _SCALARS:
        field.type_name = _type_name(kind)
    if oneof:
        names = [one.name for one in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name=FILE, package=PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, *field)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
HealthCheckRequest: Any = _CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = _CLASSES["HealthCheckResponse"]
