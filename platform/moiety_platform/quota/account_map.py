"""Accounts of a quota enforcer by window, and by the limit that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from moiety_platform.quota.account import Account
from moiety_platform.quota.lease import WindowId


class AccountMap(dict[WindowId, Account]):
    """Accounts by window. Change it by `add` and `kept` only."""

    def __init__(self) -> None:
        super().__init__()
        self._of_limits: dict[str, list[Account]] = {}

    def add(self, account: Account) -> None:
        """Add an account of a window that has none."""
        window = account.lease.window
        self[window] = account
        self._of_limits.setdefault(window.quota_id, []).append(account)

    def of_limit(self, quota_id: str) -> list[Account]:
        """Return the accounts of a limit, in all windows."""
        return self._of_limits.get(quota_id, [])

    def kept(self, is_kept: Callable[[Account], bool]) -> Self:
        """Return a map with the accounts for which `is_kept` is true."""
        new = type(self)()
        for account in filter(is_kept, self.values()):
            new.add(account)
        return new
