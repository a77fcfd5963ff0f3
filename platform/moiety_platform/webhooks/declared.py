"""Webhooks in a file that `moiety apply` reads. The secret that signs alerts goes into a Secret of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry
from moiety_platform.resources.paths import path_of


class WebhookForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"key_secret": "keySecret"}):
    """An address for alerts; the secret that signs them goes into the Secret `keySecret`."""

    name: str
    url: str
    key_secret: str | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: WebhookForm = entry.form
    yield DeclaredObject("webhook", form.name, form.name, entry.path, {"url": form.url}, key_secret=form.key_secret)


WEBHOOK = ApplyKind(
    kind="webhook",
    form=WebhookForm,
    objects=_objects,
    keeps_name=True,
    has_secret=True,
    create_request=lambda declared, parent: AdminRequest("POST", "/webhooks", declared.fields),
    remove_request=lambda row: AdminRequest("DELETE", path_of("webhooks", row["id"])),
)
