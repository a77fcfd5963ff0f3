from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from moiety_engine.front.telemetry import phase_recorder
from moiety_engine.scripted.script import Script
from moiety_wire.messages import Abort

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def recorder() -> tuple[Any, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return phase_recorder(provider.get_tracer("test")), exporter


async def test_a_finished_request_leaves_its_phases_under_the_gateways_span(bench: Any, submit: Any) -> None:
    record, exporter = recorder()
    async with bench(on_finished=record) as running:
        answer = await running.connect().ask(submit(prompt="secret", traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01"))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"engine.queue", "engine.prefill", "engine.decode"}
    for span in spans.values():
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert f"{span.parent.span_id:016x}" == PARENT_ID
        assert span.attributes["moiety.tenant_id"] == "tenant"
        assert "secret" not in span.to_json()
    phases = answer.end.phases
    assert spans["engine.queue"].start_time == phases.received_unix_ns
    assert spans["engine.queue"].end_time == spans["engine.prefill"].start_time == phases.scheduled_unix_ns
    assert spans["engine.prefill"].end_time == spans["engine.decode"].start_time == phases.first_token_unix_ns
    assert spans["engine.decode"].end_time == phases.finished_unix_ns
    assert spans["engine.decode"].attributes["gen_ai.usage.output_tokens"] == answer.end.num_output_tokens


async def test_a_request_that_was_never_scheduled_leaves_only_its_wait(bench: Any, submit: Any) -> None:
    record, exporter = recorder()
    async with bench(Script(max_running=1), on_finished=record) as running:
        gateway = running.connect()
        await gateway.send(submit("first", credit_tokens=1), submit("second"), Abort("second", 1))
        answer = await gateway.finish("second")
        assert answer.token_ids == []
        assert [span.name for span in exporter.get_finished_spans()] == ["engine.queue"]
