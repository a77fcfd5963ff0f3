"""Which engine computes a prompt and which one writes the answer, where engines have roles. Pure.

An engine of the role prefill gets requests only with another one that goes on with them. That other one is chosen
beforehand, so that the prompt's KV can go there while it is computed.
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
    """What a request needs of engines."""

    PROMPT = auto()  # it ends with its prompt, or the token after that
    ANSWER = auto()  # a prompt, and an answer that another engine may write
    WHOLE = auto()  # both by one engine
    ADAPTED = auto()  # the same, by one that serves adapters


def need_of(submit: Submit) -> Need:
    """A prompt whose tokens are scored is told with the answer's end, by the engine that computed it."""
    if submit.adapter:
        return Need.ADAPTED
    if submit.sampling.num_prompt_logprobs is not None:
        return Need.WHOLE
    num_tokens = len(submit.resumed_ids or ())
    return Need.PROMPT if submit.embed or submit.stopping.max_tokens <= num_tokens + 1 else Need.ANSWER


def first_engines(able: Sequence[EngineState], need: Need) -> list[EngineState]:
    """Those that a request may be submitted to first, of the engines of its model that can take any. Engines of the
    role decode take whole requests where no other can. Raises Unavailable where there are engines for prompts only, or
    none that serves the adapters that are needed."""
    if need is Need.ADAPTED:
        able = [engine for engine in able if engine.card is not None and engine.card.takes_adapters]
        if not able:
            raise Unavailable(
                "No engine that serves adapters can take a request now; try again shortly.", retry_after_s=1
            )
    for engine in able:
        if _role(engine) is not EngineRole.BOTH:
            break
    else:  # as nearly everywhere
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
    """Whether it goes on with what an engine for prompts has computed."""
    return _role(engine) is not EngineRole.PREFILL and engine.card is not None and bool(engine.card.kv_address)


def is_handed_over(first: EngineState, need: Need) -> bool:
    """Whether a request with that need, submitted to that engine, is gone on with by another one."""
    return need is Need.ANSWER and _role(first) is EngineRole.PREFILL


def partner_among(able: Sequence[EngineState], service: ServiceClass | None, coming: Mapping[str, int]) -> EngineState:
    """The engine that goes on with a request. One of the role decode rather than both; then one whose steps are short
    enough for the class; then the one with the least to do, of which `coming` are requests that are on their way there
    (by address). Raises Unavailable."""
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
    """Where other engines reach it. One that listens on all addresses does not know which, but it was reached here by
    one of them."""
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
    """Whether its steps, with one more answer in them, are predicted to be longer than the class's pace."""
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
