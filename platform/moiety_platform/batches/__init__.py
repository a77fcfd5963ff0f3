"""Batches: files of requests that are answered when there is room, each line once, whatever dies meanwhile."""
