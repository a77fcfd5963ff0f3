"""Traces are read in the forms in which they are published, and refused with the line that is wrong."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from moiety_platform.bench.traces import BadTrace, TraceRequest, at_rate, draw_poisson, read_trace, shorten


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_own_form_is_sorted_by_arrival_and_starts_at_zero(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,tenant,input_tokens,output_tokens,class\n7.5,b,4,5,flex\n5.0,a,10,20,\n")
    assert read_trace(path) == [TraceRequest(0.0, "a", 10, 20, "standard"), TraceRequest(2.5, "b", 4, 5, "flex")]


def test_a_trace_without_classes_is_all_standard(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,tenant,input_tokens,output_tokens\n0,a,1,2\n")
    assert read_trace(path)[0].service_class == "standard"


def test_the_azure_form_is_read_with_its_seven_digit_seconds(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = read_trace(write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    assert (first.input_tokens, first.output_tokens) == (374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_the_vtc_form_names_its_clients_as_tenants(tmp_path: Path) -> None:
    path = write(tmp_path, "req_time_s,client,prompt_len,output_len\n0.0,13,13,199\n0.2,2,36,137\n")
    assert [request.tenant for request in read_trace(path)] == ["13", "2"]


def test_the_mooncake_form_is_json_lines_in_milliseconds(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 0, "input_length": 5, "output_length": 6}\n'
        '{"timestamp": 1500, "input_length": 7, "output_length": 8}\n'
    )
    assert read_trace(write(tmp_path, lines, "trace.jsonl"))[1] == TraceRequest(1.5, "default", 7, 8)


def test_requests_without_tokens_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,tenant,input_tokens,output_tokens\n0,a,0,5\n1,a,3,0\n2,a,3,5\n")
    assert read_trace(path) == [TraceRequest(0.0, "a", 3, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns a, b; known are"),
        ("arrival_s,tenant,input_tokens,output_tokens\n0,a,1,2\n1,a,x,2\n", "line 3"),
        ("arrival_s,tenant,input_tokens,output_tokens\n0,a,1\n", "line 2"),
        ("arrival_s,tenant,input_tokens,output_tokens\n", "holds no request"),
        ("", "known are"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadTrace, match=message):
        read_trace(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"cannot read .*nothing\.csv"):
        read_trace(tmp_path / "nothing.csv")


def test_a_rate_stretches_time_and_keeps_the_bursts() -> None:
    requests = [TraceRequest(time_s, "a", 1, 1) for time_s in (0.0, 0.1, 0.2, 3.0, 4.0)]
    stretched = at_rate(requests, rate_per_s=0.5)
    assert [request.arrival_s for request in stretched] == pytest.approx([0.0, 0.2, 0.4, 6.0, 8.0])


def test_a_trace_is_shortened_by_number_and_by_time() -> None:
    requests = [TraceRequest(float(time_s), "a", 1, 1) for time_s in range(10)]
    assert len(shorten(requests, 3, None)) == 3
    assert [request.arrival_s for request in shorten(requests, None, 2.5)] == [0.0, 1.0, 2.0]


def test_poisson_arrivals_have_the_rate_that_was_asked_for() -> None:
    requests = draw_poisson(Random(1), rate_per_s=20, num_requests=4000, input_tokens=3, output_tokens=4)
    assert requests[-1].arrival_s == pytest.approx(200, rel=0.05)
    assert requests == sorted(requests, key=lambda request: request.arrival_s)
