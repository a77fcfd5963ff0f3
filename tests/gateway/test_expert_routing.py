"""A request goes to the engine whose steps use the experts that requests like it have used, where costs are near."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire_submits import wire_submit

from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.routing.choose import Prefix, choose
from moiety_platform.routing.expert_profiles import (
    KEY_TOKENS,
    MAX_PREFIXES,
    MAX_TENANTS,
    MIN_SAMPLES,
    ExpertProfiles,
)
from moiety_wire.classes import STANDARD
from moiety_wire.engine_load import Load
from moiety_wire.expert_profile import SKETCH_SAMPLES, ExpertProfile
from moiety_wire.messages import ModelCard, Submit
from moiety_wire.prefix_events import PrefixEvents

from .conftest import NewCard, StartGateway

RANDOM = random.Random(1)
FULL = -(-MIN_SAMPLES // SKETCH_SAMPLES)  # profiles of requests until a tenant's is used
SPARE = 256


def packed(experts: Iterable[int]) -> bytes:
    profile = ExpertProfile(2)
    for _ in range(SKETCH_SAMPLES):
        profile.add(sum(1 << expert for expert in experts))
    return profile.pack()


CODE, PROSE = packed([0, 1, 2, 3]), packed([8, 9, 10, 11])
ALL = packed(range(16))


def engine(card: ModelCard, address: str, active: bytes, *, pending: int = 0, num_running: int = 4) -> EngineState:
    load = Load(
        *(num_running, 0, 0, 100, 0, 0, 16, 1, 1000, 0, 10, 10),
        engine_id=address,
        seq=0,
        pending_prefill_tokens=pending,
        active_experts=active,
    )
    blocks = PrefixBlocks()
    blocks.apply(PrefixEvents(0, b"", is_start=True))
    return EngineState(address, True, "", card, load, 0, 0.1, prefix_blocks=blocks)


def submit_of(tenant_id: str, first: int = 1000, num_tokens: int = 100) -> Submit:
    return wire_submit("r", tenant_id=tenant_id, prompt_ids=[first] * num_tokens, cache_salt=tenant_id.encode())


def key_of(submit: Submit) -> tuple[str, int | None]:
    prefix = Prefix(submit)
    assert prefix.block_names(16) is not None
    return prefix.expert_key()


@pytest.fixture
def known() -> ExpertProfiles:
    """Profiles of a tenant that uses the experts of code, and of one that uses those of prose."""
    profiles = ExpertProfiles(SPARE)
    for _ in range(FULL):
        profiles.learn("tiny", "coder", None, CODE)
        profiles.learn("tiny", "writer", None, PROSE)
    return profiles


def chosen(profiles: ExpertProfiles | None, tenant_id: str, *engines: EngineState) -> set[str]:
    submit = submit_of(tenant_id)
    return {
        choose(engines, "tiny", STANDARD, Prefix(submit), kv_aware=RANDOM, experts=profiles).address for _ in range(20)
    }


def test_of_equal_engines_the_one_that_uses_the_same_experts_is_chosen(card: ModelCard, known: ExpertProfiles) -> None:
    engines = engine(card, "code", CODE), engine(card, "prose", PROSE)
    assert chosen(known, "coder", *engines) == {"code"}
    assert chosen(known, "writer", *engines) == {"prose"}
    assert chosen(known, "stranger", *engines) == {"code", "prose"}
    assert chosen(None, "coder", *engines) == {"code", "prose"}


def test_more_work_outweighs_the_experts(card: ModelCard, known: ExpertProfiles) -> None:
    other = engine(card, "prose", PROSE)
    assert chosen(known, "coder", engine(card, "code", CODE, pending=SPARE - 16), other) == {"code"}
    assert chosen(known, "coder", engine(card, "code", CODE, pending=SPARE + 16), other) == {"prose"}


def test_an_idle_engine_is_preferred_to_a_busy_one_whose_steps_use_all_experts(
    card: ModelCard, known: ExpertProfiles
) -> None:
    idle = engine(card, "idle", b"", num_running=0)
    assert chosen(known, "coder", engine(card, "busy", ALL), idle) == {"idle"}
    found = known.saved_tokens([engine(card, "busy", CODE, num_running=0), idle], "tiny", "coder", None)
    assert found == [0, 0], "its experts are read once for both"


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_what_is_saved_differs_by_at_most_the_setting_and_follows_the_experts_read(
    any_card: ModelCard, first: int, second: int, one: int, other: int
) -> None:
    profiles = ExpertProfiles(SPARE)
    for _ in range(FULL):
        profiles.learn("tiny", "coder", None, CODE)
    costs: list[int] = []
    engines: list[EngineState] = []
    for num_running, bits in ((first, one), (second, other)):
        used = [expert for expert in range(16) if bits >> expert & 1]
        engines.append(engine(any_card, str(len(engines)), packed(used), num_running=num_running))
        costs.append(len(used) + (num_running + 1) * len({0, 1, 2, 3}.difference(used)))
    saved = profiles.saved_tokens(engines, "tiny", "coder", None)
    assert saved is not None and max(saved) - min(saved) <= SPARE
    assert (costs[0] - costs[1]) * (saved[0] - saved[1]) <= 0
    assert saved[0] != saved[1] or abs(costs[0] - costs[1]) < 0.02 * sum(costs)


def test_requests_with_the_same_beginning_have_a_profile_of_their_own(known: ExpertProfiles) -> None:
    agent, other = submit_of("coder", first=7), submit_of("coder", first=8)
    for _ in range(FULL):
        known.learn("tiny", *key_of(agent), PROSE)
    profile = known.profile_of("tiny", *key_of(agent))
    assert profile is not None and profile.overlap(ExpertProfile.unpack(PROSE)) == 1
    assert known.profile_of("tiny", *key_of(other)) is known.profile_of("tiny", "coder", None)
    assert known.profile_of("another", *key_of(agent)) is None
    assert key_of(submit_of("coder", num_tokens=KEY_TOKENS))[1] is None, "its last token has no name"
    assert key_of(submit_of("coder", num_tokens=KEY_TOKENS + 1))[1] is not None


def test_a_tenant_displaces_no_profile_of_another_and_few_are_kept(known: ExpertProfiles) -> None:
    for name in range(10 * MAX_PREFIXES):
        for _ in range(FULL):
            known.learn("tiny", "coder", name, CODE)
    own = known.profile_of("tiny", "coder", None)
    kept = [name for name in range(10 * MAX_PREFIXES) if known.profile_of("tiny", "coder", name) is not own]
    assert kept == list(range(9 * MAX_PREFIXES, 10 * MAX_PREFIXES))
    assert known.profile_of("tiny", "writer", None) is not None
    for number in range(MAX_TENANTS - 1):
        known.learn("tiny", f"t{number}", None, CODE)
    assert known.profile_of("tiny", "writer", None) is None
    assert known.profile_of("tiny", "coder", None) is own


def test_few_samples_and_unreadable_profiles_are_not_used(card: ModelCard) -> None:
    profiles = ExpertProfiles(SPARE)
    profiles.learn("tiny", "coder", None, CODE)
    profiles.learn("tiny", "coder", None, b"\xff")
    assert SKETCH_SAMPLES < MIN_SAMPLES and profiles.profile_of("tiny", "coder", None) is None
    profiles.learn("tiny", "coder", None, CODE)
    assert profiles.profile_of("tiny", "coder", None) is not None
    unknown = [engine(card, "a", b"\xff"), engine(card, "b", b"")]
    assert profiles.saved_tokens(unknown, "tiny", "coder", None) == [0, 0]


def test_the_newest_report_of_an_engine_counts(card: ModelCard, known: ExpertProfiles) -> None:
    before = engine(card, "a", CODE)
    assert before.load is not None
    after = msgspec.structs.replace(before, load=msgspec.structs.replace(before.load, active_experts=PROSE))
    other = engine(card, "b", ALL)
    assert known.saved_tokens([before, other], "tiny", "coder", None) == [SPARE // 2, -SPARE // 2]
    assert known.saved_tokens([after, other], "tiny", "coder", None) == [-85, 85]  # 24 experts beside 16


def test_profiles_of_deleted_tenants_are_removed(known: ExpertProfiles) -> None:
    known.forget_tenants(["coder", "unknown"])
    assert known.profile_of("tiny", "coder", None) is None
    assert known.profile_of("tiny", "writer", None) is not None


async def test_the_gateway_learns_from_ended_requests_while_the_setting_is_on(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    def verdict(submit: Submit) -> FakeVerdict:
        return FakeVerdict(submit.service.name, expert_profile=CODE if submit.prompt_ids[0] == 1 else PROSE)

    engines = [FakeEngineClient(new_card(f"engine-{i}"), verdict=verdict) for i in range(2)]
    for one, active in zip(engines, (CODE, PROSE), strict=True):
        one.active_experts = active
        one.prefix_blocks = PrefixBlocks()
        assert one.prefix_blocks.apply(PrefixEvents(0, b"", is_start=True))

    async with start_gateway(engines) as gateway:

        async def receivers(first: int, count: int = 24) -> set[int]:
            before = [len(one.submits) for one in engines]
            prompt: Any = [first] + [token % 256 for token in range(90)]
            for _ in range(count):
                await gateway.client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            return {i for i, one in enumerate(engines) if len(one.submits) > before[i]}

        assert await receivers(1) == {0, 1}
        settings = gateway.live.now
        changes = await gateway.live.change(settings.model_copy(update={"expert_routing_tokens": SPARE}))
        assert list(changes.at_once) == ["expert_routing_tokens"]
        await receivers(1, FULL)
        await receivers(2, FULL)
        assert (await receivers(1), await receivers(2)) == ({0}, {1})
        await gateway.live.change(settings)
        assert await receivers(1) == {0, 1}
