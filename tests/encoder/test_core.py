"""A core process that serves an encoder, over its real socket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
from tests.core_submits import core_submit

from moiety_engine.config import EngineConfig
from moiety_engine.messages import CoreHello, CoreShutdown, CoreSleep, CoreSlept, CoreStep, CoreSubmit, ToServer
from moiety_wire.messages import Sampling

from .conftest import SaveEncoder

DEADLINE_MS = 60_000
IDS = [4, 5, 6, 7, 8]


def asked(key: int) -> CoreSubmit:
    return core_submit(key, IDS, 0, sampling=Sampling(), cache_salt=b"", embed=True, second_segment_at=3)


def test_the_core_says_what_the_model_is_answers_with_logits_and_does_not_sleep(
    save_encoder: SaveEncoder, tmp_path: Path
) -> None:
    folder, model = save_encoder("bert", ("relevant",))
    address = f"ipc://{tmp_path}/core"
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(address)
        command = [sys.executable, "-m", "moiety_engine.core", "--address", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(EngineConfig(model=str(folder), name="b", device="cpu")) + b"\n")
            process.stdin.flush()

            def receive() -> ToServer:
                assert socket.poll(DEADLINE_MS), "the core says nothing"
                return msgspec.msgpack.decode(socket.recv(), type=ToServer)

            hello = receive()
            assert isinstance(hello, CoreHello)
            assert (hello.family, hello.generates, hello.labels) == ("bert", False, ("relevant",))
            assert (hello.score_activation, hello.embedding_width, hello.max_context_tokens) == ("sigmoid", 0, 64)
            socket.send(msgspec.msgpack.encode([asked(1), CoreSleep(asleep=True)]))
            ended, slept = None, None
            while ended is None or slept is None:
                message = receive()
                if isinstance(message, CoreStep) and message.outputs:
                    ended = message.outputs[0].finish
                elif isinstance(message, CoreSlept):
                    slept = message
            types = torch.tensor([[0, 0, 0, 1, 1]])
            wanted = model(input_ids=torch.tensor([IDS]), token_type_ids=types).logits.detach().numpy()[0]
            np.testing.assert_allclose(np.frombuffer(ended.embedding, "<f4"), wanted, rtol=1e-4, atol=5e-5)
            assert not slept.asleep and "not available for encoder models" in slept.problem
            socket.send(msgspec.msgpack.encode([CoreShutdown()]))
            assert process.wait(30) == 0
