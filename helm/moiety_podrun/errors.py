"""Errors of a chart's run.

PodRunError        the message says what to do next
├── NotPossible    this machine or its user cannot run it
└── Failed         a pod did not do what it should; its log is shown
"""

from __future__ import annotations


class PodRunError(Exception):
    pass


class NotPossible(PodRunError):
    pass


class Failed(PodRunError):
    pass
