"""An engine over one or several ranks as a process: `python role_engine.py CONFIG`, a line of requests at a time.

It prints its address for KV first, then each output. Its input ends it."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import msgspec

from moiety_engine.config import EngineConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.startup import load_loop


class RoleOutput(msgspec.Struct):
    """An output of a request. `reason` is "" until it ends."""

    key: int
    token_ids: list[int]
    reason: str = ""
    detail: str = ""
    has_arrived: bool = False  # its KV


def say(message: Any) -> None:
    sys.stdout.buffer.write(b"> " + msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with load_loop(config) as loop:
        loop.warm_up()
        connector = loop.intake.kv_connector
        say([connector.address, connector.host, connector.secret, connector.ranks])

        def read() -> None:
            for line in sys.stdin.buffer:
                lines.put(line)
            lines.put(b"")

        threading.Thread(target=read, daemon=True).start()
        while True:
            waits = loop.scheduler.idle and not loop.waits_for_others
            try:
                line = lines.get(timeout=0.01) if waits else lines.get_nowait()
            except queue.Empty:
                line = b" "
            if not line:
                return
            if line.strip():
                loop.submit(msgspec.json.decode(line, type=CoreSubmit))
            loop.step()
            step = loop.take_outputs()
            for output in step.outputs if step else ():
                end = output.finish
                ended = ("", "", False) if end is None else (str(end.reason), end.detail, end.arrival is not None)
                say(RoleOutput(output.key, output.token_ids, *ended))


if __name__ == "__main__":
    main()
