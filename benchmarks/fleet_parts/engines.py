"""Many scripted engines, or many external servers, in one process, for a measurement of the gateways before them.

    python -m fleet_parts.engines zeromq|vllm|generic COUNT [STEP_DELAY_S]

Prints the addresses as one line of JSON when all are ready, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import cast

import uvloop
import zmq
import zmq.asyncio

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings

MODEL = "scripted"
NUM_OTHER_SERIES = 400  # of /metrics, mostly buckets of histograms, which the gateway has no use for
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "created": 1_700_000_000, "max_model_len": 4096}]})
WANTED_SERIES = """\
vllm:num_requests_running{engine="0",model_name="scripted"} 0.0
vllm:num_requests_waiting{engine="0",model_name="scripted"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="scripted"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="200"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="scripted"} 1234.0
vllm:generation_tokens_total{engine="0",model_name="scripted"} 567.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="scripted"} 3.0
"""


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    step_delay_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_zeromq(count, step_delay_s) if kind == "zeromq" else _serve_external(kind, count))


async def _serve_zeromq(count: int, step_delay_s: float) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with AsyncExitStack() as stack:
        addresses = []
        for number in range(count):
            settings = ServerSettings(model=MODEL, listen="tcp://127.0.0.1:0")
            core = ScriptedCore(Script(step_delay_s=step_delay_s))
            server = EngineServer(settings, f"engine-{number}", scripted_text_model(), core, context)
            await server.start()
            stack.push_async_callback(server.close)
            assert await server.wait_ready()
            addresses.append(server.address)
        await _announce(addresses)
    context.destroy(linger=0)


async def _serve_external(kind: str, count: int) -> None:
    addresses = []
    for _ in range(count):
        server = await asyncio.get_running_loop().create_server(_Probed, "127.0.0.1", 0)
        addresses.append(f"openai+http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1?model={MODEL}&kind={kind}")
    await _announce(addresses)


class _Probed(asyncio.Protocol):
    """A connection of a server that answers probes alone."""

    num_answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while b"\r\n\r\n" in self._unread:
            head, _, self._unread = self._unread.partition(b"\r\n\r\n")
            _Probed.num_answers += 1
            body = _answer_of(head.split(b" ", 2)[1], _Probed.num_answers)
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _answer_of(path: bytes, number: int) -> bytes:
    if path == b"/v1/models":
        return MODELS.encode()
    if path != b"/metrics":
        return b""
    return f"process_cpu_seconds_total {number}.0\n".encode() + _OTHERS + WANTED_SERIES.encode()


_OTHERS = b"".join(
    b'vllm:time_to_first_token_seconds_bucket{engine="0",le="%d",model_name="scripted"} %d.0\n' % (bucket, bucket)
    for bucket in range(NUM_OTHER_SERIES)
)


async def _announce(addresses: list[str]) -> None:
    print(json.dumps(addresses), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    main()
