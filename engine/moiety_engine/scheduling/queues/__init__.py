"""Queues of requests: those of the scheduler by state, and the heap on which policies order them."""
