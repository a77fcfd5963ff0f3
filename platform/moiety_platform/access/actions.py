"""Actions of the admin API, each with the roles that may perform it.

Every admin route names its action in its `opt`; a route without an action is not served. The contents of a request can
require a second action, for example a quota on a whole tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from moiety_platform.access.roles import Role

ACTION = "action"  # its name in a route's `opt`

NOBODY: frozenset[Role] = frozenset()
OWNER = frozenset({Role.OWNER})
OPERATORS = frozenset({Role.OWNER, Role.OPERATOR})
READERS = frozenset({Role.OWNER, Role.OPERATOR, Role.VIEWER})
OWN_WRITERS = frozenset({Role.TENANT_ADMIN})
OWN_READERS = frozenset({Role.TENANT_ADMIN, Role.VIEWER})
SELF_SERVICE = frozenset({Role.TENANT_ADMIN, Role.DEVELOPER})


@dataclass(frozen=True, slots=True)
class AdminAction:
    """An action, and the roles that may perform it.

    `anyone` are the roles of administrators of the whole deployment, who may act on every object. `own` are the roles
    of administrators of one tenant, who may act on objects of that tenant and on objects without a tenant. An empty set
    allows no role.
    """

    name: str
    anyone: frozenset[Role]
    own: frozenset[Role] = frozenset()

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        """Return the action itself, which is immutable: the framework copies each handler with its `opt`."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionAccess:
    """Roles that may read and write the objects of a collection; see AdminAction for whole deployments and `own`."""

    readers: frozenset[Role]
    own_readers: frozenset[Role] = frozenset()
    writers: frozenset[Role]
    own_writers: frozenset[Role] = frozenset()

    def read(self, collection: str) -> AdminAction:
        """Return the action of reading the collection's objects."""
        return AdminAction(f"{collection}.read", self.readers, self.own_readers)

    def write(self, collection: str) -> AdminAction:
        """Return the action of creating, changing and deleting the collection's objects."""
        return AdminAction(f"{collection}.write", self.writers, self.own_writers)


MANAGED_BY_TENANTS = CollectionAccess(
    readers=READERS, own_readers=OWN_READERS, writers=OPERATORS, own_writers=OWN_WRITERS
)
MANAGED_BY_OPERATORS = CollectionAccess(readers=READERS, own_readers=OWN_READERS, writers=OPERATORS)
OPERATORS_ONLY = CollectionAccess(readers=OPERATORS, writers=OPERATORS)


def needs(action: AdminAction) -> dict[str, Any]:
    """Return a route's `opt`, which names the action that the route performs."""
    return {ACTION: action}
