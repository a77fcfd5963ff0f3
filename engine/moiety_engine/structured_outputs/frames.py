"""Messages between the core and its grammar processes. The first frame on a child's socket contains its role."""

from __future__ import annotations

import msgspec

from moiety_wire.grammars import GrammarSpec


class TemplateReady(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the template process. `problem`: why this tokenizer does not support grammars; "" if it does."""

    num_words: int
    problem: str


class TrialOrder(msgspec.Struct, frozen=True, tag="trial"):
    """Compile one grammar and its first mask within limits, report, and end."""

    spec: GrammarSpec
    cpu_s: float
    wall_s: float
    memory_bytes: int


class TrialReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of a trial. `refusal`: the reason for the client; "" if the grammar compiles.

    `spec` is the grammar to step: the ordered one, with the preferred schemas that are supported and no others.
    """

    refusal: str
    cpu_s: float
    memory_bytes: int
    spec: GrammarSpec


class StepperOrder(msgspec.Struct, frozen=True, tag="stepper"):
    """Step grammars until the socket closes. Comes with two descriptors: the mask buffer and the compile socket."""

    memory_bytes: int
    step_cpu_s: float
    num_words: int


class ChildOrder(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a child: its role."""

    role: TrialOrder | StepperOrder


class PrepareOrder(msgspec.Struct, frozen=True, array_like=True):
    """Compile a grammar that has passed its trial, concurrently with the steps."""

    grammar_id: int
    spec: GrammarSpec


class PrepareReport(msgspec.Struct, frozen=True, array_like=True):
    refusal: str
    cpu_s: float


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's row: accept these tokens, then write the mask of the next one. Mask i belongs to row i."""

    state_id: int
    grammar_id: int
    token_ids: list[int]
    is_new: bool


class StepOrder(msgspec.Struct, frozen=True, array_like=True):
    """All rows of one step. `grammars`: grammars of these rows that the process does not have yet."""

    rows: list[StepRow]
    grammars: list[PrepareOrder]
    freed_state_ids: list[int]
    freed_grammar_ids: list[int]


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of a step. `problems`: index of a row, and why its request cannot continue."""

    problems: list[tuple[int, str]]
