"""The demo model as an object in Python."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moiety_demo
from moiety_engine import LLM, SamplingParams
from moiety_engine.checkpoint import fingerprint
from moiety_engine.errors import EngineError, InvalidConfig, InvalidRequest
from moiety_engine.model.transformer import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(batch_invariant=True, max_running=8, num_threads=1) as model:
        yield model


def test_conversations_are_answered_in_their_order_whatever_their_length(llm: LLM) -> None:
    asked = [ask(f"What is {a} + {b}?") for a, b in ((4, 5), (123, 456), (40, 2), (7, 7))] * 6
    told = llm.chat(asked, [GREEDY, SamplingParams(temperature=0, max_tokens=30)] * 12)
    assert [one.text for one in told] == ["9", "579", "42", "14"] * 6
    assert {one.completions[0].finish_reason for one in told} == {"stop"}


def test_the_card_names_the_checkpoint_and_how_it_is_computed(llm: LLM) -> None:
    card = llm.card
    assert card.model_digest == fingerprint(moiety_demo.checkpoint_path()) and len(card.model_digest) == 64
    assert (card.layout, card.batch_invariant, card.serves_spot) == ("tp=1", True, True)


def test_the_same_seed_draws_the_same_alone_in_a_batch_and_as_the_first_of_several(llm: LLM) -> None:
    prompts = [f"The {word} of" for word in ("capital", "sum", "list", "end", "middle")]
    drawn = SamplingParams(temperature=1.5, max_tokens=16, seed=7, logprobs=3, ignore_eos=True)
    together = [one.completions[0] for one in llm.generate(prompts, drawn)]
    alone = [llm.generate(prompt, drawn)[0].completions[0] for prompt in prompts]
    assert [(one.token_ids, one.logprobs) for one in together] == [(one.token_ids, one.logprobs) for one in alone]
    several = llm.generate(prompts[0], SamplingParams(n=4, temperature=1.5, max_tokens=16, seed=7, ignore_eos=True))
    texts = [one.token_ids for one in several[0].completions]
    assert texts[0] == alone[0].token_ids
    assert len({tuple(ids) for ids in texts}) == 4


def test_logprobs_have_ids_and_the_greedy_token_is_the_likeliest(llm: LLM) -> None:
    found = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0].completions[0]
    assert found.logprobs is not None
    assert [one.token_id for one in found.logprobs] == found.token_ids
    for one in found.logprobs:
        assert max(one.top, key=lambda token: one.top[token]) == one.token_id
        assert one.top[one.token_id] == one.logprob <= 0


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"batch_invariant": True}, marks=pytest.mark.thorough), {"tp": 2}], ids=str
)
def test_a_prompts_tokens_have_the_logprobs_that_transformers_gives_them(options: dict[str, Any]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(moiety_demo.checkpoint_path(), dtype=torch.float32)
    drawn = random.Random(5)
    prompts = [[drawn.randrange(200, 1800) for _ in range(length)] for length in (1, 2, 40, 97, 40)]
    wanted = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, n=2, ignore_eos=True)
    with LLM(dtype="float32", max_batch_tokens=16, num_threads=1, **options) as model:
        model.generate(prompts, GREEDY)  # so that a cache has them
        found = model.generate(prompts, wanted)
    for ids, output in zip(prompts, found, strict=True):
        assert output.prompt_logprobs is not None
        assert [one.token_id for one in output.prompt_logprobs] == ids[1:]
        with torch.inference_mode():
            true_TV = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        for row_V, one in zip(true_TV, output.prompt_logprobs, strict=False):
            assert one.logprob == pytest.approx(float(row_V[one.token_id]), abs=2e-3)
            better = (row_V > row_V[one.token_id] + 4e-3).sum(), (row_V > row_V[one.token_id] - 4e-3).sum()
            assert better[0] < one.rank <= better[1]
            assert sorted(one.top.values()) == pytest.approx(sorted(row_V.topk(2).values.tolist()), abs=2e-3)


def test_a_stream_gives_the_same_text_and_one_that_is_left_ends(llm: LLM) -> None:
    whole = llm.generate("What is", SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True))[0]
    pieces = list(llm.stream("What is", SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True)))
    for one in whole.completions:
        mine = [piece for piece in pieces if piece.index == one.index]
        assert "".join(piece.text for piece in mine) == one.text
        assert [piece.finish_reason for piece in mine if piece.finish_reason] == ["length"]
    stream = llm.stream("What is", SamplingParams(ignore_eos=True))
    assert len(list(islice(stream, 3))) == 3
    assert llm.chat(ask("What is 2 + 3?"), GREEDY)[0].text == "5"  # beside the stream that nobody reads
    assert next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert llm.chat(ask("What is 2 + 4?"), GREEDY)[0].text == "6"
    assert llm.replica.num_open == 0


def test_stop_strings_and_stop_tokens_end_an_answer(llm: LLM) -> None:
    free = llm.chat(ask("What is 123 + 456?"), GREEDY)[0].completions[0]
    assert free.stopped_by == "stop_token"
    cut = llm.chat(ask("What is 123 + 456?"), SamplingParams(temperature=0, stop=("7",)))[0].completions[0]
    assert (cut.text, cut.stopped_by, cut.finish_reason) == (free.text.partition("7")[0], "7", "stop")


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (SamplingParams(temperature=-1), "temperature must be between"),
        (SamplingParams(n=0), "n must be at least 1"),
        (SamplingParams(max_tokens=0), "max_tokens must be at least 1"),
        ([GREEDY, GREEDY], "1 prompts and 2 SamplingParams"),
    ],
)
def test_invalid_requests_raise_and_the_model_continues(llm: LLM, params: object, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        llm.generate(["hello"], params)
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        llm.generate([[5] * 100, [5] * 100_000], GREEDY)
    assert llm.chat(ask("What is 2 + 4?"), GREEDY)[0].text == "6"


def test_options_are_checked_by_name_and_value() -> None:
    with pytest.raises(InvalidConfig, match="unknown option"):
        LLM(temperature=1)
    with pytest.raises(InvalidConfig, match="batching"):
        LLM(batching="sometimes")


def num_models() -> int:
    gc.collect()
    return sum(type(one) is Transformer for one in gc.get_objects())


def test_a_closed_model_has_given_its_memory_back() -> None:
    before = num_models()
    model = LLM()
    assert num_models() == before + 1
    model.close()
    assert num_models() == before
    with pytest.raises(EngineError, match="closed"):
        model.generate("hello")
