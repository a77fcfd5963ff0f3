"""Choice of the engine of a request: a pure function of the engines' states and of the prompt's prefix.

Load: bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads, 2018), by the engines'
predictions: a prompt goes to the engine that its prefix prefers unless that engine clearly has more work than the least
loaded.

Roles: a prefill engine gets a request only together with a decode engine that continues it. The decode engine is chosen
first, so that the prompt's KV can be transferred while it is computed.

Prefix affinity: rendezvous hashing (Thaler, Ravishankar: Using name-based mappings to increase hit rates, 1998): each
engine has a weight for a prefix, and the prefix belongs to the engine with the largest weight. A new engine takes only
the prefixes for which it now has the largest weight; a removed engine gives away only its own.

KV-aware routing: if all engines that can take a request publish the blocks of their prefix caches, it goes where it
costs least with these blocks (`prefix_cost.py`), instead of by affinity.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from hashlib import blake2b
from urllib.parse import urlsplit

from moiety_platform.engine_addresses import HOSTED_FAMILIES
from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.errors import EnginesAsleep, NotFound, Unavailable
from moiety_platform.routing.expert_profiles import KEY_TOKENS, ExpertPreference, ExpertProfiles
from moiety_platform.routing.prefix_cost import block_size_of, cheapest
from moiety_platform.routing.prefix_names import PrefixNames
from moiety_wire.classes import ServiceClass
from moiety_wire.engine_load import SleepState
from moiety_wire.images import ImageRules
from moiety_wire.messages import ModelCard, Submit
from moiety_wire.roles import ANY_HOST, EngineRole

MODEL_NOT_FOUND = "model_not_found"
WAIT_GRAIN = 0.25  # share of the SLO's wait: predictions that differ by less count as equal
SLEEP_S = 30  # retry interval for a model whose engines sleep
SPARE_REQUESTS = 4  # a prefix hit is worth this many requests more than the least loaded engine has …
SPARE_SHARE = 0.25  # … or this share more
NO_DECODE_ENGINE = "no_decode_engine"
_LOOPBACK = "127.0.0.1"
BLOCK_TOKENS = 16
DEPTHS_BLOCKS = (1, 4, 16)  # shallow prefixes, which many prompts share, come first


class RequestNeed(Enum):
    """Work that a request needs of engines."""

    PROMPT = auto()  # ends with its prompt, or with the first token
    ANSWER = auto()  # a prefill, and a decode that another engine may run
    WHOLE = auto()  # both on one engine
    ADAPTED = auto()  # the same, on an engine that serves adapters
    CHAT = auto()  # the same, on an external engine that takes images in conversations
    HOSTED = auto()  # the same, at a hosted provider, whose prompts are conversations


# ── choice ──


def choose(
    engines: Sequence[EngineState],
    model: str,
    service: ServiceClass | None = None,
    prefix: Iterable[bytes] = (),
    need: RequestNeed = RequestNeed.ANSWER,
    context_tokens: int = 0,
    kv_aware: random.Random | None = None,
    experts: ExpertProfiles | None = None,
) -> EngineState:
    """Return the healthy engine of the model that the prefix prefers and that is not overloaded against the others.

    `prefix` are keys by depth, the shallowest first. If the engine of one depth has much more work than the least
    loaded, the next depth decides; finally, and for a prompt without a prefix, it is the least loaded: the shortest
    predicted wait in the class, then the least work, then the first listed.

    With `kv_aware`, a source of random choices among equals, and a `Prefix` whose blocks have names, it is the engine
    at which the request costs least, if all these engines publish the blocks of their prefix caches. With `experts`,
    it may cost a little more where the steps use the same experts.

    Where engines have roles, it is one that may first receive a request with that need; where their contexts differ,
    one whose context holds `context_tokens`.

    Raises NotFound if no engine has that model, Unavailable if no engine of the model can take a request.
    """
    able = first_engines(capable_engines(engines, model, context_tokens), need)
    if len(able) == 1:
        return able[0]
    if kv_aware is not None and isinstance(prefix, Prefix) and (block_size := block_size_of(able)):
        names = prefix.block_names(block_size)
        if names is not None:
            if experts is None:
                return cheapest(able, names, kv_aware)
            return cheapest(able, names, kv_aware, ExpertPreference(experts, model, *prefix.expert_key()))
    least = min(able, key=lambda engine: (_wait(engine, service), *_work(engine)))
    for key in prefix:
        preferred = max(able, key=lambda engine: weight(key, engine.address))
        if _is_near(preferred, least, service):
            return preferred
    return least


def card_of(
    engines: Sequence[EngineState], model: str, allowed: frozenset[str] | None, *, has_images: bool = False
) -> ModelCard:
    """Return the card of the engine with the longest context among those that can take a request.

    For a prompt with images it is one that sees, if there is one.

    The key may use the models `allowed`, None meaning all. Raises NotFound or Unavailable.
    """
    if allowed is not None and model not in allowed:
        served = sorted(allowed & cards_of(engines).keys())
        raise NotFound(model_not_found(model[:256], served), code=MODEL_NOT_FOUND, param="model")
    longest: ModelCard | None = None
    able = capable_engines(engines, model)
    if has_images:
        able = [engine for engine in able if _takes_images(engine)] or able
    for engine in able:
        card = engine.card
        if card is not None and (longest is None or card.max_context_tokens > longest.max_context_tokens):
            longest = card
    assert longest is not None, "only engines that have a card are able"
    return longest


def engines_with_vision(engines: Sequence[EngineState], model: str, rules: ImageRules) -> list[EngineState]:
    """Return the engines without those of the model that read images by other rules, or none.

    The placeholders of a prompt are right for its rules only. Raises Unavailable if no engine of the model is left.
    """
    left, num_others, has_model = [], 0, False
    for engine in engines:
        if engine.card is not None and engine.card.model == model:
            if engine.card.images != rules:
                num_others += 1
                continue
            has_model = True
        left.append(engine)
    if num_others and not has_model:
        message = f"no engine for {model!r} that takes these images can take a request now; try again shortly"
        raise Unavailable(message, code="no_engine", retry_after_s=1)
    return left


def cards_of(engines: Sequence[EngineState]) -> dict[str, ModelCard]:
    """Return the card of every model that an engine has reported, by model name; of healthy engines where possible."""
    ordered = sorted(engines, key=lambda engine: engine.healthy)
    return {engine.card.model: engine.card for engine in ordered if engine.card is not None}


def are_extensible(engines: Sequence[EngineState], model: str) -> bool:
    """Return whether every engine of the model accepts more credit later; else a request needs all of it at once."""
    for engine in engines:  # as in `capable_engines`
        if engine.card is not None and engine.card.model == model and not engine.card.extensible:
            return False
    return True


def model_not_found(model: str, served: Sequence[str]) -> str:
    """Return the error message for a model that does not exist or that the key may not use."""
    return f"the model {model!r} does not exist or your key may not use it; available: {', '.join(served) or 'none'}"


def capable_engines(engines: Sequence[EngineState], model: str, context_tokens: int = 0) -> list[EngineState]:
    """Return the model's engines that can take requests with so many tokens of prompt and output.

    Raises NotFound or Unavailable.
    """
    candidates, able = [], []
    for engine in engines:  # several times per request, and a comprehension would be a call
        if engine.card is not None and engine.card.model == model:
            candidates.append(engine)
            if engine.can_take and engine.card.max_context_tokens >= context_tokens:
                able.append(engine)
    if able:
        return able
    if not candidates:
        served = sorted({engine.card.model for engine in engines if engine.card is not None})
        if not served:
            raise Unavailable("no engine is ready yet; try again shortly", code="no_engine", retry_after_s=1)
        raise NotFound(model_not_found(model, served), code=MODEL_NOT_FOUND, param="model")
    if all(engine.sleep is not SleepState.AWAKE for engine in candidates):
        message = f"all engines for {model!r} sleep; an administrator can wake them"
        raise EnginesAsleep(message, model, retry_after_s=SLEEP_S)
    raise Unavailable(
        f"no engine for {model!r} can take a request now; try again shortly", code="no_engine", retry_after_s=1
    )


def _takes_images(engine: EngineState) -> bool:
    card = engine.card
    return card is not None and (card.images is not None or card.image_allowance is not None)


def _is_near(engine: EngineState, least: EngineState, service: ServiceClass | None) -> bool:
    if _wait(engine, service) > _wait(least, service) + 1:
        return False
    num_least = _work(least)[0]
    return _work(engine)[0] <= num_least + max(SPARE_REQUESTS, SPARE_SHARE * num_least)


def _wait(engine: EngineState, service: ServiceClass | None) -> float:
    """Return the predicted wait in units of the grain of the class's SLO.

    An engine without a report on the class has not served it yet; an engine without any recent report comes last.
    """
    if service is None or not engine.load_is_fresh:
        return math.inf
    load = engine.class_load(service.name)
    target_s = service.max_queue_s if service.ttft_s is None else service.ttft_s
    return 0.0 if load is None else load.predicted_ttft_s // (WAIT_GRAIN * target_s)


def _work(engine: EngineState) -> tuple[int, float]:
    """Return an engine's work. Its own report is up to one heartbeat old, so our count can be more recent."""
    load = engine.load
    if load is None:
        return engine.num_inflight, 0.0
    kv_use = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    return max(load.num_running + load.num_waiting, engine.num_inflight), kv_use


# ── roles ──


def need_of(submit: Submit) -> RequestNeed:
    """Return the need of a request. Prompt logprobs come with the end of the output, from the engine that prefilled."""
    if submit.adapter:
        return RequestNeed.ADAPTED
    if isinstance(submit, ChatSubmit):
        return RequestNeed.HOSTED if submit.is_hosted else RequestNeed.CHAT
    if submit.sampling.num_prompt_logprobs is not None:
        return RequestNeed.WHOLE
    num_tokens = len(submit.resumed_ids or ())
    return RequestNeed.PROMPT if submit.embed or submit.stopping.max_tokens <= num_tokens + 1 else RequestNeed.ANSWER


def first_engines(able: Sequence[EngineState], need: RequestNeed) -> list[EngineState]:
    """Return the engines that may receive a request first, of the able engines of its model.

    Decode engines take whole requests where no other engine can. Raises Unavailable where there are only prefill
    engines, or none that serves the required adapters.
    """
    if need is RequestNeed.ADAPTED:
        able = [engine for engine in able if engine.card is not None and engine.card.takes_adapters]
        if not able:
            raise Unavailable(
                "No engine that serves adapters can take a request now; try again shortly.", retry_after_s=1
            )
    if need is RequestNeed.CHAT:
        able = [engine for engine in able if engine.card is not None and engine.card.image_allowance is not None]
        if not able:
            message = "no engine that takes images in conversations can take a request now; try again shortly"
            raise Unavailable(message, retry_after_s=1)
    for engine in able:
        if engine.card is None or engine.card.role is not EngineRole.BOTH or engine.card.family in HOSTED_FAMILIES:
            break
    else:  # true nearly everywhere
        if able and need is not RequestNeed.HOSTED:
            return list(able)
    able = _of_providers(able, hosted=need is RequestNeed.HOSTED)
    if need is RequestNeed.HOSTED:
        return able
    roles: dict[EngineRole, list[EngineState]] = {role: [] for role in EngineRole}
    for engine in able:
        roles[_role(engine)].append(engine)
    hands_over = need is RequestNeed.PROMPT or (need is RequestNeed.ANSWER and any(map(can_continue_prefill, able)))
    first = roles[EngineRole.BOTH] + (roles[EngineRole.PREFILL] if hands_over else [])
    if first or roles[EngineRole.DECODE]:
        return first or roles[EngineRole.DECODE]
    raise _no_decode_engine()


def _of_providers(able: Sequence[EngineState], *, hosted: bool) -> list[EngineState]:
    """Return the hosted providers among the engines, or the other engines. Raises Unavailable if there are none.

    A request for one cannot be sent to the other: only engines get token ids.
    """
    found = [engine for engine in able if (engine.card is not None and engine.card.family in HOSTED_FAMILIES) == hosted]
    if able and not found:
        raise Unavailable("no engine that takes such a request is available; try again shortly", retry_after_s=1)
    return found


def can_continue_prefill(engine: EngineState) -> bool:
    """Return whether the engine can decode after another engine's prefill."""
    return _role(engine) is not EngineRole.PREFILL and engine.card is not None and bool(engine.card.kv_address)


def needs_decode_engine(first: EngineState, need: RequestNeed) -> bool:
    """Return whether `first` only prefills a request with that need, so that another engine decodes it."""
    return need is RequestNeed.ANSWER and _role(first) is EngineRole.PREFILL


def partner_among(able: Sequence[EngineState], service: ServiceClass | None, coming: Mapping[str, int]) -> EngineState:
    """Return the engine that decodes a request. Raises Unavailable.

    Preference: the role decode rather than both; then steps short enough for the class; then the least work, of which
    `coming` are requests on their way there (by address).
    """
    others = [engine for engine in able if can_continue_prefill(engine)]
    if not others:
        raise _no_decode_engine()
    return min(
        others,
        key=lambda engine: (
            _role(engine) is EngineRole.BOTH,
            _is_too_slow(engine, service, coming.get(engine.address, 0)),
            _num_requests(engine) + coming.get(engine.address, 0),
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
        "the available engines compute prompts only (--role prefill), and none of the role decode or both can "
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
    extra_s = sum(max(0, rows - bend) * more_s for bend, more_s in costs.bends)
    context_s = costs.context_token_s * load.kv_blocks_used * load.block_size
    return costs.step_s + rows * costs.row_s + extra_s + context_s > service.tpot_s


def _num_requests(engine: EngineState) -> int:
    load = engine.load
    return engine.num_inflight if load is None else max(load.num_running + load.num_waiting, engine.num_inflight)


def _kv_use(engine: EngineState) -> float:
    load = engine.load
    return 0.0 if load is None or not load.kv_blocks_total else load.kv_blocks_used / load.kv_blocks_total


# ── prefix affinity ──


def prefix_keys(cache_salt: bytes, prompt_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return a key for each depth that the prompt fills, the shallowest first; none for a prompt below one block.

    The salt is the tenant's, so another tenant's same prompt has other keys.
    """
    keys: list[bytes] = []
    salt = b""
    for num_blocks in DEPTHS_BLOCKS:
        num_tokens = num_blocks * BLOCK_TOKENS
        if len(prompt_ids) < num_tokens:
            break
        tokens = array("Q", prompt_ids[:num_tokens]).tobytes()
        salt = salt or blake2b(cache_salt, digest_size=32).digest()
        keys.append(blake2b(tokens, digest_size=16, key=salt).digest())
    return tuple(keys)


class Prefix:
    """Prefix of one prompt: keys for affinity, or names of blocks. Computed on demand: one engine needs none."""

    __slots__ = ("_names", "_submit")

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._names: PrefixNames | None = None

    def __iter__(self) -> Iterator[bytes]:
        return iter(prefix_keys(self._submit.cache_salt, self._submit.prompt_ids))

    def is_of(self, submit: Submit) -> bool:
        """Return whether it is the prefix of that sequence too, of the same request: if both have one list of ids."""
        return self._submit.prompt_ids is submit.prompt_ids

    def expert_key(self) -> tuple[str, int | None]:
        """Return the tenant, and the name of the block that ends the first KEY_TOKENS tokens, if it is hashed."""
        names = self._names
        place = 0 if names is None else max(1, KEY_TOKENS // names.block_size) - 1
        return self._submit.tenant_id, None if names is None or place >= len(names.names) else names.names[place]

    def block_names(self, block_size: int) -> PrefixNames | None:
        """Return the names of the prompt's blocks of so many tokens, as far as they are hashed: at least the first.

        None for a prompt with images or an adapter, whose blocks engines hash with more than the tokens.
        """
        submit, names = self._submit, self._names
        if submit.images or submit.adapter:
            return None
        if names is None or names.block_size != block_size:
            names = self._names = PrefixNames(submit, block_size)
            names.hash_slice()
        return names


def weight(prefix_key: bytes, address: str) -> int:
    """Return the engine's weight for the prefix, from its address, which survives restarts."""
    return int.from_bytes(blake2b(address.encode(), digest_size=8, key=prefix_key).digest())
