"""Where a text has said its newest words before, and what followed: prompt look-up (Saxena, 2023; Yang et al.,
"Inference with Reference", 2023)."""

from __future__ import annotations

from itertools import islice

SHORT, LONG = 2, 4  # tokens that must agree
MOST_AT_ONCE = 4096  # tokens indexed by one look, so that a long prompt delays nobody
_BITS = 21  # of a token id
_SHORT_MASK = (1 << _BITS * SHORT) - 1
_LONG_MASK = (1 << _BITS * LONG) - 1


class NgramIndex:
    """Of one growing list of tokens: where each run of SHORT and of LONG tokens ended last."""

    __slots__ = ("_key", "_long", "_num_read", "_short")

    def __init__(self) -> None:
        self._short: dict[int, int] = {}
        self._long: dict[int, int] = {}
        self._num_read = 0
        self._key = 0  # of the last LONG tokens that were read

    def find(self, tokens: list[int], num_known: int) -> tuple[int, bool] | None:
        """After which of the first `num_known` tokens their last words stood before, and whether LONG words agree. None
        if they are new, or the index has not come as far yet."""
        short, long, key = self._short, self._long, self._key
        end = self._num_read
        for token in islice(tokens, end, min(num_known, end + MOST_AT_ONCE)):
            if end >= SHORT:
                short[key & _SHORT_MASK] = end
                if end >= LONG:
                    long[key] = end
            key = (key << _BITS | token) & _LONG_MASK
            end += 1
        self._key, self._num_read = key, end
        if end < num_known or end < SHORT:
            return None
        if end >= LONG and (found := long.get(key)) is not None:
            return found, True
        found = short.get(key & _SHORT_MASK)
        return None if found is None else (found, False)


def continuation(tokens: list[int], num_known: int, begin: int, count: int) -> list[int]:
    """`count` tokens that would follow if what was said from `begin` on were said again; what repeats itself goes on
    doing so."""
    found = tokens[begin : min(num_known, begin + count)]
    for i in range(len(found), count):
        found.append(found[i - (num_known - begin)])
    return found
