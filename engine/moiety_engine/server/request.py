"""One open request: the conversion of the core's tokens into messages for its gateway.

Owns the request's detokenizer, stop finder and counters. It uses no sockets and no other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

import msgspec

from moiety_engine.messages import CoreAdmission, CoreFailure, CoreFinish, CoreLogprob, CoreOutput, CoreScores
from moiety_engine.steps.collection import StepCollection
from moiety_text.detokenizer import CharacterCount, Detokenizer
from moiety_text.stop import new_stop_finder
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import (
    Accepted,
    Failed,
    Finished,
    FinishReason,
    MeteredUsage,
    Submit,
    TokenLogprob,
    Tokens,
    TopLogprob,
)
from moiety_wire.trace_events import Event, Phases

GATHERED_TOKENS = 16
GATHERED_CREDIT = 8  # at most 1/8 of the first credit is held: a gateway renews credit by the tokens it received


class TokenTable:
    """Cache of the text and bytes of single tokens, at most one entry per token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def describe(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text and bytes; ("", b"") for an id that only the model has."""
        found = self._known.get(token_id)
        if found is None:
            spelled = b"" if self._tokenizer.find_token(token_id) is None else self._tokenizer.token_bytes(token_id)
            found = self._known[token_id] = (spelled.decode(errors="replace"), spelled)
        return found

    def logprob(self, token_id: int, logprob: CoreLogprob, num_chars: int = -1) -> TokenLogprob:
        best = zip(logprob.top_ids, logprob.top_logprobs, strict=True)
        top = [TopLogprob(*self.describe(best_id), lp, best_id) for best_id, lp in best]
        return TokenLogprob(*self.describe(token_id), logprob.logprob, top, token_id, num_chars, logprob.rank)


@dataclass(slots=True)
class _HeldTokens:
    """Tokens that are held to be sent together with later ones."""

    position: int
    num_cached_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None


def _most_held(submit: Submit, max_tokens: int) -> int:
    if not submit.gathers:
        return 0
    is_paid = submit.credit_tokens >= max_tokens  # the credit covers all tokens
    return GATHERED_TOKENS if is_paid else min(GATHERED_TOKENS, submit.credit_tokens // GATHERED_CREDIT)


class OpenRequest:
    """Creates the request's messages: Accepted after admission, then Tokens, then one Finished or Failed.

    If the output is not streamed, tokens after the first are held until there are several, the credit is used up, or
    the request ends.
    """

    def __init__(
        self, submit: Submit, key: int, tokenizer: Tokenizer, table: TokenTable, *, max_tokens: int, now_unix_ns: int
    ) -> None:
        """Create the request. `max_tokens` is the core's limit, possibly clipped to the context."""
        self.request_id = submit.request_id
        self.key = key
        self.submit = submit
        self.received_unix_ns = now_unix_ns
        self.num_output = 0
        self.num_cached_tokens = 0  # of the prompt; set with the first output
        self.stopped_by: str | None = None  # the stop string; after that only the core's finish counts
        self.abort_detail = ""
        self.served_class = ""  # empty until the core has admitted it
        self.credit_tokens = submit.credit_tokens
        self._held: _HeldTokens | None = None
        self._most_held = _most_held(submit, max_tokens)
        self._max_tokens = max_tokens
        self._is_clipped = max_tokens < submit.stopping.max_tokens
        self._min_tokens = submit.stopping.min_tokens
        self._has_grammar = submit.grammar is not None
        self._detokenizer = Detokenizer(tokenizer, submit.shown_ids, submit.marker_ids)
        self._includes_stop = submit.stopping.includes_stop
        self._finder = new_stop_finder(submit.stopping.stop, submit.stopping.thought, includes_stop=self._includes_stop)
        self._table = table
        wants_logprobs = submit.sampling.num_logprobs is not None
        self._chars = CharacterCount(tokenizer, submit.shown_ids) if wants_logprobs else None
        self._scores: dict[int, CoreLogprob] = {}  # by position in the prompt
        self._steps = StepCollection() if submit.traceparent else None  # without a trace they are not used
        self._seq = 0

    def ran_in(self, step: msgspec.Raw) -> None:
        """Add a recorded step in which this request ran."""
        if self._steps is not None:
            self._steps.add(step)

    def resume(self, token_ids: list[int], stop_token_ids: Container[int]) -> CoreFinish | None:
        """Take in the output that another engine has sent, so that text and stop strings continue after it.

        Returns the end of the request if that output was complete and only the end was lost; otherwise None.
        """
        if not token_ids:
            return None
        may_stop = self._has_grammar or len(token_ids) > self._min_tokens  # same rule as in the core
        ends_by_token = may_stop and token_ids[-1] in stop_token_ids
        shown = token_ids[:-1] if ends_by_token and not self._includes_stop else token_ids
        if self._chars is not None:
            for token_id in shown:
                self._chars.add(token_id)
        if self._finder is None:
            self._detokenizer.add(shown)
        else:
            self._search(shown)
        self.num_output = len(token_ids)
        if ends_by_token or self.stopped_by is not None:
            return self._ended(FinishReason.STOP, "stop_token")
        if len(token_ids) >= self._max_tokens:
            return self._ended(FinishReason.LENGTH, "max_tokens")
        return None

    def accept(self, admission: CoreAdmission) -> Accepted:
        self.served_class = admission.served_class
        return Accepted(
            self.request_id,
            self._next_seq(),
            admission.served_class,
            admission.reason,
            admission.predicted_ttft_s,
        )

    def take_tokens(self, output: CoreOutput) -> Tokens | None:
        """Return the message for an output's tokens, or None while they are held or after the request has stopped.

        Sets `stopped_by` if the tokens complete a stop string.
        """
        if not output.token_ids or self.stopped_by is not None:
            return None
        token_ids = output.token_ids
        ends_by_token = output.finish is not None and output.finish.reason is FinishReason.STOP
        hides_end = ends_by_token and not self._includes_stop
        shown = token_ids[:-1] if hides_end else token_ids  # the token that ends a request has no text
        if self._finder is None:
            text = self._detokenizer.add(shown)
        else:
            text, num_shown = self._search(shown)
            if self.stopped_by is not None:
                token_ids = token_ids[:num_shown]
        held = self._held = self._held or _HeldTokens(self.num_output, output.num_cached_tokens)
        held.token_ids += token_ids
        held.text += text
        self.num_output += len(token_ids)
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        if output.logprobs is not None:
            pairs = zip(token_ids, output.logprobs, strict=False)  # shorter where a stop string cut the tokens
            held.logprobs = held.logprobs or []
            assert self._chars is not None, "the request has log-probabilities"
            for number, (token_id, logprob) in enumerate(pairs):
                num_chars = self._chars.add(token_id) if number < len(shown) else 0
                held.logprobs.append(self._table.logprob(token_id, logprob, num_chars))
        return None if self._may_wait(held) else self.release()

    def take_scores(self, scores: CoreScores) -> None:
        """Store the scores of a part of the prompt; they are sent at the end."""
        self._scores.update(enumerate(scores.logprobs, scores.position))

    def release(self) -> Tokens | None:
        """Return the message for the held tokens; None if there are none."""
        held, self._held = self._held, None
        if held is None:
            return None
        return Tokens(
            self.request_id,
            self._next_seq(),
            held.position,
            held.token_ids,
            held.text,
            held.logprobs,
            held.num_cached_tokens,
        )

    def _may_wait(self, held: _HeldTokens) -> bool:
        return (
            held.position > 0
            and len(held.token_ids) < self._most_held
            and self.num_output < self.credit_tokens
            and self.stopped_by is None
        )

    def metered(self, replica_id: str) -> MeteredUsage:
        """Return the usage so far, for its gateway process."""
        context, served_class = self.submit.billing_context, self.served_class
        return MeteredUsage(replica_id, self.request_id, context, served_class, self.num_cached_tokens, self.num_output)

    def finish(self, finish: CoreFinish, name_of: Callable[[int], str]) -> Finished:
        """Return the last message. `name_of` returns the request id of a key, for the events."""
        text, reason, detail = "", finish.reason, finish.detail
        if self.stopped_by is None:
            text = "" if reason is FinishReason.PREFILL_DONE else self._last_text()  # the other engine continues
            if detail == "max_tokens" and self._is_clipped:
                detail = "context"
            if reason is FinishReason.ABORT:
                detail = self.abort_detail
        if self.stopped_by is not None:
            reason, detail = FinishReason.STOP, self.stopped_by
        return Finished(
            request_id=self.request_id,
            seq=self._next_seq(),
            reason=reason,
            num_prompt_tokens=len(self.submit.prompt_ids),
            num_cached_tokens=finish.num_cached_tokens,
            num_output_tokens=self.num_output,
            phases=Phases(
                self.received_unix_ns, finish.scheduled_unix_ns, finish.first_token_unix_ns, finish.finished_unix_ns
            ),
            text=text,
            served_class=finish.served_class,
            events=[Event(e.unix_ns, e.kind, e.reason, name_of(e.other) if e.other else "") for e in finish.events],
            num_recomputed_tokens=finish.num_recomputed_tokens,
            detail=detail,
            embedding=finish.embedding,
            num_drafted_tokens=finish.num_drafted_tokens,
            num_accepted_tokens=finish.num_accepted_tokens,
            arrival=finish.arrival,
            steps=b"" if self._steps is None else self._steps.packed(),
            prompt_logprobs=self._prompt_logprobs(),
            num_speculative_tokens=finish.num_speculative_tokens,
            expert_read_bytes=finish.expert_read_bytes,
            expert_moved_bytes=finish.expert_moved_bytes,
            expert_profile=finish.expert_profile,
        )

    def fail(self, failure: CoreFailure) -> Failed:
        return Failed(
            self.request_id,
            self._next_seq(),
            failure.code,
            failure.message,
            self.num_output,
            failure.reason,
            failure.retry_after_s,
            failure.in_first_step,
            failure.expert_read_bytes,
            failure.expert_moved_bytes,
        )

    def _ended(self, reason: FinishReason, detail: str) -> CoreFinish:
        """Return a finish like the core's, for a request that the core never received."""
        now_ns = self.received_unix_ns
        return CoreFinish(reason, detail, 0, self.num_output, 0, 0, now_ns, self.submit.service.name, (), 0)

    def _prompt_logprobs(self) -> list[TokenLogprob] | None:
        """Return the prompt's log-probabilities; None if not requested, or not complete before an abort."""
        ids, sampling = self.submit.prompt_ids, self.submit.sampling
        positions = range(sampling.prompt_logprobs_from, len(ids))
        if sampling.num_prompt_logprobs is None or len(self._scores) != len(positions):
            return None
        return [self._table.logprob(ids[position], self._scores[position]) for position in positions]

    def _search(self, token_ids: list[int]) -> tuple[str, int]:
        """Return (text, number of tokens used): up to and including the token that completes a stop string, or all."""
        assert self._finder is not None
        text = ""
        for i, token_id in enumerate(token_ids):
            piece = self._detokenizer.add((token_id,))
            if self.num_output + i >= self._min_tokens:
                piece, self.stopped_by = self._finder.add(piece)
            else:
                piece = self._finder.skip(piece)
            text += piece
            if self.stopped_by is not None:
                return text, i + 1
        return text, len(token_ids)

    def _last_text(self) -> str:
        text = self._detokenizer.flush()
        if self._finder is None:
            return text
        if self.num_output <= self._min_tokens:
            return self._finder.skip(text) + self._finder.flush()
        text, self.stopped_by = self._finder.finish(text)
        return text

    def _next_seq(self) -> int:
        seq = self._seq
        self._seq += 1
        return seq
