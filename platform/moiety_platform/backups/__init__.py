"""Backup and restore of a deployment: the database, the peppers, the usage journal and the stored objects.

Knows the stores, and no HTTP and no command line.
"""
