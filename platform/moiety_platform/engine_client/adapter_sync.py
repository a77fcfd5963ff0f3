"""AdapterSync an engine the adapters that requests name: each is sent once a session, before the first request for
it, and again where the engine says that it has it no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import PlatformError, Unavailable
from moiety_wire.messages import Accepted, AdapterPart, Extend, Failed, FailureCode, Finished, Submit, ToEngine, Tokens

ReadAdapter = Callable[[str], AsyncIterator[AdapterPart]]


class AdapterSync:
    """Of one session. `send` hands a message to the engine, `has` says which adapters it came with."""

    def __init__(self, send: Callable[[ToEngine], None], has: Callable[[str], bool]) -> None:
        self._send, self._has = send, has
        self._sent: dict[str, asyncio.Task[None]] = {}  # adapter → its sending, which may have ended
        self._submits: dict[str, tuple[Submit, EngineStream, ReadAdapter]] = {}  # that may have to be sent once more
        self._again: set[asyncio.Task[None]] = set()

    async def submit(self, submit: Submit, stream: EngineStream, read: ReadAdapter) -> None:
        """Send a request, after its adapter. Raises NotFound where there is none any more, or Unavailable."""
        if not self._has(submit.adapter):
            self._submits[submit.request_id] = submit, stream, read
            try:
                await self._bring(submit, read)
            except BaseException as error:
                self._submits.pop(submit.request_id, None)
                if stream.ended and isinstance(error, Unavailable):
                    return  # the session was lost meanwhile, which the stream's reader is told
                stream.was_not_sent()
                raise
        self._send(submit)

    def takes(self, message: Accepted | Tokens | Finished | Failed) -> bool:
        """Whether the engine lacks a request's adapter, which is then sent to it, and the request once more."""
        if not self._submits:
            return False
        waiting = self._submits.pop(message.request_id, None)
        if waiting is None or not isinstance(message, Failed) or message.code is not FailureCode.ADAPTER_MISSING:
            return False
        task = asyncio.create_task(self._submit_again(message, *waiting), name="adapter sent again")
        self._again.add(task)
        task.add_done_callback(self._again.discard)
        return True

    def close(self) -> None:
        for task in (*self._sent.values(), *self._again):
            task.cancel()
        self._submits.clear()

    async def _submit_again(self, failed: Failed, submit: Submit, stream: EngineStream, read: ReadAdapter) -> None:
        known = self._sent.get(submit.adapter)
        if known is not None and known.done():
            del self._sent[submit.adapter]
        try:
            await self._bring(submit, read)
        except PlatformError as error:
            stream.fail(error)
            return
        if stream.wants_more:  # with what it was granted since, which went to nobody
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
        await asyncio.wait({sending})  # which goes on where who waits for it leaves
        if sending.cancelled():
            raise Unavailable("the engine was lost while it was sent the adapter; try again shortly", retry_after_s=1)
        error = sending.exception()
        if error is not None:
            if self._sent.get(adapter_id) is sending:
                del self._sent[adapter_id]
            raise error

    async def _send_all(self, adapter_id: str, tenant_id: str, read: ReadAdapter) -> None:
        async for part in read(adapter_id):
            self._send(msgspec.structs.replace(part, tenant_id=tenant_id))
