"""Disk tier of the prefix cache.

Released blocks are written beside the steps, and restored while the next request with the same prefix waits. The tier
never blocks a step, and a disk error never fails a request.
"""
