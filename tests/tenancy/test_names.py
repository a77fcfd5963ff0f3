"""What a name may be: NFC, and nothing in it that nobody sees."""

from __future__ import annotations

import pytest

from moiety_platform.errors import BadRequest
from moiety_platform.tenants.checks import check_name

INVISIBLE = (
    "\u3164\u115f\u1160\u2800\uffa0\u200b\u200d\u202e\u2066\ufeff\u00ad\u034f\ufe0f\U000e0041\U000e0101\u0000\x1b\u2028"
)


@pytest.mark.parametrize("character", INVISIBLE, ids=lambda one: f"U+{ord(one):04X}")
def test_a_name_with_an_invisible_character_is_refused(character: str) -> None:
    for name in (character, f"a{character}b", f"a{character}"):
        with pytest.raises(BadRequest) as refused:
            check_name(name)
        assert refused.value.param == "name"


def test_a_name_is_kept_in_nfc() -> None:
    assert check_name("Cafe\u0301") == "Caf\u00e9"
    assert check_name("株式会社 Ünïcode &#33;") == "株式会社 Ünïcode &#33;"
