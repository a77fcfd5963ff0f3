"""Check of a new tenant's contract: its limits and class, simulated on recent traffic with the real scheduler."""
