"""Order in which the images of waiting requests are decoded: fair to tenants, by class rank."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from moiety_engine.image_decoding.decoded_images import ImageKey
    from moiety_engine.images.prompt_images import PromptImage
    from moiety_wire.images import ImageInput


class Lane(NamedTuple):
    """Queue key of a tenant's requests of one class rank, which are served in order of arrival."""

    is_new: bool  # False: another engine began the requests
    rank: int
    tenant_id: str


@dataclass(slots=True)
class ImageJob:
    """A request's images that wait, with those that are decoded."""

    key: int
    lane: Lane
    late_at_s: float  # from then on it has waited longer than its class allows
    cache_salt: bytes
    images: list[ImageInput]
    digests: list[bytes]  # of each image's file; empty until it is computed
    found: list[PromptImage | None]

    @property
    def num_missing(self) -> int:
        return self.found.count(None)

    def image_key(self, index: int) -> ImageKey:
        """Return the key of an image in the cache. Its digest must be known."""
        return self.lane.tenant_id, self.cache_salt, self.digests[index]


@dataclass(slots=True, eq=False)
class Turn:
    """Use of a slot by a request for one image. `is_boosted`: it came first because it was late."""

    job: ImageJob
    is_boosted: bool


class DecodeTurns:
    """Requests that wait for their next turn, and the turns that run.

    A tenant with fewer running turns comes first. Then comes a late request, at most in every second turn and in one
    slot, so that late requests do not stop the others. Then come requests that another engine began, which hold memory
    or a started answer meanwhile. The rest is by class rank, and within a rank by the seconds that the tenant has used.
    A tenant that was idle starts with the seconds of the waiting tenant that used the fewest, or its own if more.
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[ImageJob]] = {}  # of equals, the lane whose turn it is comes first
        self._running: list[Turn] = []
        self._used_s: dict[str, float] = {}  # by tenant
        self._was_boosted = False  # the turn that started last

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_waiting(self) -> Counter[str]:
        """Return the number of waiting images by tenant."""
        waiting: Counter[str] = Counter()
        for lane, jobs in self._lanes.items():
            waiting[lane.tenant_id] += sum(job.num_missing for job in jobs)
        return waiting

    def add_new(self, job: ImageJob) -> None:
        """Let a request wait behind those of its lane."""
        self._begin_tenant(job.lane.tenant_id)
        self._lanes.setdefault(job.lane, deque()).append(job)

    def add_again(self, job: ImageJob) -> None:
        """Let a request, whose turn is about to end, wait before those of its lane."""
        self._lanes.setdefault(job.lane, deque()).appendleft(job)

    def start_next(self, now_s: float) -> Turn | None:
        """Start the next turn; None if no request waits. Call `end` for it."""
        if not self._lanes:
            return None
        running = Counter(turn.job.lane.tenant_id for turn in self._running)
        fewest = min(running[lane.tenant_id] for lane in self._lanes)
        allowed = [lane for lane in self._lanes if running[lane.tenant_id] == fewest]
        may_boost = not (self._was_boosted or any(turn.is_boosted for turn in self._running))
        boosted = {lane for lane in allowed if may_boost and now_s > self._lanes[lane][0].late_at_s}

        def place_of(lane: Lane) -> tuple[bool, bool, int, float]:
            is_boosted = lane in boosted
            return not is_boosted, lane.is_new, 0 if is_boosted else lane.rank, self._used_s[lane.tenant_id]

        lane = min(allowed, key=place_of)
        jobs = self._lanes.pop(lane)
        turn = Turn(jobs.popleft(), lane in boosted)
        if jobs:
            self._lanes[lane] = jobs  # behind its equals
        self._running.append(turn)
        self._was_boosted = turn.is_boosted
        return turn

    def end(self, turn: Turn, seconds: float) -> None:
        """End a turn that took so long."""
        self._running.remove(turn)
        self._used_s[turn.job.lane.tenant_id] += seconds

    def forget_request(self, key: int) -> None:
        """Drop a request that waits. Its turn that runs goes on."""
        for lane, jobs in list(self._lanes.items()):
            left = deque(job for job in jobs if job.key != key)
            if left:
                self._lanes[lane] = left
            else:
                del self._lanes[lane]

    def clear(self) -> None:
        """Drop all requests that wait."""
        self._lanes.clear()

    def _begin_tenant(self, tenant_id: str) -> None:
        active = {lane.tenant_id for lane in self._lanes} | {turn.job.lane.tenant_id for turn in self._running}
        if tenant_id in active:
            return
        floor_s = min((self._used_s[one] for one in active), default=None)
        own_s = self._used_s.get(tenant_id, 0.0)
        kept = self._used_s.items() if floor_s is not None else ()
        self._used_s = {one: used_s for one, used_s in kept if one in active or used_s > (floor_s or 0.0)}
        self._used_s[tenant_id] = 0.0 if floor_s is None else max(floor_s, own_s)
