"""Operational alerts of engines, disks and SLOs: their tables and their list."""
