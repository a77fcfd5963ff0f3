"""Batch API: files of requests that are processed with spare capacity, each line once, even if processes die."""
