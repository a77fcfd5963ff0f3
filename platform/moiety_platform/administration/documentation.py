"""Tables of docs/administration.md, from the catalog. `python -m moiety_platform.administration.documentation`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from moiety_platform.access.actions import AdminAction
from moiety_platform.access.roles import Role
from moiety_platform.access.views import VIEW_ACTIONS
from moiety_platform.administration.catalog import RESOURCES
from moiety_platform.resources.declaration import Resource

RESOURCE_HEADINGS = ("resource", "below `/admin/v1`", "read by", "changed by", "commands", "declared in a file")


def resource_table() -> str:
    """Return the table of resources: their roles, commands, and whether `moiety apply` handles them."""
    return _table(RESOURCE_HEADINGS, (_row(one) for one in RESOURCES))


def action_table() -> str:
    """Return the table of all other actions: second ones of resources, and those of views."""
    more = [action for one in RESOURCES for action in one.more]
    actions = sorted([*more, *VIEW_ACTIONS], key=lambda action: action.name)
    return _table(("action", "roles"), ((f"`{action.name}`", _roles(action)) for action in actions))


def _row(resource: Resource) -> Sequence[str]:
    commands = " · ".join(one.name for one in resource.commands)
    return (
        f"[{resource.name}]({resource.page})",
        f"`{resource.path}`",
        _roles(resource.read),
        _roles(resource.write),
        f"`moiety {resource.name}` {commands}" if commands else "–",
        "yes" if resource.apply_kind else "–",
    )


def _roles(action: AdminAction) -> str:
    """Return the roles of an action; those of one tenant come after a semicolon."""
    names = [", ".join(role for role in Role if role in roles) for roles in (action.anyone, action.own)]
    own = f"of one tenant: {names[1]}" if names[1] else ""
    return "; ".join(part for part in (names[0], own) if part)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (headings, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(headings)}", *lines[1:]])


if __name__ == "__main__":
    sys.stdout.write(f"{resource_table()}\n\n{action_table()}\n")
