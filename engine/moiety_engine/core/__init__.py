"""The core process: the step loop and its line to the front, nothing else."""
