"""Disaggregated prefill and decode: the tokens are those of a single engine, whatever happens to the KV transfer."""

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
from structlog.testing import capture_logs

from moiety_engine.config import KvTransport, Overlap, PolicyName, Speculate, TransferConfig
from moiety_engine.kv_transfer import sender_thread as sender
from moiety_engine.kv_transfer.kv_layout import layer_bytes, read
from moiety_engine.kv_transfer.messages import KvChunk
from moiety_engine.kv_transfer.staging_buffer import STALLED_S, Progress, StagingBuffer, prompt_hash
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.offline import Result, run_all
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_wire.classes import STANDARD
from moiety_wire.messages import FinishReason, Sampling
from moiety_wire.roles import EngineRole, KvHandoff, KvRanks, transfer_token
from moiety_wire.trace_events import Reason

from .kv_announcements import begin_of, share_of
from .nixl_stand_in import nixl_or_stand_in

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
    """An engine for prefill and one for decode, stepped in turns."""

    def __init__(self, prefill: EngineLoop, decode: EngineLoop) -> None:
        self.prefill, self.decode = prefill, decode
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, CoreFinish] = {}

    def hand_over(self, submit: CoreSubmit, ranks: KvRanks | None = None) -> CoreSubmit:
        """Submit to the prefill engine, as a request for these ranks; return what the decode engine gets afterwards."""
        kv_connector = self.decode.intake.kv_connector
        transfer_id = secrets.token_hex(16)
        there = KvHandoff(
            transfer_id,
            kv_connector.address,
            kv_connector.host,
            transfer_token(kv_connector.secret, transfer_id),
            ranks or kv_connector.ranks,
        )
        self.prefill.submit(msgspec.structs.replace(submit, hand_over=there))
        return msgspec.structs.replace(submit, transfer_id=there.transfer_id)

    def run(
        self, submits: list[CoreSubmit], on_step: Callable[[], None] = lambda: None, ranks: KvRanks | None = None
    ) -> None:
        """Run steps until all requests have ended at either engine."""
        following = {submit.key: self.hand_over(submit, ranks) for submit in submits}
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

    def submit_decode(self, submit: CoreSubmit) -> None:
        """Submit to the decode engine."""
        self.decode.submit(submit)

    def _take(self, output: CoreOutput, following: CoreSubmit) -> None:
        tokens = self.tokens[output.key]
        tokens += output.token_ids
        if output.finish is None:
            return
        if output.finish.reason is FinishReason.PREFILL_DONE:
            goes_on = msgspec.structs.replace(following, resumed_ids=tokens.copy())
            if output.finish.detail:
                goes_on = msgspec.structs.replace(goes_on, transfer_id="")
            self.submit_decode(goes_on)
        else:
            self.ends[output.key] = output.finish


@pytest.fixture
def pair(loops: Any) -> Iterator[Callable[..., Pair]]:
    yield from pairs_of(loops)


@pytest.fixture
def windowed_pair(windowed_loops: Any) -> Iterator[Callable[..., Pair]]:
    yield from pairs_of(windowed_loops)


def pairs_of(loops: Any) -> Iterator[Callable[..., Pair]]:
    made: list[EngineLoop] = []

    def make(
        *, way: KvTransport = KvTransport.TCP, key_file: str = "", buffer_bytes: int | None = None, **settings: Any
    ) -> Pair:
        common = TransferConfig(key_file=key_file, transport=way)
        transfer = msgspec.structs.replace(common, role=EngineRole.PREFILL)
        prefill = loops.make(transfer=transfer, max_batch_tokens=32, max_running=4)
        made.append(prefill)
        transfer = msgspec.structs.replace(common, role=EngineRole.DECODE, listen=LISTEN, buffer_bytes=buffer_bytes)
        decode = loops.make(transfer=transfer, **settings)
        made.append(decode)
        return Pair(prefill, decode)

    with nixl_or_stand_in():
        yield make
    for loop in made:
        loop.close()


@pytest.fixture
def recurrent_pair(recurrent_loops: Any) -> Iterator[Callable[..., Pair]]:
    yield from pairs_of(recurrent_loops)


@pytest.fixture(scope="module")
def whole(loops: Any) -> dict[int, Result]:
    return run_all(loops.make(), KINDS)


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        (KvTransport.TCP, {}),
        (KvTransport.MEMORY, {}),
        (KvTransport.AUTO, {"block_size": 16}),
        (KvTransport.TCP, {"block_size": 3, "host_kv_memory_bytes": 1 << 20}),
        (KvTransport.TCP, {"prefix_caching": False, "max_running": 1, "max_batch_tokens": 8}),
        (KvTransport.TCP, {"overlap": Overlap.ON, "max_batch_tokens": 16}),
        (KvTransport.NIXL, {}),
    ],
    ids=str,
)
def test_tokens_and_ends_are_those_of_one_engine(
    pair: Any, whole: dict[int, Result], way: KvTransport, settings: dict[str, Any]
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
        assert finish.arrival.transport == ("memory" if way is KvTransport.AUTO else way.value)
        assert [event.reason for event in finish.events[:2]] == [Reason.PREFILL_DONE, Reason.TRANSFERRED]
    load = engines.decode.load()
    assert (load.disaggregated_decode_requests_total, load.lost_transfers_total, load.kv_blocks_used) == (
        len(KINDS),
        0,
        0,
    )
    assert engines.prefill.load().prefill_done_requests_total == len(KINDS)


def test_sliding_window_layers_receive_the_end_of_the_prompt(windowed_pair: Any, windowed_loops: Any) -> None:
    longer = asked(5, 90)
    again = asked(6, 120, prompt_ids=[*longer.prompt_ids, *asked(6, 30).prompt_ids])  # hits on both engines
    whole = run_all(windowed_loops.make(), [*KINDS, longer, again])
    engines = windowed_pair(block_size=4)
    assert engines.decode.scheduler.kv.layout.windows == (None, 20)
    engines.run([*KINDS, longer])
    later = Pair(engines.prefill, engines.decode)
    later.run([again])
    assert {key: result.token_ids for key, result in whole.items()} == engines.tokens | later.tokens
    assert all(finish.num_recomputed_tokens == 0 for finish in (engines.ends | later.ends).values())
    assert later.ends[6].num_cached_tokens == 88
    assert engines.decode.load().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        (KvTransport.TCP, {"block_size": 4}),
        (KvTransport.MEMORY, {"overlap": Overlap.ON, "speculate": Speculate.NGRAM}),
        (KvTransport.NIXL, {"block_size": 8}),
    ],
    ids=str,
)
def test_states_go_with_the_end_of_the_prompt(
    recurrent_pair: Any, recurrent_loops: Any, way: KvTransport, settings: dict[str, Any]
) -> None:
    longer = asked(5, 90)
    again = asked(6, 120, prompt_ids=[*longer.prompt_ids, *asked(6, 30).prompt_ids])  # hits on the first engine
    whole = run_all(recurrent_loops.make(), [*KINDS, longer, again])
    engines = recurrent_pair(way=way, **settings)
    engines.run([*KINDS, longer])
    later = Pair(engines.prefill, engines.decode)
    later.run([again])
    ends = engines.ends | later.ends
    assert {key: result.token_ids for key, result in whole.items()} == engines.tokens | later.tokens
    assert all(finish.num_recomputed_tokens == 0 for finish in ends.values())
    assert [finish.arrival.num_tokens for _, finish in sorted(ends.items())] == [70, 33, 1, 64, 90, 120]
    assert engines.decode.load().kv_blocks_used == 0


def test_received_states_survive_preemption(recurrent_pair: Any, recurrent_loops: Any) -> None:
    many = [asked(key, 64 + key) for key in range(1, 9)]
    whole = run_all(recurrent_loops.make(), many)
    memory = 8 * recurrent_loops.model.state_bytes
    engines = recurrent_pair(kv_memory_bytes=memory, block_size=4, max_running=4, policy=PolicyName.FCFS)
    engines.run(many)
    assert {key: result.token_ids for key, result in whole.items()} == engines.tokens
    assert sum(finish.num_recomputed_tokens for finish in engines.ends.values()) > 0
    assert engines.decode.load().kv_blocks_used == 0


def test_kv_that_finds_no_room_is_computed_again_with_the_same_tokens(pair: Any, whole: dict[int, Result]) -> None:
    engines = pair(buffer_bytes=1)
    engines.run(KINDS)
    for submit in KINDS:
        assert engines.tokens[submit.key] == whole[submit.key].token_ids
        assert engines.ends[submit.key].arrival is None


def test_kv_for_ranks_that_cannot_be_served_is_counted_and_computed_again(pair: Any, whole: dict[int, Result]) -> None:
    engines = pair()
    with capture_logs() as logs:
        engines.run(KINDS[:1], ranks=KvRanks(tp=2))
    assert engines.tokens[1] == whole[1].token_ids
    assert engines.ends[1].arrival is None
    (said,) = [one for one in logs if one["event"] == "kv_part_not_sent"]
    assert "1 KV addresses of an engine with --tp 2, --pp 1 and 1 groups" in said["reason"]
    assert (engines.prefill.load().lost_transfers_total, engines.decode.load().lost_transfers_total) == (1, 0)


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


def test_received_requests_preempted_for_blocks_get_the_same_tokens(pair: Any, loops: Any) -> None:
    many = [asked(key, 40 + key) for key in range(1, 9)]
    whole = run_all(loops.make(), many)
    engines = pair(kv_memory_bytes=40 * loops.model.kv_bytes_per_block(4), policy=PolicyName.FCFS)
    engines.run(many)
    assert {key: result.token_ids for key, result in whole.items()} == engines.tokens
    assert sum(finish.num_recomputed_tokens for finish in engines.ends.values()) > 0
    assert engines.decode.load().kv_blocks_used == 0


def test_a_request_that_is_given_up_gives_back_the_room_of_its_kv(pair: Any, loops: Any) -> None:
    num_tokens = 200
    token = loops.model.kv_bytes_per_block(1)
    engines = pair(buffer_bytes=num_tokens * token)
    given_up = asked(1, num_tokens)
    engines.hand_over(given_up)
    for _ in range(3):
        engines.prefill.step()
    engines.prefill.abort(1)
    step = engines.prefill.take_outputs()
    assert step is not None
    assert step.outputs[-1].finish.reason is FinishReason.ABORT
    engines.run([asked(2, num_tokens)])
    assert engines.ends[2].arrival.num_bytes == num_tokens * token


LAYERS = 3


def cache_of(dtype: torch.dtype, block_size: int, *, latent: bool = False, indexed: bool = False) -> KvCache:
    """Return a cache of 64 tokens with two heads of 8, or with latent rows of 24 (16 of them latent), and perhaps index
    keys of 8."""
    num_blocks = 64 // block_size

    def layer() -> LayerCache | LatentCache:
        if latent:
            rows = torch.zeros(num_blocks, block_size, 24, dtype=dtype)
            of_parts = torch.zeros(2, num_blocks, block_size) if dtype is torch.int8 else (None, None)
            kept = torch.bfloat16 if dtype.itemsize == 1 else dtype
            keys = torch.zeros(num_blocks, block_size, 8, dtype=kept) if indexed else None
            return LatentCache(rows, 16, of_parts[0], of_parts[1], keys)
        both = torch.zeros(2, num_blocks, 2, block_size, 8, dtype=dtype)
        scales = torch.zeros(2, num_blocks, 2, block_size) if dtype is torch.int8 else (None, None)
        return LayerCache(both[0], both[1], scales[0], scales[1])

    return KvCache(tuple(layer() for _ in range(LAYERS)), num_blocks, block_size)


def values_of(kv: KvCache, layer: int, blocks: list[int], num_tokens: int) -> list[torch.Tensor]:
    rows = read(kv.layers[layer], torch.tensor(blocks), 0, num_tokens)
    if isinstance(kv.layers[layer], LatentCache) and len(rows) in (2, 4):
        keys = rows.pop(1).float()
        return [keys, *values_of_latent(rows)]
    if len(rows) == 4:
        return [rows[0].float() * rows[2][..., None], rows[1].float() * rows[3][..., None]]
    return values_of_latent(rows) if len(rows) in (1, 3) else [row.float() for row in rows]


def values_of_latent(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(rows) == 3:
        return [rows[0][:, :16] * rows[1][:, None], rows[0][:, 16:] * rows[2][:, None]]
    return [rows[0][:, :16].float(), rows[0][:, 16:].float()]


TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
TOLERANCE = {  # relative to each number, and absolute
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (0.01, 0.0),
    torch.float8_e4m3fn: (0.07, 0.0),
    torch.int8: (0.0, 0.005),
}


@pytest.mark.parametrize("here", TYPES, ids=str)
@pytest.mark.parametrize("there", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["heads", "latent", "latent with index keys"])
def test_another_type_and_another_block_size_hold_the_same_values(
    here: torch.dtype, there: torch.dtype, kind: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    how = {"latent": kind != "heads", "indexed": kind == "latent with index keys"}
    source, target, num_tokens = cache_of(here, 4, **how), cache_of(there, 16, **how), 37
    for cache in source.layers:
        for part in cache.parts:
            drawn = torch.rand(part.shape, generator=generator) + 0.1
            part.copy_((drawn * 100 if part.dtype is torch.int8 else drawn).to(part.dtype))
    staging_buffer = StagingBuffer(1 << 20, share_of(target))
    staging_buffer.serve(target)
    begin = begin_of(source, "a", num_tokens, prompt_hash(range(num_tokens)))
    assert staging_buffer.begin(begin) == ""
    blocks, offset = [7, 3, 5, 1, 0, 2, 9, 8, 4, 6], 0
    for layer, parts in enumerate(begin.form):
        for first, end in ((0, 10), (10, num_tokens)):
            rows = read(source.layers[layer], torch.tensor(blocks[first // 4 :]), first % 4, end - first)
            frames = [row.contiguous().view(-1).view(torch.uint8).numpy().data for row in rows]
            staging_buffer.put(KvChunk("a", layer, first, end, offset), frames)
            offset += (end - first) * layer_bytes(parts)
    assert staging_buffer.end("a")
    staging_buffer.load("a", 5, [[2, 0, 3]], [0])
    for layer in range(LAYERS):
        for got, sent in zip(
            values_of(target, layer, [2, 0, 3], num_tokens), values_of(source, layer, blocks, num_tokens), strict=True
        ):
            rtol, atol = (0.0, 0.0) if here is there else TOLERANCE[there]
            if got.shape[-1:] == (8,) and kind == "latent with index keys" and there.itemsize == 1:
                rtol = max(rtol, 0.01)  # index keys, which become bfloat16
            torch.testing.assert_close(got[5:], sent[5:], rtol=rtol, atol=atol)
            assert not got[:5].any(), "tokens before the first are another's"


def test_a_transfer_that_stands_still_is_lost_and_one_that_does_not_fit_is_refused() -> None:
    now_s = [0.0]
    kv = cache_of(torch.float32, 4)
    whole = begin_of(kv, "a", 8)
    staging_buffer = StagingBuffer(whole.num_bytes, share_of(kv), clock=lambda: now_s[0])
    assert staging_buffer.begin(whole) == "the engine sleeps"
    staging_buffer.serve(kv)
    whole = msgspec.structs.replace(whole, transfer_id="b")
    assert staging_buffer.begin(whole) == ""
    assert "raise --kv-buffer-bytes" in staging_buffer.begin(msgspec.structs.replace(whole, transfer_id="c"))
    assert "other layers, heads or widths" in staging_buffer.begin(
        msgspec.structs.replace(whole, transfer_id="d", form=whole.form[:1])
    )
    assert [staging_buffer.claim(name) for name in "abcdx"] == [
        Progress.LOST,
        Progress.COMING,
        Progress.LOST,
        Progress.LOST,
        Progress.UNKNOWN,
    ]
    assert not staging_buffer.end("b"), "nothing of it has come"
    whole = msgspec.structs.replace(whole, transfer_id="e")
    assert staging_buffer.begin(whole) == ""
    now_s[0] += STALLED_S + 1
    assert staging_buffer.claim("e") is Progress.LOST
    segment = msgspec.structs.replace(whole, transfer_id="f", segment="/etc/passwd", transport="memory")
    assert "is not a shared memory segment for KV" in staging_buffer.begin(segment)


def test_unanswered_transfers_are_given_up_while_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "ANSWER_S", 0.3)
    sending = sender.SenderThread(KvTransport.TCP, 150, None)
    address, announced = "tcp://127.0.0.1:1", begin_of(cache_of(torch.float32, 4), "", 1)

    def begin(name: str, num_bytes: int) -> str:
        named = msgspec.structs.replace(announced, transfer_id=name, num_bytes=num_bytes)
        return sending.begin(KvHandoff(name, address), named)

    assert begin("dead", 100) == "" and begin("busy", 10) == ""
    end = time.monotonic() + DEADLINE_S
    while begin("next", 100):
        assert time.monotonic() < end, "what goes to a dead engine keeps its room"
        sending.end("busy", address)
        time.sleep(0.001)
    sending.close()


def test_token_digests_of_a_transfer_equal_those_of_earlier_releases() -> None:
    assert prompt_hash([1, 2, 3]).hex() == "87f42c9936c7fef8aa8d303ab7be7780", (
        "engines of two releases drop each other's"
    )
