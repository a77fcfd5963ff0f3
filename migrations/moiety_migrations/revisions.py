"""The revisions of this release, oldest first.

The list allows a check for an up-to-date database without Alembic; a test compares it with the files in `versions/`.
"""

from __future__ import annotations

REVISIONS: tuple[str, ...] = (
    "0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0012", "0013", "0014",
    "0015", "0016", "0017", "0018", "0019", "0020", "0021", "0022", "0023", "0024", "0025", "0026", "0028", "0029",
    "0030", "0031", "0032", "0033", "0034", "0035", "0036", "0037", "0038", "0039", "0040", "0041", "0042", "0044",
    "0046", "0047", "0048", "0049", "0050", "0051", "0052", "0053", "0054",
)  # fmt: skip
HEAD: str = REVISIONS[-1]
