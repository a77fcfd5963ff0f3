"""Scripted in-process engine for tests and for gateway benchmarks.

It implements EngineClient with the same stream rules (credit, sequence numbers, exact counts at every end) and without
sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from msgspec.structs import replace

from moiety_platform.clock import Clock, SystemClock
from moiety_platform.engine_client.base import EngineState, require_expert_ranks
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.engine_client.stream import ABORT_WAIT_S, EngineStream, Inbox
from moiety_platform.errors import EngineDied, Unavailable
from moiety_text.stop import StopFinder, new_stop_finder
from moiety_wire.engine_load import ClassLoad, Load, SleepState, StepCosts
from moiety_wire.experts import ExpertBalance, ExpertLoad
from moiety_wire.fleet_service import FleetService, ServiceReport
from moiety_wire.messages import (
    Abort,
    Accepted,
    Extend,
    Failed,
    Finished,
    FinishReason,
    ModelCard,
    Submit,
    TokenLogprob,
    Tokens,
    TopLogprob,
)
from moiety_wire.trace_events import Event, Phases, Reason

Piece = tuple[int, str]  # a token and the text that it completes
Script = Callable[[Submit], Iterable[Piece | Failed] | Failed]


@dataclass(frozen=True, slots=True)
class FakeVerdict:
    """The scripted engine's admission of a request, and the results that it reports at the end."""

    served_class: str
    reason: Reason = Reason.IN_TIME
    predicted_ttft_s: float | None = None
    events: tuple[Event, ...] = ()
    num_cached_tokens: int = 0
    steps: bytes = b""  # see Finished
    expert_profile: bytes = b""


def admit(submit: Submit) -> FakeVerdict:
    """Return the default verdict: the requested class is served."""
    return FakeVerdict(submit.service.name)


def report_counts(submit: Submit) -> Sequence[Piece]:
    """Return the default script: the numerals '1', '2' …, one token each, up to the maximum number of tokens."""
    return [(1 + i % 9, f"{' ' if i else ''}{i + 1}") for i in range(submit.stopping.max_tokens)]


def name_last_token(submit: Submit, width: int) -> Sequence[float]:
    """Return the default vector: a unit vector along the axis given by the prompt's last token.

    It stands for the last token's hidden state.
    """
    axis = submit.prompt_ids[-1] % width
    return [float(i == axis) for i in range(width)]


@dataclass(slots=True)
class _Running:
    submit: Submit
    stream: EngineStream
    credit_tokens: int
    credit_last: bool = False  # no further credit follows
    aborted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_emitted: int = 0
    seq: int = 0

    def take_seq(self) -> int:
        self.seq += 1
        return self.seq - 1


@dataclass(eq=False)
class FakeEngineClient:
    """Answers every request by its script, one token per turn of the event loop or every `token_s` seconds.

    An embedding takes as long as one token.
    """

    card: ModelCard
    script: Script = report_counts
    clock: Clock = field(default_factory=SystemClock)
    verdict: Callable[[Submit], FakeVerdict] = admit
    token_s: float = 0.0
    vector: Callable[[Submit, int], Sequence[float]] = name_last_token

    def __post_init__(self) -> None:
        self.class_loads: list[ClassLoad] = []
        self.load_age_s: float | None = 0.0
        self.step_costs: StepCosts | None = None  # as its loads report them
        self.expert_loads: dict[str | None, ExpertLoad] = {}  # by tenant, None for all tenants
        self.balance: ExpertBalance | None = None
        self.expert_bytes_per_token = 0  # that its requests are charged for
        self.active_experts = b""  # as its loads report them
        self.prefix_blocks: PrefixBlocks | None = None
        self.submits: list[Submit] = []
        self._prefilled_ahead: list[list[int]] = []  # speculatively prefilled prompts without a request yet
        self.settled_ids: list[str] = []
        self.forgotten_ids: list[str] = []
        self.tenant_service: ServiceReport | None = None  # as its loads report it
        self.fleet_services: list[FleetService] = []  # messages that it got
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._alive = False
        self._sleep = SleepState.AWAKE
        self.wake_s = 0.0  # time that waking takes
        self.wake_problem = ""  # why it falls asleep again instead of waking
        self.num_wakes = self.num_sleeps = 0  # commands that it got
        self.expert_ranks, self.can_change_expert_ranks = 0, False
        self._num_connections = 0
        self._on_change: Callable[[], None] = lambda: None
        self._num_output_tokens = 0
        self._num_prompt_tokens = 0

    @property
    def address(self) -> str:
        return f"fake://{self.card.engine_id}"

    @property
    def state(self) -> EngineState:
        reason = "" if self._alive else "stopped"
        return EngineState(
            self.address,
            self._alive,
            reason,
            self.card,
            self._load(),
            len(self._running),
            self.load_age_s,
            self._num_connections,
            balance=self.balance,
            prefix_blocks=self.prefix_blocks,
        )

    def on_state_change(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def acknowledge_usage(self, request_id: str) -> None:
        self.settled_ids.append(request_id)

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        self.forgotten_ids = list(tenant_ids)

    def send_fleet_service(self, message: FleetService) -> None:
        if self._alive and self.card.exchanges_service:
            self.fleet_services.append(message)

    def set_asleep(self, *, asleep: bool) -> None:
        """Sleep once no request runs, or wake within `wake_s`; stay awake if it has not fallen asleep yet."""
        if not self._alive:
            raise Unavailable(f"the engine at {self.address} is not available; try again shortly", retry_after_s=1)
        if asleep:
            self.num_sleeps += 1
            self._sleep = SleepState.FALLING_ASLEEP
            return
        self.num_wakes += 1
        is_asleep = self._sleep_state() is not SleepState.FALLING_ASLEEP
        self._sleep = SleepState.WAKING if is_asleep and self.wake_s else SleepState.AWAKE
        if self.wake_s:
            asyncio.get_running_loop().call_later(self.wake_s, self._be_awake)

    def _be_awake(self) -> None:
        if self._sleep is SleepState.WAKING:
            self._sleep = SleepState.ASLEEP if self.wake_problem else SleepState.AWAKE

    def _sleep_state(self) -> SleepState:
        if self._sleep is SleepState.FALLING_ASLEEP and not self._running:
            self._sleep = SleepState.ASLEEP
        return self._sleep

    def scale_expert_ranks(self, num_ranks: int) -> None:
        """Have this number of expert ranks at once, if there are any."""
        if not self._alive:
            raise Unavailable(f"the engine at {self.address} is not available; try again shortly", retry_after_s=1)
        require_expert_ranks(self.state.load, self.address)
        self.expert_ranks = num_ranks

    async def expert_load(self, minutes: int, tenant_id: str | None) -> ExpertLoad | None:
        if not self._alive:
            raise Unavailable(f"the engine at {self.address} is not available; try again shortly", retry_after_s=1)
        return self.expert_loads.get(tenant_id)

    async def start(self) -> None:
        self._alive = True
        self._num_connections += 1
        self._on_change()

    async def close(self) -> None:
        self.die()

    def die(self) -> None:
        """End like a killed process: every stream fails, and nothing is answered until `start`."""
        self._alive = False
        for task in self._tasks:
            task.cancel()
        for run in list(self._running.values()):
            in_first_step = run.num_emitted == len(run.submit.resumed_ids or ())
            message = "the engine was lost while it answered; send the request again"
            run.stream.fail(EngineDied(message, in_first_step=in_first_step))
        self._on_change()

    @asynccontextmanager
    async def open(self, submit: Submit, inbox: Inbox[EngineStream] | None = None) -> AsyncIterator[EngineStream]:
        if not self._alive:
            raise Unavailable(f"the engine for {submit.model!r} is not available; try again shortly", retry_after_s=1)
        stream = EngineStream(submit, inbox, self._take)
        num_resumed = len(submit.resumed_ids or ())
        run = self._running[submit.request_id] = _Running(submit, stream, submit.credit_tokens, num_emitted=num_resumed)
        self.submits.append(submit)
        self._num_prompt_tokens += len(submit.prompt_ids)
        task = asyncio.create_task(self._answer(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield stream
        finally:
            stream.abort()
            try:
                await stream.wait_ended(ABORT_WAIT_S)
            finally:
                self._running.pop(submit.request_id, None)

    def _take(self, message: Extend | Abort) -> None:
        run = self._running.get(message.request_id)
        if run is None:
            return
        if isinstance(message, Extend):
            run.credit_tokens = max(run.credit_tokens, message.credit_tokens)
            run.credit_last = run.credit_last or message.last
        else:
            run.aborted = True
        run.changed.set()

    def _accept(self, run: _Running, script: Iterable[Piece | Failed] | Failed, verdict: FakeVerdict) -> None:
        """Deliver the verdict, unless the script rejects the request."""
        if isinstance(script, Failed) and script.seq == 0:
            return
        reason, ttft_s = verdict.reason, verdict.predicted_ttft_s
        run.stream.deliver(Accepted(run.submit.request_id, run.take_seq(), verdict.served_class, reason, ttft_s))

    async def _answer(self, run: _Running) -> None:
        received_ns = self.clock.unix_ns()
        if run.submit.speculative_prefill is not None:
            await self._pause(run)
            self._prefilled_ahead.append(run.submit.prompt_ids)
            self._finish(run, self.verdict(run.submit), received_ns, FinishReason.STOP, "computed")
            return
        script, verdict = self.script(run.submit), self.verdict(run.submit)
        self._accept(run, script, verdict)
        if isinstance(script, Failed):
            run.stream.deliver(script)
            return
        if run.submit.embed:
            await self._embed(run, verdict, received_ns)
            return
        reason, detail = FinishReason.STOP, ""
        finder = new_stop_finder(run.submit.stopping.stop, run.submit.stopping.thought)
        pieces = iter(script)
        said = [piece for piece in islice(pieces, run.num_emitted) if not isinstance(piece, Failed)]
        resumed = "".join([text for _, text in said])  # not sent again
        if finder is not None:
            finder.add(resumed)
        for piece in pieces:
            await self._pause(run)
            if isinstance(piece, Failed):
                run.stream.deliver(replace(piece, seq=run.take_seq(), num_output_tokens=run.num_emitted))
                return
            token_id, text = piece
            while run.num_emitted >= run.credit_tokens and not run.aborted and not run.credit_last:
                run.changed.clear()
                await run.changed.wait()
            if run.aborted:
                break
            if run.num_emitted >= run.credit_tokens:
                reason, detail = FinishReason.LENGTH, "credit_refused"
                break
            logprobs = _logprobs(token_id, text, run.submit.sampling.num_logprobs)
            shown, stopped_by = (text, None) if finder is None else finder.add(text)
            tokens = Tokens(
                run.submit.request_id,
                run.take_seq(),
                run.num_emitted,
                [token_id],
                shown,
                logprobs,
                verdict.num_cached_tokens,
            )
            run.num_emitted += 1
            self._num_output_tokens += 1
            run.stream.deliver(tokens)
            if stopped_by is not None:
                detail = stopped_by
                break
            if run.num_emitted >= run.submit.stopping.max_tokens:
                reason, detail = FinishReason.LENGTH, "max_tokens"
                break
            if run.submit.hand_over is not None:
                reason = FinishReason.PREFILL_DONE
                break
        set_asleep, stopped_by = ("", None) if reason is FinishReason.PREFILL_DONE else _last_text(finder)
        reason, detail = (reason, detail) if stopped_by is None else (FinishReason.STOP, stopped_by)
        self._finish(run, verdict, received_ns, reason, detail, text=set_asleep)

    async def _embed(self, run: _Running, verdict: FakeVerdict, received_ns: int) -> None:
        await self._pause(run)
        width = len(self.card.labels) or self.card.embedding_width
        vector = struct.pack(f"<{width}f", *self.vector(run.submit, width))
        self._finish(run, verdict, received_ns, FinishReason.STOP, embedding=vector)

    async def _pause(self, run: _Running) -> None:
        """Wait for the duration of one token, or until an abort."""
        if self.token_s == 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.token_s):
                while not run.aborted:
                    run.changed.clear()
                    await run.changed.wait()

    def _finish(
        self,
        run: _Running,
        verdict: FakeVerdict,
        received_ns: int,
        reason: FinishReason,
        detail: str = "",
        text: str = "",
        embedding: bytes = b"",
    ) -> None:
        if run.aborted:
            reason, detail, embedding = FinishReason.ABORT, "", b""
        phases = Phases(received_ns, received_ns, received_ns, self.clock.unix_ns())
        run.stream.deliver(
            Finished(
                request_id=run.submit.request_id,
                seq=run.take_seq(),
                reason=reason,
                num_prompt_tokens=len(run.submit.prompt_ids),
                num_cached_tokens=verdict.num_cached_tokens,
                num_output_tokens=run.num_emitted,
                phases=phases,
                text=text,
                served_class=verdict.served_class,
                events=list(verdict.events),
                steps=verdict.steps,
                expert_profile=verdict.expert_profile,
                detail=detail,
                embedding=embedding,
                prompt_logprobs=_prompt_logprobs(run.submit),
                num_speculative_tokens=self._num_speculative(run.submit),
                expert_read_bytes=self.expert_bytes_per_token * (len(run.submit.prompt_ids) + run.num_emitted),
                expert_moved_bytes=self.expert_bytes_per_token,
            )
        )

    def _num_speculative(self, submit: Submit) -> int:
        """Return the number of speculatively prefilled tokens.

        For a speculative prefill that is the whole prompt, for a request the longest prefilled prefix, which counts
        once.
        """
        if submit.speculative_prefill is not None:
            return len(submit.prompt_ids)
        found = [ids for ids in self._prefilled_ahead if submit.prompt_ids[: len(ids)] == ids]
        self._prefilled_ahead = [ids for ids in self._prefilled_ahead if ids not in found]
        return max(map(len, found), default=0)

    def _load(self) -> Load:
        return Load(
            engine_id=self.card.engine_id,
            tenant_service=self.tenant_service,
            seq=0,
            num_running=len(self._running),
            num_waiting=0,
            num_paused=sum(run.num_emitted >= run.credit_tokens for run in self._running.values()),
            kv_blocks_total=0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            block_size=16,
            steps_total=0,
            prompt_tokens_total=self._num_prompt_tokens,
            cached_tokens_total=0,
            output_tokens_total=self._num_output_tokens,
            requests_total=len(self.submits),
            classes=self.class_loads,
            step_costs=self.step_costs,
            active_experts=self.active_experts,
            sleep=self._sleep_state(),
            sleep_problem=self.wake_problem if self._sleep is SleepState.ASLEEP and self.num_wakes else "",
            expert_ranks=self.expert_ranks,
            can_change_expert_ranks=self.can_change_expert_ranks,
            requested_expert_ranks=self.expert_ranks,
        )


def _last_text(finder: StopFinder | None) -> tuple[str, str | None]:
    return ("", None) if finder is None else finder.finish("")


def _logprobs(token_id: int, text: str, num_top: int | None) -> list[TokenLogprob] | None:
    if num_top is None:
        return None
    data = text.encode()
    return [TokenLogprob(text, data, -0.5, [TopLogprob(text, data, -0.5, token_id)] * min(num_top, 1), token_id)]


def _prompt_logprobs(submit: Submit) -> list[TokenLogprob] | None:
    count, first = submit.sampling.num_prompt_logprobs, submit.sampling.prompt_logprobs_from
    scored = [_logprobs(token_id, str(token_id), count) or [] for token_id in submit.prompt_ids[first:]]
    return (
        None
        if count is None
        else [msgspec.structs.replace(logprob, rank=1) for several in scored for logprob in several]
    )
