"""How a CPU multiplies, of the ways that this machine has."""

from __future__ import annotations

import pytest

from moiety_kernels.cpu import dots, tiles

PACKED = {"packed": (16, 8, 4), "packed eights": (8,), "vectors": ()}  # bits of the weights that are


@pytest.fixture(params=["tiles", *PACKED])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On matrix tiles; by packed rows as where there are no tiles, or only in eight bits as where bfloat16 is not
    multiplied in pairs; and by floats as where there is nothing of these."""
    way = str(request.param)
    if way == "tiles":
        if not tiles.usable():
            pytest.skip("this processor has no matrix tiles")
        return way
    if not all(map(dots.usable, PACKED[way])):
        pytest.skip("this processor does not multiply so")
    monkeypatch.setattr(tiles, "usable", lambda: False)
    monkeypatch.setattr(dots, "usable", lambda bits: bits in PACKED[way])
    return way
