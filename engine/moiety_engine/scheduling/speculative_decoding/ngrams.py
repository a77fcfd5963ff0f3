"""Index of earlier occurrences of a text's newest tokens, for prompt lookup.

Sources: Saxena, 2023; Yang et al., "Inference with Reference", 2023.
"""

from __future__ import annotations

from itertools import islice

SHORT, LONG = 2, 4  # tokens that must match
MAX_AT_ONCE = 4096  # tokens indexed per call, so that a long prompt delays no step
_BITS = 21  # of a token id
_SHORT_MASK = (1 << _BITS * SHORT) - 1
_LONG_MASK = (1 << _BITS * LONG) - 1


class NgramIndex:
    """Index of one growing list of tokens: the end of the last occurrence of each run of SHORT and of LONG tokens."""

    __slots__ = ("_key", "_long", "_num_read", "_short")

    def __init__(self) -> None:
        self._short: dict[int, int] = {}
        self._long: dict[int, int] = {}
        self._num_read = 0
        self._key = 0  # of the last LONG tokens that were read

    def find(self, tokens: list[int], num_known: int) -> tuple[int, bool] | None:
        """Return (end of the last earlier occurrence of the newest tokens, whether LONG tokens match).

        Only the first `num_known` tokens count. Return None if there is no match, or the index has not reached
        `num_known` yet.
        """
        short, long, key = self._short, self._long, self._key
        end = self._num_read
        for token in islice(tokens, end, min(num_known, end + MAX_AT_ONCE)):
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
    """Return `count` tokens that follow if the text from `begin` repeats; a periodic text continues periodically."""
    found = tokens[begin : min(num_known, begin + count)]
    for i in range(len(found), count):
        found.append(found[i - (num_known - begin)])
    return found
