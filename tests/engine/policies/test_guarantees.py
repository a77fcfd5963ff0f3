"""Requests that cannot be preempted always finish: reservations and the banker's algorithm, on random demands."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from tests.core_submits import core_submit

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.scheduling.policies.moiety.kv_reservations import KvReservations
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.classes import FLEX, PRIORITY, ServiceClass
from moiety_wire.messages import Sampling

SIZE = 4


def a_sequence(key: int, num_prompt: int, max_tokens: int, service: ServiceClass = FLEX) -> Sequence:
    submit = core_submit(
        key, [1] * num_prompt, max_tokens, service=service, sampling=Sampling(), cache_salt=b"", arrival_unix_ns=1
    )
    return Sequence(submit, order=key, seed=0)


@dataclass
class Bank:
    """A pool, of which only the number of free blocks counts, and its guarantees."""

    num_blocks: int

    def __post_init__(self) -> None:
        self.guarantees = KvReservations(self.num_blocks, TableLayout(SIZE))
        self.running: list[Sequence] = []

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(len(s.kv.blocks) for s in self.running)

    def join(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        blocks = -(-len(sequence.tokens) // SIZE)
        if not self.guarantees.can_join(sequence, num_tokens) or blocks > self.num_free:
            return False
        sequence.state = SequenceState.RUNNING
        sequence.kv.blocks = [0] * blocks
        sequence.tokens.append(1)  # the first output token
        sequence.kv.num_computed = len(sequence.tokens) - 1
        self.running.append(sequence)
        return True

    def step(self) -> bool:
        """Give a token to each request that can have one, and return whether there was any."""
        growing = [s for s in self.running if s.kv.num_computed >= len(s.kv.blocks) * SIZE]
        held_up = self.guarantees.waiting_for_others(growing)
        for s in growing:
            if s not in held_up:
                assert self.num_free > 0, "a block was promised that is not there"
                s.kv.blocks.append(0)
        decoding = [s for s in self.running if s not in held_up]
        for s in decoding:
            s.tokens.append(1)
            s.kv.num_computed += 1
            if s.num_output >= s.request.submit.max_tokens:
                self.running.remove(s)
                s.state = SequenceState.ENDED
                self.guarantees.forget(s)
        return bool(decoding)


@given(
    num_blocks=st.integers(6, 40),
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
)
@settings(max_examples=examples(300), deadline=None)
def test_all_that_are_owed_end_though_each_asks_for_all_it_may(
    num_blocks: int, sizes: list[tuple[int, int, int]]
) -> None:
    bank = Bank(num_blocks)
    waiting = []
    for key, (num_prompt, max_tokens, predicted) in enumerate(sizes):
        if -(-(num_prompt + max_tokens) // SIZE) <= num_blocks:
            sequence = a_sequence(key, num_prompt, max_tokens)
            sequence.predicted_output = min(predicted, max_tokens)  # right or wrong
            bank.guarantees.guarantee(sequence)
            waiting.append(sequence)
    for _ in range(2000):
        waiting = [s for s in waiting if not bank.join(s)]
        if not bank.running:
            break
        assert bank.step(), "all wait for each other"
    assert not waiting
    assert not bank.running


def test_the_owed_run_side_by_side_where_their_claims_do_not_fit_but_their_predictions_do() -> None:
    bank = Bank(40)
    asking = [a_sequence(key, 8, 100) for key in range(6)]  # 27 blocks each at the most
    for sequence in asking:
        sequence.predicted_output = 8.0
        bank.guarantees.guarantee(sequence)
    assert sum(bank.join(s) for s in asking) == 4  # 4 of 4 blocks, and 23 more for one of them


def test_a_reservation_protects_up_to_its_end_and_is_kept_from_newcomers() -> None:
    bank = Bank(10)
    first, second = (a_sequence(key, 8, 40, PRIORITY) for key in range(2))
    assert bank.join(first, 24)
    bank.guarantees.reserve(first, 24)
    assert bank.guarantees.protects(first)
    assert not bank.guarantees.can_join(second, 24)
    assert bank.guarantees.can_join(second, 16)
    first.tokens += [1] * 16  # beyond what it was predicted to need
    assert not bank.guarantees.protects(first)
    assert bank.guarantees.can_join(second, 24)
