"""Entity tags of objects that administrators edit, to prevent lost updates.

A tag depends on the editable values: it is the same again when the object is. Fields that change by themselves (use,
expiry) do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, TypeVar

import msgspec
from litestar import Response

from moiety_platform.errors import PreconditionFailed

PRECONDITION = "precondition"  # name of the dependency, for handlers that use it

_TAG = re.compile(r'(W/)?"([^"]*)"')


class Tagged(msgspec.Struct, frozen=True):
    """An object as the admin API shows it. `transient` are the fields that change by themselves."""

    transient: ClassVar[frozenset[str]] = frozenset()


View = TypeVar("View", bound=Tagged)


def etag_of(view: Tagged) -> str:
    """Return the entity tag, in quotes."""
    fields = {name: value for name, value in msgspec.structs.asdict(view).items() if name not in view.transient}
    return f'"{blake2b(msgspec.json.encode(fields), digest_size=12).hexdigest()}"'


def tagged(view: View) -> Response[View]:
    """Return the response for an object, with its tag."""
    return Response(view, headers={"ETag": etag_of(view)})


@dataclass(frozen=True, slots=True)
class Precondition:
    """`If-Match` and `If-None-Match` of a request, None where absent; of the latter only `*` has an effect."""

    if_match: str | None
    if_none_match: str | None = None

    def check(self, current: Tagged | None) -> None:
        """Check the precondition. Raises PreconditionFailed.

        Call it in the transaction of the change, with the object's current state, None if there is none.
        """
        if current is not None and (self.if_none_match or "").strip() == "*":
            raise PreconditionFailed("The object exists already, and was not changed; get it, and change it.")
        if self.if_match is None:
            return
        if current is None:
            raise PreconditionFailed("The object does not exist, so no ETag matches; omit If-Match to create it.")
        is_any = self.if_match.strip() == "*"
        if not is_any and etag_of(current) not in (f'"{tag}"' for weak, tag in _TAG.findall(self.if_match) if not weak):
            raise PreconditionFailed(
                "The object has changed since its ETag was read, and was not changed; get it again, and repeat "
                "the change with the ETag of that answer if it still makes sense."
            )
