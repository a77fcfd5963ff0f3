"""GuideRefused: what a client asked for cannot be followed, and why."""

from moiety_engine.errors import EngineError


class GuideRefused(EngineError):
    """The message is for the client."""
