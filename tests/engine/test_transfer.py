"""A prompt that one engine computes and another goes on with: the tokens are those of one engine, however the KV went
and whatever became of it on the way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from moiety_engine.config import KvWay, TransferConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_wire.classes import STANDARD
from moiety_wire.messages import FinishReason, Reason, Sampling
from moiety_wire.roles import EngineRole, HandOver

DEADLINE_S = 120.0
LENGTH = 16
LISTEN = "tcp://127.0.0.1:0"


def asked(key: int, num_prompt: int = 70, **changes: Any) -> CoreSubmit:
    prompt = torch.randint(3, 320, (num_prompt,), generator=torch.Generator().manual_seed(key)).tolist()
    fields: dict[str, Any] = {
        "key": key,
        "tenant_id": "t",
        "service": STANDARD,
        "prompt_ids": prompt,
        "sampling": Sampling(temperature=0.0),
        "max_tokens": LENGTH,
        "min_tokens": 0,
        "stop_token_ids": [7, 8],
        "credit_tokens": LENGTH,
        "cache_salt": b"s",
        "arrival_unix_ns": time.time_ns(),
    }
    return CoreSubmit(**{**fields, **changes})


KINDS = [
    asked(1),
    asked(2, 33, sampling=Sampling(temperature=1.0, seed=11, frequency_penalty=0.7)),
    asked(3, 1, sampling=Sampling(temperature=0.8, top_p=0.9, seed=12, repetition_penalty=1.3)),
    asked(4, 64, sampling=Sampling(temperature=1.2, top_k=20, seed=13)),
]


class Pair:
    """An engine for prompts and one for answers, stepped in turns."""

    def __init__(self, prefill: EngineLoop, decode: EngineLoop) -> None:
        self.prefill, self.decode = prefill, decode
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, CoreFinish] = {}

    def hand_over(self, submit: CoreSubmit) -> CoreSubmit:
        """To the first engine; returns what the second one gets once that has ended it."""
        exchange = self.decode.exchange
        there = HandOver(secrets.token_hex(16), exchange.address, exchange.host)
        self.prefill.submit(msgspec.structs.replace(submit, hand_over=there))
        return msgspec.structs.replace(submit, transfer_id=there.transfer_id)

    def run(self, submits: list[CoreSubmit], on_step: Callable[[], None] = lambda: None) -> None:
        """Until all have ended at one of the two."""
        following = {submit.key: self.hand_over(submit) for submit in submits}
        self.tokens |= {submit.key: [] for submit in submits}
        end_s = time.monotonic() + DEADLINE_S
        while len(self.ends) < len(following):
            assert time.monotonic() < end_s, f"still open: {set(following) - set(self.ends)}"
            for loop in (self.prefill, self.decode):
                loop.step()
                step = loop.take_outputs()
                for output in [] if step is None else step.outputs:
                    self._take(output, following[output.key])
            on_step()

    def _take(self, output: CoreOutput, following: CoreSubmit) -> None:
        tokens = self.tokens[output.key]
        tokens += output.token_ids
        if output.finish is None:
            return
        if output.finish.reason is FinishReason.HANDED_OVER:
            goes_on = msgspec.structs.replace(following, resumed_ids=tokens.copy())
            if output.finish.detail:
                goes_on = msgspec.structs.replace(goes_on, transfer_id="")
            self.decode.submit(goes_on)
        else:
            self.ends[output.key] = output.finish


@pytest.fixture
def pair(loops: Any) -> Iterator[Callable[..., Pair]]:
    made: list[EngineLoop] = []

    def make(*, way: KvWay = KvWay.TCP, key_file: str = "", landing_bytes: int | None = None, **settings: Any) -> Pair:
        common = TransferConfig(key_file=key_file, way=way)
        transfer = msgspec.structs.replace(common, role=EngineRole.PREFILL)
        prefill = loops.make(transfer=transfer, max_batch_tokens=32, max_running=4)
        made.append(prefill)
        transfer = msgspec.structs.replace(common, role=EngineRole.DECODE, listen=LISTEN, landing_bytes=landing_bytes)
        decode = loops.make(transfer=transfer, **settings)
        made.append(decode)
        return Pair(prefill, decode)

    yield make
    for loop in made:
        loop.close()


@pytest.fixture(scope="module")
def whole(loops: Any) -> dict[int, Result]:
    return run_all(loops.make(), KINDS)


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        (KvWay.TCP, {}),
        (KvWay.MEMORY, {}),
        (KvWay.AUTO, {"block_size": 16}),
        (KvWay.TCP, {"block_size": 3, "host_kv_memory_bytes": 1 << 20}),
        (KvWay.TCP, {"prefix_caching": False, "max_running": 1, "max_batch_tokens": 8}),
    ],
    ids=str,
)
def test_tokens_and_ends_are_those_of_one_engine(
    pair: Any, whole: dict[int, Result], way: KvWay, settings: dict[str, Any]
) -> None:
    engines = pair(way=way, **settings)
    engines.run(KINDS)
    for submit in KINDS:
        right, finish = whole[submit.key], engines.ends[submit.key]
        assert engines.tokens[submit.key] == right.token_ids
        assert right.finish is not None
        assert (finish.reason, finish.num_output_tokens) == (right.finish.reason, len(right.token_ids))
        assert finish.num_recomputed_tokens == 0
        assert finish.arrival.num_tokens == len(submit.prompt_ids)
        assert finish.arrival.way == ("tcp" if way is KvWay.TCP else "memory")
        assert [event.reason for event in finish.events[:2]] == [Reason.HANDED_OVER, Reason.TRANSFERRED]
    load = engines.decode.load()
    assert (load.taken_over_requests_total, load.lost_transfers_total, load.kv_blocks_used) == (len(KINDS), 0, 0)
    assert engines.prefill.load().handed_over_requests_total == len(KINDS)


def test_kv_that_finds_no_room_is_computed_again_with_the_same_tokens(pair: Any, whole: dict[int, Result]) -> None:
    engines = pair(landing_bytes=1)
    engines.run(KINDS)
    for submit in KINDS:
        assert engines.tokens[submit.key] == whole[submit.key].token_ids
        assert engines.ends[submit.key].arrival is None


def test_an_engine_with_another_key_brings_nothing(pair: Any, whole: dict[int, Result], tmp_path: Path) -> None:
    keys = [tmp_path / name for name in ("ours", "theirs")]
    for path in keys:
        path.write_bytes(zmq.curve_keypair()[1])
    ours = pair(key_file=str(keys[0]))
    ours.run(KINDS[:1])
    assert ours.ends[1].arrival is not None
    theirs = pair(key_file=str(keys[1]))
    mixed = Pair(theirs.prefill, ours.decode)
    mixed.run([msgspec.structs.replace(KINDS[1], key=2)])
    assert mixed.ends[2].arrival is None
    assert mixed.ends[2].events[1].reason is Reason.KV_LOST
    assert mixed.tokens[2] == whole[2].token_ids
