"""Profile of the experts that tokens used: a count for each expert of a few layers, in a few hundred bytes.

The counts are kept in bit planes: plane i is an integer with one bit per expert, bit i of that expert's count. Adding a
sample and multiplying two profiles are a few operations on integers instead of a loop over experts. Engines choose the
layers (`moiety_engine.expert_profiler`); this module does not know what a bit stands for.
"""

from __future__ import annotations

SKETCH_SAMPLES = 15  # of a profile that an engine sends
NUM_PLANES = SKETCH_SAMPLES.bit_length()  # of such a profile
MAX_PACKED_BYTES = 4096


class ExpertProfile:
    """Counts of the samples that used each expert. At most `max_samples` count; older ones fade by halves.

    A sample is the set of experts of a token or of a step, one bit for each expert.
    """

    __slots__ = ("max_samples", "num_bytes", "num_samples", "planes")

    def __init__(self, num_bytes: int, max_samples: int = SKETCH_SAMPLES) -> None:
        """Create an empty profile. `num_bytes` is the size of a packed plane, which has one bit per expert."""
        self.num_bytes = num_bytes
        self.max_samples = max_samples
        self.num_samples = 0
        self.planes: list[int] = []

    def add(self, experts: int) -> None:
        """Count one sample."""
        if self.num_samples >= self.max_samples:
            self._halve()
        self.num_samples += 1
        self._add_plane(0, experts)

    def merge(self, other: ExpertProfile) -> None:
        """Count the samples of another profile, of at most as many samples as this one can hold."""
        while self.num_samples and self.num_samples + other.num_samples > self.max_samples:
            self._halve()
        self.num_samples += other.num_samples
        for place, plane in enumerate(other.planes):
            self._add_plane(place, plane)

    @property
    def mean_experts(self) -> float:
        """Number of experts of a sample, on average; 0 without samples."""
        uses = sum(plane.bit_count() << place for place, plane in enumerate(self.planes))
        return uses / self.num_samples if self.num_samples else 0.0

    def overlap(self, active: ExpertProfile) -> float:
        """Return the expected share of a token's experts that a step of `active` reads anyway, from 0 to 1.

        0 if either profile has no samples.
        """
        uses = sum(plane.bit_count() << place for place, plane in enumerate(self.planes))
        if not uses or not active.num_samples:
            return 0.0
        shared = 0
        for place, plane in enumerate(self.planes):
            for other_place, other in enumerate(active.planes):
                shared += (plane & other).bit_count() << (place + other_place)
        return shared / (uses * active.num_samples)

    def counts(self, num_experts: int) -> list[int]:
        """Return the counts of the first experts."""
        return [
            sum((plane >> expert & 1) << place for place, plane in enumerate(self.planes))
            for expert in range(num_experts)
        ]

    def pack(self) -> bytes:
        """Return a profile of at most SKETCH_SAMPLES samples as bytes; b"" without samples.

        The number of samples comes first, then all planes, the lowest bits of the counts first.
        """
        if not self.num_samples:
            return b""
        planes = self.planes + [0] * (NUM_PLANES - len(self.planes))
        return bytes([self.num_samples]) + b"".join(plane.to_bytes(self.num_bytes, "little") for plane in planes)

    @classmethod
    def unpack(cls, data: bytes) -> ExpertProfile:
        """Return the profile that `pack` wrote. Raises ValueError for other bytes."""
        num_bytes, rest = divmod(len(data) - 1, NUM_PLANES)
        if rest or num_bytes < 1 or len(data) > MAX_PACKED_BYTES or not 0 < data[0] <= SKETCH_SAMPLES:
            raise ValueError(f"{len(data)} bytes are no expert profile of {NUM_PLANES} planes")
        profile = cls(num_bytes)
        profile.num_samples = data[0]
        profile.planes = [int.from_bytes(data[at : at + num_bytes], "little") for at in range(1, len(data), num_bytes)]
        return profile

    def _halve(self) -> None:
        """Forget half of each count, rounded down. No count then exceeds the number of samples."""
        self.num_samples //= 2
        del self.planes[:1]

    def _add_plane(self, place: int, carry: int) -> None:
        planes = self.planes
        while carry:
            if place >= len(planes):
                planes += [0] * (place + 1 - len(planes))
            planes[place], carry = planes[place] ^ carry, planes[place] & carry
            place += 1
