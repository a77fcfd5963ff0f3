"""Requests with images over the wire: a real model behind the engine server, which decodes them before the core."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from PIL import Image
from tests.vision_checkpoint import END, IMAGE, START, write_checkpoint

from moiety_engine.config import EngineConfig, ImageOptions
from moiety_engine.core.service import execute_command, hello_of
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreShutdown, CoreStep, ToCore
from moiety_engine.server.core_link import CoreEvents
from moiety_engine.startup import load_loop
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_wire.images import ImageInput
from moiety_wire.messages import (
    Abort,
    Extend,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Forget,
    Sampling,
    Stopping,
    Submit,
)

Bench = Callable[..., AbstractAsyncContextManager[Any]]
LIMITS = ImageOptions(max_images=2, max_bytes=40_000, max_source_pixels=20_000, max_pixels=3_000)


class LoopCore:
    """A core in the engine server's own event loop, with a real model."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.submitted: list[int] = []
        self._events: CoreEvents | None = None

    async def start(self, events: CoreEvents) -> None:
        self._events = events
        asyncio.get_running_loop().call_soon(events.on_message, hello_of(self.loop))

    def send(self, commands: list[ToCore]) -> None:
        for command in commands:
            if isinstance(command, CoreShutdown):
                self._events = None
            else:
                execute_command(self.loop, command)
        asyncio.get_running_loop().call_soon(self._step)

    def first_step_keys(self) -> frozenset[int]:
        return frozenset()

    async def stop(self) -> None:
        self._events = None

    def _step(self) -> None:
        stepped = self.loop.step()
        outputs = self.loop.take_outputs() or CoreStep([], [], self.loop.load())
        if self._events is not None:
            self._events.on_message(outputs)
            if stepped:
                asyncio.get_running_loop().call_soon(self._step)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLoop]:
    folder: Path = tmp_path_factory.mktemp("vision")
    write_checkpoint(folder)
    config = EngineConfig(model=str(folder), name="scripted", device="cpu", dtype="float32", images=LIMITS)
    loop = load_loop(config)
    yield loop
    loop.intake.close()


@pytest.fixture
def serving(bench: Bench, loop: EngineLoop) -> Callable[[], AbstractAsyncContextManager[Any]]:
    return lambda: bench(core=LoopCore(loop), images=LIMITS)


def png(width: int, height: int, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def plain_png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def prompt_of(counts: list[int]) -> tuple[list[int], list[int]]:
    """A prompt with images of so many tokens, and where they start."""
    ids, starts = [5, 6], []
    for count in counts:
        starts.append(len(ids) + 1)
        ids += [START, *[IMAGE] * count, END, 7]
    return ids, starts


@pytest.fixture
def ask_about(submit: Callable[..., Submit]) -> Callable[..., Submit]:
    def make(request_id: str, images: list[bytes], counts: list[int], **changes: Any) -> Submit:
        ids, starts = prompt_of(counts)
        inputs = [ImageInput(start, data) for start, data in zip(starts, images, strict=True)]
        how = {"sampling": Sampling(temperature=0.0, num_logprobs=0), "stopping": Stopping(6, ignore_eos=True)}
        fields = {**how, "images": inputs, **changes}
        return submit(request_id, ids, **fields)

    return make


async def test_the_card_tells_what_a_gateway_needs_to_count_tokens(serving: Any) -> None:
    async with serving() as running:
        card = await running.connect().greet()
        assert card.images.image_token_id == IMAGE
        assert card.images.num_tokens(40, 24) * 64 >= 2304
        assert (card.images.max_images, card.images.max_pixels) == (2, 3_000)


async def test_an_image_is_decoded_and_answered_and_another_one_gets_another_answer(
    serving: Any, ask_about: Any
) -> None:
    async with serving() as running:
        gateway = running.connect()
        rules = (await gateway.greet()).images
        count = rules.num_tokens(40, 24)
        answers = [
            await gateway.ask(ask_about(name, [png(40, 24, seed)], [count]))
            for name, seed in (("a", 1), ("b", 1), ("c", 2))
        ]
        assert all(isinstance(one.end, Finished) and one.end.reason is FinishReason.LENGTH for one in answers)
        first, same, other = ([one.logprob for one in answer.logprobs] for answer in answers)
        assert first == pytest.approx(same)
        assert first != pytest.approx(other, abs=1e-3)
        assert [one.end.num_cached_tokens > count for one in answers] == [False, True, False]


async def test_credit_that_comes_while_an_image_is_decoded_counts(serving: Any, ask_about: Any) -> None:
    async with serving() as running:
        gateway = running.connect()
        count = (await gateway.greet()).images.num_tokens(40, 24)
        await gateway.send(ask_about("r", [png(40, 24, 5)], [count], credit_tokens=1), Extend("r", 1, 3, last=True))
        answer = await gateway.finish("r")
        assert (answer.end.reason, answer.end.detail, len(answer.token_ids)) == (
            FinishReason.LENGTH, "credit_refused", 3,
        )  # fmt: skip


async def test_a_request_that_is_aborted_while_its_image_is_decoded_ends_at_once(
    serving: Any, ask_about: Any, submit: Any
) -> None:
    async with serving() as running:
        gateway = running.connect()
        count = (await gateway.greet()).images.num_tokens(40, 24)
        await gateway.send(ask_about("r", [png(40, 24, 6)], [count]), Abort("r", 1))
        answer = await gateway.finish("r")
        assert (answer.end.reason, answer.token_ids) == (FinishReason.ABORT, [])
        after = await gateway.ask(submit("after", [3, 4], stopping=Stopping(2)))
        assert isinstance(after.end, Finished)
        assert running.front.num_open == 0


@pytest.mark.parametrize(
    ("images", "counts", "reason"),
    [
        ([png(40, 24)] * 3, [15] * 3, "at most 2 are allowed"),
        ([png(40, 24)], [14], "takes 36 tokens"),
        ([plain_png(200, 140)], [36], "at most 20,000 are allowed"),
        ([bytes(50_000)], [36], "at most 40,000 are allowed"),
        ([b"not an image"], [36], "convert it"),
        ([png(40, 24)[:300]], [36], "cannot be decoded"),
    ],
    ids=["too many", "placeholders", "pixels", "bytes", "format", "cut off"],
)
async def test_wrong_images_are_refused_with_the_reason(
    serving: Any, ask_about: Any, images: list[bytes], counts: list[int], reason: str
) -> None:
    async with serving() as running:
        gateway = running.connect()
        rules = (await gateway.greet()).images
        if reason == "takes 36 tokens":
            reason = f"takes {rules.num_tokens(40, 24)} tokens"
        elif reason == "cannot be decoded":
            counts = [rules.num_tokens(40, 24)]
        answer = await gateway.ask(ask_about("r", images, counts))
        assert isinstance(answer.end, Failed)
        is_decoded = reason == "cannot be decoded"
        assert answer.end.code is (FailureCode.IMAGE_REFUSED if is_decoded else FailureCode.INVALID_REQUEST)
        assert reason in answer.end.message
        assert running.front.num_open == 0


async def test_an_engine_without_a_vision_encoder_refuses_images(bench: Bench, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        assert (await gateway.greet()).images is None
        image = ImageInput(1, png(40, 24))
        answer = await gateway.ask(submit("r", [1, 2, 3], images=[image]))
        assert "does not take images" in answer.end.message


async def test_a_conversation_of_twenty_turns_decodes_and_encodes_its_image_once(
    serving: Any, ask_about: Any, loop: EngineLoop
) -> None:
    features = loop.executor.awake().runner.features
    assert features is not None
    before = features.encoded_total
    async with serving() as running:
        gateway = running.connect()
        count = (await gateway.greet()).images.num_tokens(48, 32)
        file = png(48, 32, 77)
        first = await gateway.ask(ask_about("turn 0", [file], [count]))
        for turn in range(1, 20):
            submit = ask_about(f"turn {turn}", [file], [count])
            short = msgspec.structs.replace(submit, images=[one.reference() for one in submit.images])
            answer = await gateway.ask(short if turn % 2 else submit)
            assert isinstance(answer.end, Finished)
            assert answer.token_ids == first.token_ids
        load = running.front.stats().load
        assert (load.decoded_images_total, load.decoded_image_hits_total) == (1, 19)
        assert features.encoded_total - before == 1


async def test_a_reference_that_the_engine_does_not_have_is_answered_with_a_code_of_its_own(
    serving: Any, ask_about: Any
) -> None:
    async with serving() as running:
        gateway = running.connect()
        count = (await gateway.greet()).images.num_tokens(40, 24)
        submit = ask_about("r", [png(40, 24)], [count], tenant_id="leaving")
        short = msgspec.structs.replace(submit, images=[one.reference() for one in submit.images])
        missing = await gateway.ask(short)
        assert missing.end.code is FailureCode.IMAGES_MISSING
        assert isinstance((await gateway.ask(msgspec.structs.replace(submit, request_id="whole"))).end, Finished)
        assert isinstance((await gateway.ask(msgspec.structs.replace(short, request_id="short"))).end, Finished)
        await gateway.send(Forget([submit.tenant_id]))
        forgotten = await gateway.ask(msgspec.structs.replace(short, request_id="forgotten"))
        assert forgotten.end.code is FailureCode.IMAGES_MISSING
        assert running.front.stats().load.decoded_image_bytes == 0
        assert running.front.num_open == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"digest": b"short"}, "neither a file nor the digest"),
        ({"width": 4000}, "at most 20,000 are allowed"),
        ({"height": 0}, "too narrow"),
    ],
)
async def test_malformed_references_are_refused(serving: Any, ask_about: Any, change: Any, reason: str) -> None:
    async with serving() as running:
        gateway = running.connect()
        count = (await gateway.greet()).images.num_tokens(40, 24)
        submit = ask_about("r", [png(40, 24)], [count])
        images = [msgspec.structs.replace(one.reference(), **change) for one in submit.images]
        answer = await gateway.ask(msgspec.structs.replace(submit, images=images))
        assert answer.end.code is FailureCode.INVALID_REQUEST
        assert reason in answer.end.message


async def test_a_gateway_sends_an_image_once_and_again_if_the_engine_has_dropped_it(
    bench: Bench, loop: EngineLoop, ask_about: Any, submit: Any
) -> None:
    """The cache of the engine holds one image; the gateway does not know of it."""
    rules = hello_of(loop).images
    assert rules is not None
    count = rules.num_tokens(40, 24)
    num_bytes = 3 * math.prod(rules.resized(40, 24))
    limits = msgspec.structs.replace(LIMITS, decoded_cache_bytes=num_bytes)
    context: zmq.Context[Any] = zmq.Context()
    async with bench(core=LoopCore(loop), images=limits) as running:
        client = ZmqEngineClient(running.front.address, context, SystemClock(), None)
        await client.start()
        async with asyncio.timeout(60):
            while not client.state.healthy:  # noqa: ASYNC110 - what is watched has no event
                await asyncio.sleep(0.01)

        async def ask(name: str, seed: int, **changes: Any) -> tuple[int, ...]:
            asked = ask_about(name, [png(40, 24, seed)], [count], **changes)
            async with client.open(asked) as stream:
                return tuple([one async for message in stream.messages() for one in getattr(message, "token_ids", [])])

        def figures() -> tuple[int, int]:
            load = running.front.stats().load
            return load.decoded_images_total, load.decoded_image_hits_total

        cat, again = await ask("cat", 1), await ask("cat again", 1)
        assert cat == again
        assert figures() == (1, 1)
        dog = await ask("dog", 2)
        assert figures() == (2, 1)
        assert await ask("dropped", 1) == cat
        assert figures() == (3, 1), "the engine asked for the file again"
        assert await ask("other tenant", 1, tenant_id="another") == cat
        client.forget_tenants(["another"])
        assert await ask("dog again", 2) == dog
        await client.close()
    context.destroy(linger=0)
