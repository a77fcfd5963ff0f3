"""Errors of backups.

BackupError     the backup or the restore failed; the message says what to do
"""

from __future__ import annotations


class BackupError(Exception):
    """A backup or a restore that failed. The message says why, and what to do."""
