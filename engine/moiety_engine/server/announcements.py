"""Messages that the engine server sends to every gateway: the model card and the load."""

from __future__ import annotations

import time

import msgspec

from moiety_engine.messages import CoreHello, CoreLoad
from moiety_text.folder import TextModel
from moiety_wire.engine_load import Load, LoadMetrics, SleepState
from moiety_wire.messages import ModelCard
from moiety_wire.roles import EngineRole


def latest_load(before: CoreLoad, load: CoreLoad | None) -> CoreLoad:
    """Return the newest load of the core, with the newest report of tenants' service, which not every load has."""
    if load is None:
        return before
    if load.tenant_service is None and before.tenant_service is not None:
        return msgspec.structs.replace(load, tenant_service=before.tenant_service)
    return load


def make_load(
    engine_id: str,
    load: CoreLoad,
    *,
    draining: bool,
    sleep: SleepState,
    sleep_problem: str,
    unacknowledged_replicas: list[str],
) -> Load:
    """Return the load without the fields of a session: its number and the uptime are 0."""
    return Load(
        **{name: getattr(load, name) for name in LoadMetrics.__struct_fields__},
        engine_id=engine_id,
        seq=0,
        draining=draining,
        sleep=sleep,
        sleep_problem=sleep_problem,
        unacknowledged_replicas=unacknowledged_replicas,
        tenant_service=load.tenant_service,
    )


def make_card(
    model: str,
    engine_id: str,
    text: TextModel,
    hello: CoreHello,
    role: EngineRole = EngineRole.BOTH,
    adapters: tuple[str, ...] = (),
    tool_format: str = "auto",
    reasoning_format: str = "auto",
    device_group: str = "",
) -> ModelCard:
    of_core = {name: getattr(hello, name) for name in CoreHello.__struct_fields__ if name not in ("state", "message")}
    return ModelCard(
        **of_core,
        engine_id=engine_id,
        model=model,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
        eos_token_ids=tuple(token_id for token_id in text.eos_token_ids if token_id < hello.vocab_size),
        sampling_defaults=text.sampling_defaults,
        created_unix_s=int(time.time()),
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        role=role,
        adapters=adapters,
        device_group=device_group,
        forgets=True,
        controls_reasoning=True,
    )
