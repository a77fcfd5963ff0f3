"""What gateways ask of the experts' load: their questions go to the core, and its answers to whoever asked. How evenly
experts are used is told to all, when the core says so and to who joins."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moiety_engine.server.sessions import GatewaySession
from moiety_wire.experts import AskExperts, ExpertBalance, ExpertLoad
from moiety_wire.messages import ToGateway

MAX_OPEN = 256  # questions; a core that answers none of them is not asked any more


class ExpertQueries:
    """Owns the questions that are open. One thread."""

    def __init__(self, post: Callable[[GatewaySession, ToGateway], None]) -> None:
        self._post = post
        self._open: dict[int, tuple[GatewaySession, int]] = {}
        self._num_asked = 0
        self._asks: list[AskExperts] = []
        self._balance: ExpertBalance | None = None

    def ask(self, session: GatewaySession, ask: AskExperts) -> None:
        """One that is too many is not answered: the gateway that asked gives up after a while."""
        if len(self._open) >= MAX_OPEN:
            self._open = {key: one for key, one in self._open.items() if not one[0].is_gone}
        if len(self._open) >= MAX_OPEN:
            return
        self._num_asked += 1
        self._open[self._num_asked] = session, ask.ask_id
        self._asks.append(msgspec.structs.replace(ask, ask_id=self._num_asked))

    def take_asks(self) -> list[AskExperts]:
        """What the core has to be asked since the last call."""
        asks, self._asks = self._asks, []
        return asks

    def answer(self, load: ExpertLoad) -> None:
        session, ask_id = self._open.pop(load.ask_id)
        self._post(session, msgspec.structs.replace(load, ask_id=ask_id))

    def tell(self, sessions: list[GatewaySession], balance: ExpertBalance) -> None:
        self._balance = balance
        for session in sessions:
            self.greet(session)

    def greet(self, session: GatewaySession) -> None:
        """What a gateway that joins has missed."""
        if self._balance is not None and session.has_card and not session.outbox:
            self._post(session, self._balance)
