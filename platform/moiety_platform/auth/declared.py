"""Keys in a file that `moiety apply` reads. The file never holds a key's text, which goes into a Secret or a file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry
from moiety_platform.resources.paths import path_of


class KeyForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"key_secret": "keySecret"}):
    """A key for clients, which expires at `expires_at` if that is given. Its text goes into the Secret `keySecret`."""

    name: str
    models: list[str] | None = None
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    key_secret: str | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: KeyForm = entry.form
    assert entry.parent is not None
    models = form.models if form.models is not None else entry.around[0].models  # those of its tenant
    fields: dict[str, Any] = {"allowed_models": None if models is None else sorted(set(models))}
    if form.expires_at is not None:
        fields["expires_at"] = msgspec.to_builtins(form.expires_at.astimezone(UTC))  # as the admin API writes it
    yield DeclaredObject(
        "key",
        f"{entry.parent.name}/{form.name}",
        form.name,
        entry.path,
        fields,
        entry.parent.place,
        form.key_secret,
    )


KEY = ApplyKind(
    kind="key",
    form=KeyForm,
    within=("project",),
    objects=_objects,
    is_listed=False,
    keeps_name=True,
    has_secret=True,
    create_request=lambda declared, parent: AdminRequest(
        "POST", "/keys", {"name": declared.api_name, "project_id": parent, **declared.fields}
    ),
    remove_request=lambda row: AdminRequest("POST", path_of("keys", row["id"], "revoke")),
)
