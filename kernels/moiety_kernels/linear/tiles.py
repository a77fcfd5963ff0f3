"""Tiles of a linear map, and the choice among them. Handles no tensors and needs no GPU."""

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
    per_sm: int = 1  # programs per multiprocessor
    flat: bool = False  # tiles and steps as one loop: the next tile's operands are fetched during a store

    @property
    def name(self) -> str:
        return f"{self.BM}x{self.BN}x{self.BK}w{self.warps}s{self.stages}{'f' if self.flat else ''}"


# All tiles of one tuple have the same BK and multiply in the same way: a row's bits must not depend on the choice.
HOPPER = (Tile(16, 64, 64, 4, 8, 2, flat=True), Tile(64, 64, 64, 4, 5, 2, flat=True), Tile(128, 128, 64, 8, 4))
NARROW = (  # 8-bit weights, widened in registers; as many of them are in flight as of wide weights
    Tile(16, 64, 128, 4, 8, 2, flat=True),
    Tile(64, 64, 128, 4, 4, 2, flat=True),
    Tile(128, 128, 128, 8, 4),
)
FOUR = (  # 4-bit weights: a step's 64 inputs have two scales
    Tile(16, 64, 64, 4, 8, 2, flat=True),
    Tile(64, 64, 64, 4, 6, 2, flat=True),
    Tile(128, 128, 64, 8, 5),
)
PORTABLE = (Tile(16, 64, 64, 4, 3), Tile(64, 64, 64, 4, 2), Tile(128, 128, 64, 8, 2))
SINGLE = (Tile(16, 32, 16, 4, 2), Tile(64, 64, 16, 8, 2))  # float32, without tensor cores


def choose(tiles: tuple[Tile, ...], rows: int, columns: int, num_sms: int) -> Tile:
    """Return the lowest tile that takes all rows at once, else the tallest with enough tiles for every multiprocessor.

    If there is none with enough, return the tallest but one.
    """
    for tile in tiles[:-1]:
        if rows <= tile.BM:
            return tile
    tallest = tiles[-1]
    many = -(-rows // tallest.BM) * -(-columns // tallest.BN) >= num_sms
    return tallest if many else tiles[-2]
