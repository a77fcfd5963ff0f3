"""Sends adapters to an engine on demand.

Each adapter is sent once per session, before the first request that needs it, and again if the engine reports that it
no longer has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import PlatformError, Unavailable
from moiety_wire.messages import Accepted, AdapterPart, Extend, Failed, FailureCode, Finished, Submit, ToEngine, Tokens

ReadAdapter = Callable[[str], AsyncIterator[AdapterPart]]


class AdapterSync:
    """Adapter transfers of one session.

    `send` sends a message to the engine. `has` says which adapters the engine had at connection.
    """

    def __init__(self, send: Callable[[ToEngine], None], has: Callable[[str], bool]) -> None:
        self._send, self._has = send, has
        self._sent: dict[str, asyncio.Task[None]] = {}  # adapter → its transfer, running or done
        self.submits: dict[str, tuple[Submit, EngineStream, ReadAdapter]] = {}  # requests that may be resent
        self._again: set[asyncio.Task[None]] = set()

    async def submit(self, submit: Submit, stream: EngineStream, read: ReadAdapter) -> None:
        """Send a request after its adapter. Raises NotFound if the adapter no longer exists, or Unavailable."""
        if not self._has(submit.adapter):
            self.submits[submit.request_id] = submit, stream, read
            try:
                await self._bring(submit, read)
            except BaseException as error:
                self.submits.pop(submit.request_id, None)
                if stream.ended and isinstance(error, Unavailable):
                    return  # the session was lost meanwhile; the stream has already failed
                stream.was_not_sent()
                raise
        self._send(submit)

    def takes(self, message: Accepted | Tokens | Finished | Failed) -> bool:
        """Return whether the engine lacks the request's adapter. The adapter and then the request are sent again."""
        waiting = self.submits.pop(message.request_id, None)
        if waiting is None or not isinstance(message, Failed) or message.code is not FailureCode.ADAPTER_MISSING:
            return False
        task = asyncio.create_task(self._submit_again(message, *waiting), name="adapter sent again")
        self._again.add(task)
        task.add_done_callback(self._again.discard)
        return True

    def close(self) -> None:
        for task in (*self._sent.values(), *self._again):
            task.cancel()
        self.submits.clear()

    async def _submit_again(self, failed: Failed, submit: Submit, stream: EngineStream, read: ReadAdapter) -> None:
        known = self._sent.get(submit.adapter)
        if known is not None and known.done():
            del self._sent[submit.adapter]
        try:
            await self._bring(submit, read)
        except PlatformError as error:
            stream.fail(error)
            return
        if stream.wants_more:  # resend with the credit granted since, which the engine ignored
            self._send(msgspec.structs.replace(submit, credit_tokens=stream.credit_tokens))
            if stream.credit_is_last:
                self._send(Extend(submit.request_id, submit.seq + 1, stream.credit_tokens, last=True))
        else:
            stream.deliver(failed)

    async def _bring(self, submit: Submit, read: ReadAdapter) -> None:
        adapter_id = submit.adapter
        sending = self._sent.get(adapter_id)
        if sending is None:
            sending = asyncio.create_task(self._send_all(adapter_id, submit.tenant_id, read), name="adapter sent")
            self._sent[adapter_id] = sending
        await asyncio.wait({sending})  # continues if the waiting request is cancelled
        if sending.cancelled():
            raise Unavailable(
                "the engine was lost while the adapter was sent to it; try again shortly", retry_after_s=1
            )
        error = sending.exception()
        if error is not None:
            if self._sent.get(adapter_id) is sending:
                del self._sent[adapter_id]
            raise error

    async def _send_all(self, adapter_id: str, tenant_id: str, read: ReadAdapter) -> None:
        async for part in read(adapter_id):
            self._send(msgspec.structs.replace(part, tenant_id=tenant_id))
