"""`python -m moiety_engine.scripted.core --address ipc://…`: the scripted core as a process.

It uses the real core's protocol. It reads a Script as one line of JSON on standard input, which stays open: the core
exits when it closes.
"""

from __future__ import annotations

import sys
import threading
import time

import msgspec
import zmq

from moiety_engine.core.command import EXIT_REFUSED, end_with_server, parse_arguments
from moiety_engine.core.link import IDLE_WAIT_MS, ServerLink
from moiety_engine.first_steps import FirstSteps
from moiety_engine.messages import CoreHello, CoreShutdown, CoreState
from moiety_engine.scripted.engine import ScriptedEngine
from moiety_engine.scripted.script import Script

DIED_BY_SCRIPT = 9


def main() -> int:
    address, first_steps = parse_arguments("moiety_engine.scripted.core")
    script = msgspec.json.decode(sys.stdin.buffer.readline(), type=Script)
    end_with_server()
    with zmq.Context() as context, ServerLink(context, address) as link:
        if script.refuses:
            link.send_refusal(script.refuses)
            return EXIT_REFUSED
        if script.loads_for_ever:
            link.send(CoreHello(CoreState.LOADING, "loading weights: never done"))
            threading.Event().wait()
        return _serve(link, ScriptedEngine(script), first_steps)


def _serve(link: ServerLink, engine: ScriptedEngine, first_steps: FirstSteps | None) -> int:
    link.send(engine.hello())
    num_steps = 0
    while True:
        commands = link.receive(wait_ms=0 if engine.has_work else IDLE_WAIT_MS)
        engine.execute_commands(commands)
        if any(isinstance(command, CoreShutdown) for command in commands):
            return 0
        for answer in engine.take_answers():
            link.send(answer)
        if not engine.has_work:
            link.beat(engine.load)
            continue
        if first_steps is not None:
            first_steps.write(engine.first_step_keys())
        if num_steps == engine.script.dies_at_step:
            return DIED_BY_SCRIPT  # sent messages are still delivered: the link lingers
        time.sleep(engine.script.step_delay_s)
        link.send(engine.step())
        num_steps += 1


if __name__ == "__main__":
    sys.exit(main())
