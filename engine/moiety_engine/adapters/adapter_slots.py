"""Adapter slots of one replica: the slot and the users of each adapter, and the requests that wait for adapters.

An adapter is identified by its id and its folder. A thread reads it when a request first needs it; it is loaded into a
slot between two steps, and stays there until another adapter needs the memory and no open request uses it. With several
ranks an adapter has the same slot on each of them, and this registry, on rank 0, decides for all.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from moiety_engine.adapters.peft import read_adapter
from moiety_engine.adapters.slot_sizing import SlotRequirement, find_layout, padded_rank
from moiety_engine.errors import AdapterError, OutOfMemory
from moiety_engine.messages import CoreFailure, CoreSubmit
from moiety_engine.model.adapter_modules import products_of_modules
from moiety_wire.messages import FailureCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.adapter_modules import AdapterModules
    from moiety_engine.model.adapter_stacks import Key
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.adapter_loading import AdapterLoader

log = structlog.get_logger()

MAX_OVERTAKEN_S = 1.0  # how long later requests with loaded adapters may overtake a request that waits for a slot


@dataclass(frozen=True, slots=True)
class _ReadAdapter:
    """An adapter in host memory that the ranks arrange under this number of the loader."""

    number: int
    need: SlotRequirement


@dataclass(slots=True)
class _Adapter:
    folder: Path
    slot: int = -1  # -1: in no slot
    num_users: int = 0  # open requests that may run
    need: SlotRequirement | None = None  # of the loaded adapter
    reading: Future[AdapterModules] | None = None
    read: _ReadAdapter | None = None
    problem: str = ""  # why it cannot be served
    lacked_memory: bool = False  # that is the problem, which may have ended when the next request names it


class AdapterSlots:
    """Owner of the adapter slots. Used by the step loop's thread only, except for reading adapters."""

    def __init__(
        self, model: Transformer, loader: AdapterLoader, *, max_bytes: int, max_slots: int, max_rank: int
    ) -> None:
        """Create the registry. `max_bytes`: memory of each rank; 0: no adapter is served."""
        self._model, self._stacks, self._loader = model, model.adapters, loader
        self._max_bytes, self._max_slots, self._max_rank = max_bytes, max_slots, max_rank
        self._known: OrderedDict[str, _Adapter] = OrderedDict()  # least recently used first
        self._slot_of: dict[str, int] = {}
        self._pending: dict[int, tuple[CoreSubmit, float]] = {}  # request and its arrival time, in arrival order
        self._users: dict[int, str] = {}  # request's key → adapter
        self._refused: deque[CoreFailure] = deque()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="adapters") if max_bytes else None
        self.evictions_total = 0

    @property
    def slots(self) -> dict[str, int]:
        """Slot of each loaded adapter, by adapter id."""
        return self._slot_of

    @property
    def is_open(self) -> bool:
        return self._readers is not None

    def learn(self, adapter_id: str, folder: Path) -> None:
        """Register an adapter, or change the folder of a registered one."""
        known = self._known.setdefault(adapter_id, _Adapter(folder))
        self._drop(known)
        known.folder, known.problem, known.reading, known.lacked_memory = folder, "", None, False

    def add_request(self, submit: CoreSubmit) -> None:
        """Queue a request until its adapter is in a slot; refuse it if its adapter cannot be served."""
        known = self._known.get(submit.adapter)
        if self._readers is None:
            self._refuse(submit.key, FailureCode.ADAPTER_REFUSED, "adapters are not available on this engine")
        elif known is None:
            self._refuse(submit.key, FailureCode.ADAPTER_MISSING, "this engine does not have the request's adapter")
        else:
            if known.lacked_memory:
                known.problem, known.lacked_memory = "", False
            self._pending[submit.key] = submit, time.monotonic()

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove and return a pending request; return None if it is not pending."""
        submit, _ = self._pending.pop(key, (None, 0.0))
        if submit is None:
            return None
        known = self._known[submit.adapter]
        if all(other.adapter != submit.adapter for other, _ in self._pending.values()):
            self._drop(known)  # no request waits for it: discard its weights or its failure
        return submit

    def take_ready(self) -> Iterator[CoreSubmit]:
        """Yield the requests whose adapters are in slots.

        If the slots are full, a request that has waited longer than MAX_OVERTAKEN_S blocks all later requests, so that
        slots become free.
        """
        is_full = False  # a later request does not take the slot that an earlier one waits for
        for key, (submit, since_s) in list(self._pending.items()):
            name = submit.adapter
            known = self._known[name]
            if known.slot < 0 and not known.problem and not is_full:
                is_full = self._try_to_place(name, known)
                if is_full and time.monotonic() - since_s > MAX_OVERTAKEN_S:
                    return
            if known.problem:
                del self._pending[key]
                self._refuse(key, FailureCode.ADAPTER_REFUSED, f"the adapter cannot be loaded: {known.problem}")
            elif known.slot >= 0:
                del self._pending[key]
                self._known.move_to_end(name)
                known.num_users += 1
                self._users[key] = name
                yield submit

    def take_refused(self) -> list[CoreFailure]:
        refused = list(self._refused)
        self._refused.clear()
        return refused

    def ended(self, key: int) -> None:
        """Release the adapter of a request that has ended; does nothing if it had none."""
        name = self._users.pop(key, None)
        if name is not None:
            self._known[name].num_users -= 1

    def load_all(self) -> None:
        """Read the registered adapters and load them into slots, as far as memory allows.

        Raises AdapterError for an adapter that cannot be served. Call it only before the first request.
        """
        for name, known in self._known.items():
            try:
                self._begin(known, self._read(known.folder))
                if known.read is not None:
                    self._check(known.read)
                    self._place(name, known, known.read)
            except AdapterError as exc:
                raise AdapterError(f"adapter {name!r} in {known.folder}: {exc}") from exc
            self._drop(known)
            if known.problem:
                raise AdapterError(f"adapter {name!r} in {known.folder}: {known.problem}")

    def read_again(self) -> None:
        """Drop what the ranks arrange of adapters that are in no slot yet, and read these adapters again.

        Call it before experts change their ranks: new ranks have not received these adapters, and the parts of other
        ranks are those of the layout before.
        """
        for known in self._known.values():
            if known.read is not None:
                self._drop(known)

    def give_up(self) -> None:
        """Release the device memory of all adapters; adapters needed later are read again.

        Call it only while no request is open.
        """
        assert not self._users, "adapters must not be unloaded while requests use them"
        for name in list(self._slot_of):
            self._empty(name)
        self._loader.lay_out(frozenset(), 0, 0, {})

    def close(self) -> None:
        self._loader.close()
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def _read(self, folder: Path) -> AdapterModules:
        """Read an adapter; also runs in the reader's thread. Raises AdapterError for every problem."""
        with _as_adapter_errors(folder=str(folder)):
            return read_adapter(folder, self._model.spec, max_rank=self._max_rank, dtype=self._stacks.dtype)

    def _begin(self, known: _Adapter, modules: AdapterModules) -> None:
        """Let all ranks begin to arrange an adapter, unless it is too large for any of them (`known.problem`).

        Raises AdapterError.
        """
        with _as_adapter_errors(folder=str(known.folder)):
            need = SlotRequirement(frozenset(products_of_modules(modules, self._model.spec)), modules.rank)
        least = self._stacks.num_bytes(need.keys, 1, padded_rank(need.rank))
        if least > self._max_bytes:
            known.problem = (
                f"it needs {least} bytes, more than this engine's --adapter-memory-bytes {self._max_bytes}: "
                "train with a lower rank, or raise --adapter-memory-bytes"
            )
            return
        known.read = _ReadAdapter(self._loader.begin(modules), need)

    def _check(self, adapter: _ReadAdapter) -> None:
        """Wait until the first rank has arranged the adapter. Raises AdapterError if it does not fit the model."""
        with _as_adapter_errors(number=adapter.number):
            self._loader.check(adapter.number)

    def _drop(self, known: _Adapter) -> None:
        """Drop what was read of an adapter and is not loaded, on all ranks."""
        if known.reading is not None:
            known.reading.cancel()
        if known.read is not None:
            self._loader.drop(known.read.number)
        known.reading = known.read = None

    def _try_to_place(self, name: str, known: _Adapter) -> bool:
        """Continue to read and place an adapter. Return whether it is in host memory but has no layout yet."""
        if known.read is None and known.reading is None:
            assert self._readers is not None, "no request waits for an adapter where adapters are not available"
            known.reading = self._readers.submit(self._read, known.folder)
        try:
            if known.reading is not None:
                if not known.reading.done():
                    return False
                reading, known.reading = known.reading, None
                self._begin(known, reading.result())
            if known.read is None or not self._loader.is_done(known.read.number):
                return False
            self._check(known.read)
        except AdapterError as exc:
            self._drop(known)
            known.problem = str(exc)
            return False
        if self._place(name, known, known.read) or known.problem:
            self._drop(known)
            return False
        return True

    def _place(self, name: str, known: _Adapter, adapter: _ReadAdapter) -> bool:
        """Load an adapter into a slot on all ranks; return whether it is in one now.

        If not, `known.problem` says that a rank lacks memory; if that is empty, the adapter must wait.
        """
        need = adapter.need
        device_state = [(other, self._known[other]) for other in self._known if other in self._slot_of]
        in_use = [one.need for _, one in device_state if one.num_users and one.need]
        idle = [(other, one.need) for other, one in device_state if not one.num_users and one.need]
        layout = find_layout(
            need, in_use, idle,
            num_bytes=self._stacks.num_bytes, max_bytes=self._max_bytes, max_slots=self._max_slots,
        )  # fmt: skip
        if layout is None:
            return False
        for other in layout.evicted:
            self._empty(other)
            self.evictions_total += 1
        try:
            self._lay_out(layout.keys, layout.num_slots, layout.rank)
            slot = min(set(range(self._stacks.num_slots)) - set(self._slot_of.values()))
            self._loader.fill(slot, adapter.number)
        except OutOfMemory as exc:
            known.problem, known.lacked_memory = f"{exc}; send the request again later", True
            self._drop(known)
            return False
        except AdapterError as exc:
            known.problem = str(exc)
            self._drop(known)
            return False
        known.read = None  # the ranks have dropped it
        known.slot, known.need = slot, need
        self._slot_of[name] = slot
        log.info("adapter_loaded", adapter=name, rank=need.rank, slot=slot, evicted=len(layout.evicted))
        return True

    def _lay_out(self, keys: frozenset[Key], num_slots: int, rank: int) -> None:
        """Make the slots large enough for this layout; they are reallocated only if they are too small."""
        stacks = self._stacks
        if keys <= stacks.keys and num_slots <= stacks.num_slots and rank <= stacks.rank:
            return
        moves = {old: new for new, old in enumerate(sorted(self._slot_of.values()))}
        self._loader.lay_out(keys, num_slots, rank, moves)
        for name, old in self._slot_of.items():
            self._slot_of[name] = self._known[name].slot = moves[old]

    def _empty(self, name: str) -> None:
        del self._slot_of[name]
        known = self._known[name]
        known.slot, known.need = -1, None

    def _refuse(self, key: int, code: FailureCode, message: str) -> None:
        self._refused.append(CoreFailure(key, code, message))


@contextmanager
def _as_adapter_errors(**where: object) -> Iterator[None]:
    """Raise AdapterError for every problem within, so that a tenant's files cannot stop the engine.

    `where`: fields of the log entry.
    """
    try:
        yield
    except AdapterError:
        raise
    except Exception as exc:
        log.exception("adapter_not_read", **where)
        raise AdapterError("it cannot be read; see the engine's log for the reason") from exc
