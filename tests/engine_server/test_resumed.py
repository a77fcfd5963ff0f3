"""A request that another engine has begun goes on as if nothing had happened, wherever it was broken off."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from moiety_engine.scripted.script import Script, ScriptedDecision
from moiety_engine.scripted.text_model import END_ID
from moiety_wire.messages import Failed, FailureCode, FinishReason, Sampling, Stopping
from moiety_wire.trace_events import Reason

CASES = {
    "code points": (Script(tokens=tuple("naïve 日本語 🙂 end".encode())), Stopping(max_tokens=100)),
    "two tokens a step": (Script(tokens=tuple("añbñc".encode()), tokens_per_step=2), Stopping(max_tokens=100)),
    "stop string": (
        Script(tokens=tuple(b"one two stopping there")),
        Stopping(max_tokens=100, stop=("stop there", "ing")),
    ),
    "included stop string": (
        Script(tokens=tuple(b"one two stopping there")),
        Stopping(max_tokens=100, stop=("stop there", "ing"), includes_stop=True),
    ),
    "held back to the end": (Script(tokens=tuple(b"one sto")), Stopping(max_tokens=100, stop=("stop",))),
    "least": (Script(tokens=tuple(b"ab stop cd stop")), Stopping(max_tokens=100, min_tokens=9, stop=("stop",))),
    "length": (Script(tokens=tuple(b"abcdef")), Stopping(max_tokens=17, ignore_eos=True)),
    "broken at length": (Script(tokens=tuple("日本".encode())), Stopping(max_tokens=4)),
}

EMBEDDED = {"embed": True, "stopping": Stopping(max_tokens=0), "credit_tokens": 0}


@pytest.mark.parametrize("case", CASES)
async def test_text_end_and_counts_are_those_of_an_undisturbed_run_wherever_it_was_broken_off(
    bench: Any, submit: Any, case: str
) -> None:
    script, stopping = CASES[case]
    asked = {"stopping": stopping, "sampling": Sampling(num_logprobs=2)}
    async with bench(script) as first, bench(script) as second:
        gateway = first.connect()
        whole = await gateway.ask(submit(**asked))
        texts = dict(zip(accumulate(_lengths(whole, script)), accumulate(whole.pieces), strict=True))
        other = second.connect()
        await other.greet()
        for num_had, text in {0: "", **texts}.items():
            resumed = submit(f"cut at {num_had}", **asked, resumed_ids=whole.token_ids[:num_had])
            answer = other.answers[resumed.request_id] = type(whole)(whole.token_ids[:num_had], text)
            await other.ask(resumed)
            assert (answer.text, answer.token_ids) == (whole.text, whole.token_ids), num_had
            assert answer.logprobs == whole.logprobs[num_had:]
            assert answer.accepted.reason is Reason.FAILED_OVER
            for name in ("reason", "detail", "num_prompt_tokens", "num_output_tokens", "served_class"):
                assert getattr(answer.end, name) == getattr(whole.end, name), (num_had, name)
        await other.until_idle()
        assert second.front.num_open == 0


def _lengths(whole: Any, script: Script) -> list[int]:
    """Return the number of tokens of each message."""
    step = script.tokens_per_step
    num_left = len(whole.token_ids) - step * (len(whole.pieces) - 1)
    return [step] * (len(whole.pieces) - 1) + [num_left]


async def test_credit_goes_on_being_a_total(bench: Any, submit: Any) -> None:
    async with bench(Script(tokens=tuple(b"abc"))) as running:
        gateway = running.connect()
        await gateway.greet()
        begun = await gateway.ask(submit("begun", stopping=Stopping(max_tokens=4, ignore_eos=True)))
        answer = gateway.answers["r"] = type(begun)(begun.token_ids.copy(), begun.text)
        stopping = Stopping(max_tokens=50, ignore_eos=True)
        await gateway.send(submit(stopping=stopping, resumed_ids=begun.token_ids, credit_tokens=6))
        await gateway.until(lambda: gateway.loads and gateway.loads[-1].num_paused == 1)
        assert (answer.text, answer.token_ids) == ("abcabc", list(b"abcabc"))


async def test_resumed_requests_are_admitted_where_new_ones_are_refused(bench: Any, submit: Any) -> None:
    async with bench(Script(verdicts=(ScriptedDecision(reason=Reason.PREDICTED_LATE),))) as running:
        gateway = running.connect()
        assert isinstance((await gateway.ask(submit("new"))).end, Failed)
        resumed = await gateway.ask(submit("resumed", resumed_ids=[]))
        assert (resumed.text, resumed.end.reason) == ("hello", FinishReason.STOP)
        embedded = await gateway.ask(submit("embedded", resumed_ids=[], **EMBEDDED))
        assert (embedded.accepted.reason, embedded.end.reason) == (Reason.FAILED_OVER, FinishReason.STOP)
        assert embedded.end.embedding


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resumed_ids": [END_ID + 1000]}, "outside the model's vocabulary"),
        ({"resumed_ids": [97] * 101}, "101 output tokens cannot be resumed: this engine allows at most 100"),
        ({**EMBEDDED, "resumed_ids": [97]}, "1 output tokens cannot be resumed: this engine allows at most 0"),
    ],
)
async def test_invalid_resumptions_are_refused(bench: Any, submit: Any, changes: Any, words: str) -> None:
    async with bench(Script()) as running:
        gateway = running.connect()
        end = (await gateway.ask(submit(**changes))).end
        assert (end.code, words in end.message) == (FailureCode.INVALID_REQUEST, True)
