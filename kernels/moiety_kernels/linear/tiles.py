"""The tiles of a linear map, and which of them a product takes. Knows no tensors and needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """BM rows by BN columns of the result, summed in steps of BK."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that share a multiprocessor
    flat: bool = False  # tiles and steps as one loop: the next tile's operands are fetched while one is stored

    @property
    def name(self) -> str:
        return f"{self.BM}x{self.BN}x{self.BK}w{self.warps}s{self.stages}{'f' if self.flat else ''}"


# Of one tuple all have the same BK and multiply in the same way: a row's bits must not depend on which is taken.
HOPPER = (Tile(16, 64, 64, 4, 8, 2, flat=True), Tile(64, 64, 64, 4, 5, 2, flat=True), Tile(128, 128, 64, 8, 4))
NARROW = (  # weights of 8 bits, widened in registers: as many of them are on their way as of the wide ones
    Tile(16, 64, 128, 4, 8, 2, flat=True),
    Tile(64, 64, 128, 4, 4, 2, flat=True),
    Tile(128, 128, 128, 8, 4),
)
FOUR = (  # bits: a step's 64 inputs have two scales
    Tile(16, 64, 64, 4, 8, 2, flat=True),
    Tile(64, 64, 64, 4, 6, 2, flat=True),
    Tile(128, 128, 64, 8, 5),
)
PORTABLE = (Tile(16, 64, 64, 4, 3), Tile(64, 64, 64, 4, 2), Tile(128, 128, 64, 8, 2))
SINGLE = (Tile(16, 32, 16, 4, 2), Tile(64, 64, 16, 8, 2))  # float32, without tensor cores


def choose(tiles: tuple[Tile, ...], rows: int, columns: int, num_sms: int) -> Tile:
    """The lowest tile that takes all rows at once, else the tallest of which there are enough for every
    multiprocessor, else the tallest but one."""
    for tile in tiles[:-1]:
        if rows <= tile.BM:
            return tile
    tallest = tiles[-1]
    many = -(-rows // tallest.BM) * -(-columns // tallest.BN) >= num_sms
    return tallest if many else tiles[-2]
