"""Workloads: published traces of requests, randomly generated arrivals, and transforms of both.

A leaf package: it knows no scheduler, no device and no HTTP, and needs only the standard library.
"""
