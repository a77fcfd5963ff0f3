"""Webhooks in a file that `moiety apply` reads. The secret that signs alerts goes into a Secret of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry
from moiety_platform.resources.paths import path_of
from moiety_platform.webhooks.terms import EventGroup, WebhookFormat, hash_routing_key

_HASH = "routing_key_hash"


class WebhookForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"key_secret": "keySecret"}):
    """An address for alerts; the secret that signs them goes into the Secret `keySecret`."""

    name: str
    url: str
    format: WebhookFormat = WebhookFormat.JSON
    routing_key: str | None = None
    events: list[EventGroup] | None = None
    key_secret: str | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    """Return the object. The gateway does not show a routing key, so its hash is compared."""
    form: WebhookForm = entry.form
    fields: dict[str, Any] = {"url": form.url}
    if "format" in entry.raw:
        fields["format"] = form.format.value
    if form.events is not None:
        fields["events"] = [group.value for group in sorted(form.events, key=list(EventGroup).index)]
    identity = {}
    if form.routing_key is not None:
        fields[_HASH] = hash_routing_key(form.url, form.routing_key)
        identity["routing_key"] = form.routing_key
    yield DeclaredObject(
        "webhook", form.name, form.name, entry.path, fields, key_secret=form.key_secret, identity=identity
    )


def _create(declared: DeclaredObject, _parent: str) -> AdminRequest:
    shown = {name: value for name, value in declared.fields.items() if name != _HASH}
    return AdminRequest("POST", "/webhooks", {**shown, **declared.identity})


WEBHOOK = ApplyKind(
    kind="webhook",
    form=WebhookForm,
    objects=_objects,
    keeps_name=True,
    has_secret=True,
    create_request=_create,
    remove_request=lambda row: AdminRequest("DELETE", path_of("webhooks", row["id"])),
)
