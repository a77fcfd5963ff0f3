"""Tasks and their train/held-out split. Knows no domain."""

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HELD_OUT_ONE_IN = 8


class Split(enum.Enum):
    """Side of the train/held-out split: TRAIN for training, HELD_OUT for evaluation."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Task:
    """One question with its only right answer.

    `split_key` decides the split: the operands, or the wording where the facts are few.
    """

    domain: str
    kind: str
    prompt: str
    answer: str
    split_key: str

    @property
    def split(self) -> Split:
        return split_of(self.split_key)


Sampler = Callable[[Random, Split], Task]


def split_of(key: str) -> Split:
    """Return the split of `key`, by a hash that is stable across processes and versions."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"moiety-demo").digest()
    return Split.HELD_OUT if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else Split.TRAIN
