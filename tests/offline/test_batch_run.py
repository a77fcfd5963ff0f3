"""`moiety batch run`, the real command with the demo model: answered, killed at any byte, gone on with, refused."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.offline.answer_file import AnswerFile
from moiety_platform.cli.offline.input_file import read_work
from moiety_platform.cli.offline.run import run_file

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
DEADLINE_S = 120


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "moiety-demo", **body}}


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    return line(custom_id, messages=[{"role": "user", "content": text}], temperature=0, **body)


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "moiety_platform.cli", "batch", "run", *map(str, arguments)]


def run_on_terminal(line: list[str]) -> tuple[subprocess.CompletedProcess[bytes], str]:
    """With standard error on a terminal: the second is all that was drawn there."""
    terminal, end = pty.openpty()
    drawn: list[bytes] = []

    def watch() -> None:
        with contextlib.suppress(OSError):  # of a terminal that nobody has open any more
            while piece := os.read(terminal, 4096):
                drawn.append(piece)

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=end, timeout=DEADLINE_S, check=False)
    os.close(end)
    watcher.join()
    os.close(terminal)
    return done, b"".join(drawn).decode()


def never() -> Any:
    raise AssertionError("there is nothing to load a model for")


def test_lines_of_every_endpoint_are_answered_in_openais_shape_with_a_bar_on_a_terminal(tmp_path: Path) -> None:
    sums = [chat(f"sum-{a}", f"What is {a} + {a + 7}?", max_tokens=20) for a in range(12)]
    others = [
        line("text", COMPLETIONS, prompt=["What", "The"], n=2, seed=3, logprobs=2, max_tokens=4),
        line("vectors", EMBEDDINGS, input=["one", "two"], dimensions=4),
        line("scores", "/v1/score", text_1="one", text_2=["one", "two"]),
        line("message", "/v1/messages", max_tokens=4, messages=[{"role": "user", "content": "hello"}]),
        chat("hot", "hello") | {"body": {"model": "moiety-demo", "messages": [], "temperature": 9}},
        line("other", model="gpt", messages=[{"role": "user", "content": "hello"}]),
        line("nowhere", "/v1/nowhere"),
        chat("long", "a b " * 5000, max_tokens=4),
        line("file", messages=[{"role": "user", "content": [{"type": "file", "file": {"file_data": "JVBERi0="}}]}]),
    ]
    file, output = write(tmp_path / "asked.jsonl", sums + others), tmp_path / "out.jsonl"
    done, drawn = run_on_terminal(command(file, "--output", output, "--json"))
    assert done.returncode == 0, drawn
    assert "21/21" in drawn
    report = json.loads(done.stdout)
    assert (report["lines"], report["answered"], report["failed"]) == (21, 15, 6)
    answers = {one["custom_id"]: one["response"] for one in read(output)}
    bodies = {name: response["body"] for name, response in answers.items()}
    assert len(answers) == 21
    told = [bodies[f"sum-{a}"]["choices"][0]["message"]["content"] for a in range(12)]
    assert told == [str(2 * a + 7) for a in range(12)]
    assert [choice["index"] for choice in bodies["text"]["choices"]] == [0, 1, 2, 3]
    assert len(bodies["text"]["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    assert [len(one["embedding"]) for one in bodies["vectors"]["data"]] == [4, 4]
    scores = [one["score"] for one in bodies["scores"]["data"]]
    assert scores == [pytest.approx(1.0, abs=1e-6), pytest.approx(scores[1])] and -1 <= scores[1] < 0.9999
    codes = {
        name: (answers[name]["status_code"], bodies[name]["error"]["code"])
        for name in bodies
        if "error" in bodies[name]
    }
    assert codes == {
        "hot": (400, "invalid_request"),
        "other": (404, "model_not_found"),
        "nowhere": (400, "mismatched_endpoint"),
        "message": (400, "mismatched_endpoint"),
        "long": (400, "context_length_exceeded"),
        "file": (400, "invalid_document"),
    }
    used = sum(body["usage"].get("completion_tokens", 0) for body in bodies.values() if "usage" in body)
    assert report["output_tokens"] == used
    assert report["output_tokens_per_s"] > 0


def test_a_run_that_is_killed_goes_on_with_the_lines_that_have_no_whole_answer(tmp_path: Path) -> None:
    lines = [chat(f"{a}", f"What is {a} + 1?", max_tokens=120, ignore_eos=True) for a in range(16)]
    file, output = write(tmp_path / "asked.jsonl", lines), tmp_path / "asked.answers.jsonl"
    running = subprocess.Popen(command(file, "--max-running", 4), stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + DEADLINE_S
    while not output.exists() or output.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < until_s and running.poll() is None, "no answer was written in time"
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait(DEADLINE_S)
    whole = output.read_bytes()
    whole = whole[: whole.rindex(b"\n") + 1]
    kept = whole[: whole.rindex(b"\n", 0, -1) + 1]
    output.write_bytes(whole[:-40])  # as though it had been killed in the middle of a write
    num_kept = kept.count(b"\n")
    assert 0 < num_kept < len(lines)
    done = subprocess.run(command(file, "--json"), capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")  # and no bar in a pipe
    report = json.loads(done.stdout)
    assert (report["answered_before"], report["answered"]) == (num_kept, len(lines) - num_kept)
    assert output.read_bytes().startswith(kept)
    assert sorted(one["custom_id"] for one in read(output)) == sorted(one["custom_id"] for one in lines)
    run_file(file, None, model="moiety-demo", open_replica=never, as_json=True)


def test_a_line_that_was_cut_at_any_byte_is_dropped_and_nothing_before_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    one, two = (
        json.dumps({"id": f"batch_req_{n}", "custom_id": n}, separators=(",", ":")).encode() + b"\n" for n in "ab"
    )
    for cut in range(len(two)):
        path.write_bytes(one + two[:cut])
        with AnswerFile(path) as answers:
            assert answers.keys == {"a": "a"}
            with pytest.raises(CommandError, match="another run"):
                AnswerFile(path)
            answers.add(two[:-1])
        assert path.read_bytes() == one + two


def test_files_that_are_no_outputs_of_the_batch_are_left_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "asked.jsonl", [chat("a", "hello")])
    notes = tmp_path / "notes.txt"
    answer = b'{"id":"batch_req_0","custom_id":"a","response":null,"error":null}\n'
    for content, told in ((b"my notes\n", "line 1"), (b"my notes", "ends with"), (answer, "of another line or model")):
        notes.write_bytes(content)
        with pytest.raises(CommandError, match=told):
            run_file(file, notes, model="moiety-demo", open_replica=never, as_json=True)
        assert notes.read_bytes() == content
    with pytest.raises(CommandError, match="file of requests"):
        run_file(file, file, model="moiety-demo", open_replica=never, as_json=True)


def test_lines_without_an_id_of_their_own_are_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    file = write(
        tmp_path / "asked.jsonl", [chat("a", "hello"), chat("a", "hello"), chat("", "hello"), {"custom_id": "b"}]
    )
    with pytest.raises(CommandError) as raised:
        run_file(file, None, model="moiety-demo", open_replica=never, as_json=True)
    named = [part.partition(":")[0] for part in str(raised.value).splitlines()[1:]]
    assert named == ["line 2", "line 3", "line 4"]


def test_the_longest_lines_go_first(tmp_path: Path) -> None:
    lines = [
        chat("short", "hi", max_tokens=2),
        chat("two", "hi", max_tokens=40, n=2),
        chat("prompt", "word " * 200, max_tokens=2),
        chat("one", "hi", max_completion_tokens=50),
    ]
    work = read_work(write(tmp_path / "asked.jsonl", lines), "moiety-demo")
    assert [one.custom_id for one in work] == ["prompt", "two", "one", "short"]
