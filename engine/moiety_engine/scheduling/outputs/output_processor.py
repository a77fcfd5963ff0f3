"""Output processor: turns the samples and vectors of a step into output of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from moiety_engine.messages import CoreFinish, CoreLogprob, CoreOutput
from moiety_engine.scheduling.outputs.finish import why_it_ends
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.queues.request_queues import RequestQueues
from moiety_engine.scheduling.speculative_decoding.speculator import Speculator
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.messages import FinishReason

_Sampled = tuple[int, CoreLogprob | None]


class OutputProcessor:
    """Appends sampled tokens to their sequences, accepts drafts, and finds the sequences that end."""

    def __init__(
        self,
        queues: RequestQueues,
        speculator: Speculator | None,
        *,
        on_computed: Callable[[Sequence, int], None],
        on_end: Callable[..., CoreFinish],
        on_pause: Callable[[Sequence], None],
    ) -> None:
        """Create the processor.

        `on_computed` is called with the number of accepted draft tokens whose KV counts as computed, `on_end` ends a
        sequence and returns its report, and `on_pause` is called for a sequence without credit.
        """
        self._queues = queues
        self._speculator = speculator
        self._on_computed, self._on_end, self._on_pause = on_computed, on_end, on_pause
        self.non_finite_keys: list[int] = []  # keys of sequences to end because their newest row is not finite
        self.drafted_tokens_total = self.accepted_tokens_total = 0
        self.tokens_past_stop_total = 0  # sampled for sequences that had already ended

    def process(
        self,
        plan: Plan,
        token_ids: list[int],
        logprobs: list[CoreLogprob | None],
        now_ns: int,
        embeddings: Iterable[bytes],
        non_finite: frozenset[int],
    ) -> tuple[list[CoreOutput], list[Sequence]]:
        """Return the outputs of a step, and the sequences that got a token, once for each token.

        In the plan's order, there is one token for each chunk that samples and one for each token of its draft, and one
        vector for each chunk that embeds. Results of rows in `non_finite`, and empty vectors, are not output; the keys
        of their sequences are added to `non_finite_keys`.
        """
        outputs = []
        sampled = iter(zip(token_ids, logprobs, strict=True))
        embedded = iter(embeddings)
        got_token = []
        row = 0  # the chunk's first row among the sampled rows
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.samples:
                token = next(sampled)
                drafted = list(islice(sampled, len(chunk.draft))) if chunk.draft else []
                first, row = row, row + 1 + len(chunk.draft)
                if sequence.pending_row < 0:
                    self.tokens_past_stop_total += 1
                    continue
                if chunk.draft or non_finite or self._queues.verifying:
                    output = self._take_samples(chunk, [token, *drafted], now_ns, first, non_finite)
                    if output is None:
                        continue
                    got_token += [sequence] * len(output.token_ids)
                else:
                    output = self._take_token(sequence, *token, now_ns)
                    got_token.append(sequence)
                outputs.append(output)
            elif chunk.embeds:
                outputs += self._take_vector(sequence, next(embedded), now_ns)
        return outputs, got_token

    def _take_samples(
        self, chunk: Chunk, sampled: list[_Sampled], now_ns: int, first: int, non_finite: frozenset[int]
    ) -> CoreOutput | None:
        """Process the samples of a chunk; its first row is row `first` of the step. None if that row is not finite."""
        if non_finite:
            sampled = sampled[: next((i for i in range(len(sampled)) if first + i in non_finite), None)]
        if not sampled:
            self.non_finite_keys.append(chunk.sequence.key)
            return None
        if chunk.draft:
            return self._take_draft(chunk, sampled[0], sampled[1:], now_ns)
        output = self._take_token(chunk.sequence, *sampled[0], now_ns)
        if chunk.sequence in self._queues.verifying:  # other steps are in the pipeline
            self._queues.verified(chunk.sequence)
        return output

    def _take_vector(self, sequence: Sequence, vector: bytes, now_ns: int) -> list[CoreOutput]:
        """Process the vector of an embedded prompt; an empty vector is not finite."""
        if sequence.state is SequenceState.ENDED:
            return []
        if not vector:
            self.non_finite_keys.append(sequence.key)
            return []
        finish = self._on_end(sequence, FinishReason.STOP, "", now_ns, vector)
        return [CoreOutput(sequence.key, [], None, finish)]

    def _take_token(self, sequence: Sequence, token_id: int, logprob: CoreLogprob | None, now_ns: int) -> CoreOutput:
        sequence.fill_token(token_id, now_ns / 1e9)
        num_cached, timeline, request = 0, sequence.timeline, sequence.request
        if timeline.first_token_unix_ns == 0:
            timeline.first_token_unix_ns, num_cached = now_ns, sequence.kv.num_cached
        finish = None
        num_output, submit = len(sequence.tokens) - request.num_prompt, request.submit
        if num_output >= submit.max_tokens or num_output >= sequence.credit_tokens or token_id in submit.stop_token_ids:
            ends = why_it_ends(sequence, token_id)
            finish = ends and self._on_end(sequence, *ends, now_ns)
        return CoreOutput(submit.key, [token_id], None if logprob is None else [logprob], finish, num_cached)

    def _take_draft(self, chunk: Chunk, first: _Sampled, drafted: list[_Sampled], now_ns: int) -> CoreOutput:
        """Process the first token and the accepted part of the draft.

        As long as a draft token equals the sampled token, the token sampled after it counts as output.
        """
        sequence = chunk.sequence
        counts = sequence.drafts
        sequence.drafts = counts._replace(num_drafted=counts.num_drafted + len(chunk.draft))
        self.drafted_tokens_total += len(chunk.draft)
        output = self._take_token(sequence, *first, now_ns)
        token_ids, logprobs, finish = output.token_ids, output.logprobs, output.finish
        for place, guessed in enumerate(chunk.draft):
            if finish is not None or guessed != token_ids[-1]:
                break
            if place == len(drafted):  # the next value is not finite
                self.non_finite_keys.append(sequence.key)
                break
            sampled = drafted[place]
            sequence.drafts = sequence.drafts._replace(num_accepted=sequence.drafts.num_accepted + 1)
            self._on_computed(sequence, 1)
            sequence.expect_token(-1)
            more = self._take_token(sequence, *sampled, now_ns)
            token_ids += more.token_ids
            logprobs = logprobs and logprobs + (more.logprobs or [])
            finish = more.finish
        self.accepted_tokens_total += (num_right := len(token_ids) - 1)
        if self._speculator is not None:
            one_wrong = finish is None and num_right < len(drafted)
            self._speculator.verified(sequence, len(chunk.draft), num_right, one_wrong=one_wrong)
        if sequence.state is SequenceState.RUNNING:
            self._queues.verified(sequence)
            if not sequence.has_credit:
                self._on_pause(sequence)
        return CoreOutput(sequence.key, token_ids, logprobs, finish)
