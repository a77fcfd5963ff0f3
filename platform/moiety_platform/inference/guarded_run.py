"""Runs whose output is observed: guardrails check it, held back in bounded pieces or not, and contents are logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moiety_platform.guardrails.detectors import MAX_MATCH_CHARS
from moiety_platform.guardrails.terms import Guardrail, GuardrailAction, GuardrailStage
from moiety_platform.inference.guardrail_checks import GuardrailChecks, stage_of
from moiety_platform.inference.run import InferenceRun
from moiety_platform.request_contents.terms import terms_of
from moiety_platform.request_rules.cache import TextRule
from moiety_wire.messages import Finished, Tokens

PIECE_CHARS = 1024  # of new text, after which a blocking guardrail checks what is held back


@dataclass(slots=True)
class _Held:
    """Output of one sequence: its text that later checks need, and the messages that are not released.

    Each message has the number of characters that the sequence had at its end.
    """

    parts: list[str] = field(default_factory=list)
    num_chars: int = 0
    num_checked: int = 0
    messages: deque[tuple[int, Tokens | Finished]] = field(default_factory=deque)


class CapturingRun(InferenceRun):
    """Run that notes its output in the record, if the contents of the tenant's requests are logged."""

    async def __anext__(self) -> tuple[int, Tokens | Finished]:
        index, message = await super().__anext__()
        if self.record.content is not None:
            self.record.content.add(index, message.text)
        return index, message


class GuardedRun(CapturingRun):
    """Run with the guardrails of its output, set by `guard` before it is read.

    A blocking guardrail sees each piece before the reader gets it, with the text before it that a detector may need;
    the last of that text is held back, too. Without a blocking one, nothing is held back but the end.
    """

    def guard(self, checks: GuardrailChecks, guardrails: Sequence[Guardrail]) -> None:
        """Check the output by these guardrails of its stage."""
        self._checks = checks
        self._guardrails = guardrails
        self._blocks = any(one.action is GuardrailAction.BLOCK for one in guardrails)
        self._held: dict[int, _Held] = {}
        self._released: deque[tuple[int, Tokens | Finished]] = deque()

    async def __anext__(self) -> tuple[int, Tokens | Finished]:
        while not self._released:
            index, message = await super().__anext__()
            held = self._held.setdefault(index, _Held())
            held.parts.append(message.text)
            held.num_chars += len(message.text)
            held.messages.append((held.num_chars, message))
            await self._look(index, held, is_last=isinstance(message, Finished))
        return self._released.popleft()

    async def _look(self, index: int, held: _Held, *, is_last: bool) -> None:
        """Check the text if a piece is complete, and release what no later check needs."""
        is_due = self._blocks and held.num_chars - held.num_checked >= PIECE_CHARS
        if is_last or is_due:
            if text := "".join(held.parts):
                await self._checks.check(self._guardrails, self.record, text, is_last=is_last)
            held.num_checked, held.parts = held.num_chars, [text[-MAX_MATCH_CHARS:]]
        until = held.num_chars if is_last or not self._blocks else held.num_checked - MAX_MATCH_CHARS
        while held.messages and held.messages[0][0] <= until:
            self._released.append((index, held.messages.popleft()[1]))


def guarded_runs(checks: GuardrailChecks, rules: Iterable[TextRule]) -> Callable[..., InferenceRun]:
    """Return the constructor of a request's run, with the arguments of InferenceRun.

    The run is guarded if a guardrail checks outputs, and notes its output if contents are logged.
    """
    of_output = stage_of(rules, GuardrailStage.OUTPUT)
    if not of_output:
        return InferenceRun if terms_of(rules) is None else CapturingRun

    def make_run(*arguments: Any) -> InferenceRun:
        run = GuardedRun(*arguments)
        run.guard(checks, of_output)
        return run

    return make_run
