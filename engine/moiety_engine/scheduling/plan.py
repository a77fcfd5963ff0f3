"""What a step will do: the output of scheduling, the input of the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from moiety_engine.scheduling.step_time_model import StepShape
from moiety_engine.sequence import PENDING, Sequence


class Chunk(NamedTuple):
    """The part of one sequence that runs in a step: tokens num_computed … num_computed+num_tokens-1, then `num_pad`
    rows that are computed and thrown away (padded strategy). `samples`: the last token's logits give a new token;
    `embeds`: its hidden state is what was asked for, and the sequence ends with it. `draft`: the last of its tokens are
    guesses that the sequence does not have yet; the logits of each, and of the one before them, give a token. Those
    that a draft model is yet to say are PENDING."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    num_pad: int = 0
    embeds: bool = False
    draft: tuple[int, ...] = ()


class DraftCatchUp(NamedTuple):
    """Tokens of a sequence that a draft model takes in, the next so many that it has not."""

    sequence: Sequence
    num_tokens: int


class KvLoad(NamedTuple):
    """KV from another engine that goes into a sequence's blocks, which are those from its start: that of tokens `first`
    and later."""

    key: int
    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Chunks that decode come first: a single token each, or one and a draft. `preempted` left the batch to
    make room. Before the model runs, blocks are copied: first those of `swap_out` (device block, host block), then
    those of `swap_in` (host block, device block); of several groups of ranks each one's are numbered after those of the
    groups before it. Then what came from other engines lands, and a draft model does what is left to it: it takes in
    tokens, and says those of the chunks' drafts."""

    chunks: list[Chunk]
    num_decode: int
    num_rows: int  # tokens and pads; at most the budget
    preempted: list[Sequence]
    shape: StepShape = field(default_factory=StepShape)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    landings: list[KvLoad] = field(default_factory=list)
    planned_ns: int = 0
    taken_in: list[DraftCatchUp] = field(default_factory=list)

    @property
    def wants_drafts(self) -> bool:
        """Whether a draft model has anything to do."""
        return bool(self.taken_in) or any(PENDING in chunk.draft for chunk in self.chunks[: self.num_decode])

    @property
    def is_speculative_prefill(self) -> bool:
        """Whether it does what nobody has asked for yet, which nothing else runs beside."""
        return bool(self.chunks) and self.chunks[0].sequence.submit.speculative_prefill is not None
