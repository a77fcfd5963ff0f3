"""Embeddings over the wire: a request that ends with its vector, without credit and without a token."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from moiety_engine.scripted.script import Script
from moiety_wire.messages import (
    Abort,
    Accepted,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Hello,
    Stopping,
    UsageAcknowledgement,
)

NOTHING = Stopping(max_tokens=0)


def wanted(submit: Any, request_id: str = "r", prompt: Any = "hello", **changes: Any) -> Any:
    return submit(request_id, prompt, **{"embed": True, "stopping": NOTHING, "credit_tokens": 0, **changes})


async def test_it_is_accepted_and_ends_with_a_unit_vector_and_no_token(bench: Any, submit: Any) -> None:
    async with bench(Script(embedding_width=8)) as running:
        gateway = running.connect()
        card = await gateway.greet()
        assert card.embedding_width == 8
        answer = await gateway.ask(wanted(submit))
        end = answer.end
        assert isinstance(answer.accepted, Accepted) and isinstance(end, Finished)
        assert (end.reason, end.num_prompt_tokens, end.num_output_tokens, end.text) == (FinishReason.STOP, 5, 0, "")
        assert math.hypot(*struct.unpack("<8f", end.embedding)) == pytest.approx(1.0, abs=1e-6)
        assert (await gateway.until_idle()).output_tokens_total == 0


async def test_the_vector_follows_from_the_prompt_alone(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        found = {}
        for request_id, prompt in (("a", "hello"), ("b", "hello"), ("c", "hellp")):
            found[request_id] = (await gateway.ask(wanted(submit, request_id, prompt))).end.embedding
        assert found["a"] == found["b"] != found["c"]
        assert isinstance((await gateway.ask(submit("d"))).end, Finished)
        assert gateway.answers["d"].end.embedding == b""


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        (Script(embedding_width=0), {}, "embeddings are not available"),
        (Script(), {"stopping": Stopping(max_tokens=1)}, "max_tokens must be 0, not 1"),
        (Script(), {"sibling_tokens": -1}, "sibling_tokens must be 0 or more"),
        (Script(), {"embed": False}, "max_tokens must be at least 1"),
    ],
)
async def test_invalid_embedding_requests_are_refused_with_a_reason(
    bench: Any, submit: Any, script: Script, changes: Any, message: str
) -> None:
    async with bench(script) as running:
        gateway = running.connect()
        await gateway.greet()
        end = (await gateway.ask(wanted(submit, **changes))).end
        assert isinstance(end, Failed) and end.code is FailureCode.INVALID_REQUEST
        assert message in end.message


async def test_a_prompt_may_fill_the_context_and_no_more(bench: Any, submit: Any) -> None:
    async with bench(Script(max_context_tokens=10)) as running:
        gateway = running.connect()
        await gateway.greet()
        assert isinstance((await gateway.ask(wanted(submit, "fits", "0123456789"))).end, Finished)
        end = (await gateway.ask(wanted(submit, "does not", "0123456789a"))).end
        assert isinstance(end, Failed) and end.code is FailureCode.CONTEXT_LENGTH_EXCEEDED


async def test_an_abort_ends_it_without_a_vector(bench: Any, submit: Any) -> None:
    async with bench(Script(step_delay_s=0.2)) as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(wanted(submit), Abort("r", 1))
        end = (await gateway.finish()).end
        assert isinstance(end, Finished)
        assert (end.reason, end.embedding) == (FinishReason.ABORT, b"")
        await gateway.until_idle()


async def test_an_embedding_is_metered_as_a_prompt_without_output(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(Hello("gateway", replica_id="first"))
        await gateway.until(lambda: gateway.loads)
        await gateway.ask(wanted(submit, billing_context=b"bill"))
        assert "first" in (await gateway.until_load(lambda load: load.unacknowledged_replicas)).unacknowledged_replicas
        await gateway.send(UsageAcknowledgement("first", ["r"]))
        await gateway.until_load(lambda load: not load.unacknowledged_replicas)


async def test_an_encoder_with_a_head_returns_its_logits_and_refuses_to_generate(bench: Any, submit: Any) -> None:
    async with bench(Script(labels=("bad", "good"))) as running:
        gateway = running.connect()
        card = await gateway.greet()
        assert (card.generates, card.labels, card.score_activation) == (False, ("bad", "good"), "softmax")
        assert card.embedding_width == 0
        end = (await gateway.ask(wanted(submit, "pair", second_segment_at=3))).end
        assert isinstance(end, Finished) and len(end.embedding) == 8
        for request_id, changes, message in (
            ("text", {"embed": False, "stopping": Stopping(max_tokens=2)}, "an encoder generates no text"),
            ("far", {"second_segment_at": 5}, "second_segment_at must be an index of the prompt's 5 tokens, not 5"),
            ("low", {"second_segment_at": -1}, "second_segment_at must be an index"),
        ):
            refused = (await gateway.ask(wanted(submit, request_id, **changes))).end
            assert isinstance(refused, Failed) and message in refused.message
