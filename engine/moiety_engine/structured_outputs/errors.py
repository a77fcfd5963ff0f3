"""GrammarRefused: the engine cannot follow a client's grammar."""

from moiety_engine.errors import EngineError


class GrammarRefused(EngineError):
    """The engine cannot follow a client's grammar. The message is for the client."""
