"""Sums over requests, in a table with one row per group. Within the caller's transaction.

The sums are updated together with the requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base, WideInteger
from moiety_platform.db.bulk import BulkInsert
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.wide_sums import raised_sum

_NAMES = (
    *("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("good_tokens", "ttft_ms", "num_ttft", "queue_ms", "num_queue", "duration_ms", "preemptions"),
    *("cost_nanodollars", "num_slo_attained", "num_slo_requests", "speculative_tokens", "speculative_used_tokens"),
    *("expert_read_bytes", "expert_moved_bytes", "credit_nanodollars", "num_guarantees", "num_guarantees_met"),
)


def _amounts(row: UsageRow) -> tuple[float, ...]:
    """Return what a request adds to the sums of `_NAMES`, in their order."""
    return (
        row.is_request,
        row.outcome == "failed",
        row.outcome == "rejected",
        row.outcome == "disconnected",
        row.prompt_tokens,
        row.cached_tokens,
        row.output_tokens,
        row.output_tokens if row.slo_attained else 0,
        row.ttft_ms or 0.0,
        row.ttft_ms is not None,
        row.queue_ms or 0.0,
        row.queue_ms is not None,
        row.duration_ms,
        row.num_preemptions,
        row.cost_nanodollars,
        row.slo_attained is True,
        row.slo_attained is not None,
        row.speculative_tokens,
        row.speculative_used_tokens,
        row.expert_read_bytes,
        row.expert_moved_bytes,
        row.credit_nanodollars,
        row.guarantee_met is not None,
        row.guarantee_met is True,
    )


class UsageSums:
    """Sums of one table: its columns outside the primary key, named as in `_NAMES`.

    `group_of` returns a request's key, in the order of the columns.
    """

    def __init__(self, model: type[Base], group_of: Callable[[UsageRow], tuple[Any, ...]]) -> None:
        columns = list(model.__table__.columns)
        self.keys = tuple(column.name for column in columns if column.primary_key)
        names = tuple(column.name for column in columns[len(self.keys) :])
        assert not any(column.primary_key for column in columns[len(self.keys) :]), "keys stand before sums"
        self._group_of = group_of
        self._pick = itemgetter(*(_NAMES.index(name) for name in names))
        table = model.__table__.c

        def raising(insert: Any) -> Any:
            raised = {}
            for name in names:
                stored, more = table[name], insert.excluded[name]
                is_wide = isinstance(stored.type, WideInteger)
                raised[name] = raised_sum(insert, stored, more) if is_wide else stored + more
            return insert.on_conflict_do_update(index_elements=list(self.keys), set_=raised)

        self._raise = BulkInsert(model, raising)

    async def add(self, session: AsyncSession, rows: Iterable[UsageRow], less: Iterable[UsageRow] = ()) -> None:
        """Add requests to the sums of their groups, and subtract those in `less`. Sums are locked in order."""
        await self._raise(session, self.of(rows, less))

    def of(self, rows: Iterable[UsageRow], less: Iterable[UsageRow] = ()) -> list[tuple[Any, ...]]:
        """Return rows of the table with the sums of these requests, ordered by their keys."""
        grouped: defaultdict[tuple[Any, ...], list[tuple[float, ...]]] = defaultdict(list)
        for row in rows:
            grouped[self._group_of(row)].append(self._pick(_amounts(row)))
        for row in less:
            grouped[self._group_of(row)].append(tuple(-amount for amount in self._pick(_amounts(row))))
        return [(*key, *map(sum, zip(*of_all, strict=True))) for key, of_all in sorted(grouped.items())]
