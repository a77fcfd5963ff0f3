"""Why a simulation came to nothing."""

from __future__ import annotations


class SimulationProblem(Exception):
    """The message says why, and what to do."""
