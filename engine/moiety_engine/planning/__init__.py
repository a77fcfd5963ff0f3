"""Planner of a model on GPUs that are not here: memory, step times, tokens/s and cost by layout. Runs nothing."""
