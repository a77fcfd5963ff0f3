"""Entity tags of what administrators edit, so that nobody overwrites what another has changed meanwhile.

A tag stands for what can be edited, by value: it is the same again when the object is. What changes by itself (use,
expiry) is not in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, TypeVar

import msgspec
from litestar import Response

from moiety_platform.errors import PreconditionFailed

PRECONDITION = "precondition"  # the name of the dependency, for handlers that take one

_TAG = re.compile(r'(W/)?"([^"]*)"')


class Tagged(msgspec.Struct, frozen=True):
    """An object as the admin API shows it. `transient` are the fields that change by themselves."""

    transient: ClassVar[frozenset[str]] = frozenset()


View = TypeVar("View", bound=Tagged)


def etag_of(view: Tagged) -> str:
    """The entity tag, in quotes."""
    fields = {name: value for name, value in msgspec.structs.asdict(view).items() if name not in view.transient}
    return f'"{blake2b(msgspec.json.encode(fields), digest_size=12).hexdigest()}"'


def tagged(view: View) -> Response[View]:
    """The answer that shows an object, with its tag."""
    return Response(view, headers={"ETag": etag_of(view)})


@dataclass(frozen=True, slots=True)
class Precondition:
    """The `If-Match` and `If-None-Match` of a request, None where it has none; of the latter `*` alone counts."""

    if_match: str | None
    if_none_match: str | None = None

    def check(self, current: Tagged | None) -> None:
        """Call it in the transaction of the change, with the object as it is there, None if there is none. Raises
        PreconditionFailed."""
        if current is not None and (self.if_none_match or "").strip() == "*":
            raise PreconditionFailed(
                "There is such an object already, and it was left as it is; get it, and change it."
            )
        if self.if_match is None:
            return
        if current is None:
            raise PreconditionFailed("There is no such object, so that no ETag matches; leave If-Match out to make it.")
        is_any = self.if_match.strip() == "*"
        if not is_any and etag_of(current) not in (f'"{tag}"' for weak, tag in _TAG.findall(self.if_match) if not weak):
            raise PreconditionFailed(
                "The object is not what it was when its ETag was read, and was left as it is; get it again, and repeat "
                "the change with the ETag of that answer if it still makes sense."
            )
