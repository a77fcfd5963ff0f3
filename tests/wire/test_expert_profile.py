"""Profiles of experts count samples exactly until they are full, and then fade by halves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_wire.expert_profile import MAX_PACKED_BYTES, NUM_PLANES, SKETCH_SAMPLES, ExpertProfile

NUM_EXPERTS, NUM_BYTES = 24, 3
samples = st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1)), max_size=SKETCH_SAMPLES)


def profile_of(found: list[set[int]], max_samples: int = SKETCH_SAMPLES) -> ExpertProfile:
    profile = ExpertProfile(NUM_BYTES, max_samples)
    for experts in found:
        profile.add(sum(1 << expert for expert in experts))
    return profile


def counts_of(found: list[set[int]]) -> list[int]:
    return [sum(expert in experts for experts in found) for expert in range(NUM_EXPERTS)]


@given(samples, samples)
def test_counts_are_exact_and_add_up_until_the_profile_is_full(first: list[set[int]], second: list[set[int]]) -> None:
    one, other = profile_of(first), profile_of(second)
    assert one.counts(NUM_EXPERTS) == counts_of(first) and one.num_samples == len(first)
    both = ExpertProfile(NUM_BYTES, 255)
    both.merge(one)
    both.merge(other)
    assert both.counts(NUM_EXPERTS) == counts_of(first + second) and both.num_samples == len(first) + len(second)


@given(st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1)), min_size=1, max_size=100), st.integers(1, 15))
def test_a_full_profile_forgets_half_of_each_count(found: list[set[int]], max_samples: int) -> None:
    profile = profile_of(found, max_samples)
    expected, num_samples = [0] * NUM_EXPERTS, 0
    for experts in found:
        if num_samples == max_samples:
            expected, num_samples = [count // 2 for count in expected], num_samples // 2
        expected = [count + (expert in experts) for expert, count in enumerate(expected)]
        num_samples += 1
    assert (profile.counts(NUM_EXPERTS), profile.num_samples) == (expected, num_samples)
    assert max(expected) <= num_samples <= max_samples


@given(samples.filter(bool))
def test_a_packed_profile_is_the_same_afterwards(found: list[set[int]]) -> None:
    packed = profile_of(found).pack()
    assert len(packed) == 1 + NUM_PLANES * NUM_BYTES
    back = ExpertProfile.unpack(packed)
    assert (back.counts(NUM_EXPERTS), back.num_samples) == (counts_of(found), len(found))
    assert back.pack() == packed


@given(samples, samples)
def test_the_overlap_is_the_mean_share_of_a_tokens_experts_that_a_step_uses(
    tokens: list[set[int]], steps: list[set[int]]
) -> None:
    shared = sum(len(token & step) for token in tokens for step in steps)
    uses = sum(map(len, tokens)) * len(steps)
    found = profile_of(tokens).overlap(profile_of(steps))
    assert found == pytest.approx(shared / uses if uses else 0.0)
    assert 0 <= found <= 1


def test_a_profile_without_samples_is_no_bytes() -> None:
    assert ExpertProfile(NUM_BYTES).pack() == b""


@pytest.mark.parametrize(
    "data",
    [b"", b"\x01", b"\x01" + bytes(3), b"\x00" + bytes(4), b"\x10" + bytes(4), b"\x01" + bytes(MAX_PACKED_BYTES)],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no expert profile"):
        ExpertProfile.unpack(data)
