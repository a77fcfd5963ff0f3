"""Reading of an adapter's stored content, part by part."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from moiety_platform.adapters.magnitudes import Magnitudes
from moiety_platform.adapters.models import Adapter
from moiety_platform.adapters.service import get_adapter, read_part
from moiety_platform.adapters.tensors import check_config, check_head, head_bytes
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound
from moiety_wire.messages import AdapterPart


@dataclass(frozen=True, slots=True)
class AdapterContents:
    """Reader of adapters that reads one part per transaction, so that an adapter is never in memory as a whole."""

    database: Database

    async def parts(self, adapter_id: str) -> AsyncIterator[AdapterPart]:
        """Yield the parts in the form that engines accept. Raises NotFound or Unavailable."""
        async with self.database.read() as session:
            adapter = await get_adapter(session, adapter_id)
            num_bytes, config = adapter.num_bytes, adapter.config
        index = start = 0
        while start < num_bytes:
            async with self.database.read() as session:
                data = await read_part(session, adapter_id, start)
            if not data:
                raise NotFound("the model's adapter was deleted meanwhile", code="model_not_found", param="model")
            start += len(data)
            yield AdapterPart(adapter_id, index, data, "" if index else config, start >= num_bytes)
            index += 1

    async def check(self, adapter: Adapter) -> str:
        """Return the digest of a completed upload. Raises BadRequest where the bytes are not an adapter's tensors."""
        digest, head, length = hashlib.sha256(), b"", 0
        if not adapter.num_bytes:
            raise BadRequest("nothing was uploaded; send the parts of adapter_model.safetensors first")
        async for part in self.parts(adapter.id):
            digest.update(part.data)
            if not part.index:
                length = head_bytes(part.data)
            if len(head) < length:
                head += part.data[: length - len(head)]
        await self._check_values(adapter, Magnitudes(check_head(head, adapter.num_bytes), length))
        return digest.hexdigest()

    async def _check_values(self, adapter: Adapter, magnitudes: Magnitudes) -> None:
        """Read the parts again, now that the offsets of all tensors are known, and check their values.

        Raises BadRequest.
        """
        start = 0
        async for part in self.parts(adapter.id):
            await asyncio.to_thread(magnitudes.take, start, part.data)
            start += len(part.data)
        magnitudes.check_gain(check_config(adapter.config))
