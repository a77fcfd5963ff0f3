"""Failure of a simulation."""

from __future__ import annotations


class SimulationProblem(Exception):
    """The simulation failed; the message says why, and what to do."""
