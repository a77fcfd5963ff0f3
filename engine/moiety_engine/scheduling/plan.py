"""Plan of a step: the output of scheduling and the input of the runner."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from moiety_engine.scheduling.step_time.step_time_model import StepShape
from moiety_engine.sequence import PENDING, Sequence


class Chunk(NamedTuple):
    """Part of one sequence that runs in a step.

    It covers tokens num_computed … num_computed+num_tokens-1, then `num_pad` rows whose results are discarded (padded
    batching). With `samples`, the last token's logits give a new token; with `embeds`, its hidden state is the result
    and the sequence ends. `draft` holds the last tokens of the chunk, which are proposals that the sequence does not
    contain yet; the logits of each, and of the token before them, give a token. Draft tokens that a draft model has yet
    to generate are PENDING.
    """

    sequence: Sequence
    num_tokens: int
    samples: bool
    num_pad: int = 0
    embeds: bool = False
    draft: tuple[int, ...] = ()


class DraftCatchUp(NamedTuple):
    """Next tokens of a sequence that a draft model has yet to process."""

    sequence: Sequence
    num_tokens: int


class KvLoad(NamedTuple):
    """KV from another engine to load into a sequence's blocks.

    `tables` are its block tables, of which blocks `firsts` and later ones are held; the KV of token `first` and later
    tokens is loaded, and the state after the last one into `state_slot`, -1 without recurrent layers.
    """

    key: int
    first: int
    tables: list[list[int]]
    firsts: tuple[int, ...]
    state_slot: int = -1


class Plan(msgspec.Struct, frozen=True):
    """One step.

    Decode chunks come first: a single token each, or one token and a draft. `preempted` sequences left the batch to
    free blocks or batch slots. Before the forward pass, blocks are copied: first those of `swap_out` (device block,
    host block), then those of `swap_in` (host block, device block). Recurrent states are advanced by recorded tokens
    (`state_replays`: slot, number of tokens), and then copied between slots, one after the other (source, target).
    With several rank groups, the numbers of a group's blocks and slots follow those of the groups before it. Then KV
    from other engines is loaded, and the draft model processes the tokens of `catch_ups` and generates the pending
    draft tokens.
    """

    chunks: list[Chunk]
    num_decode: int
    num_rows: int  # tokens and pads; at most the budget
    preempted: list[Sequence]
    shape: StepShape = StepShape()
    swap_out: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    state_replays: list[tuple[int, int]] = []
    state_copies: list[tuple[int, int]] = []
    kv_loads: list[KvLoad] = []
    planned_ns: int = 0
    catch_ups: list[DraftCatchUp] = []

    @property
    def wants_drafts(self) -> bool:
        """True if a draft model has work to do."""
        return bool(self.catch_ups) or any(PENDING in chunk.draft for chunk in self.chunks[: self.num_decode])

    @property
    def is_speculative_prefill(self) -> bool:
        """True if the step is a speculative prefill, which never shares a step with requests."""
        return bool(self.chunks) and self.chunks[0].sequence.request.submit.speculative_prefill is not None
