"""The endpoint picker protocol, spoken by a gRPC client as Envoy speaks it, with the command as a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.conftest import wait_for

from moiety_platform.endpoint_picker.certificates import NAME, self_signed_certificate
from moiety_platform.endpoint_picker.messages import NOT_SERVING, SERVING, BodyMode, HeaderMode, ProcessingRequest
from moiety_platform.endpoint_picker.processing import DESTINATION, has_response_ended

from .picker_process import KEY, FakeGateway, Picker, exchange, request_headers, response_headers, running_picker


@pytest.fixture(scope="module")
def gateways() -> Iterator[list[FakeGateway]]:
    with FakeGateway() as first, FakeGateway() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def picker(gateways: list[FakeGateway], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Picker]:
    with running_picker(tmp_path_factory.mktemp("picker"), *endpoint_options(gateways)) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def channel(picker: Picker, gateways: list[FakeGateway]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{picker.port}") as opened:
        yield opened
        for one in gateways:
            one.status, one.answer = 200, {"status": "ready", "open_requests": 0}
        wait_for(lambda: len(chosen(opened)) == len(gateways), "both gateways to be ready")


def chosen(channel: grpc.Channel) -> set[str]:
    """Return the destinations of requests with many keys."""
    answers = [exchange(channel, [request_headers(f"key-{one}"), response_headers()])[0] for one in range(16)]
    return {one.dynamic_metadata["envoy.lb"][DESTINATION] for one in answers if one.HasField("dynamic_metadata")}


def endpoint_options(gateways: list[FakeGateway]) -> list[str]:
    return [f"--endpoint=http://{one.address}" for one in gateways]


def destination(channel: grpc.Channel, **terms: Any) -> str:
    """Return the destination of a request, which header and metadata must give alike."""
    answer, _ = exchange(channel, [request_headers(**terms), response_headers()])
    (header,) = answer.request_headers.response.header_mutation.set_headers
    assert header.header.key == DESTINATION
    value = header.header.raw_value.decode()
    assert dict(answer.dynamic_metadata["envoy.lb"]) == {DESTINATION: value}
    return value


def test_header_and_metadata_name_the_same_endpoint_and_a_key_keeps_it(
    channel: grpc.Channel, gateways: list[FakeGateway]
) -> None:
    addresses = {one.address for one in gateways}
    found = {key: {destination(channel, key=key) for _ in range(3)} for key in (f"key-{index}" for index in range(24))}
    assert {len(one) for one in found.values()} == {1}, "a key keeps its gateway"
    assert set.union(*found.values()) == addresses, "and keys spread"


def test_a_proxy_is_asked_for_headers_alone(channel: grpc.Channel) -> None:
    (answer,) = exchange(channel, [request_headers()])
    mode = answer.mode_override
    assert (mode.request_body_mode, mode.response_body_mode) == (BodyMode.NONE, BodyMode.NONE)
    assert mode.request_trailer_mode == mode.response_trailer_mode == HeaderMode.SKIP
    assert mode.response_header_mode == HeaderMode.SEND


def test_the_key_of_the_messages_api_counts_too(channel: grpc.Channel) -> None:
    message = request_headers(None)
    message.request_headers.headers.headers.add(key="x-api-key", value=KEY)
    answer, _ = exchange(channel, [message, response_headers()])
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == destination(channel)


def test_a_subset_is_honoured(channel: grpc.Channel, gateways: list[FakeGateway]) -> None:
    for one in gateways:
        assert destination(channel, subset=[one.address, "10.1.1.1:80"]) == one.address
        assert destination(channel, subset=one.address) == one.address, "also in one text"


@pytest.mark.parametrize("subset", [[], ["10.1.1.1:80"], ""])
def test_a_subset_without_an_eligible_endpoint_is_answered_503(channel: grpc.Channel, subset: Any) -> None:
    (answer,) = exchange(channel, [request_headers(subset=subset)])
    assert answer.immediate_response.status.code == 503


def test_without_a_ready_gateway_the_answer_is_the_gateways_own_503(
    channel: grpc.Channel, gateways: list[FakeGateway]
) -> None:
    for one in gateways:
        one.drain()

    def refused() -> Any:
        (answer,) = exchange(channel, [request_headers()])
        return answer.immediate_response if answer.WhichOneof("response") == "immediate_response" else None

    refusal = wait_for(refused, "a refusal")
    assert refusal.status.code == 503
    assert {one.header.key: one.header.raw_value for one in refusal.headers.set_headers} == {
        "content-type": b"application/json",
        "retry-after": b"1",
    }
    error = json.loads(refusal.body)["error"]
    assert (error["code"], "no gateway is ready" in error["message"]) == ("unavailable", True)


def test_a_draining_gateway_gets_no_request_and_gets_them_again_when_it_is_back(
    channel: grpc.Channel, gateways: list[FakeGateway]
) -> None:
    first, second = gateways
    first.drain()
    wait_for(lambda: chosen(channel) == {second.address}, "the picker to notice")
    first.status, first.answer = 200, {"status": "ready", "open_requests": 0}
    assert wait_for(lambda: chosen(channel) == {first.address, second.address}, "both")


def test_the_reported_load_moves_a_key_to_another_gateway(channel: grpc.Channel, gateways: list[FakeGateway]) -> None:
    preferred = destination(channel)
    (busy,) = (one for one in gateways if one.address == preferred)
    busy.answer = {"status": "ready", "open_requests": 40}
    wait_for(lambda: destination(channel) != preferred, "the key to move")
    busy.answer = {"status": "ready", "open_requests": 0}
    assert wait_for(lambda: destination(channel) == preferred, "the key to return")


def test_streamed_responses_count_until_the_next_report(gateways: list[FakeGateway], tmp_path: Path) -> None:
    with running_picker(tmp_path, *endpoint_options(gateways), "--probe-interval-s=600") as picker:
        picker.wait_until_ready()
        with grpc.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            for _ in range(8):
                exchange(channel, [request_headers("other"), response_headers()])
            assert destination(channel) == destination(channel), "ended ones do not count"
            preferred = destination(channel)
            for _ in range(2):
                exchange(channel, [request_headers(), response_headers("text/event-stream; charset=utf-8")])
            assert destination(channel) != preferred


def test_bodies_that_are_sent_nevertheless_come_back_unchanged(channel: grpc.Channel) -> None:
    duplex = BodyMode.FULL_DUPLEX_STREAMED
    messages = [request_headers(request_body_mode=duplex, response_body_mode=duplex)]
    for part, body, is_last in (("request_body", b"ab", False), ("request_body", b"c", True)):
        message = ProcessingRequest()
        getattr(message, part).body, getattr(message, part).end_of_stream = body, is_last
        messages.append(message)
    for part in ("response_headers", "response_body", "response_trailers"):
        message = ProcessingRequest()
        getattr(message, part).SetInParent()
        messages.append(message)
    messages[-2].response_body.body = b"d"
    answers = exchange(channel, messages)
    assert [one.WhichOneof("response") for one in answers] == [one.WhichOneof("request") for one in messages]
    streamed = [one.request_body.response.body_mutation.streamed_response for one in answers[1:3]]
    assert [(one.body, one.end_of_stream) for one in streamed] == [(b"ab", False), (b"c", True)]
    last = answers[4].response_body.response.body_mutation.streamed_response
    assert (last.body, last.end_of_stream) == (b"d", False)


def test_buffered_bodies_are_left_to_the_proxy(channel: grpc.Channel) -> None:
    body = ProcessingRequest()
    body.request_body.body, body.request_body.end_of_stream = b"ab", True
    answer = exchange(channel, [request_headers(request_body_mode=BodyMode.BUFFERED), body])[1]
    assert answer.WhichOneof("response") == "request_body"
    assert not answer.request_body.response.HasField("body_mutation")


def test_several_endpoints_are_named_if_wanted(gateways: list[FakeGateway], tmp_path: Path) -> None:
    with running_picker(tmp_path, *endpoint_options(gateways), "--num-endpoints", "2") as picker:
        picker.wait_until_ready()
        with grpc.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            assert set(destination(channel).split(",")) == {one.address for one in gateways}


def test_health_checks_report_readiness_and_life(picker: Picker) -> None:
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert picker.health(service) == SERVING
    with pytest.raises(grpc.RpcError) as refused:
        picker.health("other")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_picker_that_has_probed_no_gateway_is_alive_and_not_ready(tmp_path: Path) -> None:
    gone = "--endpoint=http://127.0.0.1:1"
    with running_picker(tmp_path, gone, "--probe-interval-s=600") as picker:
        assert picker.health("liveness") == SERVING
        wait_for(lambda: picker.health() == SERVING, "the first probe, which fails")
    api = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("t")
    (account / "namespace").write_text("prod")
    (account / "ca.crt").write_bytes(self_signed_certificate()[1])
    with running_picker(tmp_path, "--selector=a=b", f"--account={account}", environment=api) as picker:
        assert (picker.health("liveness"), picker.health()) == (SERVING, NOT_SERVING)
        wait_for(lambda: "pods_not_read" in picker.output, "a line that says why")


def test_no_key_is_logged(channel: grpc.Channel, picker: Picker) -> None:
    destination(channel)
    exchange(channel, [request_headers(subset=[])])
    assert KEY not in picker.output
    assert KEY.partition(".")[2] not in picker.output


def test_proxies_that_verify_get_the_given_certificate(gateways: list[FakeGateway], tmp_path: Path) -> None:
    key, chain = self_signed_certificate()
    (tmp_path / "tls.key").write_bytes(key)
    (tmp_path / "tls.crt").write_bytes(chain)
    files = [f"--tls-certificate={tmp_path / 'tls.crt'}", f"--tls-key={tmp_path / 'tls.key'}"]
    with running_picker(tmp_path, *endpoint_options(gateways), *files, tls=True) as picker:
        picker.wait_until_ready()
        name = (("grpc.ssl_target_name_override", NAME),)
        credentials = grpc.ssl_channel_credentials(chain)
        with grpc.secure_channel(f"127.0.0.1:{picker.port}", credentials, options=name) as channel:
            assert destination(channel) in {one.address for one in gateways}
        key, chain = self_signed_certificate()
        (tmp_path / "tls.crt").write_bytes(chain)
        with grpc.secure_channel(f"127.0.0.1:{picker.port}", credentials, options=name) as channel:
            assert destination(channel)  # a certificate without its key is not used
        (tmp_path / "tls.key").write_bytes(key)
        renewed = grpc.ssl_channel_credentials(chain)
        with grpc.secure_channel(f"127.0.0.1:{picker.port}", renewed, options=name) as channel:
            assert destination(channel)
        assert "certificate_renewed" in picker.output


def test_a_request_is_over_with_its_response_or_with_the_end_of_a_stream() -> None:
    assert not has_response_ended(request_headers())
    assert has_response_ended(response_headers())
    assert not has_response_ended(response_headers("text/event-stream"))
    body = ProcessingRequest()
    body.response_body.body = b"data: 1"
    assert not has_response_ended(body)
    body.response_body.end_of_stream = True
    assert has_response_ended(body)
