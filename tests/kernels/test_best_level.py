"""The level of CPU features for which kernels are compiled is the best that a CPU has, within a limit."""

from __future__ import annotations

import pytest

from moiety_kernels.cpu.levels import X86_LEVELS, best_level, has_slow_pairs

V3, V4 = X86_LEVELS["avx2"].features, X86_LEVELS["avx512"].features


@pytest.mark.parametrize(
    "features, expected",
    [
        (V3 - {"fma"}, ""),  # an old CPU, or a hypervisor that hides a feature
        (V3 | {"sha"}, "avx2"),
        (V3 | {"avxvnni"}, "avxvnni"),
        (V3 | {"avx512f"}, "avx2"),  # without the other parts of AVX-512
        (V4, "avx512"),
        (V4 | {"avx512vnni", "avxvnni"}, "avx512vnni"),
        (V4 | {"avx512vnni", "avx512bf16"}, "avx512bf16"),
        (X86_LEVELS["amx"].features, "amx"),
        (X86_LEVELS["amx"].features - {"amx-int8"}, "avx512bf16"),
    ],
)
def test_the_level_with_the_most_features_of_a_cpu_is_chosen(features: frozenset[str], expected: str) -> None:
    assert best_level(features) == expected


@pytest.mark.parametrize("limit", X86_LEVELS)
def test_a_limit_is_reached_and_not_exceeded(limit: str) -> None:
    everything = frozenset().union(*(level.features for level in X86_LEVELS.values()))
    assert best_level(everything, limit) == limit
    assert best_level(V3, limit) == "avx2"


@pytest.mark.parametrize(
    "cpu, level", [("emeraldrapids", "avx512bf16-slow"), ("cooperlake", "avx512bf16-slow"), ("znver4", "avx512bf16")]
)
def test_processors_with_slow_pairs_have_a_level_of_their_own(cpu: str, level: str) -> None:
    features = X86_LEVELS["avx512bf16"].features
    assert best_level(features, has_slow_pairs=has_slow_pairs(cpu)) == level
    assert best_level(features, "amx", has_slow_pairs=has_slow_pairs(cpu)) == level
    for limit in ("avx512bf16", "avx512bf16-slow", "avx512"):
        assert best_level(features, limit, has_slow_pairs=has_slow_pairs(cpu)) == limit


def test_tiles_are_used_beside_slow_pairs() -> None:
    assert best_level(X86_LEVELS["amx"].features, has_slow_pairs=True) == "amx"
