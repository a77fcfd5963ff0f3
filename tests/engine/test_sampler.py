"""The sampler against its specification, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from moiety_engine.messages import CoreSubmit
from moiety_engine.sampling import Sampler
from moiety_engine.sampling.randomness import uniforms
from moiety_engine.sampling.sampler import draws, penalties_of
from moiety_engine.sequence import Sequence
from moiety_engine.server.validation import MAX_BIAS, MAX_PENALTY, MIN_REPETITION_PENALTY, ModelLimits, find_refusal
from moiety_kernels.sample import penalised
from moiety_kernels.sample import sample as draw_on_device
from moiety_kernels.sample.reference import MIN_TEMPERATURE
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling, Stopping, Submit

V = 50
LIMITS = ModelLimits("m", 100, V, 20, (), makes_embeddings=False)


def make_row(sampling: Sampling, *, output: list[int] | None = None, seed: int = 1, min_tokens: int = 0) -> Sequence:
    submit = CoreSubmit(0, "t", "c", [1, 2, 3], sampling, 100, min_tokens, [4], 100, b"", 0)
    row = Sequence(submit, order=0, seed=seed)
    row.tokens += output or []
    return row


def sample(logits_LV: torch.Tensor, *rows: Sequence) -> list[int]:
    return Sampler(logits_LV.shape[1], torch.device("cpu")).sample(logits_LV.clone(), rows).unpack()[0]


def frequencies(logits_V: torch.Tensor, sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    rows = [make_row(sampling, seed=seed) for seed in range(draws)]
    tokens = torch.tensor(sample(logits_V.expand(draws, -1), *rows))
    return torch.bincount(tokens, minlength=len(logits_V)) / draws


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(3, V)
    assert sample(logits, *[make_row(Sampling(temperature=0.0))] * 3) == logits.argmax(-1).tolist()


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    expected = (logits / 0.7).softmax(-1)
    assert torch.allclose(frequencies(logits, Sampling(temperature=0.7)), expected, atol=0.03)


def test_top_k_keeps_exactly_k_tokens_and_their_proportions() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, 2.0])
    expected = logits.clone()
    expected[[1, 2]] = -math.inf
    assert torch.allclose(frequencies(logits, Sampling(top_k=2)), expected.softmax(-1), atol=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seen = frequencies(probs.log(), Sampling(top_p=0.75))
    assert torch.allclose(seen, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.03)


def test_a_top_p_of_zero_keeps_the_best_token() -> None:
    logits = torch.randn(3, V)
    assert sample(logits, *[make_row(Sampling(top_p=0.0), seed=i) for i in range(3)]) == logits.argmax(-1).tolist()


def test_min_p_drops_what_is_far_below_the_best() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seen = frequencies(probs.log(), Sampling(min_p=0.5))
    assert torch.allclose(seen, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.03)


def test_a_filter_that_needs_more_than_the_preselected_tokens_uses_the_whole_vocabulary() -> None:
    wide = torch.zeros(5000)
    seen = set(sample(wide.expand(400, -1), *[make_row(Sampling(top_p=0.9), seed=s) for s in range(400)]))
    assert 300 < len(seen) <= 400  # far more than could come from a thousand preselected ones: most are distinct
    assert max(seen) >= 1024


@given(
    seed=st.integers(0, 2**63),
    position=st.integers(0, 1000),
    temperature=st.floats(0.1, 2),
    top_p=st.floats(0.05, 1),
    top_k=st.sampled_from([0, 1, 5, 40]),
    neighbours=st.integers(0, 4),
    data=st.data(),
)
@settings(max_examples=examples(80), deadline=None)
def test_a_seeded_draw_does_not_depend_on_the_neighbours(
    seed: int, position: int, temperature: float, top_p: float, top_k: int, neighbours: int, data: st.DataObject
) -> None:
    logits_V = torch.randn(V, generator=torch.Generator().manual_seed(seed % 1000))
    row = make_row(Sampling(temperature=temperature, top_p=top_p, top_k=top_k), output=[9] * position, seed=seed)
    others = [make_row(Sampling(temperature=1.0, top_p=0.5 + 0.1 * i), seed=i) for i in range(neighbours)]
    place = data.draw(st.integers(0, neighbours))
    rows = [*others[:place], row, *others[place:]]
    logits_LV = torch.randn(neighbours + 1, V)
    logits_LV[place] = logits_V
    assert sample(logits_LV, *rows)[place] == sample(logits_V[None], row)[0]


def test_penalties_follow_their_definitions() -> None:
    logits = torch.zeros(1, V)
    logits[0, 10], logits[0, 11], logits[0, 12] = 5.0, 4.0, 3.0
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert sample(logits, make_row(Sampling(**greedy, presence_penalty=1.5), output=[10])) == [11]
    assert sample(logits, make_row(Sampling(**greedy, frequency_penalty=1.1), output=[10, 10, 11])) == [12]
    assert sample(logits, make_row(Sampling(**greedy, repetition_penalty=2.0), output=[10])) == [11]
    assert sample(logits, make_row(Sampling(**greedy, logit_bias={30: 100.0}))) == [30]


def test_stop_tokens_are_banned_below_min_tokens() -> None:
    logits = torch.zeros(1, V)
    logits[0, 4] = 9.0
    assert sample(logits, make_row(Sampling(temperature=0.0))) == [4]
    assert sample(logits, make_row(Sampling(temperature=0.0), min_tokens=1)) != [4]


def test_logprobs_are_those_of_the_model_before_bias_and_temperature() -> None:
    logits = torch.randn(2, V)
    rows = [make_row(Sampling(temperature=0.5, num_logprobs=3, logit_bias={7: 50.0})), make_row(Sampling())]
    tokens, logprobs = Sampler(V, torch.device("cpu")).sample(logits.clone(), rows).unpack()
    expected = logits[0].log_softmax(-1)
    assert tokens[0] == 7
    assert logprobs[1] is None
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(expected[7].item(), abs=1e-5)
    assert logprobs[0].top_ids == expected.topk(3).indices.tolist()


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**6))
def test_the_uniform_number_is_in_range_and_reproducible(seed: int, position: int) -> None:
    number = uniforms([seed], [position])[0]
    assert 0 <= number < 1
    assert uniforms([3, seed], [0, position])[1] == number


def test_uniform_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    for values in (uniforms([*range(2000)], [0] * 2000), uniforms([3] * 2000, [*range(2000)])):
        counts = torch.histc(torch.from_numpy(values), bins=10, min=0, max=1)
        chi_squared = ((counts - 200) ** 2 / 200).sum()
        assert chi_squared < 30  # 9 degrees of freedom: p < 0.0005


def test_the_operation_for_gpus_draws_the_same_tokens() -> None:
    settings_of = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8),
        Sampling(top_k=7),
        Sampling(top_k=2**40),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1, temperature=1.5),
        Sampling(top_k=20, top_p=0.9, min_p=0.01),
    ] * 20
    rows = [make_row(one, seed=seed) for seed, one in enumerate(settings_of)]
    logits = torch.randn(len(rows), V) * 2
    asked = draws(rows, torch.from_numpy)
    assert draw_on_device(logits.clone(), asked).tolist() == sample(logits, *rows)
    lowering = [Sampling(repetition_penalty=1.7), Sampling(temperature=0.0, presence_penalty=2.0, top_k=5), Sampling()]
    lowering += [Sampling(frequency_penalty=0.9, top_p=0.7), Sampling(temperature=0.0)]
    rows = [make_row(one, seed=seed, output=[seed % 9, 7, 7]) for seed, one in enumerate(lowering * 20)]
    picked = [i for i in range(len(rows)) if i % 5 in (0, 1, 3)]
    lowered = penalties_of(rows, picked, V, None, torch.from_numpy)
    drawn = draw_on_device(logits[: len(rows)].clone(), draws(rows, torch.from_numpy), lowered).tolist()
    assert drawn == sample(logits[: len(rows)], *rows)
    assert drawn != draw_on_device(logits[: len(rows)].clone(), draws(rows, torch.from_numpy)).tolist()


SMALL = st.sampled_from([0.0, 5e-324, 1e-300, 1e-46, 1e-39, 1e-30, 1e-6])


@settings(max_examples=examples(200))
@given(
    temperature=SMALL | st.just(100.0),
    top_p=SMALL | st.just(1.0),
    min_p=SMALL | st.just(1.0),
    repetition=st.sampled_from([MIN_REPETITION_PENALTY, 1.0, MAX_PENALTY]),
    presence=st.sampled_from([-MAX_PENALTY, -1e-39, 0.0, MAX_PENALTY]),
    frequency=st.sampled_from([-MAX_PENALTY, 1e-39, 0.0, MAX_PENALTY]),
    bias=st.sampled_from([-MAX_BIAS, -1e-39, 0.0, MAX_BIAS]),
    seed=st.integers(0, 99),
)
def test_no_setting_that_is_accepted_makes_a_number_that_is_not_finite(
    temperature: float,
    top_p: float,
    min_p: float,
    repetition: float,
    presence: float,
    frequency: float,
    bias: float,
    seed: int,
) -> None:
    asked = Sampling(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={2: bias, 5: -bias},
    )
    assert find_refusal(Submit("r", 0, "m", "t", STANDARD, [1], asked, Stopping(1), 1, b"", 0), LIMITS) is None
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 30
    row = make_row(asked, output=[2, 2, 3, 5], seed=seed)
    lowered = penalties_of([row], [0], V, None, torch.from_numpy)
    biased = logits.clone()
    biased[0, 2] += bias
    biased[0, 5] -= bias
    if lowered is not None:
        biased = penalised(biased, lowered)
    assert (biased / MIN_TEMPERATURE).isfinite().all()
    for token in (*sample(logits, row), *draw_on_device(biased, draws([row], torch.from_numpy), None).tolist()):
        assert 0 <= token < V
        if temperature < 1e-6 or top_p < 1e-6 or min_p == 1:
            assert biased[0, token] == biased.max()


@pytest.mark.parametrize(
    "asked",
    [
        *(Sampling(repetition_penalty=value) for value in (0.0, 1e-39, 1e-4, 1e39, math.inf, math.nan)),
        *(Sampling(logit_bias={1: value}) for value in (1e39, -1e300, math.inf, -math.inf, math.nan)),
        *(Sampling(presence_penalty=value) for value in (1e39, math.nan)),
        *(Sampling(frequency_penalty=value) for value in (-1e39, math.nan)),
        *(Sampling(temperature=value) for value in (-1e-39, 1e39, math.nan)),
    ],
)
def test_a_setting_beyond_what_float32_computes_is_refused(asked: Sampling) -> None:
    assert find_refusal(Submit("r", 0, "m", "t", STANDARD, [1], asked, Stopping(1), 1, b"", 0), LIMITS) is not None
