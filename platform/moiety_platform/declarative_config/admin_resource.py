"""Declaration of the ledger of declared objects as an administered resource. `moiety apply` is its only command."""

from __future__ import annotations

from moiety_platform.access.actions import OPERATORS, READERS, AdminAction
from moiety_platform.resources.declaration import Resource

DECLARATIONS = Resource(
    name="declaration",
    collection="declarations",
    read=AdminAction("declarations.read", READERS),
    write=AdminAction("declarations.write", OPERATORS),
    page="administration.md#declarative-configuration-gitops",
)
