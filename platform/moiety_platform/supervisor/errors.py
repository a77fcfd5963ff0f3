"""What keeps `moiety serve` from starting or staying up.

SupervisorError
├── DataDirInUse    another serve holds the data directory
├── CannotListen    the port is taken, or the address not ours
└── PartFailed      a part ended before it had ever been ready
"""

from __future__ import annotations


class SupervisorError(Exception):
    """Root; the message says what to do next."""


class DataDirInUse(SupervisorError):
    pass


class CannotListen(SupervisorError):
    pass


class PartFailed(SupervisorError):
    pass
