"""GrammarRefused: the engine cannot follow a client's grammar. GrammarWorkerFailed: it cannot follow any."""

from moiety_engine.errors import EngineError


class GrammarRefused(EngineError):
    """The engine cannot follow a client's grammar. The message is for the client."""


class GrammarWorkerFailed(EngineError):
    """The processes that compile and step grammars cannot run on this machine, whatever the grammar."""
