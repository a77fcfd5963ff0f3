"""One request of the scripted core. Knows no other request."""

from __future__ import annotations

import math
import struct
from hashlib import shake_128

from moiety_engine.messages import CoreEvent, CoreFinish, CoreLogprob, CoreScores, CoreSubmit
from moiety_engine.scheduling.queues.class_counters import ClassCounter
from moiety_engine.scripted.script import Script
from moiety_wire.messages import FinishReason
from moiety_wire.trace_events import EventKind


class ScriptedRequest:
    """One request, owned by the ScriptedEngine."""

    def __init__(self, submit: CoreSubmit, script: Script, now_unix_ns: int) -> None:
        self.submit = submit
        self.served_class = ""  # until admission
        self.answer = list(script.tokens) if script.tokens else submit.prompt_ids
        self.credit_tokens = submit.credit_tokens
        self.credit_is_last = False
        self.num_output = len(submit.resumed_ids or ())
        self.num_blocks = -(-(len(submit.prompt_ids) + submit.max_tokens) // script.block_size)
        self.queued_unix_ns = now_unix_ns
        self.scheduled_unix_ns = 0
        self.first_token_unix_ns = 0
        self.events: list[CoreEvent] = []
        self.num_recomputed = 0
        self._script = script

    @property
    def key(self) -> int:
        return self.submit.key

    @property
    def can_go_on(self) -> bool:
        return self.num_output < self.credit_tokens or self.credit_is_last or self.submit.embed

    def next_token(self) -> int:
        at, submit = self.num_output, self.submit
        is_over = at >= len(self.answer) and at >= submit.min_tokens
        if is_over and self._script.end_token_id in submit.stop_token_ids:
            return self._script.end_token_id
        return self.answer[at % len(self.answer)]

    def end_after(self, token_id: int) -> tuple[FinishReason, str] | None:
        """Return why this token, already counted, ends the request; None if it does not."""
        if token_id in self.submit.stop_token_ids and self.num_output > self.submit.min_tokens:
            return FinishReason.STOP, "stop_token"
        if self.num_output >= self.submit.max_tokens:
            return FinishReason.LENGTH, "max_tokens"
        return None

    def logprobs(self, token_ids: list[int]) -> list[CoreLogprob] | None:
        """Return made-up log-probabilities: the chosen token is the best, then the tokens with the next ids."""
        count = self.submit.sampling.num_logprobs
        return None if count is None else self._make_up(token_ids, count)

    def scores(self) -> CoreScores | None:
        """Return made-up log-probabilities of the prompt."""
        count, first = self.submit.sampling.num_prompt_logprobs, self.submit.sampling.prompt_logprobs_from
        return None if count is None else CoreScores(first, self._make_up(self.submit.prompt_ids[first:], count))

    def _make_up(self, token_ids: list[int], count: int) -> list[CoreLogprob]:
        size = self._script.vocab_size
        return [
            CoreLogprob(-0.5, [(t + i) % size for i in range(count)], [-0.5 - i for i in range(count)], 1)
            for t in token_ids
        ]

    def embedding(self) -> bytes:
        """Return a unit vector determined by the prompt's tokens, in the model's format: little-endian float32."""
        ids, width = self.submit.prompt_ids, len(self._script.labels) or self._script.embedding_width
        digest = shake_128(struct.pack(f"<{len(ids)}I", *ids)).digest(width)
        length = math.hypot(*(byte - 127.5 for byte in digest))
        return struct.pack(f"<{width}f", *((byte - 127.5) / length for byte in digest))

    def finish(self, reason: FinishReason, detail: str, now_unix_ns: int, embedding: bytes = b"") -> CoreFinish:
        return CoreFinish(
            reason=reason,
            detail=detail,
            num_cached_tokens=0,
            num_output_tokens=self.num_output,
            scheduled_unix_ns=self.scheduled_unix_ns,
            first_token_unix_ns=self.first_token_unix_ns,
            finished_unix_ns=now_unix_ns,
            served_class=self.served_class,
            events=tuple(self.events),
            num_recomputed_tokens=self.num_recomputed,
            embedding=embedding,
        )


def count_event(counter: ClassCounter, event: CoreEvent, num_recomputed: int) -> None:
    """Count an event of a request of the counter's class."""
    counter.recomputed_tokens += num_recomputed
    match event.kind:
        case EventKind.PREEMPTED:
            counter.preempted[event.reason.value] += 1
        case EventKind.DEMOTED:
            counter.demoted += 1
        case EventKind.BOOSTED:
            counter.boosted += 1
        case _:
            pass
