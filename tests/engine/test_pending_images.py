"""Requests whose images are still being decoded wait in the core: they are counted, end and meet deadlines as
others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.vision_checkpoint import write_checkpoint

from moiety_engine.config import ImageOptions
from moiety_engine.kv_transfer import kv_receiver
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_wire.classes import STANDARD
from moiety_wire.messages import FinishReason
from moiety_wire.trace_events import Reason

from .conftest import Loops, tokens
from .test_images import CAT, STRIP, num_encoded, pair_of, submit_of, text
from .test_kv_transfer import Pair

ASKED = submit_of(1, text(6, 1), CAT, text(9, 2))
BOTH = [ASKED, submit_of(2, text(3, 4), STRIP, text(4, 5), CAT, text(12, 6))]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    folder: Path = tmp_path_factory.mktemp("vision")
    write_checkpoint(folder)
    return Loops(folder)


def without_images(submit: CoreSubmit, **changes: Any) -> CoreSubmit:
    return msgspec.structs.replace(submit, images=[], images_pending=True, **changes)


def answer(loop: EngineLoop, key: int) -> list[int]:
    found: list[int] = []
    for _ in range(1000):
        loop.step()
        step = loop.take_outputs()
        for output in [] if step is None else step.outputs:
            found += output.token_ids
            if output.key == key and output.finish is not None:
                return found
    raise AssertionError("the request does not end")


def test_a_request_waits_for_its_images_counts_as_waiting_and_gets_the_answer_of_another_order(seeing: Loops) -> None:
    expected = tokens(seeing.make(), [ASKED])[1]
    loop = seeing.make()
    loop.submit(without_images(ASKED))
    assert not loop.step()
    load = loop.load()
    assert (load.images_waiting, load.num_waiting, load.num_running) == (1, 1, 0)
    assert loop.waits_for_others
    loop.intake.add_images(1, ASKED.images)
    assert answer(loop, 1) == expected
    load = loop.load()
    assert (load.images_waiting, load.num_waiting) == (0, 0)


def test_credit_that_comes_while_a_request_waits_for_its_images_counts(seeing: Loops) -> None:
    loop = seeing.make()
    loop.submit(without_images(ASKED, credit_tokens=1))
    loop.extend(1, 3, last=True)
    loop.intake.add_images(1, ASKED.images)
    assert len(answer(loop, 1)) == 3


def test_a_request_that_is_aborted_while_it_waits_ends_and_its_images_are_ignored(seeing: Loops) -> None:
    loop = seeing.make()
    loop.submit(without_images(ASKED))
    loop.abort(1)
    step = loop.take_outputs()
    assert step is not None
    (output,) = step.outputs
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ABORT
    loop.intake.add_images(1, ASKED.images)
    assert not loop.step()
    assert loop.load().num_waiting == 0
    assert not loop.waits_for_others


def test_the_time_of_the_wait_counts_against_the_deadline_and_in_admission(seeing: Loops) -> None:
    now_ns = 10**18
    hurried = msgspec.structs.replace(STANDARD, ttft_s=5.0, ttft_per_1k_s=0.0)
    loop = seeing.make(clock_ns=lambda: now_ns)
    begun_ns = now_ns
    loop.submit(without_images(ASKED, service=hurried, arrival_unix_ns=now_ns))
    now_ns += 7 * 10**9
    loop.intake.add_images(1, ASKED.images)
    loop.intake.queue_ready()
    (waiting,) = loop.scheduler.queues.by_key.values()
    assert waiting.deadlines.first_s == pytest.approx(begun_ns / 1e9 + 5.0)
    step = loop.take_outputs()
    assert step is not None
    (admission,) = step.admissions
    assert admission.reason is Reason.ACCEPTED_LATE
    assert admission.predicted_ttft_s is not None
    assert admission.predicted_ttft_s > 7.0


class PairWithLateImages(Pair):
    """Sends the second engine its images apart: the first request's at once, the second's after its KV has come."""

    def __init__(self, prefill: EngineLoop, decode: EngineLoop) -> None:
        super().__init__(prefill, decode)
        self._submitted: dict[int, CoreSubmit] = {}

    def submit_decode(self, submit: CoreSubmit) -> None:
        self._submitted[submit.key] = submit
        self.decode.submit(without_images(submit))
        if submit.key == 1:
            self.decode.intake.add_images(1, submit.images)

    def give_late_images(self) -> None:
        receiver = self.decode.intake.kv_connector.kv_receiver
        assert receiver is not None
        if 2 in self._submitted and not receiver.num_waiting:
            self.decode.intake.add_images(2, self._submitted[2].images)


def test_images_may_come_before_or_after_the_kv_from_another_engine(seeing: Loops) -> None:
    expected = tokens(seeing.make(), BOTH)
    with pair_of(seeing, PairWithLateImages) as pair:
        pair.run(BOTH, pair.give_late_images)
    assert pair.tokens == expected
    assert num_encoded(pair.decode) == 0, "the KV was claimed while the images were decoded"
    assert pair.decode.load().lost_transfers_total == 0


class PairWithVeryLateImages(PairWithLateImages):
    """Sends the second request's images only after its received KV was dropped."""

    def give_late_images(self) -> None:
        if self.decode.load().lost_transfers_total:
            super().give_late_images()


def test_kv_that_takes_room_while_images_are_awaited_is_dropped_and_computed_again(
    seeing: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_receiver, "MAX_HELD_S", 0.05)
    expected = tokens(seeing.make(), BOTH)
    with pair_of(seeing, PairWithVeryLateImages) as pair:
        pair.run(BOTH, pair.give_late_images)
        assert pair.tokens == expected
        assert pair.ends[2].num_recomputed_tokens >= len(BOTH[1].prompt_ids)
        assert pair.ends[1].num_recomputed_tokens == 0
        receiver = pair.decode.intake.kv_connector.kv_receiver
        assert receiver is not None
        assert receiver.arrival_of(2) is None
        assert pair.decode.load().lost_transfers_total == 1


def test_the_cache_of_encoded_images_tells_hits_misses_evictions_and_bytes(seeing: Loops) -> None:
    loop = seeing.make(prefix_caching=False)
    run_all(loop, [submit_of(1, CAT, text(9, 2))])
    run_all(loop, [submit_of(2, CAT, STRIP, text(9, 2))])
    load = loop.load()
    assert (load.image_cache_hits_total, load.image_cache_misses_total, load.image_cache_evictions_total) == (1, 2, 0)
    assert load.encoded_image_tokens_total == CAT.num_tokens + STRIP.num_tokens
    assert 0 < load.image_cache_bytes_used <= load.image_cache_bytes_total
    assert load.image_encode_seconds_total > 0
    small = seeing.make(prefix_caching=False, images=ImageOptions(cache_bytes=0))
    run_all(small, [submit_of(1, CAT, text(9, 2))])
    assert small.load().image_cache_evictions_total == 1
    assert small.load().image_cache_bytes_used == 0
