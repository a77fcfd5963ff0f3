"""Engines that wake up between the refusal of a request and its wait."""

from __future__ import annotations

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import EnginesAsleep
from moiety_wire.messages import ModelCard

from .conftest import StartGateway
from .test_wake_on_request import ON, chat, put_to_sleep


async def test_a_request_whose_engine_wakes_up_just_before_it_would_wait_is_served(
    start_gateway: StartGateway, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON) as gateway:
        put_to_sleep(engine)
        waker = gateway.assembled.services.waker
        assert waker is not None
        note = waker.note_request

        def note_and_wake(model: str) -> EnginesAsleep:
            error = note(model)
            engine.set_asleep(asleep=False)
            assert not waker.is_asleep(model)
            return error

        monkeypatch.setattr(waker, "note_request", note_and_wake)
        assert (await chat(gateway))[0] == 200
