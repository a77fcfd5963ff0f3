"""An engine is sent an image once: later requests refer to it, and the files follow where it has dropped one."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tests.wire_submits import wire_submit

from moiety_platform.engine_client import image_sync
from moiety_platform.engine_client.image_sync import ImageSync
from moiety_platform.engine_client.stream import EngineStream, error_of
from moiety_platform.errors import BadRequest, PlatformError, Unavailable
from moiety_wire.images import ImageInput, image_digest
from moiety_wire.messages import Accepted, Extend, Failed, FailureCode, Submit
from moiety_wire.trace_events import Reason


def file(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 64, 32) + struct.pack(">I", number)


def asks(request_id: str, *numbers: int, **changes: Any) -> Submit:
    images = [ImageInput(place, file(number)) for place, number in enumerate(numbers)]
    return wire_submit(request_id, **{"prompt_ids": [1] * 40, "credit_tokens": 4, "images": images, **changes})


class Link:
    """One end of a session: its sent messages, and the streams of its requests."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.streams: dict[str, EngineStream] = {}
        self.sync = ImageSync(self._send)

    def _send(self, message: Any) -> None:
        self.sent.append(self.sync.with_references(message) if isinstance(message, Submit) else message)

    def submit(self, submit: Submit) -> EngineStream:
        stream = self.streams[submit.request_id] = EngineStream(submit, None, self._send)
        self._send(submit)
        return stream

    def whole(self, index: int = -1) -> list[bool]:
        """Which images of a sent request are whole files."""
        return [bool(image.data) for image in self.sent[index].images]

    def accept(self, request_id: str) -> None:
        assert not self.sync.takes(Accepted(request_id, 0, "standard", Reason.IN_TIME), self.streams)

    def misses(self, request_id: str) -> bool:
        return self.sync.takes(Failed(request_id, 0, FailureCode.IMAGES_MISSING, "send the files"), self.streams)


def link_with_known_file() -> Link:
    """Return a link that has sent the file 1 with an accepted request."""
    link = Link()
    link.submit(asks("a", 1))
    link.accept("a")
    return link


def test_files_are_sent_until_a_request_with_them_was_accepted_and_new_images_always() -> None:
    link = Link()
    link.submit(asks("a", 1))
    link.submit(asks("b", 1))
    assert link.whole(0) == link.whole(1) == [True]
    link.accept("a")
    link.submit(asks("c", 1, 2))
    assert link.whole() == [False, True]
    reference = link.sent[-1].images[0]
    assert reference == ImageInput(0, file(1)).reference()
    assert (reference.width, reference.height) == (64, 32)


def test_an_image_that_was_hashed_before_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link, digest = Link(), image_digest(file(1))
    images = [ImageInput(0, file(1), digest)]
    monkeypatch.delattr(image_sync, "image_digest")
    monkeypatch.delattr("moiety_wire.images.image_digest")
    for request_id in ("a", "b"):
        link.submit(asks(request_id, images=images))
        link.accept(request_id)
    assert link.sent[-1].images == [ImageInput(0, b"", digest, 64, 32)]


@pytest.mark.parametrize("other", [{"tenant_id": "u"}, {"cache_salt": b"z"}])
def test_images_of_another_tenant_or_salt_are_sent_whole(other: dict[str, Any]) -> None:
    link = link_with_known_file()
    link.submit(asks("b", 1, **other))
    assert link.whole() == [True]


def test_a_request_whose_images_were_dropped_is_sent_again_whole_with_the_credit_given_since() -> None:
    link = Link()
    link.submit(asks("a", 1, 2))
    link.accept("a")
    stream = link.submit(asks("b", 1, 2))
    assert link.whole() == [False, False]
    stream.extend(7, last=True)
    assert link.misses("b")
    again, extend = link.sent[-2:]
    assert [image.data for image in again.images] == [file(1), file(2)]
    assert again.credit_tokens == 7
    assert isinstance(extend, Extend)
    assert extend.last
    link.accept("b")
    link.submit(asks("c", 1))
    assert link.whole() == [False]


def test_a_request_that_was_aborted_meanwhile_is_not_sent_again() -> None:
    link = link_with_known_file()
    stream = link.submit(asks("b", 1))
    stream.abort()
    num_sent = len(link.sent)
    assert not link.misses("b")
    assert len(link.sent) == num_sent
    assert not link.sync.submits


def test_another_failure_is_the_requests_and_its_files_are_sent_next_time() -> None:
    link = link_with_known_file()
    link.submit(asks("b", 1))
    assert not link.sync.takes(Failed("b", 0, FailureCode.OVERLOADED, "later"), link.streams)
    link.submit(asks("c", 1))
    assert link.whole() == [True]


def test_deleted_tenants_are_forgotten_and_what_is_known_is_bounded() -> None:
    link = link_with_known_file()
    link.sync.forget_tenants(["t"])
    link.submit(asks("b", 1))
    assert link.whole() == [True]
    for number in range(image_sync.MAX_KNOWN + 1):
        link.submit(asks(f"{number}", number))
        link.accept(f"{number}")
    link.submit(asks("z", 0, 1))
    assert link.whole() == [True, False]


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        (FailureCode.IMAGE_REFUSED, BadRequest, "invalid_image"),
        (FailureCode.IMAGES_MISSING, Unavailable, "images_missing"),
        (FailureCode.OVERLOADED, Unavailable, "overloaded"),
    ],
)
def test_image_failures_map_to_client_or_engine_errors(code: FailureCode, kind: type[PlatformError], name: str) -> None:
    error = error_of(Failed("r", 0, code, "what to do"))
    assert isinstance(error, kind)
    assert error.code == name
