"""Workloads: traces of requests as they are published, arrivals drawn at random, and what turns one into another.

A leaf beside the wire: it knows no scheduler, no device and no HTTP, and needs nothing but the standard library.
"""
