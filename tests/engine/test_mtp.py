"""A checkpoint's MTP layer drafts tokens: no output changes, and the layer's KV moves with the model's KV.

There are two checkpoints. In one, the MTP layer copies the only layer of the model and reads tokens: it predicts what
the model generates, except for the first token, which it lacks, and some noise. In the other, tokens follow each other
in a circle, and the layer sees only the model's hidden states of earlier tokens: it is right if and only if these are
there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.config import EngineConfig, Overlap, PolicyName, Speculate, TransferConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.offline import Result, run_all
from moiety_engine.scheduling.speculative_decoding.costs import MAX_BEHIND
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.sequence import Sequence
from moiety_engine.startup import load_loop
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.messages import Sampling
from moiety_wire.roles import EngineRole, KvHandoff, transfer_token

from .mtp_checkpoints import (
    NEMOTRON_NAMES,
    let_tokens_decide,
    write_one_that_reads_tokens,
    write_one_that_reads_what_was_made,
    write_one_with_several_layers,
)

BLOCK_SIZE = 4
LIMIT_S = 120.0
KINDS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, seed=4, repetition_penalty=1.1),
    Sampling(temperature=0.8, top_k=5, min_p=0.05, seed=5, num_logprobs=1),
]


class MtpLoops:
    """Loops over one checkpoint, with the layer and without, each loaded once."""

    def __init__(self, folder: Path, *, always_right: bool) -> None:
        self.folder, self.always_right = folder, always_right
        self.plain_model = load_loop(self._config(speculate=Speculate.OFF)).executor.model
        loop = load_loop(self._config())
        assert loop.executor.draft is not None
        self.model, self.layers = loop.executor.model, loop.executor.draft.models

    def plain(self, **settings: Any) -> EngineLoop:
        return build_loop(self.plain_model, self._config(speculate=Speculate.OFF, **settings))

    def make(self, **settings: Any) -> EngineLoop:
        ticks = count(10**18, 10**7)  # a clock by which all steps take the same
        config = self._config(**settings)
        layers = self.layers if config.speculate is Speculate.MTP else ()
        return build_loop(self.model, config, clock_ns=lambda: next(ticks), draft_models=layers)

    def check(self, loop: EngineLoop) -> None:
        """Check that enough draft tokens were accepted."""
        load = loop.load()
        least = load.drafted_tokens_total * (1.0 if self.always_right else 0.2)
        assert load.accepted_tokens_total >= max(1, least)

    def _config(self, **settings: Any) -> EngineConfig:
        usual: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "speculate": Speculate.MTP}
        return EngineConfig(model=str(self.folder), name="tiny", device="cpu", **usual | settings)


@pytest.fixture(scope="module")
def of_what_was_made(tmp_path_factory: pytest.TempPathFactory) -> MtpLoops:
    folder = tmp_path_factory.mktemp("made")
    write_one_that_reads_what_was_made(folder)
    return MtpLoops(folder, always_right=True)


@pytest.fixture(scope="module")
def of_tokens(tmp_path_factory: pytest.TempPathFactory) -> MtpLoops:
    folder = tmp_path_factory.mktemp("tokens")
    write_one_that_reads_tokens(folder)
    return MtpLoops(folder, always_right=False)


@pytest.fixture(scope="module")
def of_several_layers(tmp_path_factory: pytest.TempPathFactory) -> MtpLoops:
    folder = tmp_path_factory.mktemp("several")
    write_one_with_several_layers(folder)
    loops = MtpLoops(folder, always_right=True)
    assert len(loops.layers) == 3
    return loops


@pytest.fixture(params=["of_what_was_made", "of_tokens", "of_several_layers"])
def mtp(request: pytest.FixtureRequest) -> MtpLoops:
    found: MtpLoops = request.getfixturevalue(request.param)
    return found


def make_submit(key: int, *, num_prompt: int = 22, max_tokens: int = 40, **more: Any) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 60 for i in range(num_prompt)]
    sampling = KINDS[key % len(KINDS)]
    submit = CoreSubmit(key, "t", BATCH, prompt, sampling, max_tokens, 0, [], max_tokens, b"s", 0)
    return msgspec.structs.replace(submit, **more)


def told(results: dict[int, Result]) -> dict[int, tuple[list[int], list[Any]]]:
    return {key: (result.token_ids, result.logprobs) for key, result in results.items()}


def settle(loop: EngineLoop, is_busy: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while is_busy():
        loop.step()
        assert time.monotonic() < limit_s, "something is on its way for ever"


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_every_kind_of_sampling_gives_the_same_in_fewer_steps(mtp: MtpLoops, overlap: Overlap) -> None:
    submits = [make_submit(key) for key in range(4)]
    expected = told(run_all(mtp.plain(), submits))
    loop = mtp.make(overlap=overlap)
    results = run_all(loop, submits)
    assert told(results) == expected
    mtp.check(loop)
    assert loop.steps_total < (20 if mtp.always_right else 40)
    finishes = [result.finish for result in results.values() if result.finish]
    assert sum(finish.num_drafted_tokens for finish in finishes) == loop.load().drafted_tokens_total > 40
    assert sum(finish.num_accepted_tokens for finish in finishes) == loop.load().accepted_tokens_total


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_preempted_and_swapped_requests_go_on_with_what_was_made_of_their_tokens(
    mtp: MtpLoops, overlap: Overlap, num_host_blocks: int
) -> None:
    submits = [make_submit(key) for key in range(7)]
    expected = told(run_all(mtp.plain(), submits))
    block_bytes = mtp.model.kv_bytes_per_block(BLOCK_SIZE)
    own_bytes = sum(layer.kv_bytes_per_block(BLOCK_SIZE) for layer in mtp.layers)
    loop = mtp.make(
        overlap=overlap,
        kv_memory_bytes=36 * (block_bytes + own_bytes),
        host_kv_memory_bytes=num_host_blocks * block_bytes,
        max_context_tokens=100,
        policy=PolicyName.FCFS,
    )
    results = run_all(loop, submits)
    assert told(results) == expected
    events = [event for result in results.values() if result.finish for event in result.finish.events]
    assert any(event.kind == "preempted" for event in events)
    mtp.check(loop)


@pytest.mark.parametrize(
    ("variant", "speculate"),
    [
        ("qwen3_next", Speculate.MTP),
        pytest.param("qwen3_5_moe", Speculate.MTP, marks=pytest.mark.thorough),
        pytest.param("qwen3_next", Speculate.NGRAM, marks=pytest.mark.thorough),
    ],
)
def test_drafts_over_gated_delta_layers_change_no_answer(tmp_path: Path, variant: str, speculate: Speculate) -> None:
    from tests.model.conftest import write_checkpoint
    from tests.model.test_mtp_spec import publish_as_qwen

    publish_as_qwen(write_checkpoint(tmp_path, f"{variant}, full attention last"))
    let_tokens_decide(tmp_path)
    check_answers(tmp_path, speculate)


@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_drafts_over_mamba_2_layers_change_no_answer_of_preempted_requests_either(
    tmp_path: Path, num_host_blocks: int
) -> None:
    from tests.model.conftest import write_checkpoint
    from tests.model.test_mtp_nemotron import publish_as_nemotron, variant_with

    variants = variant_with("full_attention", "moe", mamba_head_dim=16, ssm_state_size=16)
    publish_as_nemotron(write_checkpoint(tmp_path, "with mtp", variants=variants))
    let_tokens_decide(tmp_path, NEMOTRON_NAMES)
    check_answers(tmp_path, Speculate.MTP, num_blocks=40, num_host_blocks=num_host_blocks)


def check_answers(
    folder: Path, speculate: Speculate, num_blocks: int | None = None, num_host_blocks: int | None = None
) -> None:
    """Check that drafts change no answer and are right in part. `num_blocks`: so few that requests are preempted."""
    mtp = MtpLoops(folder, always_right=False)
    sampling = Sampling(temperature=0.0, num_logprobs=1)
    submits = [make_submit(key, sampling=sampling) for key in range(5)]
    expected = run_all(mtp.plain(max_running=4), submits)
    tight: dict[str, Any] = {}
    if num_blocks is not None and num_host_blocks is not None:
        block_bytes = mtp.model.kv_bytes_per_block(BLOCK_SIZE)
        both_bytes = block_bytes + mtp.layers[0].kv_bytes_per_block(BLOCK_SIZE)
        tight = {"kv_memory_bytes": num_blocks * both_bytes + 8 * mtp.model.state_bytes, "max_context_tokens": 100}
        tight |= {"policy": PolicyName.FCFS, "prefix_caching": False}
        tight |= {"host_kv_memory_bytes": num_host_blocks * block_bytes + bool(num_host_blocks) * (1 << 22)}
    for overlap in (Overlap.OFF, Overlap.ON):
        loop = mtp.make(max_running=4, overlap=overlap, speculate=speculate, **tight)
        results = run_all(loop, submits)
        events = [event for one in results.values() if one.finish for event in one.finish.events]
        assert any(event.kind == "preempted" for event in events) == bool(tight)
        for key, one in results.items():
            assert one.token_ids == expected[key].token_ids
            pairs = zip(one.logprobs, expected[key].logprobs, strict=True)
            assert max(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs) <= 1e-4
        load = loop.load()
        assert 0 < load.accepted_tokens_total <= load.drafted_tokens_total
        assert speculate is Speculate.NGRAM or load.accepted_tokens_total < load.drafted_tokens_total


def test_drafts_over_compressed_attention_change_no_answer(tmp_path: Path) -> None:
    """The layer gets all residual streams of the tokens before; it is right where the model says one of two words."""
    from tests.model.conftest import write_checkpoint
    from tests.model.test_mtp_v4 import WITH_MTP_LAYER, publish_v4

    publish_v4(write_checkpoint(tmp_path, "one more", variants=WITH_MTP_LAYER))
    mtp = MtpLoops(tmp_path, always_right=False)
    sampling = Sampling(temperature=0.0, num_logprobs=1, logit_bias={17: 32.0, 23: 30.0})
    submits = [make_submit(key, sampling=sampling) for key in range(5)]
    expected = {key: one.token_ids for key, one in run_all(mtp.plain(max_running=4), submits).items()}
    for overlap in (Overlap.OFF, Overlap.ON):
        loop = mtp.make(max_running=4, overlap=overlap)
        assert {key: one.token_ids for key, one in run_all(loop, submits).items()} == expected
        load = loop.load()
        assert 0 < load.accepted_tokens_total < load.drafted_tokens_total


def test_shared_prefixes_are_not_computed_again_by_the_mtp_layer(mtp: MtpLoops) -> None:
    loop = mtp.make()
    long = make_submit(0, num_prompt=MAX_BEHIND + 44)

    def drafted_after_two_steps(submit: CoreSubmit) -> int:
        before = loop.load().drafted_tokens_total
        loop.submit(submit)
        loop.step()  # its prompt
        loop.step()  # a decode; the step admits as much beside it as it can, or verifies a draft
        return loop.load().drafted_tokens_total - before

    def answer_of(key: int) -> list[int]:
        settle(loop, lambda: not loop.scheduler.idle)
        step = loop.take_outputs()
        assert step is not None
        return [token for output in step.outputs if output.key == key for token in output.token_ids]

    assert drafted_after_two_steps(long) == 0
    first = answer_of(0)
    assert first == run_all(mtp.plain(), [long])[0].token_ids
    longer = make_submit(1, prompt_ids=long.prompt_ids + first[:20])
    assert drafted_after_two_steps(longer) > 0
    assert answer_of(1) == run_all(mtp.plain(), [longer])[1].token_ids
    mtp.check(loop)


def test_mtp_blocks_come_back_from_disk_after_a_restart(of_what_was_made: MtpLoops, tmp_path: Path) -> None:
    submit = make_submit(0, num_prompt=60)
    expected = told(run_all(of_what_was_made.plain(), [submit]))
    for num_cached in (0, 56):
        loop = of_what_was_made.make(disk_cache=str(tmp_path))
        results = run_all(loop, [submit])
        assert told(results) == expected
        assert results[0].finish is not None
        assert results[0].finish.num_cached_tokens == num_cached
        of_what_was_made.check(loop)
        settle(loop, partial(getattr, loop, "waits_for_others"))
        loop.close()


@pytest.mark.parametrize("alike", [True, False])
def test_a_prompt_that_is_handed_over_brings_it_along_or_is_computed_again(
    of_what_was_made: MtpLoops, alike: bool
) -> None:
    submit = make_submit(0, num_prompt=60)
    expected = run_all(of_what_was_made.plain(), [submit])[0].token_ids
    to = TransferConfig(role=EngineRole.PREFILL)
    prefill = of_what_was_made.make(transfer=to) if alike else of_what_was_made.plain(transfer=to)
    with (
        prefill,
        of_what_was_made.make(transfer=TransferConfig(role=EngineRole.DECODE, listen="tcp://127.0.0.1:0")) as decode,
    ):
        kv_connector = decode.intake.kv_connector
        transfer_id = secrets.token_hex(16)
        there = KvHandoff(
            transfer_id, kv_connector.address, kv_connector.host, transfer_token(kv_connector.secret, transfer_id)
        )
        begun = run_all(prefill, [msgspec.structs.replace(submit, hand_over=there)])[0]
        assert begun.finish is not None
        transfer_id = "" if begun.finish.detail else there.transfer_id
        goes_on = msgspec.structs.replace(submit, resumed_ids=begun.token_ids, transfer_id=transfer_id)
        ended = run_all(decode, [goes_on])[0]
        assert begun.token_ids + ended.token_ids == expected
        assert ended.finish is not None
        assert (ended.finish.arrival is not None) is alike
        of_what_was_made.check(decode)


def test_all_memory_is_given_back_asleep_and_it_drafts_on_when_woken(of_what_was_made: MtpLoops) -> None:
    ticks = count(10**18, 10**7)
    loop = load_loop(of_what_was_made._config(), clock_ns=lambda: next(ticks))
    before = told(run_all(loop, [make_submit(0)]))
    assert loop.executor.draft is not None
    loop.sleep()
    assert loop.executor.model.is_offloaded and loop.executor.draft.model.is_offloaded
    assert loop.executor.draft._passes._made_NPD is None
    loop.wake()
    loop.executor.draft.proposer.passes.measured([])  # by this clock each step takes the same time
    drafted = loop.load().drafted_tokens_total
    assert told(run_all(loop, [make_submit(0)])) == before
    assert loop.load().accepted_tokens_total == loop.load().drafted_tokens_total > drafted > 0


def test_random_weights_will_do_and_a_checkpoint_without_the_layer_is_refused(
    of_tokens: MtpLoops, checkpoint: Path
) -> None:
    settings: dict[str, Any] = {"name": "t", "device": "cpu", "dtype": "float32", "load_format": LoadFormat.DUMMY}
    submits = [make_submit(key) for key in range(2)]
    both = [
        told(run_all(load_loop(EngineConfig(model=str(of_tokens.folder), speculate=speculate, **settings)), submits))
        for speculate in (Speculate.OFF, Speculate.MTP)
    ]
    assert both[0] == both[1]
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe checkpoint with 2 layers.*--speculate ngram"):
        load_loop(EngineConfig(model=str(checkpoint), speculate=Speculate.MTP, **settings))


def test_the_last_place_of_a_block_is_taken_in_again_since_it_hangs_on_the_next_token() -> None:
    def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
        made = Sequence(CoreSubmit(0, "t", BATCH, tokens, Sampling(), 50, 0, [], 50, b"s", 0), order=0, seed=0)
        made.kv.blocks = blocks
        return made

    held = DraftedKv(block_size=2, lag=1)
    one = sequence([1, 2, 3, 4, 5], [7, 8, 9])
    assert (held.num_there(one), held.num_behind(one)) == (0, 4)
    held.record_computed(one, 0, 4, [6, 9])
    assert (held.num_there(one), held.num_behind(one)) == (3, 1), "the newest one is always taken in"
    one.tokens += [6, 9]  # guesses came true, which it said from what it had made of them itself
    one.kv.blocks.append(3)
    assert (held.num_there(one), held.num_behind(one)) == (4, 2)
    assert held.num_there(sequence([1, 2, 3, 4, 7], [7, 8, 2])) == 3
    assert held.num_there(sequence([1, 2, 9, 9, 9], [7, 8, 2])) == 1
    assert held.num_there(sequence([1, 2, 3], [5, 8])) == 0
    of_three = DraftedKv(block_size=2, lag=1, num_layers=3)
    assert of_three.num_there(one) == 0
    of_three.record_computed(one, 0, 6, [], num_guessed=2)
    assert (of_three.num_there(one), of_three.num_behind(one)) == (4, 2), "two were read with draft tokens"
    assert of_three.num_there(sequence([1, 2, 3, 4, 7], [7, 8, 2])) == 1, "three hang on the next tokens"
