"""WorkerFailed: processes with limits cannot be used, whatever the input is."""


class WorkerFailed(Exception):
    """The processes cannot run on this machine now, whatever the input is."""
