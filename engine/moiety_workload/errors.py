"""Errors of workloads.

WorkloadError
├── BadTrace        the file is not a trace of a known form; the message says where
└── BadSpec         a generator's or a share's description that means nothing; the message says what would
"""


class WorkloadError(ValueError):
    """Root of what this package raises on purpose."""


class BadTrace(WorkloadError):
    pass


class BadSpec(WorkloadError):
    pass
