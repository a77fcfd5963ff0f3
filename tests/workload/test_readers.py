"""Traces are read in the forms in which they are published, and refused with the line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moiety_workload.errors import BadTrace
from moiety_workload.readers import load_workload, read_trace
from moiety_workload.request import TraceRequest


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
        ("arrival_s,tenant,input_tokens,output_tokens\n", "has no requests"),
        ("", "known are"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadTrace, match=message):
        read_trace(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"cannot read .*nothing\.csv"):
        read_trace(tmp_path / "nothing.csv")


def mooncake(*rows: tuple[int, int, list[int]]) -> str:
    lines = (
        json.dumps({"timestamp": at, "input_length": length, "output_length": 4, "hash_ids": ids})
        for at, length, ids in rows
    )
    return "\n".join(lines)


CONVERSATIONS = [(0, 700, [0, 1]), (0, 1300, [0, 2, 3]), (3000, 1200, [0, 1, 4])]
COMMON = [(6000, 600, [0, number]) for number in range(100, 160)]  # so that block 0 is what all prompts start with


def test_mooncake_requests_that_share_a_leading_block_beyond_the_system_prompt_are_one_conversation(
    tmp_path: Path,
) -> None:
    requests = read_trace(write(tmp_path, mooncake(*CONVERSATIONS, *COMMON), "trace.jsonl"))
    assert requests[0].prefix_ids == (0, 1)
    assert [request.conversation for request in requests[:3]] == ["1", "2", "1"]
    assert len({request.conversation for request in requests}) == 62


def test_hash_ids_that_do_not_cover_the_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="line 1: 2 hash_ids for 1025 tokens"):
        read_trace(write(tmp_path, mooncake((0, 1025, [0, 1])), "trace.jsonl"))


def test_a_workload_of_conversations_keeps_each_with_one_tenant_and_spreads_the_coarse_times(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(*CONVERSATIONS, *COMMON), "trace.jsonl")
    workload = load_workload(path, seed=3, num_tenants=4)
    assert workload.prefix_block_tokens == 512
    by_conversation: dict[str, set[str]] = {}
    for request in workload.requests:
        by_conversation.setdefault(request.conversation, set()).add(request.tenant)
    assert all(len(tenants) == 1 for tenants in by_conversation.values())
    assert 2 <= len(workload.tenants) <= 4
    times = [request.arrival_s for request in workload.requests]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert max(times) < workload.duration_s
    assert workload == load_workload(path, seed=3, num_tenants=4)
    assert workload != load_workload(path, seed=4, num_tenants=4)
