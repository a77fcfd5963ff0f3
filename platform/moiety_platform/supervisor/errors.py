"""Errors that keep `moiety serve` from starting or from staying up.

SupervisorError
├── DataDirInUse    another serve holds the data directory
├── CannotListen    the port is in use, or the address does not belong to this machine
└── ComponentFailed      a part ended before it was ready for the first time
"""

from __future__ import annotations


class SupervisorError(Exception):
    """Base class; the message says what to do next."""


class DataDirInUse(SupervisorError):
    pass


class CannotListen(SupervisorError):
    pass


class ComponentFailed(SupervisorError):
    pass
