"""How a CPU multiplies, of the ways that this machine has."""

from __future__ import annotations

import pytest

from moiety_kernels.cpu import dots, tiles


@pytest.fixture(params=["tiles", "packed", "vectors"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On matrix tiles, by packed rows as where there are no tiles, and by floats as where there is neither."""
    if request.param == "tiles":
        if not tiles.usable():
            pytest.skip("this processor has no matrix tiles")
        return "tiles"
    monkeypatch.setattr(tiles, "usable", lambda: False)
    if request.param == "vectors":
        monkeypatch.setattr(dots, "usable", lambda _: False)
    elif not all(map(dots.usable, (4, 8, 16))):
        pytest.skip("this processor does not multiply bfloat16 in pairs")
    return str(request.param)
