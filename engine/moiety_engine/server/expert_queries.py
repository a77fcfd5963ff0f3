"""Queries of gateways about the expert load, and commands about expert ranks.

The core answers each query, and the answer goes to the gateway that sent it. Loads report the effect of commands.

The balance of the experts is sent to all gateways when the core reports it, and to each gateway that connects.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from moiety_engine.server.sessions import GatewaySession
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery, ScaleExpertRanks
from moiety_wire.messages import ToGateway

MAX_OPEN = 256  # open queries; beyond it, further queries are dropped

log = structlog.get_logger()


class ExpertQueries:
    """Owns the open queries. Used by one thread."""

    def __init__(self, post: Callable[[GatewaySession, ToGateway], None]) -> None:
        self._post = post
        self._open: dict[int, tuple[GatewaySession, int]] = {}
        self._num_queries = 0
        self._queries: list[ExpertLoadQuery | ScaleExpertRanks] = []
        self._balance: ExpertBalance | None = None

    def add(self, session: GatewaySession, query: ExpertLoadQuery | ScaleExpertRanks) -> None:
        """Add a query or a command. Beyond MAX_OPEN a query is dropped, and the gateway times out."""
        if isinstance(query, ScaleExpertRanks):
            log.info("engine_scaling_requested", num_ranks=query.num_ranks)
            self._queries.append(query)
            return
        if len(self._open) >= MAX_OPEN:
            self._open = {key: one for key, one in self._open.items() if not one[0].is_gone}
        if len(self._open) >= MAX_OPEN:
            return
        self._num_queries += 1
        self._open[self._num_queries] = session, query.query_id
        self._queries.append(msgspec.structs.replace(query, query_id=self._num_queries))

    def take_queries(self) -> list[ExpertLoadQuery | ScaleExpertRanks]:
        """Return the queries and commands for the core since the last call."""
        queries, self._queries = self._queries, []
        return queries

    def answer(self, load: ExpertLoad) -> None:
        """Send the core's answer to the gateway that sent the query, unless the query was dropped since."""
        found = self._open.pop(load.query_id, None)
        if found is not None:
            session, query_id = found
            self._post(session, msgspec.structs.replace(load, query_id=query_id))

    def send_balance(self, sessions: list[GatewaySession], balance: ExpertBalance) -> None:
        self._balance = balance
        for session in sessions:
            self.greet(session)

    def greet(self, session: GatewaySession) -> None:
        """Send the last balance to a gateway that connects."""
        if self._balance is not None and session.has_card and not session.outbox:
            self._post(session, self._balance)
