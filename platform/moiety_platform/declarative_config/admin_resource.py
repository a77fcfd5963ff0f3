"""Declaration of the ledger of declared objects as an administered resource. `moiety apply` is its only command."""

from __future__ import annotations

from moiety_platform.access.actions import OPERATORS, READERS, CollectionAccess
from moiety_platform.resources.declaration import Resource

DECLARATIONS = Resource(
    name="declaration",
    access=CollectionAccess(readers=READERS, writers=OPERATORS),
    page="administration.md#declarative-configuration-gitops",
)
