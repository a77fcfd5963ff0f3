"""Requests whose guide is being compiled. They wait here, and nobody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from moiety_engine.messages import CoreFailure, CoreSubmit
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GuideRefused
from moiety_engine.structured_outputs.state import GrammarState
from moiety_wire.messages import FailureCode

log = structlog.get_logger()

NUM_COMPILERS = 2
NOT_HELD_HERE = "this engine cannot hold an answer to a form: {reason}"


class GrammarCompileQueue:
    """Of one replica; used by the step loop's thread. Its compilers are threads that take nobody else's time but the
    processor's."""

    def __init__(self, library: GrammarCompiler | str) -> None:
        """`library`: or why there is none."""
        self._library = None if isinstance(library, str) else library
        self._reason = library if isinstance(library, str) else ""
        self._guests: dict[int, tuple[CoreSubmit, Future[GrammarState]]] = {}  # by the request's key
        self._refused: deque[CoreFailure] = deque()
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="guides") if self._library else None

    @property
    def is_open(self) -> bool:
        return self._library is not None

    @property
    def num_words(self) -> int:
        """Of a mask; 0 where there are none."""
        return 0 if self._library is None else self._library.num_words

    def enter(self, submit: CoreSubmit) -> None:
        assert submit.guide is not None, "only who has a guide waits for it"
        if self._library is None or self._compilers is None:
            self._refuse(submit.key, NOT_HELD_HERE.format(reason=self._reason))
            return
        self._guests[submit.key] = submit, self._compilers.submit(self._library.open, submit.guide)

    def leave(self, key: int) -> CoreSubmit | None:
        """A guest goes; None if there is no such guest."""
        submit, opening = self._guests.pop(key, (None, None))
        if opening is not None:
            opening.cancel()
        return submit

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarState]]:
        """Who need not wait any more, and the guide."""
        for key in [key for key, (_, opening) in self._guests.items() if opening.done()]:
            submit, opening = self._guests.pop(key)
            try:
                follower = opening.result()
            except GuideRefused as exc:
                self._refuse(key, f"the form that was asked for cannot be followed: {exc}")
                continue
            except Exception:  # the root of a compiler's task: it costs its request, and not the engine
                log.exception("guide_failed")
                self._refuse(key, "the form that was asked for cannot be compiled; write it otherwise")
                continue
            yield submit, follower

    def take_refused(self) -> list[CoreFailure]:
        refused = list(self._refused)
        self._refused.clear()
        return refused

    def _refuse(self, key: int, message: str) -> None:
        self._refused.append(CoreFailure(key, FailureCode.GUIDE_REFUSED, message))
