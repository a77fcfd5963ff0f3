"""The engine server's request manager and the core's loop in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from moiety_engine.config import EngineConfig
from moiety_engine.core.service import digest_of_model, execute_command, hello_of
from moiety_engine.environment import environment
from moiety_engine.errors import CheckpointError, EngineError
from moiety_engine.loop import EngineLoop
from moiety_engine.runner.device_state import free_cached_memory
from moiety_engine.server.announcements import make_card
from moiety_engine.server.request_manager import RequestManager
from moiety_engine.server.sessions import GatewaySession
from moiety_engine.server.usage_meter import UsageMeter
from moiety_engine.server.validation import ModelLimits
from moiety_engine.startup import load_loop
from moiety_text.errors import TextError
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import Abort, Submit, ToGateway

ENGINE_ID = "in-process"
SLICE_S = 0.05
_BATCHING_WAIT_S = 0.001  # pause before polling again when requests wait for a batch or for other threads


class InProcessReplica:
    """`moiety_wire.replica.Replica` implemented by the engine. Owns the model from its construction to `close`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_load: Callable[[int, int], None] | None = None,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        """Load the model; `on_load` gets bytes read and total bytes. Raises EngineError."""
        try:
            text = read_text_model(Path(config.model))
        except TextError as exc:
            raise CheckpointError(str(exc)) from exc
        loop = load_loop(config, progress=on_load)
        loop.warm_up()
        self._loop: EngineLoop | None = loop
        card = make_card(
            config.name,
            ENGINE_ID,
            text,
            msgspec.structs.replace(hello_of(loop), model_digest=digest_of_model(config)),
            adapters=tuple(config.adapters),
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )
        self.card = msgspec.structs.replace(card, images=None)  # there are no processes that decode images
        self.tokenizer = Tokenizer.from_json(text.tokenizer_json)
        self._messages: list[ToGateway] = []
        self._session = GatewaySession(b"", 0.0)
        self._requests = RequestManager(
            self.tokenizer, self._receive, UsageMeter(time.monotonic), adapters=config.adapters
        )
        self._requests.limits = ModelLimits.of(self.card)

    @property
    def num_open(self) -> int:
        return self._requests.num_open

    @property
    def max_running(self) -> int:
        return self._running().scheduler.limits.max_running

    def advance(self, submits: Iterable[Submit] = (), *, at_most_s: float = SLICE_S) -> list[ToGateway]:
        """Run the engine, see the protocol. With `at_most_s` 0, run one step. Raises EngineError once closed."""
        loop = self._running()
        for submit in submits:
            self._requests.submit(self._session, submit)
        until_s = time.monotonic() + at_most_s
        while self._requests.num_open:
            for command in self._requests.take_commands():
                execute_command(loop, command)
            if not loop.step() and (loop.scheduler.num_waiting or loop.waits_for_others):
                time.sleep(_BATCHING_WAIT_S)
            outputs = loop.take_outputs()
            if outputs is not None:
                self._requests.take_step(outputs)
            if time.monotonic() >= until_s:
                break
        messages, self._messages = self._messages, []
        return messages

    def abort(self, request_id: str) -> None:
        """Abort a request; `advance` returns its end. Does nothing if it has ended already."""
        self._requests.abort(self._session, Abort(request_id, 0))

    def environment(self) -> dict[str, Any]:
        return environment(self._running())

    def close(self) -> None:
        if self._loop is None:
            return
        device = self._loop.executor.model.device
        self._loop.close()
        self._loop = None
        free_cached_memory(device)

    def _running(self) -> EngineLoop:
        if self._loop is None:
            raise EngineError("the model was closed; make a new one")
        return self._loop

    def _receive(self, _session: GatewaySession, message: ToGateway) -> None:
        self._messages.append(message)
