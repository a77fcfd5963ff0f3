"""Processes with limits of memory and time that the kernel enforces, forked from a template: for inputs of clients."""
