"""The scripted core within the engine server's own process, stepped by its event loop."""

from __future__ import annotations

import asyncio

from moiety_engine.messages import CoreShutdown, CoreStep, ToCore, ToServer
from moiety_engine.scripted.engine import ScriptedEngine
from moiety_engine.scripted.script import Script
from moiety_engine.server.core_link import CoreEvents


class ScriptedCore:
    """A CoreLink to an in-process scripted core.

    It sends its hello in the next turn of the loop, then steps as long as there is work, and sends the load after
    commands that caused none.
    """

    def __init__(self, script: Script) -> None:
        self.engine = ScriptedEngine(script)
        self._events: CoreEvents | None = None
        self._step_is_due = False

    async def start(self, events: CoreEvents) -> None:
        self._events = events
        loop = asyncio.get_running_loop()
        loop.call_soon(events.on_message, self.engine.hello())

    def send(self, commands: list[ToCore]) -> None:
        self.engine.execute_commands(commands)
        if any(isinstance(command, CoreShutdown) for command in commands):
            self._events = None
        for answer in self.engine.take_answers():
            asyncio.get_running_loop().call_soon(self._deliver, answer)
        self._step_soon()
        if not self._step_is_due:
            asyncio.get_running_loop().call_soon(self._deliver_load)

    def first_step_keys(self) -> frozenset[int]:
        return frozenset(self.engine.first_step_keys())

    async def stop(self) -> None:
        self._events = None

    def _step_soon(self) -> None:
        if self._step_is_due or self._events is None or not self.engine.has_work:
            return
        self._step_is_due = True
        delay_s = self.engine.script.step_delay_s
        loop = asyncio.get_running_loop()
        if delay_s:
            loop.call_later(delay_s, self._step)
        else:
            loop.call_soon(self._step)

    def _deliver_load(self) -> None:
        self._deliver(CoreStep([], [], self.engine.load()))

    def _deliver(self, message: ToServer) -> None:
        if self._events is not None:
            self._events.on_message(message)

    def _step(self) -> None:
        self._step_is_due = False
        if self._events is not None:
            self._events.on_message(self.engine.step())
            self._step_soon()
