"""Choice of prefill and decode engines, where engines have roles. Pure.

A prefill engine gets a request only together with a decode engine that continues it. The decode engine is chosen first,
so that the prompt's KV can be transferred while it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from urllib.parse import urlsplit

from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import Unavailable
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import Submit
from moiety_wire.roles import ANY_HOST, EngineRole

NO_DECODE_ENGINE = "no_decode_engine"
_LOOPBACK = "127.0.0.1"


class Need(Enum):
    """Work that a request needs of engines."""

    PROMPT = auto()  # ends with its prompt, or with the first token
    ANSWER = auto()  # a prefill, and a decode that another engine may run
    WHOLE = auto()  # both on one engine
    ADAPTED = auto()  # the same, on an engine that serves adapters


def need_of(submit: Submit) -> Need:
    """Return the need of a request. Prompt logprobs come with the end of the output, from the engine that prefilled."""
    if submit.adapter:
        return Need.ADAPTED
    if submit.sampling.num_prompt_logprobs is not None:
        return Need.WHOLE
    num_tokens = len(submit.resumed_ids or ())
    return Need.PROMPT if submit.embed or submit.stopping.max_tokens <= num_tokens + 1 else Need.ANSWER


def first_engines(able: Sequence[EngineState], need: Need) -> list[EngineState]:
    """Return the engines that may receive a request first, of the able engines of its model.

    Decode engines take whole requests where no other engine can. Raises Unavailable where there are only prefill
    engines, or none that serves the required adapters.
    """
    if need is Need.ADAPTED:
        able = [engine for engine in able if engine.card is not None and engine.card.takes_adapters]
        if not able:
            raise Unavailable(
                "No engine that serves adapters can take a request now; try again shortly.", retry_after_s=1
            )
    for engine in able:
        if _role(engine) is not EngineRole.BOTH:
            break
    else:  # true nearly everywhere
        if able:
            return list(able)
    roles: dict[EngineRole, list[EngineState]] = {role: [] for role in EngineRole}
    for engine in able:
        roles[_role(engine)].append(engine)
    hands_over = need is Need.PROMPT or (need is Need.ANSWER and any(map(takes_over, able)))
    first = roles[EngineRole.BOTH] + (roles[EngineRole.PREFILL] if hands_over else [])
    if first or roles[EngineRole.DECODE]:
        return first or roles[EngineRole.DECODE]
    raise _no_decode_engine()


def takes_over(engine: EngineState) -> bool:
    """Return whether the engine can decode after another engine's prefill."""
    return _role(engine) is not EngineRole.PREFILL and engine.card is not None and bool(engine.card.kv_address)


def is_handed_over(first: EngineState, need: Need) -> bool:
    """Return whether another engine continues a request with that need that was submitted to `first`."""
    return need is Need.ANSWER and _role(first) is EngineRole.PREFILL


def partner_among(able: Sequence[EngineState], service: ServiceClass | None, coming: Mapping[str, int]) -> EngineState:
    """Return the engine that decodes a request. Raises Unavailable.

    Preference: the role decode rather than both; then steps short enough for the class; then the least work, of which
    `coming` are requests on their way there (by address).
    """
    others = [engine for engine in able if takes_over(engine)]
    if not others:
        raise _no_decode_engine()
    return min(
        others,
        key=lambda engine: (
            _role(engine) is EngineRole.BOTH,
            _is_too_slow(engine, service, coming.get(engine.address, 0)),
            _work(engine) + coming.get(engine.address, 0),
            _kv_use(engine),
        ),
    )


def kv_address_of(engine: EngineState) -> str:
    """Return the address at which other engines reach it.

    An engine that listens on all addresses does not know its own, so the host of the gateway's connection is used.
    """
    assert engine.card is not None, "chosen by its card"
    found = urlsplit(engine.address)
    host = (found.hostname or _LOOPBACK) if found.scheme == "tcp" else _LOOPBACK
    return engine.card.kv_address.replace(f"tcp://{ANY_HOST}:", f"tcp://[{host}]:" if ":" in host else f"tcp://{host}:")


def _no_decode_engine() -> Unavailable:
    return Unavailable(
        "the engines that are there compute prompts only (--role prefill), and none of the role decode or both can "
        "take a request now; try again shortly, or start one with --role decode",
        code=NO_DECODE_ENGINE,
        retry_after_s=1,
    )


def _role(engine: EngineState) -> EngineRole:
    card = engine.card
    if card is None or (card.role is EngineRole.PREFILL and not card.hands_over):
        return EngineRole.BOTH
    return card.role


def _is_too_slow(engine: EngineState, service: ServiceClass | None, num_coming: int) -> bool:
    """Return whether its predicted step time, with one more output in the batch, exceeds the class's TPOT."""
    load = engine.load
    if service is None or service.tpot_s is None or load is None or load.step_costs is None:
        return False
    costs, rows = load.step_costs, load.num_running + num_coming + 1
    bent_s = sum(max(0, rows - bend) * more_s for bend, more_s in costs.bends)
    context_s = costs.context_token_s * load.kv_blocks_used * load.block_size
    return costs.step_s + rows * costs.row_s + bent_s + context_s > service.tpot_s


def _work(engine: EngineState) -> int:
    load = engine.load
    return engine.num_inflight if load is None else max(load.num_running + load.num_waiting, engine.num_inflight)


def _kv_use(engine: EngineState) -> float:
    load = engine.load
    return 0.0 if load is None or not load.kv_blocks_total else load.kv_blocks_used / load.kv_blocks_total
