"""Requests that wait for an engine which is woken or started for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from moiety_platform.admission.gate import AdmissionGate
from moiety_platform.classes.cache import ClassCache
from moiety_platform.errors import EnginesAsleep, Unavailable
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_platform.wake_on_request.waker import EngineWaker

DRAINING = "engine_draining"  # code of a request that an engine refuses before its load says that it sleeps
SETTLE_S = 0.05
MAX_WAITS = 4  # of one request, since an engine can be put to sleep again before the request reaches it


async def start_when_awake(
    waker: EngineWaker,
    gate: AdmissionGate,
    classes: ClassCache,
    record: RequestRecord,
    error: Unavailable,
    keep_alive: Callable[[], AbstractAsyncContextManager[None]],
    start: Callable[[], Awaitable[InferenceRun]],
) -> InferenceRun:
    """Wait until an engine of the request's model is awake, then start the request, which failed with `error`.

    Meanwhile the request has a place among its tenant's requests, the context `keep_alive` is open, and no quota is
    reserved. Raises `error` if the model's engines do not sleep, and the errors of `start`.
    """
    for _ in range(MAX_WAITS):
        model = error.model if isinstance(error, EnginesAsleep) else record.base_model
        if error.code == DRAINING:
            await asyncio.sleep(SETTLE_S)
        woke_meanwhile = isinstance(error, EnginesAsleep) and waker.can_serve(error.model)
        if not model or not (woke_meanwhile or waker.is_asleep(model)):
            raise error
        catalogue, principal, generation = await classes.current(), record.principal, record.generation
        assert generation is not None, "set before engines are looked for"
        if principal.service_class not in catalogue.names:
            catalogue = await classes.find(principal.service_class)
        service = catalogue.choose(principal.service_class, generation.service_tier).service
        place = gate.reserve(principal.tenant_id, max(1, record.num_sequences))
        try:
            async with keep_alive():
                slo_s = service.max_queue_s if service.ttft_s is None else service.ttft_s
                await waker.wait_awake(model, slo_s, error.note if isinstance(error, EnginesAsleep) else None)
        finally:
            place.release()
        record.forget_attempt()
        try:
            return await start()
        except Unavailable as again:
            error = again
    raise error
