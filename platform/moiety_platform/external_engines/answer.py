"""One request at an external engine: converts its stream to wire messages.

It keeps the output position, the detokenizer and the stop string search, which also continue a request of a failed
engine. It is independent of HTTP. Where a server sends no token ids, the tokenizer's ids of its text are used instead.
They continue the text after a failover, but the server's own count is billed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from moiety_platform.clock import Clock
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.external_engines.dialect import AnswerDelta, DeltaLogprob, MalformedAnswer, Token
from moiety_text.detokenizer import Detokenizer
from moiety_text.stop import new_stop_finder
from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import Accepted, Finished, FinishReason, Submit, TokenLogprob, Tokens, TopLogprob
from moiety_wire.trace_events import Phases, Reason

OVERRUN = 8  # times the limit in the tokenizer's count: beyond that the server ignores the limit


class ExternalAnswer:
    """Converter of one answer. It produces Accepted, then Tokens, then one Finished."""

    def __init__(
        self,
        submit: Submit,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        clock: Clock,
        ids_of: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Create the converter. `ids_of` returns the ids of a text, by default those of the tokenizer."""
        self._submit = submit
        self._ids_of = tokenizer.encode if ids_of is None else ids_of
        self._tokenizer = tokenizer
        self._stop_ids = set(submit.stopping.stop_token_ids)
        if not submit.stopping.ignore_eos:
            self._stop_ids.update(eos_token_ids)
        self._clock = clock
        self._detokenizer = Detokenizer(tokenizer, submit.shown_ids, submit.marker_ids)
        self._includes_stop = submit.stopping.includes_stop
        self._finder = new_stop_finder(submit.stopping.stop, submit.stopping.thought, includes_stop=self._includes_stop)
        self._min_tokens = submit.stopping.min_tokens
        self._limit = min(submit.stopping.max_tokens, submit.credit_tokens)
        self._num_output = 0
        self._num_resumed = 0
        self._num_seen = 0  # output tokens, including those beyond the limit
        self._num_counted: int | None = None  # output tokens in the server's count, without resumed ones
        self._num_cached = 0
        self._num_prompt = len(submit.prompt_ids)  # in the server's count where it renders the prompt
        self._withheld_ids: list[int] | None = []  # ids received without text; None if some are unknown
        self._finish: FinishReason | None = None  # as sent by the server
        self._stopped_by: str | None = None  # the stop string that was found
        self._seq = 0
        self._received_unix_ns = clock.unix_ns()
        self._first_token_unix_ns = 0

    @property
    def service(self) -> ServiceClass:
        return self._submit.service

    @property
    def has_started(self) -> bool:
        """True once the first output has arrived."""
        return self._first_token_unix_ns != 0

    @property
    def num_left(self) -> int:
        """Number of tokens up to the limit."""
        return self._limit - self._num_output

    @property
    def num_min_left(self) -> int:
        return max(0, self._min_tokens - self._num_output)

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids that the server continues: the prompt and any resumed output."""
        return self._submit.prompt_ids + (self._submit.resumed_ids or [])

    @property
    def has_finished(self) -> bool:
        """True once the server has sent a finish reason. Its counts may still follow."""
        return self._finish is not None

    @property
    def is_complete(self) -> bool:
        """True if no further output belongs to the answer, although the server has not sent a finish reason."""
        return self._finish is None and (self._stopped_by is not None or self._is_beyond)

    @property
    def _is_beyond(self) -> bool:
        """True if the server exceeds the limit.

        Both its count and the tokenizer's must exceed it, or the tokenizer's alone by the factor OVERRUN.
        """
        is_counted = self._num_resumed + (self._num_counted or 0) > self._limit
        return self._num_seen > OVERRUN * self._limit or (is_counted and self._num_seen >= self._limit)

    def resume(self) -> bool:
        """Add the output that another engine has sent, and return whether it was complete and only its end was lost."""
        token_ids = self._submit.resumed_ids
        if not token_ids:
            return False
        ends_by_token = token_ids[-1] in self._stop_ids and len(token_ids) > self._min_tokens
        self._text_of(token_ids[:-1] if ends_by_token and not self._includes_stop else token_ids)
        self._num_output = self._num_resumed = self._num_seen = len(token_ids)
        if ends_by_token:
            self._finish = FinishReason.STOP
        return ends_by_token or self._stopped_by is not None or self.num_left <= 0

    def accept(self) -> Accepted:
        submit = self._submit
        reason = Reason.FAILED_OVER if submit.resumed_ids is not None else Reason.IN_TIME
        return Accepted(submit.request_id, self._next_seq(), submit.service.name, reason)

    def take(self, piece: AnswerDelta) -> Tokens | None:
        """Return the message for a delta, or None if it has nothing new. Raises MalformedAnswer."""
        num_more = self._count(piece.num_output_tokens)
        if piece.num_prompt_tokens is not None and isinstance(self._submit, ChatSubmit):
            self._num_prompt = piece.num_prompt_tokens
        if piece.num_cached_tokens is not None:
            self._num_cached = min(piece.num_cached_tokens, self._num_prompt)
        if piece.finish is not None:
            self._finish = piece.finish
        if self._stopped_by is not None:
            return None
        token_ids, text, logprobs = self._contents(piece, num_more)
        if self._finish is FinishReason.STOP and piece.stop_string is not None:
            self._stopped_by = self._stopped_by or piece.stop_string
        if not token_ids and not text and not logprobs:
            return None
        if not self._first_token_unix_ns:
            self._first_token_unix_ns = self._clock.unix_ns()
        position = self._num_output
        self._num_output += len(token_ids)
        described = None if self._submit.sampling.num_logprobs is None else [self._describe(one) for one in logprobs]
        request_id = self._submit.request_id
        return Tokens(request_id, self._next_seq(), position, token_ids, text, described, self._num_cached)

    def end(self) -> Finished:
        """Return the last message of a request that has ended."""
        reason = self._finish
        text = ""
        if self._stopped_by is None:
            text = self._last_text()
        if self._stopped_by is not None:
            return self._finished(FinishReason.STOP, text, self._stopped_by)
        if reason is None or reason is FinishReason.LENGTH:
            is_short_of_credit = self._submit.credit_tokens < self._submit.stopping.max_tokens
            return self._finished(FinishReason.LENGTH, text, "credit_refused" if is_short_of_credit else "max_tokens")
        return self._finished(reason, text)

    def abort(self) -> Finished:
        """Return the last message of a request that this gateway aborted."""
        return self._finished(FinishReason.ABORT, "")

    def _count(self, num_output: int | None) -> int | None:
        """Return how many more tokens the server counts than before.

        Returns None where its count has no information: it is sent only at the end, has not risen, or is 0 beside text.
        """
        before = self._num_counted or 0
        if num_output is None or num_output <= before:
            return None
        self._num_counted = num_output
        return num_output - before

    def _contents(self, piece: AnswerDelta, num_more: int | None) -> tuple[list[int], str, list[DeltaLogprob]]:
        """Return ids, text and logprobs of a delta, without anything beyond the limit or a stop string."""
        token_ids, logprobs = piece.token_ids, piece.logprobs
        if logprobs is None:
            if self._submit.sampling.num_logprobs is not None:
                raise MalformedAnswer("logprobs do not have OpenAI's format")
            logprobs = []
        if piece.text is not None:
            are_told = token_ids is not None and num_more in (None, len(token_ids))
            if self._finder is not None and piece.finish is None:
                self._withhold(piece.text, token_ids if are_told else None)
            if token_ids is None or not are_told:
                token_ids = self._ids_of(piece.text) if piece.text else []
            self._num_seen += len(token_ids)
            return token_ids[: self.num_left], self._search(piece.text, self._num_output), logprobs
        assert token_ids is not None, "a piece has text or ids"
        num_told = self._num_output - self._num_resumed + len(token_ids)
        if num_more is not None and (self._num_counted or 0) > num_told:
            raise MalformedAnswer(f"the server sent {num_told} token ids but counted {self._num_counted} tokens")
        self._num_seen += len(token_ids)
        token_ids = token_ids[: self.num_left]
        ends_by_token = (
            bool(token_ids)
            and piece.finish is FinishReason.STOP
            and piece.stop_string is None
            and token_ids[-1] in self._stop_ids
        )
        hides_end = ends_by_token and not self._includes_stop
        text, num_shown = self._text_of(token_ids[:-1] if hides_end else token_ids)
        if self._stopped_by is not None:
            token_ids = token_ids[:num_shown]
        return token_ids, text, logprobs[: len(token_ids)]

    def _text_of(self, token_ids: list[int]) -> tuple[str, int]:
        """Return the text, and the number of tokens up to the one that completes a stop string, or of all tokens."""
        if self._finder is None:
            return self._detokenizer.add(token_ids), len(token_ids)
        text = ""
        for i, token_id in enumerate(token_ids):
            text += self._search(self._detokenizer.add((token_id,)), self._num_output + i)
            if self._stopped_by is not None:
                return text, i + 1
        return text, len(token_ids)

    def _withhold(self, text: str, token_ids: list[int] | None) -> None:
        """Keep the ids of a possible stop string.

        A server releases that text if it is none, but not if the limit ends the answer.
        """
        if text:
            self._withheld_ids = []
        elif token_ids is None:
            self._withheld_ids = None
        elif self._withheld_ids is not None:
            self._withheld_ids += token_ids

    def _search(self, text: str, position: int) -> str:
        """Return the part of the text that may be released."""
        if self._finder is None:
            return text
        if position < self._min_tokens:
            return self._finder.skip(text)
        text, self._stopped_by = self._finder.add(text)
        return text

    def _last_text(self) -> str:
        """Return the text held back here and by a server that reached its limit. It may complete a stop string."""
        withheld_ids = self._withheld_ids if self._finish is FinishReason.LENGTH else None
        text = self._detokenizer.add(withheld_ids or ()) + self._detokenizer.flush()
        if self._finder is None:
            return text
        if self._num_output < self._min_tokens:
            return self._finder.skip(text) + self._finder.flush()
        text, self._stopped_by = self._finder.finish(text)
        return text

    def _describe(self, one: DeltaLogprob) -> TokenLogprob:
        top = one.top[: self._submit.sampling.num_logprobs]
        best = [TopLogprob(*self._spell(token), logprob, _id_of(token)) for token, logprob in top]
        return TokenLogprob(*self._spell(one.token), one.logprob, best, _id_of(one.token))

    def _spell(self, token: Token) -> tuple[str, bytes]:
        if isinstance(token, str):
            return token, token.encode()
        spelled = b"" if self._tokenizer.find_token(token) is None else self._tokenizer.token_bytes(token)
        return spelled.decode(errors="replace"), spelled

    def _finished(self, reason: FinishReason, text: str, detail: str = "") -> Finished:
        submit = self._submit
        num_output, num_counted = self._num_output, self._num_resumed + (self._num_counted or 0)
        if self._num_counted is not None and num_counted <= self._limit and not self.is_complete:
            num_output = num_counted  # the server's count, unless it exceeds the requested limit
        return Finished(
            request_id=submit.request_id,
            seq=self._next_seq(),
            reason=reason,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
            num_output_tokens=num_output,
            phases=Phases(self._received_unix_ns, 0, self._first_token_unix_ns, self._clock.unix_ns()),
            text=text,
            served_class=submit.service.name,
            detail=detail,
        )

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1


def _id_of(token: Token) -> int:
    return token if isinstance(token, int) else -1
