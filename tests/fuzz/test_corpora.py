"""What fuzzing has kept of each target, its findings among it, is taken or refused in words. Runs without a fuzzer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = [path.stem for path in sorted((ROOT / "fuzz" / "corpora").glob("*.jsonl"))]
MUTATIONS = 2  # of each input that is kept


@pytest.fixture
def corpora(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.fuzz import corpora

    return corpora


def test_every_target_has_a_corpus(corpora: Any) -> None:
    assert sorted(corpora.TARGETS) == NAMES
    assert all(corpora.kept(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_all_that_was_kept_is_taken_or_refused_in_words(corpora: Any, name: str) -> None:
    target, chance, num_taken = corpora.TARGETS[name], random.Random(name), 0
    take = target.opened()
    for data in corpora.kept(name):
        take(data)
        for _ in range(MUTATIONS if target.mutate else 0):
            take(target.mutate(data, chance)[: target.max_bytes])
        num_taken += 1
    assert num_taken == len(corpora.kept(name)) > 0
