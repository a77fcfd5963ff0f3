"""Pytest plugin that keeps only the first tests of every file, for tools that make each a hundred times slower."""

from __future__ import annotations

from collections import Counter

import pytest

A_FILE = 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run last, since the selection by name excludes the mutants."""
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        file = item.nodeid.partition("::")[0]
        (kept if seen[file] < A_FILE else left_out).append(item)
        seen[file] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
