"""Exit codes of commands, and the errors that carry them.

CommandError          1  the command failed; the message says what to do next
├── NotReachable      3  the gateway did not answer
├── Refused           1  the gateway refused the request
└── NotAllowed        4  the gateway refused the key

Wrong usage (an unknown option, a malformed value) ends with 2.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_REACHABLE = 3
EXIT_NOT_ALLOWED = 4


class CommandError(Exception):
    """Error shown as one line on standard error, without a traceback."""

    exit_code: ClassVar[int] = EXIT_FAILED


class Refused(CommandError):
    """The gateway refused the request. `param` is the field in question, if the gateway named one."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class NotReachable(CommandError):
    exit_code = EXIT_NOT_REACHABLE


class NotAllowed(CommandError):
    exit_code = EXIT_NOT_ALLOWED
