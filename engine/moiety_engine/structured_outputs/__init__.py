"""Structured outputs: grammars compiled in other processes, and token masks for each decode step."""
