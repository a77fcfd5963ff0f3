"""WorkerFailed: processes with limits cannot be used, whatever the input is."""

from moiety_engine.errors import EngineError


class WorkerFailed(EngineError):
    """The processes cannot run on this machine now, whatever the input is."""
