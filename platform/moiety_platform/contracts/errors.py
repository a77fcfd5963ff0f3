"""Errors of contract checks.

ContractProblem   the check cannot be made; the message says what to change
"""

from __future__ import annotations


class ContractProblem(Exception):
    """The check cannot be made."""
