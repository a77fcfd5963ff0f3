"""Rows of a step's logits: a sequence, or a sequence as it will be if its draft tokens are accepted."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from moiety_engine.scheduling.plan import Plan
from moiety_engine.sequence import Sequence
from moiety_engine.sequence_records import RequestFacts
from moiety_engine.thought_scan import ThoughtScan


class Row(Protocol):
    """Part of a sequence that its next token depends on."""

    @property
    def request(self) -> RequestFacts: ...
    @property
    def num_output(self) -> int: ...
    @property
    def known_output(self) -> list[int]: ...
    def recent_output(self, count: int) -> list[int]:
        """Return the output's newest tokens, at most `count`, with PENDING for one that is not known yet."""
        ...

    @property
    def thought_scan(self) -> ThoughtScan | None:
        """Scan of the known output before the previous token; None without a thought budget."""
        ...

    @property
    def pending(self) -> bool: ...
    @property
    def pending_row(self) -> int: ...


class LaunchedSequence:
    """Sequence as it was when a step was launched; its token is sampled after the scheduler expects it."""

    __slots__ = ("_num_tokens", "_sequence", "num_output", "pending", "pending_row", "request")

    def __init__(self, sequence: Sequence) -> None:
        assert not sequence.pending, "a step of a pipeline contains a token that is not known"
        self._sequence, self._num_tokens = sequence, len(sequence.tokens)
        self.request = sequence.request
        self.num_output = sequence.num_output
        self.pending, self.pending_row = False, -1

    @property
    def known_output(self) -> list[int]:
        return self._sequence.tokens[self.request.num_prompt : self._num_tokens]

    def recent_output(self, count: int) -> list[int]:
        first = max(self.request.num_prompt, self._num_tokens - count)
        return self._sequence.tokens[first : self._num_tokens]

    @property
    def thought_scan(self) -> ThoughtScan | None:
        return self._sequence.thought_scan_before(self._num_tokens)


class Drafted:
    """Sequence after some draft tokens: its next token is drawn for that position, with penalties for these tokens."""

    __slots__ = ("_draft", "_sequence", "num_output", "pending", "pending_row", "request")

    def __init__(self, sequence: Sequence | LaunchedSequence, draft: tuple[int, ...]) -> None:
        self._sequence, self._draft = sequence, draft
        self.request = sequence.request
        self.num_output = sequence.num_output + len(draft)
        self.pending, self.pending_row = sequence.pending, sequence.pending_row

    @property
    def known_output(self) -> list[int]:
        return [*self._sequence.known_output, *self._draft]

    def recent_output(self, count: int) -> list[int]:
        num_before = max(0, count - len(self._draft))
        drafted = list(self._draft[max(0, len(self._draft) - count) :])
        return [*self._sequence.recent_output(num_before), *drafted]

    @property
    def thought_scan(self) -> ThoughtScan | None:
        scan = self._sequence.thought_scan
        if scan is None:
            return None
        unscanned = [*self._sequence.recent_output(1), *self._draft]
        return scan.after(unscanned[: self.num_output - 1 - scan.num_scanned])


class DraftedRow:
    """Sequence advanced by some tokens that are not known here.

    Its next token is drawn for that position, with penalties for the tokens known before them.
    """

    __slots__ = ("_sequence", "num_output", "pending", "pending_row", "request")

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        submit = sequence.request.submit
        if submit.sampling.num_logprobs is not None:  # never returned
            sampling = msgspec.structs.replace(submit.sampling, num_logprobs=None)
            submit = msgspec.structs.replace(submit, sampling=sampling)
        self.request = dataclasses.replace(sequence.request, submit=submit, grammar=None)
        self.num_output = sequence.num_output
        self.pending, self.pending_row = sequence.pending, sequence.pending_row

    def after(self, count: int) -> DraftedRow:
        """Move this row to `count` tokens ahead of the sequence, and return it."""
        self.num_output = self._sequence.num_output + count
        return self

    @property
    def known_output(self) -> list[int]:
        return self._sequence.known_output

    def recent_output(self, count: int) -> list[int]:
        return self._sequence.recent_output(count) if self.num_output == self._sequence.num_output else []

    @property
    def thought_scan(self) -> ThoughtScan | None:
        scan = self._sequence.thought_scan
        if scan is None or self.num_output == self._sequence.num_output:
            return scan
        return scan.after(self._sequence.recent_output(1))  # before which the sequence's scan ends


def rows_of(plan: Plan, *, as_launched: bool = False) -> list[Row]:
    """Return the rows of the step's logits in their order.

    For each chunk that samples: the row of its newest token, then those of its draft tokens. `as_launched`: the rows
    are used after the scheduler has recorded the launch of the step.
    """
    rows: list[Row] = []
    for chunk in plan.chunks:
        if chunk.samples:
            sequence = LaunchedSequence(chunk.sequence) if as_launched else chunk.sequence
            rows.append(sequence)
            if chunk.draft:
                rows += [Drafted(sequence, chunk.draft[:end]) for end in range(1, len(chunk.draft) + 1)]
    return rows
