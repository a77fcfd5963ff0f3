# ruff: noqa: F811  fixtures are imported
"""The step loop with a vision model: the answer to a prompt with images does not depend on its scheduling."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core_submits import core_submit
from tests.vision_checkpoint import (
    END,
    IMAGE,
    START,
    folder,  # noqa: F401  a fixture
    oracle,  # noqa: F401  a fixture
)

from moiety_engine.adapters.dummy import write_adapter
from moiety_engine.config import EngineConfig, ImageOptions, Speculate, TransferConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.vision_encoder import patches_of
from moiety_engine.offline import run_all
from moiety_engine.scheduling.policies.policy_interface import StepBudget
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.startup import load_loop
from moiety_wire.engine_choices import Batching, Overlap, PolicyName
from moiety_wire.messages import FailureCode
from moiety_wire.roles import EngineRole

from .conftest import Loops, tokens, tokens_alone
from .test_kv_transfer import LISTEN, Pair

SIDE = 8  # pixels of a token's side
ANSWER = 12


@pytest.fixture(scope="session")
def seeing(oracle: Any, folder: Path) -> Loops:
    return Loops(folder)


def text(count: int, seed: int) -> list[int]:
    return torch.randint(0, 370, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def image_of(rows: int, columns: int, seed: int) -> PromptImage:
    shape = (rows * SIDE, columns * SIDE, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).tobytes()
    return PromptImage(0, rows, columns, shape[0], shape[1], hashlib.blake2b(pixels, digest_size=32).digest(), pixels)


def submit_of(key: int, *parts: list[int] | PromptImage, **changes: Any) -> CoreSubmit:
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, PromptImage):
            images.append(msgspec.structs.replace(part, start=len(prompt) + 1))
            prompt += [START, *[IMAGE] * (part.rows * part.columns), END]
        else:
            prompt += part
    submit = core_submit(key, prompt, ANSWER, images=images)
    return msgspec.structs.replace(submit, **changes)


@torch.no_grad()
def oracle_tokens(oracle: Any, spec: ModelSpec, submit: CoreSubmit) -> list[int]:
    assert spec.vision is not None
    made = []
    for one in submit.images:
        pixels = torch.frombuffer(bytearray(one.pixels), dtype=torch.uint8).view(one.height, one.width, 3)
        made.append(patches_of(pixels, spec.vision))
    ids = torch.tensor([submit.prompt_ids])
    oracle.model.rope_deltas = None
    generated = oracle.generate(
        input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), pixel_values=torch.cat([one for one, _ in made]),
        image_grid_thw=torch.tensor([[1, *grid] for _, grid in made]), max_new_tokens=ANSWER, do_sample=False,
        eos_token_id=None,
    )  # fmt: skip
    return list(generated[0, len(submit.prompt_ids) :].tolist())


CAT, DOG, STRIP = image_of(5, 3, 1), image_of(5, 3, 2), image_of(2, 14, 3)
MIXED = [
    submit_of(1, text(6, 1), CAT, text(9, 2)),
    submit_of(2, text(40, 3)),
    submit_of(3, text(3, 4), STRIP, text(4, 5), CAT, text(12, 6)),
    submit_of(4, DOG, text(5, 7)),
    submit_of(5, text(9, 8), STRIP),
]


AnyPair = TypeVar("AnyPair", bound=Pair)


@contextmanager
def pair_of(seeing: Loops, kind: type[AnyPair]) -> Iterator[AnyPair]:
    """Yield an engine for prompts and one for answers, and close both."""
    prefill = seeing.make(transfer=TransferConfig(role=EngineRole.PREFILL), max_batch_tokens=32)
    decode = seeing.make(transfer=TransferConfig(role=EngineRole.DECODE, listen=LISTEN))
    try:
        yield kind(prefill, decode)
    finally:
        prefill.close()
        decode.close()


def num_encoded(loop: EngineLoop) -> int:
    """Return how many images the loop has encoded."""
    features = loop.executor.awake().runner.features
    assert features is not None
    return features.encoded_total


@pytest.fixture(scope="module")
def alone(seeing: Loops) -> dict[int, list[int]]:
    return tokens_alone(seeing, MIXED)


def test_greedy_answers_are_those_of_transformers(alone: dict[int, list[int]], oracle: Any, seeing: Loops) -> None:
    for submit in MIXED:
        if submit.images:
            assert alone[submit.key] == oracle_tokens(oracle, seeing.model.spec, submit)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_tokens": 5, "max_running": 3, "policy": PolicyName.FCFS},
        {"max_batch_tokens": 64, "block_size": 8},
        {"max_batch_tokens": 16, "max_running": 4, "speculate": Speculate.NGRAM},
        {"max_batch_tokens": 16, "max_running": 4, "images": ImageOptions(cache_bytes=0)},
        {"batching": Batching.PADDED, "static_batch_size": 3},
        {"overlap": Overlap.ON, "max_batch_tokens": 16, "max_running": 4},
        {"kv_memory_bytes": 24 * 8192, "host_kv_memory_bytes": 1 << 20, "block_size": 4, "policy": PolicyName.FCFS},
        {"policy": PolicyName.VTC, "max_batch_tokens": 7, "max_running": 5},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_chunks_batches_and_caches(
    seeing: Loops, alone: dict[int, list[int]], settings: dict[str, Any]
) -> None:
    loop = seeing.make(**settings)
    assert tokens(loop, MIXED) == alone
    again = [msgspec.structs.replace(submit, key=submit.key + 10) for submit in MIXED]
    assert tokens(loop, again) == {key + 10: answer for key, answer in alone.items()}


def test_answers_are_the_same_when_blocks_run_short(seeing: Loops, alone: dict[int, list[int]]) -> None:
    block_bytes = seeing.model.kv_bytes_per_block(4)
    sizes = {"block_size": 4, "max_batch_tokens": 64, "max_running": 5, "policy": PolicyName.FCFS}
    loop = seeing.make(kv_memory_bytes=24 * block_bytes, prefix_caching=False, **sizes)
    assert tokens(loop, MIXED) == alone
    assert sum(sum(one.preempted_total.values()) for one in loop.load().classes) > 0


def test_an_answer_resumed_after_a_failover_goes_on_as_before(seeing: Loops, alone: dict[int, list[int]]) -> None:
    for submit in MIXED:
        resumed = msgspec.structs.replace(submit, resumed_ids=alone[submit.key][:5])
        assert tokens(seeing.make(), [resumed])[submit.key] == alone[submit.key][5:]


def test_the_same_image_hits_the_prefix_cache_and_another_one_does_not(
    seeing: Loops, alone: dict[int, list[int]]
) -> None:
    loop = seeing.make(block_size=4)
    first, same = submit_of(1, CAT, text(9, 2)), submit_of(2, CAT, text(9, 2))
    other, elsewhere = submit_of(3, DOG, text(9, 2)), submit_of(4, CAT, text(9, 2), cache_salt=b"else")
    results = run_all(loop, [first])
    results |= run_all(loop, [same])
    results |= run_all(loop, [other])
    results |= run_all(loop, [elsewhere])
    cached = {key: result.finish.num_cached_tokens for key, result in results.items()}
    assert cached == {1: 0, 2: 24, 3: 0, 4: 0}
    assert results[1].token_ids == results[2].token_ids == results[4].token_ids
    assert results[3].token_ids == tokens(seeing.make(prefix_caching=False), [other])[3] != results[1].token_ids


def test_an_image_is_encoded_once_for_each_tenant_s_salt(seeing: Loops) -> None:
    loop = seeing.make(prefix_caching=False)
    features = loop.executor.awake().runner.features
    assert features is not None
    tokens(loop, [submit_of(1, CAT, text(9, 2)), submit_of(2, text(5, 3), CAT, CAT)])
    assert features.encoded_total == 1
    tokens(loop, [submit_of(3, CAT, text(9, 2), cache_salt=b"else"), submit_of(4, CAT, text(9, 2), tenant_id="u")])
    assert features.encoded_total == 3


def test_the_encoded_images_stay_within_their_budget(seeing: Loops) -> None:
    spec = seeing.model.spec
    assert spec.vision is not None
    of_a_cat = 15 * (1 + len(spec.vision.deepstack_layers)) * spec.hidden_size * 4
    loop = seeing.make(prefix_caching=False, images=ImageOptions(cache_bytes=2 * of_a_cat))
    features = loop.executor.awake().runner.features
    assert features is not None
    for number in range(4):
        tokens(loop, [submit_of(number, image_of(5, 3, number), text(4, 1))])
        assert features.num_bytes == min(number + 1, 2) * of_a_cat
    tokens(loop, [submit_of(8, image_of(5, 3, 3), text(4, 1))])
    assert features.encoded_total == 4


def test_a_forgotten_tenant_leaves_no_encoded_image(seeing: Loops) -> None:
    loop = seeing.make()
    features = loop.executor.awake().runner.features
    assert features is not None
    tokens(loop, [submit_of(1, CAT, text(9, 2)), submit_of(2, DOG, text(9, 2), tenant_id="u")])
    both = features.num_bytes
    loop.forget_tenants(["t"])
    assert features.num_bytes == both // 2
    tokens(loop, [submit_of(3, CAT, text(9, 2))])  # of a request that was on its way
    assert features.num_bytes == both // 2


def test_the_encoder_s_work_is_part_of_a_step(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=64)
    cost = loop.scheduler.limits.encoder_cost.tokens(CAT.num_tokens)
    assert cost > CAT.num_tokens
    loop.submit(submit_of(1, CAT, text(9, 2)))
    plan = loop.scheduler.plan(10**18)
    assert plan.shape.prefill_rows == plan.num_rows + cost


def test_images_that_do_not_fit_into_a_step_together_are_encoded_one_after_the_other(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=100, max_running=4)
    loop.submit(submit_of(1, text(3, 1), CAT, DOG, text(9, 2)))
    plan = loop.scheduler.plan(10**18)
    (chunk,) = plan.chunks
    assert chunk.num_tokens == 3 + 17 + 1  # up to the second image's first token


def test_an_image_whose_features_are_kept_is_no_work_for_the_encoder(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=64, prefix_caching=False)
    tokens(loop, [submit_of(1, CAT, text(9, 2))])
    loop.submit(submit_of(2, CAT, text(9, 2)))
    (waiting,) = loop.scheduler.queues.by_key.values()
    assert waiting.kv.num_uncached == len(waiting.tokens)
    plan = loop.scheduler.plan(10**18)
    assert plan.shape.prefill_rows == plan.num_rows == len(waiting.tokens)


def test_an_image_that_was_dropped_before_its_last_token_counts_again_in_the_step_that_encodes_it_again(
    seeing: Loops,
) -> None:
    loop = seeing.make(max_batch_tokens=64, images=ImageOptions(cache_bytes=0))
    work, features = loop.scheduler.encoder_work, loop.executor.awake().runner.features
    assert features is not None
    loop.submit(submit_of(1, text(60, 1), STRIP, text(4, 2)))
    (sequence,) = loop.scheduler.queues.by_key.values()
    sequence.kv.num_computed = 65  # within the image, as after a prefix hit
    cost = loop.scheduler.limits.encoder_cost.tokens(STRIP.num_tokens)
    assert work.cost_from(sequence.request.images, 65) == cost
    sequence.kv.num_computed = 0
    counted, encoded = [], []
    for _ in range(20):
        plan = loop.scheduler.plan(10**18)
        if not plan.chunks[plan.num_decode :]:
            break
        counted.append(plan.shape.prefill_rows - plan.num_rows)
        before = features.encoded_total
        run_step(loop, plan)
        encoded.append(features.encoded_total - before)
    assert counted == [cost * number for number in encoded]
    assert sum(encoded) >= 1


def run_step(loop: Any, plan: Any) -> None:
    """Run one planned step and collect its results."""
    state = loop.executor.awake()
    loop._flights.append(state.runner.launch(plan))
    loop._collect(state)


@pytest.mark.parametrize("max_batch_tokens", [7, 40, 200])
@pytest.mark.parametrize("kept_images", [0, 1, 9])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_each_step_counts_exactly_the_images_that_it_encodes(
    seeing: Loops, max_batch_tokens: int, kept_images: int, *, prefix_caching: bool
) -> None:
    spec = seeing.model.spec
    assert spec.vision is not None
    of_a_strip = STRIP.num_tokens * (1 + len(spec.vision.deepstack_layers)) * spec.hidden_size * 4
    images = ImageOptions(cache_bytes=kept_images * of_a_strip)
    limits: dict[str, Any] = {"max_batch_tokens": max_batch_tokens, "max_running": 3, "block_size": 8}
    loop = seeing.make(images=images, prefix_caching=prefix_caching, **limits)
    state, cost = loop.executor.awake(), loop.scheduler.limits.encoder_cost
    features = state.runner.features
    assert features is not None
    costs = {one.digest: cost.tokens(one.num_tokens) for submit in MIXED for one in submit.images}
    for submit in MIXED * 2:
        loop.submit(msgspec.structs.replace(submit, key=loop.intake.requests_total))
    encoded: list[int] = []
    encode = features.encode

    class Counting:
        """The cache of the loop, which notes what each image costs that it encodes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(features, name)

        def encode(self, key: bytes, image: PromptImage) -> None:
            encoded.append(costs[image.digest])
            encode(key, image)

    state.runner.features = Counting()  # type: ignore[assignment]
    num_steps = 0
    while not loop.scheduler.idle:
        plan = loop.scheduler.plan(10**18)
        encoded.clear()
        run_step(loop, plan)
        counted = plan.shape.prefill_rows + plan.shape.decode_rows - plan.num_rows
        assert counted == sum(encoded)
        assert len(encoded) <= 1 or plan.num_rows + counted <= max_batch_tokens
        num_steps += 1
    assert num_steps > ANSWER
    assert features.encoded_total >= 3


def test_an_image_that_several_requests_of_a_step_share_is_counted_once(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=256, max_running=4, prefix_caching=False)
    for key in (1, 2, 3):
        loop.submit(submit_of(key, text(key, key), CAT, text(4, 2)))
    plan = loop.scheduler.plan(10**18)
    assert len(plan.chunks) == 3
    assert plan.shape.prefill_rows - plan.num_rows == loop.scheduler.limits.encoder_cost.tokens(CAT.num_tokens)


def test_tokens_and_the_encoding_of_their_images_share_the_budget_of_a_step(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=64)
    cost = loop.scheduler.limits.encoder_cost.tokens(CAT.num_tokens)
    loop.submit(submit_of(1, CAT, text(90, 1)))
    plan = loop.scheduler.plan(10**18)
    assert plan.shape.prefill_rows == plan.num_rows + cost <= 64


def test_an_image_larger_than_a_step_s_budget_is_encoded_in_a_step_that_begins_with_it(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=24)
    cost = loop.scheduler.limits.encoder_cost.tokens(CAT.num_tokens)
    assert cost > 24
    loop.submit(submit_of(1, text(3, 1), CAT, text(9, 2)))
    sizes = []
    while (plan := loop.scheduler.plan(10**18)).chunks[plan.num_decode :]:
        sizes.append((plan.num_rows, plan.shape.prefill_rows - plan.num_rows))
        run_step(loop, plan)
    assert sizes == [(4, 0), (CAT.num_tokens, cost), (10, 0)]


def test_a_step_limited_in_time_stops_before_an_image_that_would_end_too_late(seeing: Loops) -> None:
    loop = seeing.make(max_batch_tokens=512)
    submit = submit_of(1, text(20, 1), CAT, text(9, 2))
    loop.submit(submit)
    (sequence,) = loop.scheduler.queues.by_key.values()
    model = StepTimeModel()
    cost = loop.scheduler.limits.encoder_cost.tokens(CAT.num_tokens)
    text_s = model.predict_s(StepShape(prefill_rows=21, attended_pairs=21 * 10))
    image_s = model.predict_s(StepShape(prefill_rows=38 + cost, attended_pairs=38 * 19))
    prefill_tokens = []
    for seconds in (text_s, image_s - 1e-4, image_s + 1e-4):
        planner = StepPlanner(loop.scheduler.groups, 512, model, None, loop.scheduler.encoder_work)
        planner.limit_time(StepBudget(seconds, floor_tokens=16))
        prefill_tokens.append(planner.max_prefill_tokens(sequence))
    assert prefill_tokens[0] == 21
    assert 21 < prefill_tokens[1] < 38 <= prefill_tokens[2] < len(submit.prompt_ids)


def test_another_engine_goes_on_with_the_kv_of_a_prompt_with_images(seeing: Loops, alone: dict[int, list[int]]) -> None:
    with pair_of(seeing, Pair) as pair:
        pair.run(MIXED)
    assert pair.tokens == alone
    assert num_encoded(pair.decode) == 0


def test_an_adapter_changes_a_prompt_with_images_as_merged_weights_do(
    seeing: Loops, folder: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", folder, modules=("q_proj", "k_proj", "v_proj", "o_proj"), alpha=8.0)
    factors = load_file(adapter / "adapter_model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        product = factors[name.replace("lora_A", "lora_B")] @ factors[name]
        tensors[name.removeprefix("base_model.model.").replace(".lora_A", "")] += 8.0 / 4 * product
    merged = tmp_path / "merged"
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    (merged / "config.json").write_text((folder / "config.json").read_text())
    ours = tokens(seeing.make(adapters={"mine": str(adapter)}), [msgspec.structs.replace(MIXED[0], adapter="mine")])
    assert ours == tokens(Loops(merged).make(), MIXED[:1])
    assert ours != tokens(seeing.make(), MIXED[:1])


def test_a_prompt_with_images_is_refused_by_a_model_that_does_not_see(loops: Any) -> None:
    loop = loops.make()
    loop.submit(submit_of(1, text(3, 1), CAT))
    (failure,) = loop.take_outputs().failures
    assert failure.code is FailureCode.INVALID_REQUEST
    assert "does not take images" in failure.message


def test_a_draft_model_is_refused_with_a_model_that_sees(oracle: Any, folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), name="tiny", device="cpu", speculate=Speculate.DRAFT, draft_model=str(folder)
    )
    with pytest.raises(InvalidConfig, match="--speculate ngram"):
        load_loop(config)
