"""String formats as patterns, where the library is looser than validators and languages.

Every match of a pattern has the format; not every valid value matches the pattern, for instance years before 1000.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_YEAR = r"[1-9][0-9]{3}"
_LEAP_YEAR = r"(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    rf"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]{1,20}(?:-[a-zA-Z0-9]{1,12}){0,3}"  # at most 63 characters, and no two consecutive hyphens
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_SEGMENT = r"[A-Za-z0-9._~-]{0,40}"

PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^{_DATE}$",
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}T{_TIME}$",
        "hostname": f"^{_DOMAIN}$",
        "email": rf"^{_ATOM}(?:\.{_ATOM}){{0,2}}@{_DOMAIN}$",
    }
)
TEXT_PATTERNS: Mapping[str, str] = MappingProxyType(  # of formats that the library knows only within JSON
    {
        **PATTERNS,
        "uuid": r"^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        "ipv4": rf"^{_OCTET}(?:\.{_OCTET}){{3}}$",
        "ipv6": r"^[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}$",
        "duration": r"^P(?:[0-9]{1,4}[WDMY]|(?:[0-9]{1,4}D)?T[0-9]{1,4}[HMS])$",
        "uri": rf"^https?://{_DOMAIN}(?::[1-9][0-9]{{0,3}})?(?:/{_SEGMENT}){{0,8}}(?:\?[A-Za-z0-9._~=&-]{{0,80}})?$",
    }
)
