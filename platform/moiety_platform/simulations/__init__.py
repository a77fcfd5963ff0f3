"""What-if: the last hour's own traffic again, under other settings, by the engine's simulator in a process apart."""
