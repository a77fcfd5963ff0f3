"""Allowed tokens and banned runs in the sampler."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from moiety_engine.messages import CoreSubmit
from moiety_engine.sampling import Sampler, is_plain
from moiety_engine.sampling.rows import Drafted
from moiety_engine.sampling.token_masks import TokenMasks
from moiety_engine.sequence import Sequence
from moiety_engine.server.validation import MAX_RULE_IDS, ModelLimits, find_refusal
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling, Stopping, Submit, TokenRules

V = 40
LIMITS = ModelLimits("m", 100, V, 20, (9,), makes_embeddings=False)


def row_of(
    *output: int, allowed: tuple[int, ...] = (), runs: tuple[tuple[int, ...], ...] = (), seed: int = 1, **more: Any
) -> Sequence:
    sampling = Sampling(**({"temperature": 0.0} | more), token_rules=TokenRules(allowed, runs))
    row = Sequence(CoreSubmit(0, "t", STANDARD, [1, 2, 3], sampling, 100, 0, [9], 100, b"", 0), order=0, seed=seed)
    row.tokens += output
    return row


def best_of(
    order: list[int], *rows: Any, sampled: list[int] | None = None, allowed: TokenMasks | None = None
) -> list[int]:
    """Return the greedy tokens of rows for which the tokens in `order` are the most likely ones."""
    logits_V = torch.zeros(V)
    logits_V[order] = torch.arange(len(order), 0, -1).float()
    sampled_L = None if sampled is None else torch.tensor(sampled)
    return Sampler(V, torch.device("cpu")).sample(logits_V.repeat(len(rows), 1), rows, sampled_L, allowed).unpack()[0]


def test_only_allowed_tokens_are_drawn_at_any_temperature() -> None:
    rows = [row_of(allowed=(5, 6), temperature=5.0, seed=seed) for seed in range(200)]
    assert set(best_of([30, 5, 6], *rows)) == {5, 6}
    assert best_of([30, 5, 6], row_of(allowed=(6, 5)), row_of(runs=((7,),))) == [5, 30], "other rows are free"
    assert not is_plain(rows[0])


def test_the_token_that_completes_a_banned_run_is_not_drawn() -> None:
    runs = ((30,), (5, 6, 7), (8, 8))
    assert best_of([30, 7], row_of(runs=runs)) == [7], "a run of one token is always banned"
    assert best_of([7, 4], row_of(5, 6, runs=runs), row_of(6, 6, runs=runs), row_of(6, runs=runs)) == [4, 7, 7]
    assert best_of([8, 4], row_of(8, runs=runs), row_of(8, 5, runs=runs)) == [4, 8]
    prompt_ends_like_run = row_of(runs=((3, 7),))
    assert best_of([7, 4], prompt_ends_like_run) == [7], "the prompt is no part of a run"


def test_a_run_may_end_in_a_token_that_the_running_step_samples() -> None:
    runs = ((5, 6, 7), (4, 6, 7), (6, 6, 7))
    rows = [row_of(before, runs=runs) for before in (5, 5, 8)]
    for number, row in enumerate(rows):
        row.expect_token(number)
    assert best_of([7, 3], *rows, sampled=[6, 5, 6]) == [3, 7, 7]
    rows[0].fill_token(6, 0.0)
    assert best_of([7, 3], rows[0]) == [3], "the same once it is known"


def test_draft_tokens_count_as_output() -> None:
    sequence = row_of(4, runs=((5, 6, 7),))
    assert best_of([7, 3], Drafted(sequence, (5, 6)), Drafted(sequence, (5,)), Drafted(sequence, (6,))) == [3, 7, 7]
    sequence.expect_token(0)
    assert best_of([7, 3], Drafted(sequence, (6,)), sampled=[5]) == [3]
    assert best_of([7, 3], Drafted(sequence, (6,)), sampled=[4]) == [7]


def test_a_grammar_comes_before_allowed_tokens_and_these_before_banned_runs() -> None:
    words = np.zeros((1, 2), dtype=np.int32)
    words[0, 0] = 1 << 7 | 1 << 8
    mask = TokenMasks([0], words)
    assert best_of([30, 5, 7, 8], row_of(allowed=(5, 8)), allowed=mask) == [8]
    assert best_of([30, 5, 7, 8], row_of(allowed=(5, 6)), allowed=mask) == [7], "the grammar leaves none of them"
    assert best_of([30, 5, 6], row_of(allowed=(5, 6), runs=((5,), (6,)))) == [5]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (TokenRules((V,)), "vocabulary"),
        (TokenRules((), ((1, -1),)), "vocabulary"),
        (TokenRules((), ((),)), "no tokens"),
        (TokenRules(tuple([1] * (MAX_RULE_IDS + 1))), "4,096"),
        (TokenRules((), ((1,) * (MAX_RULE_IDS + 1),)), "4,096"),
        (TokenRules((9,)), "min_tokens forbids"),
        (TokenRules((9, 8), ((8,),)), ""),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(rules: TokenRules, words: str) -> None:
    sampling = Sampling(token_rules=rules)
    submit = Submit("r", 0, "m", "t", STANDARD, [1], sampling, Stopping(5, min_tokens=2), 5, b"", 0)
    refusal = find_refusal(submit, LIMITS)
    assert refusal is None if not words else refusal is not None and words in refusal.message
    free = msgspec.structs.replace(submit, sampling=Sampling(token_rules=TokenRules((9,))), stopping=Stopping(5))
    assert find_refusal(free, LIMITS) is None
