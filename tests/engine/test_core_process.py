"""The core as a process of its own, over its real socket."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.messages import (
    CoreAbort,
    CoreHello,
    CoreLoad,
    CoreShutdown,
    CoreSleep,
    CoreSlept,
    CoreState,
    CoreStep,
    CoreSubmit,
    PrefixChanges,
    ToCore,
    ToServer,
)
from moiety_wire.classes import STANDARD
from moiety_wire.experts import ExpertBalance
from moiety_wire.messages import FinishReason, Sampling

DEADLINE_MS = 60_000


class EngineServerStub:
    """The other end of the PAIR socket."""

    def __init__(self, config: EngineConfig, folder: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        address = f"ipc://{folder}/core"
        self._socket.bind(address)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moiety_engine.core", "--address", address],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()

    def send(self, *commands: ToCore) -> None:
        self._socket.send(msgspec.msgpack.encode(list(commands)))

    def receive(self) -> ToServer:
        assert self._socket.poll(DEADLINE_MS), "the core says nothing"
        return msgspec.msgpack.decode(self._socket.recv(), type=ToServer)

    def hello(self) -> CoreHello:
        while True:
            message = self.receive()
            if isinstance(message, CoreHello) and message.state is not CoreState.LOADING:
                return message

    def beat(self) -> CoreStep:
        """Return the next step or heartbeat, and skip messages of expert balance and of the prefix cache."""
        while isinstance(message := self.receive(), ExpertBalance | PrefixChanges):
            pass
        assert isinstance(message, CoreStep)
        return message

    def told(self) -> tuple[CoreStep, CoreLoad]:
        """Return the next step that reports the load, and the load."""
        while (load := (step := self.beat()).load) is None:
            pass
        return step, load

    def step(self) -> CoreStep:
        while True:
            message = self.receive()
            if isinstance(message, CoreStep) and (message.outputs or message.failures):
                return message

    def steps_to_the_end(self) -> Iterator[CoreStep]:
        """Yield the steps of one request until it ends."""
        while True:
            step = self.step()
            yield step
            if step.outputs[0].finish is not None:
                return

    def rested(self) -> CoreSlept:
        while True:
            message = self.receive()
            if isinstance(message, CoreSlept):
                return message

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def start() -> Iterator[object]:
    stubs = []
    with tempfile.TemporaryDirectory() as folder:

        def _start(model: str, **options: object) -> EngineServerStub:
            config = msgspec.structs.replace(EngineConfig(model=model, name="tiny", device="cpu"), **options)
            stub = EngineServerStub(config, folder)
            stubs.append(stub)
            return stub

        yield _start
        for stub in stubs:
            stub.close()


def _submit(key: int, *, num_prompt: int = 3, max_tokens: int = 5) -> CoreSubmit:
    sampling = Sampling(temperature=0.0)
    prompt_ids = [5 + i for i in range(num_prompt)]
    return CoreSubmit(key, "t", STANDARD, prompt_ids, sampling, max_tokens, 0, [], max_tokens, b"s", 0)


def test_the_core_tells_its_load_while_prompts_bring_no_output_and_while_it_is_idle(
    start: object, checkpoint: Path
) -> None:
    stub: EngineServerStub = start(str(checkpoint), max_batch_tokens=1, max_running=1)
    stub.hello()
    stub.send(_submit(1, num_prompt=500))  # as many steps, the last of which brings the first output
    while (told := stub.told())[1].num_running == 0:
        pass
    beat, load = told
    assert (beat.outputs, beat.failures) == ([], [])
    assert 0 < load.steps_total < 500
    stub.send(CoreAbort(1, FinishReason.ABORT))
    while (step := stub.step()).outputs[0].finish is None:
        pass
    for _ in range(3):
        idle, load = stub.told()
        assert (idle.outputs, load.num_running, load.kv_blocks_used) == ([], 0, 0)
        assert step.load is not None, "with an end the load is told"
        assert load.steps_total == step.load.steps_total


def test_the_core_says_hello_answers_counts_an_abort_and_ends_when_told(start: object, checkpoint: Path) -> None:
    stub: EngineServerStub = start(str(checkpoint))
    hello = stub.hello()
    assert (hello.state, hello.family, hello.max_context_tokens) == (CoreState.READY, "qwen3_moe", 512)
    stub.send(_submit(1))
    received: list[int] = []
    while True:
        step = stub.step()
        received += step.outputs[0].token_ids
        if (finish := step.outputs[0].finish) is not None:
            break
    assert (len(received), finish.reason) == (5, FinishReason.LENGTH)
    assert 0 < finish.scheduled_unix_ns <= finish.first_token_unix_ns <= finish.finished_unix_ns
    assert step.load is not None, "with an end the load is told"
    assert step.load.kv_blocks_used == 0

    stub.send(_submit(2, max_tokens=400))
    stub.step()
    stub.send(CoreAbort(2, FinishReason.ABORT))
    while (finish := stub.step().outputs[0].finish) is None:
        pass
    assert finish.reason == FinishReason.ABORT
    stub.send(CoreShutdown())
    assert stub.process.wait(90) == 0


def test_the_core_sleeps_and_wakes_with_steps_that_overlap_and_ends_at_once_when_its_front_is_gone(
    start: object, checkpoint: Path
) -> None:
    stub: EngineServerStub = start(str(checkpoint), overlap=Overlap.ON)
    stub.hello()
    answers = []
    for key in (1, 2):
        stub.send(_submit(key))
        answers.append([token for step in stub.steps_to_the_end() for token in step.outputs[0].token_ids])
        stub.send(CoreSleep(asleep=True))
        assert stub.rested() == CoreSlept(asleep=True)
        _, load = stub.told()  # a heartbeat
        assert load.kv_blocks_cached == 0
        stub.send(CoreSleep(asleep=False))
        assert stub.rested() == CoreSlept(asleep=False)
    assert len(answers[0]) == 5
    assert answers[0] == answers[1]
    assert stub.process.stdin is not None
    stub.process.stdin.close()
    assert stub.process.wait(90) == 3


def test_a_checkpoint_that_cannot_be_served_is_refused_with_the_reason_after_its_ignored_settings_are_logged(
    start: object, tmp_path: Path
) -> None:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings", "intermediate_size"), 64)
    config = {"model_type": "llama", **sizes, "num_hidden_layers": 1, "num_attention_heads": 2, "attention_twist": 2}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    stub: EngineServerStub = start(str(tmp_path))
    hello = stub.hello()
    assert hello.state is CoreState.REFUSED
    assert f"{tmp_path} holds neither model.safetensors nor" in hello.message
    assert stub.process.wait(90) == 4
    assert stub.process.stderr is not None
    logged = [line for line in stub.process.stderr.read().splitlines() if b"config_keys_ignored" in line]
    assert [msgspec.json.decode(line)["keys"] for line in logged] == [["attention_twist"]]
