"""Request and response bodies of the admin API for adapters."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from moiety_platform.adapters.models import MAX_ADAPTER_NAME_LENGTH, Adapter
from moiety_platform.openapi.schemas import shows
from moiety_platform.prices.models import MAX_MODEL_LENGTH
from moiety_wire.shared_fields import copy_fields

NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ADAPTER_NAME_LENGTH - 1}}}", re.ASCII)
MAX_CONFIG_LENGTH = 10_000  # PEFT writes about one thousand
MAX_PART_BYTES = 1024 * 1024

Name = Annotated[str, shows(pattern=f"^{NAME.pattern}$")]


class NewAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to upload: `config` is the text of its adapter_config.json.

    Or an adapter that an operator has stored on the engines under the name `engine_adapter`, for this tenant to use.
    """

    tenant_id: str
    model: Annotated[str, shows(minLength=1, maxLength=MAX_MODEL_LENGTH, format="printable")]
    name: Name
    config: Annotated[str, shows(maxLength=MAX_CONFIG_LENGTH)] | None = None
    engine_adapter: Name | None = None


class AdapterPartBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of adapter_model.safetensors from `start` on, in base64."""

    start: Annotated[int, shows(minimum=0)]
    data: Annotated[bytes, shows(maxLength=-(-MAX_PART_BYTES // 3) * 4)]


class AdapterView(msgspec.Struct, frozen=True):
    """One adapter. Clients use the name `served_as`. `digest` is the SHA-256 of its tensors, once they are complete."""

    id: str
    tenant_id: str
    model: str
    name: str
    served_as: str
    state: str
    num_bytes: int
    digest: str | None
    engine_adapter: str | None
    created_at: datetime

    @classmethod
    def of(cls, adapter: Adapter) -> AdapterView:
        return copy_fields(
            adapter,
            cls,
            served_as=served_name(adapter.model, adapter.name),
            created_at=datetime.fromtimestamp(adapter.created_ms / 1000, UTC),
        )


class AdapterViews(msgspec.Struct, frozen=True):
    """Adapters by tenant, model and name."""

    data: list[AdapterView]


def served_name(model: str, name: str) -> str:
    """Return the name that clients use for the model with that adapter."""
    return f"{model}:{name}"
