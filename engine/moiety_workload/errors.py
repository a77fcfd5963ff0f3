"""Errors of workloads.

WorkloadError
├── BadTrace        the file is not a trace of a known format; the message says where
└── BadSpec         an invalid description of a generator or a share; the message says what is valid
"""


class WorkloadError(ValueError):
    """Root of this package's errors."""


class BadTrace(WorkloadError):
    pass


class BadSpec(WorkloadError):
    pass
