"""Speculative prefill of next turns, for tenants that enable it.

When a chat answer ends, the prefix of the next turn's prompt is known. With a reasoning model it differs from the
engine's prefix cache, since later prompts omit reasoning. The gateway sends this prefix to the engine that answered.
The engine decides whether the next turn is likely, and computes the prefix while it is idle. It is not a request; no
client waits for it. Failures are only counted.

The computed tokens are stored once, in a usage row of their own. Where the tenant is charged, they cost the price of
input tokens and count toward the tenant's quotas.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self

import msgspec
import structlog

from moiety_platform.clock import Clock
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import BadRequest, PlatformError, RequestExceedsQuota, forget_frames
from moiety_platform.inference.generation import Conversation
from moiety_platform.inference.model_texts import encoding_scope
from moiety_platform.inference.quota_reservation import UsedTokens, scopes_of
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.request_recorder import UsageSink
from moiety_platform.inference.run import InferenceRun
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.kinds import Unit
from moiety_platform.quota.lease import Charge, Hold
from moiety_platform.randomness import ordered_hex
from moiety_platform.speculative_prefill.metrics import SpeculativePrefillMetrics
from moiety_platform.speculative_prefill.next_turn_prompt import has_called, next_turns, num_shared
from moiety_platform.tenants.models import SpeculativePrefillMode
from moiety_platform.usage.row import SPECULATIVE, UsageRow
from moiety_text.errors import TextError
from moiety_text.tools.deltas import Parts
from moiety_wire.messages import ModelCard, Sampling, SpeculativePrefillRequest, Stopping, Submit
from moiety_wire.roles import EngineRole

WAIT_S = 60.0  # timeout of one speculative prefill at the engine
MAX_OPEN = 512  # concurrent prefills in this process; further turns are skipped
MAX_DEPTH = 3  # turns of a conversation; deeper turns are treated alike
REFUSED, LIMITED, LOST, TIMED_OUT, CROWDED = "refused", "limited", "lost", "timed_out", "crowded"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that has ended: its request, its answer, and the engine whose cache holds it."""

    record: RequestRecord
    run: InferenceRun
    conversation: Conversation
    output_ids: list[int]
    client: EngineClient


class NextTurnPrefill:
    """Speculative prefill of one gateway process.

    Entered in its event loop, and exited before the usage recorder stops.
    """

    def __init__(
        self, usage: UsageSink, quotas: QuotaEnforcer, metrics: SpeculativePrefillMetrics, clock: Clock
    ) -> None:
        self._usage = usage
        self._quotas = quotas
        self._metrics = metrics
        self._clock = clock
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the open prefills. Tokens that engines have computed are still stored."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def ended(self, record: RequestRecord, run: InferenceRun) -> None:
        """Start a speculative prefill after a complete answer to a tenant that enables it.

        Returns at once and never raises.
        """
        turn = _turn_of(record, run)
        if turn is None:
            return
        if len(self._open) >= MAX_OPEN:
            self._metrics.observe(record.base_model, CROWDED)
            return
        task = asyncio.create_task(self._follow(turn), name="speculative_prefill")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _follow(self, turn: _Turn) -> None:
        record = turn.record
        try:
            submit = await self._submit_of(turn)
            outcome = REFUSED if submit is None else await self._have_computed(turn, submit)
        except (BadRequest, TextError):  # the template rejects the model's answer, or the prompt is too long
            outcome = REFUSED
        except (QuotaExceeded, RequestExceedsQuota):
            outcome = LIMITED
        except PlatformError as error:
            forget_frames(error)
            log.debug("speculative_prefill_failed", request_id=record.request_id, code=error.code)
            outcome = LOST
        except Exception:  # root of a task that is not awaited
            log.exception("speculative_prefill_failed", request_id=record.request_id)
            outcome = LOST
        self._metrics.observe(record.base_model, outcome)

    async def _submit_of(self, turn: _Turn) -> Submit | None:
        """Return the request for the engine, or None if the next turns share no prefix."""
        record, run, conversation = turn.record, turn.run, turn.conversation
        asked_ids, output_ids = run.prompts[0], turn.output_ids
        assert record.generation is not None and record.chosen is not None, "it was answered"
        answer = await run.text.read_answer(record.generation, run.prompts, output_ids)
        first, second = await run.text.encode(
            next_turns(conversation, answer), scope=encoding_scope(record.principal.tenant_id, record.generation)
        )
        prompt_ids = first[: num_shared(first, second)]
        before = [*asked_ids, *output_ids]
        shared = num_shared(prompt_ids, before)
        if not prompt_ids:
            return None
        principal = record.principal
        return Submit(
            request_id=f"fore-{ordered_hex()}",
            seq=0,
            model=record.base_model,
            tenant_id=principal.tenant_id,
            service=record.chosen,
            prompt_ids=prompt_ids,
            sampling=Sampling(),
            stopping=Stopping(max_tokens=0),
            credit_tokens=0,
            cache_salt=principal.cache_salt,
            arrival_unix_ns=self._clock.unix_ns(),
            tenant_weight=principal.weight,
            speculative_prefill=SpeculativePrefillRequest(
                _pattern_key(turn, answer), shared, before[shared:], len(asked_ids)
            ),
        )

    async def _have_computed(self, turn: _Turn, submit: Submit) -> str:
        """Run the prefill at the engine, store the usage, and return the outcome."""
        record = turn.record
        is_charged = record.principal.speculative_prefill is SpeculativePrefillMode.CHARGED
        price = record.reservation.cost if is_charged else _free
        most = UsedTokens(record.service_class, len(submit.prompt_ids), 0, 0)
        if is_charged:  # check the quota, but hold nothing while the engine waits until it is idle
            room = await self._reserve(record, most, price(most))
            room.settle({Unit.TOKENS: 0, Unit.MONEY: 0})
        stream: EngineStream | None = None
        try:
            async with asyncio.timeout(WAIT_S), turn.client.open(submit) as stream:
                async for _ in stream.messages():
                    pass
        except TimeoutError:
            return TIMED_OUT
        finally:  # leaving the stream ends the prefill at the engine
            finished = None if stream is None else stream.finished
            computed = 0 if finished is None else min(finished.num_speculative_tokens, most.prompt_tokens)
            if computed:
                used = UsedTokens(record.service_class, computed, 0, 0)
                cost, charges = await self._charge(record, used, price(used)) if is_charged else (0, ())
                row = self._row(record, submit.request_id, used, cost, charges)
                read, moved = (0, 0) if stream is None else stream.expert_bytes
                self._usage.record(msgspec.structs.replace(row, expert_read_bytes=read, expert_moved_bytes=moved))
        return LOST if finished is None else finished.detail

    async def _charge(self, record: RequestRecord, used: UsedTokens, cost: int) -> tuple[int, tuple[Charge, ...]]:
        """Return the cost and the charged quotas, or nothing if other requests have exhausted the quota meanwhile."""
        try:
            hold = await self._reserve(record, used, cost)
        except PlatformError:
            return 0, ()
        return cost, hold.settle({Unit.TOKENS: used.prompt_tokens, Unit.MONEY: cost})

    async def _reserve(self, record: RequestRecord, most: UsedTokens, cost: int) -> Hold:
        """Reserve quota. Raises QuotaExceeded where a quota is exhausted, or Unavailable."""
        return await self._quotas.hold(scopes_of(record.principal), {Unit.TOKENS: most.prompt_tokens, Unit.MONEY: cost})

    def _row(
        self, record: RequestRecord, row_id: str, used: UsedTokens, cost: int, charges: tuple[Charge, ...]
    ) -> UsageRow:
        principal = record.principal
        return UsageRow(
            request_id=row_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            model=record.served_model,
            started_at=self._clock.now(),
            cost_nanodollars=cost,
            speculative_tokens=used.prompt_tokens,
            charges=charges,
            **SPECULATIVE,
        )


def _turn_of(record: RequestRecord, run: InferenceRun) -> _Turn | None:
    """Return the ended turn, or None if no next turn is possible."""
    generation = record.generation
    if generation is None or record.num_sequences != 1 or generation.cache_salt:
        return None
    (conversation,), output_ids = generation.prompts, run.whole_answer()
    is_adapted = record.base_model != record.served_model
    if (
        not isinstance(conversation, Conversation)
        or conversation.prefill
        or output_ids is None
        or is_adapted
        or conversation.images
    ):
        return None
    client = next((client for client, _ in reversed(record.sequences) if _prefills_ahead(client.state.card)), None)
    return None if client is None else _Turn(record, run, conversation, output_ids, client)


def _prefills_ahead(card: ModelCard | None) -> bool:
    """Return whether the engine does speculative prefill. Decode-only engines do not."""
    return card is not None and card.speculative_prefill and card.role is not EngineRole.DECODE


def _pattern_key(turn: _Turn, answer: Parts) -> str:
    """Return the key for next-turn statistics.

    It combines API key, number of turns so far, and whether the answer has tool calls.
    """
    depth = sum(message["role"] == "assistant" for message in turn.conversation.messages)
    kind = "call" if has_called(answer) else "turn"
    return f"{turn.record.principal.root_key_id}:{kind}:{min(depth, MAX_DEPTH)}"


def _free(_: UsedTokens) -> int:
    return 0
