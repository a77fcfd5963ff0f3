"""Offline inference: a replica without a server, as one object, for a file of requests and for Python programs."""
