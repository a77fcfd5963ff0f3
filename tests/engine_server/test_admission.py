"""Verdicts and decisions of the core, as the engine server forwards them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from moiety_engine.scripted.script import Script, ScriptedDecision, ScriptedEvent
from moiety_wire.classes import FLEX, PRIORITY, STANDARD, OverloadAction
from moiety_wire.messages import Abort, Failed, FailureCode, FinishReason
from moiety_wire.trace_events import EventKind, Reason

FALLING_BACK = replace(STANDARD, on_overload=OverloadAction.DOWNGRADE)


async def test_a_request_is_accepted_when_the_core_has_admitted_it(bench: Any, submit: Any) -> None:
    async with bench(Script(predicted_ttft_s={"standard": 0.25})) as running:
        answer = await running.connect().ask(submit())
        accepted = answer.accepted
        assert (accepted.seq, accepted.served_class, accepted.reason) == (0, "standard", Reason.IN_TIME)
        assert accepted.predicted_ttft_s == 0.25
        assert answer.end.served_class == "standard"


async def test_a_rejected_request_fails_without_having_been_accepted(bench: Any, submit: Any) -> None:
    verdict = ScriptedDecision(service_class="priority", reason=Reason.PREDICTED_LATE, retry_after_s=2.5)
    async with bench(Script(verdicts=(verdict,))) as running:
        gateway = running.connect()
        await gateway.greet()
        answer = await gateway.ask(submit("late", service=PRIORITY))
        assert answer.accepted is None
        assert isinstance(answer.end, Failed)
        assert (answer.end.code, answer.end.reason) == (FailureCode.OVERLOADED, Reason.PREDICTED_LATE)
        assert (answer.end.seq, answer.end.retry_after_s, answer.end.num_output_tokens) == (0, 2.5, 0)
        assert (await gateway.ask(submit("other"))).text == "hello"
        await gateway.until(lambda: any(load.rejected_total for load in gateway.loads[-1].classes))
        (priority,) = (load for load in gateway.loads[-1].classes if load.name == "priority")
        assert priority.rejected_total == {"predicted_late": 1}


async def test_a_downgraded_request_is_served_in_its_fallback_and_says_so(bench: Any, submit: Any) -> None:
    async with bench(Script(verdicts=(ScriptedDecision(reason=Reason.KV_PEAK, downgrades=True),))) as running:
        answer = await running.connect().ask(submit(service=FALLING_BACK, fallback=FLEX))
        assert (answer.accepted.served_class, answer.accepted.reason) == ("flex", Reason.KV_PEAK)
        assert (answer.end.served_class, answer.text) == ("flex", "hello")


async def test_a_request_that_is_aborted_while_it_waits_has_been_accepted(bench: Any, submit: Any) -> None:
    async with bench(Script(max_running=1, num_blocks=7)) as running:
        gateway = running.connect()
        await gateway.send(submit("first", credit_tokens=1), submit("second"))
        await gateway.until(lambda: {"first", "second"} <= gateway.answers.keys())
        assert gateway.answers["second"].accepted is not None
        await gateway.send(Abort("second", 1))
        answer = await gateway.finish("second")
        assert (answer.token_ids, answer.end.reason) == ([], FinishReason.ABORT)


async def test_events_name_the_other_request_by_its_id_even_after_its_end(bench: Any, submit: Any) -> None:
    event = ScriptedEvent(kind=EventKind.PREEMPTED, reason=Reason.OVER_SHARE, after_tokens=1, names_another=True)
    async with bench(Script(events=(event,))) as running:
        gateway = running.connect()
        await gateway.send(submit("winner", credit_tokens=0))
        await gateway.until(lambda: "winner" in gateway.answers)
        await gateway.send(submit("loser", credit_tokens=1))
        await gateway.until(lambda: "loser" in gateway.answers and gateway.answers["loser"].token_ids)
        await gateway.send(Abort("winner", 1))
        await gateway.finish("winner")
        await gateway.send(Abort("loser", 1))
        events = (await gateway.finish("loser")).end.events
        assert [(e.kind, e.reason, e.other) for e in events] == [
            (EventKind.ADMITTED, Reason.IN_TIME, ""),
            (EventKind.PREEMPTED, Reason.OVER_SHARE, "winner"),
        ]


async def test_decisions_come_with_the_end_and_say_in_which_phase_they_were_made(bench: Any, submit: Any) -> None:
    events = (
        ScriptedEvent(kind=EventKind.BOOSTED, reason=Reason.WAITED_TOO_LONG),
        ScriptedEvent(kind=EventKind.PREEMPTED, reason=Reason.DECODE_NEEDS_BLOCKS, after_tokens=2, names_another=True),
        ScriptedEvent(kind=EventKind.RESUMED, reason=Reason.RECOMPUTE, after_tokens=2),
        ScriptedEvent(kind=EventKind.DEMOTED, reason=Reason.SLO_UNATTAINABLE, after_tokens=3),
    )
    script = Script(events=events, verdicts=(ScriptedDecision(reason=Reason.PREDICTED_LATE, downgrades=True),))
    async with bench(script) as running:
        gateway = running.connect()
        await gateway.send(submit("other", credit_tokens=0))
        await gateway.until(lambda: "other" in gateway.answers)
        end = (await gateway.ask(submit("victim", service=FALLING_BACK, fallback=FLEX))).end
    bounds = (end.phases.received_unix_ns, end.phases.scheduled_unix_ns, end.phases.first_token_unix_ns)
    told = [(sum(event.unix_ns >= at for at in bounds), event.kind, event.reason, event.other) for event in end.events]
    assert told == [
        (1, EventKind.DOWNGRADED, Reason.PREDICTED_LATE, ""),
        (2, EventKind.BOOSTED, Reason.WAITED_TOO_LONG, ""),
        (3, EventKind.PREEMPTED, Reason.DECODE_NEEDS_BLOCKS, "other"),
        (3, EventKind.RESUMED, Reason.RECOMPUTE, ""),
        (3, EventKind.DEMOTED, Reason.SLO_UNATTAINABLE, ""),
    ]
    assert (end.served_class, end.num_recomputed_tokens) == ("flex", 7)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"service": replace(STANDARD, ttft_s=-1.0)}, "service: ttft_s must be above 0"),
        ({"service": replace(STANDARD, weight=float("nan"))}, "service: weight must be above 0"),
        ({"service": replace(STANDARD, name="")}, "service: a class's name must have 1 to 64 characters"),
        ({"fallback": replace(FLEX, completion_s=None)}, "fallback: a class needs ttft_s"),
    ],
)
async def test_a_class_that_makes_no_sense_is_refused(
    bench: Any, submit: Any, changes: dict[str, Any], complaint: str
) -> None:
    async with bench() as running:
        end = (await running.connect().ask(submit(**changes))).end
        assert end.code is FailureCode.INVALID_REQUEST
        assert complaint in end.message
